"""Routing of few tokens to experts: the choice, the order by expert, and the sum of what the experts give back.

    choose             router logits [N, E], bias [E]  ->  ids and weights of k experts a token
    sort_assignments   ids [N, k]                      ->  assignments in expert order, and where each expert's end
    sum_choices        rows in expert order            ->  their weighted sums, back in token order

Each is one launch on a GPU that the kernels support; the references in plain torch are their definitions. Nothing is
read by the host and no shape depends on the ids, so a decode step can be captured in a CUDA graph. Results do not
depend on the order in which programs run. Source: k3 architecture section 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3rl.kernels import limits
from k3rl.kernels.gemm.skinny import sum_partials


class Assignments(NamedTuple):
    """R = N * k assignments (token, choice) by expert, equal ones in their order.

    token int64 [R]: token of each sorted row; inverse int64 [R]: sorted row of each assignment; ends int32 [E]: one
    past the last sorted row of each expert.
    """

    token: torch.Tensor
    inverse: torch.Tensor
    ends: torch.Tensor


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    renormalize: bool,
    scaling: float,
    recorded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, E] and bias [E], float32 -> weights [N, k] of the chosen experts and their ids int64 [N, k].

    logits [P, N, E] are to be added up over P, in their order.
    Chosen are the k largest sigmoid(logit) + bias, the largest first, the lowest id among equals, NaN before others.
    Weights are the scores without the bias, divided by their sum where `renormalize`, times `scaling`. recorded [N, k]:
    a choice to keep; its weights are bit-equal to those it had when it was made from these logits.
    """
    _check(logits, bias, k)
    if limits.DECODE_ROUTING.takes_choice(logits, bias, k):
        from k3rl.kernels.moe import decode_routing_kernels

        return decode_routing_kernels.choose(logits, bias, k, renormalize, scaling, recorded)
    return choose_reference(logits, bias, k, renormalize, scaling, recorded)


def _check(logits: torch.Tensor, bias: torch.Tensor, k: int) -> None:
    if logits.dim() not in (2, 3) or bias.shape != logits.shape[-1:] or not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"choose: logits must be [N, E] or [P, N, E], bias [E] and k in 1..E; got "
                         f"{tuple(logits.shape)}, {tuple(bias.shape)} and k = {k}")  # fmt: skip


def choose_reference(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    renormalize: bool,
    scaling: float,
    recorded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose` in plain torch."""
    if logits.dim() == 3:
        logits = sum_partials(logits)
    scores = torch.sigmoid(logits)
    if recorded is None:
        ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :k]
    else:
        ids = recorded.to(torch.int64)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, ids


def sort_assignments(ids: torch.Tensor, experts: int) -> Assignments:
    """ids int64 [N, k], each in 0..experts - 1 -> the assignments in expert order."""
    if limits.DECODE_ROUTING.takes_sort(ids, experts):
        from k3rl.kernels.moe import decode_routing_kernels

        return Assignments(*decode_routing_kernels.sort_assignments(ids, experts))
    return sort_reference(ids, experts)


def sort_reference(ids: torch.Tensor, experts: int) -> Assignments:
    """`sort_assignments` in plain torch."""
    found, order = torch.sort(ids.reshape(-1), stable=True)
    number = torch.arange(max(len(order), experts), device=order.device)
    ends = torch.searchsorted(found, number[:experts], right=True, out_int32=True)
    inverse = torch.empty_like(order).scatter_(0, order, number[: len(order)])
    return Assignments(order // ids.shape[1], inverse, ends)


def sum_choices(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """rows [R, b] in expert order, inverse [R], weights [N, k] -> sums over k [N, b] in `dtype`, taken in float32 or
    wider, the first choice first. norm: weight [b] and eps of an RMSNorm of the sums, as they are rounded."""
    if inverse.numel() and dtype == rows.dtype and limits.DECODE_ROUTING.takes_sum(rows):
        from k3rl.kernels.moe import decode_routing_kernels

        if norm is None or rows.shape[1] <= limits.DECODE_ROUTING.normed:
            return decode_routing_kernels.sum_choices(rows, inverse, weights, norm)
        return _normed(decode_routing_kernels.sum_choices(rows, inverse, weights), norm)
    return sum_reference(rows, inverse, weights, dtype, norm)


def _normed(sums: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    if norm is None:
        return sums
    weight, eps = norm
    wide = sums.to(torch.promote_types(sums.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(sums.dtype) * weight


def sum_reference(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """`sum_choices` in plain torch."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    choices = rows.index_select(0, inverse).view(*weights.shape, rows.shape[1]).to(wide)
    return _normed((choices * weights.unsqueeze(-1)).sum(1).to(dtype), norm)
