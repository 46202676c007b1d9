"""What stands before and behind the attention of an MLA decode step, one launch each.

    queries    projections of the new token  ->  queries in latent space; its latent goes to its page
    attend     queries, pages                ->  the values of all heads, times their gates

Both are for models whose matrices a program can read again for every 16 rows; larger ones are the business of products
that reuse what they read. The references in plain torch are the definitions. Nothing is read by the host. Source: k3
architecture section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3rl.kernels import limits
from k3rl.kernels.mla import decode_attention
from k3rl.kernels.norm.rms_norm import rms_norm_reference


class Norm(NamedTuple):
    """An RMSNorm: weight [n] and eps."""

    weight: torch.Tensor
    eps: float


def queries(
    q_a: torch.Tensor, c: torch.Tensor, k_r: torch.Tensor, q_norm: Norm, c_norm: Norm, q_b: torch.Tensor,
    kv_b: torch.Tensor, nope: int, pages: torch.Tensor, place: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q_a [R, Q], c [R, Z] and k_r [R, r] as they are projected -> absorbed [h, R, Z] and q_r [R, h, r].

    q_b [h (n + r), Q] makes queries of normed q_a, kv_b [h, n + V, Z] with n = `nope` takes them to latent space. The
    normed c and k_r are written at place int64 [R], counted in tokens over all pages [P, page, Z + r].
    """
    if limits.MLA_DECODE_STEP.takes_queries(q_a, q_b, kv_b, nope, pages):
        from k3rl.kernels.mla import decode_step_kernels

        return decode_step_kernels.queries(q_a, c, k_r, q_norm, c_norm, q_b, kv_b, nope, pages, place)
    return queries_reference(q_a, c, k_r, q_norm, c_norm, q_b, kv_b, nope, pages, place)


def queries_reference(
    q_a: torch.Tensor, c: torch.Tensor, k_r: torch.Tensor, q_norm: Norm, c_norm: Norm, q_b: torch.Tensor,
    kv_b: torch.Tensor, nope: int, pages: torch.Tensor, place: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`queries` in plain torch."""
    latent = torch.cat([rms_norm_reference(c, *c_norm)[0], k_r], dim=-1)
    pages.view(-1, pages.shape[2]).index_copy_(0, place, latent)
    q = torch.nn.functional.linear(rms_norm_reference(q_a, *q_norm)[0], q_b).view(len(q_a), kv_b.shape[0], -1)
    return torch.bmm(q[..., :nope].transpose(0, 1), kv_b[:, :nope]), q[..., nope:]


def attend(
    absorbed: torch.Tensor, q_r: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, past: torch.Tensor,
    scale: float, kv_b: torch.Tensor, nope: int, gate: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`decode_attention.attend`, the value half of kv_b [h, n + V, Z], then sigmoid(gate [R, h * V]) -> [R, h * V]."""
    if limits.MLA_DECODE_STEP.takes_attention(pages, q_r.shape[-1], kv_b, nope, gate):
        from k3rl.kernels.mla import decode_step_kernels

        return decode_step_kernels.attend(absorbed, q_r, pages, table, past, scale, kv_b, nope, gate)
    return attend_reference(absorbed, q_r, pages, table, past, scale, kv_b, nope, gate)


def attend_reference(
    absorbed: torch.Tensor, q_r: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, past: torch.Tensor,
    scale: float, kv_b: torch.Tensor, nope: int, gate: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`attend` in plain torch."""
    context = decode_attention.attend_reference(absorbed, q_r, pages, table, past, scale)
    o = torch.bmm(context, kv_b[:, nope:].mT).transpose(0, 1).reshape(gate.shape)
    return o * torch.sigmoid(gate)
