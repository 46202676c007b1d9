"""Logprobs of target tokens from hidden rows, without the table of all logits.

A table of P targets and a vocabulary V is the largest tensor of a step: 8,192 targets of K3 take 5.4 GB, and its
gradients as much again. Here it exists for a run of rows at a time, and is computed once more in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TABLE_ELEMENTS = 1 << 22  # a table up to this size is kept: computing it again costs more than its 16 MiB


def target_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """hidden [P, H], head weight [V, H], targets [P] int64 -> logprobs [P] and entropies [P] in nats.

    Both in float32 or wider, under softmax(logits / temperature); temperature 0 counts as 1, as in sampling. Logprobs
    have gradients to hidden and weight, entropies none.
    """
    kind = torch.promote_types(hidden.dtype, torch.float32)
    scale = 1.0 if temperature == 0.0 else 1.0 / temperature
    if targets.numel() * weight.shape[0] > TABLE_ELEMENTS and torch.is_grad_enabled():
        logprobs, entropy = _TargetLogprobs.apply(hidden, weight, targets, scale, kind)
        return logprobs, entropy
    pieces = [
        _from_table(rows, weight, chosen, scale, kind) for rows, chosen in _runs(hidden, targets, weight.shape[0])
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _runs(hidden: Tensor, targets: Tensor, vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    """Runs of rows whose tables stay below the limit; at least one, maybe empty."""
    rows = max(1, TABLE_ELEMENTS // vocabulary)
    return list(zip(hidden.split(rows), targets.split(rows), strict=True))


def _from_table(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden.to(kind), weight.to(kind))
    table = torch.log_softmax(logits if scale == 1.0 else logits * scale, dim=-1)
    with torch.no_grad():
        entropy = -(table.exp() * table).sum(-1)
    return table.gather(1, targets[:, None])[:, 0], entropy


class _TargetLogprobs(torch.autograd.Function):
    """d logprob / d logit = scale (1 at the target - softmax); saves the log of the normalizer, one number a row."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, kind: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        wide = weight.to(kind)
        logprobs, entropies, normalizers = [], [], []
        for rows, chosen in _runs(hidden, targets, weight.shape[0]):
            logits = torch.mm(rows.to(kind), wide.t()).mul_(scale)
            normalizer = torch.logsumexp(logits, -1)
            logprobs.append(logits.gather(1, chosen[:, None])[:, 0] - normalizer)
            normalizers.append(normalizer)
            p = (logits - normalizer[:, None]).exp_()
            entropies.append(normalizer - torch.linalg.vecdot(p, logits))
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalizers))
        ctx.scale, ctx.kind = scale, kind
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        kind, vocabulary = ctx.kind, weight.shape[0]
        wide = weight.to(kind)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(wide) if ctx.needs_input_grad[1] else None  # a frozen head needs no memory
        step = max(1, TABLE_ELEMENTS // vocabulary)
        for start in range(0, targets.numel(), step):
            here = slice(start, start + step)
            rows = hidden[here].to(kind)
            d = torch.mm(rows, wide.t()).mul_(ctx.scale).sub_(normalizers[here, None]).exp_()
            each = grad[here].to(kind) * ctx.scale
            d.mul_(-each[:, None]).scatter_add_(1, targets[here, None], each[:, None])
            grad_hidden[here] = torch.mm(d, wide)
            if grad_weight is not None:
                grad_weight.addmm_(d.t(), rows)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
