"""Routing of many tokens to experts, as training wants it: the choice with its gradient, and the order by expert.

    choose           as `decode_routing.choose`, and the scores and the first one left out, for who balances the load
    choose_gradient  the gradient of the router's logits from that of the weights
    sort_many        as `decode_routing.sort_assignments`, for any number of assignments

The references in plain torch are the definitions. Nothing is read by the host and no shape depends on the ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3rl.kernels.moe.decode_routing import choose_reference, sort_reference


class Chosen(NamedTuple):
    """weights [N, k] float32, ids int64 [N, k]; scores [N, E], sigmoids without the bias; cutoff [N], the largest
    biased score that was left out."""

    weights: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    cutoff: torch.Tensor


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    renormalize: bool,
    scaling: float,
    recorded: torch.Tensor | None = None,
) -> Chosen:
    """logits [N, E], bias [E] float32 of rows that `limits.TRAIN_ROUTING` takes; bits are those of
    `decode_routing.choose`.
    """
    from k3rl.kernels.moe import train_routing_kernels

    return Chosen(*train_routing_kernels.choose(logits, bias, k, renormalize, scaling, recorded))


def chosen_reference(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    renormalize: bool,
    scaling: float,
    recorded: torch.Tensor | None = None,
) -> Chosen:
    """`choose` in plain torch."""
    scores = torch.sigmoid(logits)
    cutoff = torch.sort(scores + bias, dim=-1, descending=True, stable=True).values[:, k]
    return Chosen(*choose_reference(logits, bias, k, renormalize, scaling, recorded), scores, cutoff)


def choose_gradient(
    grad: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, renormalize: bool, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """grad [N, k] of the weights -> the gradient of the logits [N, E] in `dtype`, float32 or bf16."""
    from k3rl.kernels.moe import train_routing_kernels

    return train_routing_kernels.choose_gradient(grad, logits, ids, renormalize, scaling, dtype)


def gradient_reference(
    grad: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, renormalize: bool, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """`choose_gradient` in plain torch."""
    score = torch.sigmoid(logits.gather(1, ids))
    d = grad * scaling
    if renormalize:
        whole = score.sum(-1, keepdim=True) + 1e-20
        d = (d - (d * score).sum(-1, keepdim=True) / whole) / whole
    return torch.zeros_like(logits).scatter_(1, ids, d * score * (1 - score)).to(dtype)


Sorted = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def sort_many(ids: torch.Tensor, experts: int, weights: torch.Tensor | None = None) -> Sorted:
    """ids int64 [N, k] that `limits.TRAIN_ROUTING` takes -> order, inverse and token int64 [N * k], ends int32 [E], and
    the weights [N * k] float32 of the sorted rows where they are given, [N, k].

    order: the assignment of each sorted row, equal ones in their order; token: its token; the others as in
    `decode_routing.Assignments`.
    """
    from k3rl.kernels.moe import train_routing_kernels

    return train_routing_kernels.sort_many(ids, experts, weights)


def sort_many_reference(ids: torch.Tensor, experts: int, weights: torch.Tensor | None = None) -> Sorted:
    """`sort_many` in plain torch."""
    found = sort_reference(ids, experts)
    order = torch.empty_like(found.inverse)
    order.scatter_(0, found.inverse, torch.arange(len(order), device=ids.device))
    routed = None if weights is None else weights.detach().reshape(-1).index_select(0, order)
    return order, found.inverse, found.token, found.ends, routed
