"""KDA of sequences that several ranks hold, by its definition: each rank hands its last state on to the next.

The kernels compute the same without a rank waiting for the whole chain (`autograd.incoming_state`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k3rl.types import ContextCommunicator


class _FromLeft(torch.autograd.Function):
    """The state before the first sequence, in the shape and dtype of `like`; its gradient goes back to the left.

    anchor: any tensor that gradients are wanted of.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, like: torch.Tensor, context: ContextCommunicator) -> torch.Tensor:
        ctx.context = context
        return context.receive(like)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.context.send(grad)
        return None, None, None


class _ToRight(torch.autograd.Function):
    """o as it is; the state after the last sequence goes to the right, and its gradient comes from there."""

    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, state: torch.Tensor, context: ContextCommunicator) -> torch.Tensor:
        ctx.context, ctx.like = context, torch.empty_like(state)
        context.send(state, right=True)
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.context.receive(ctx.like, right=True), None


def handed_on(
    plain: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    context: ContextCommunicator,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kda` with a context by `plain`, which is `kda_reference`; differentiable."""
    wide = torch.float32
    for tensor in (q, k, v, gate, beta, A_log, dt_bias):
        wide = torch.promote_types(wide, tensor.dtype)
    initial = None
    if context.before:
        sequences = 1 if cu_seqlens is None else cu_seqlens.numel() - 1
        like = q.new_empty(q.shape[2], q.shape[3], v.shape[3], dtype=wide)
        rest = like.new_zeros(sequences - 1, *like.shape)
        initial = torch.cat([_FromLeft.apply(v, like, context).unsqueeze(0), rest])
    o, final = plain(q, k, v, gate, beta, A_log, dt_bias, lower_bound, initial, cu_seqlens)
    if context.continues:
        o = _ToRight.apply(o, final[-1], context)
    return o, final.detach()
