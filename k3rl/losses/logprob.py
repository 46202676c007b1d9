"""Logprobs of target tokens from hidden rows, without the table of all logits.

A table of P targets and a vocabulary V is the largest tensor of a step: 8,192 targets of K3 take 5.4 GB, and its
gradients as much again. Here it exists for a run of rows at a time, and is computed once more in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3rl.packed import SamplingMasks

TABLE_ELEMENTS = 1 << 22  # a table up to this size is kept: computing it again costs more than its 16 MiB


def target_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    sampling_mask: SamplingMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [P, H], head weight [V, H], targets [P] int64 -> logprobs [P] and entropies [P] in nats.

    Both in float32 or wider, under softmax(logits / temperature); temperature 0 counts as 1, as in sampling.
    sampling_mask, of the P targets: the softmax of a target that has a set is over that set alone, as it was drawn.
    Logprobs have gradients to hidden and weight, entropies none.
    """
    kind = torch.promote_types(hidden.dtype, torch.float32)
    scale = 1.0 if temperature == 0.0 else 1.0 / temperature
    if targets.numel() * weight.shape[0] > TABLE_ELEMENTS and torch.is_grad_enabled():
        logprobs, entropy = _TargetLogprobs.apply(hidden, weight, targets, scale, kind, sampling_mask)
        return logprobs, entropy
    pieces = [
        _from_table(rows, weight, chosen, scale, kind, cut)
        for rows, chosen, cut in _runs(hidden, targets, weight.shape[0], sampling_mask)
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _runs(
    hidden: Tensor, targets: Tensor, vocabulary: int, sampling_mask: SamplingMasks | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Runs of rows whose tables stay below the limit, with `_outside` of each; at least one, maybe empty."""
    step, start = max(1, TABLE_ELEMENTS // vocabulary), 0
    for rows, chosen in zip(hidden.split(step), targets.split(step), strict=True):
        yield rows, chosen, _outside(sampling_mask, start, start + len(chosen), vocabulary, hidden.device)
        start += len(chosen)


def _outside(
    sampling_mask: SamplingMasks | None, start: int, stop: int, vocabulary: int, device: torch.device
) -> Tensor | None:
    """bool [stop - start, V]: what these targets could not be; None when none of them has a set."""
    if sampling_mask is None:
        return None
    which = sampling_mask.which[start:stop]
    cut = np.flatnonzero(which >= 0)
    if not cut.size:
        return None
    numbers, place = np.unique(which[cut], return_inverse=True)
    table = torch.ones(len(numbers), vocabulary, dtype=torch.bool)
    for row, number in zip(table.unbind(), numbers.tolist(), strict=True):
        row[torch.from_numpy(sampling_mask.set(number)).long()] = False
    outside = torch.zeros(len(which), vocabulary, dtype=torch.bool)
    outside[torch.from_numpy(cut)] = table[torch.from_numpy(place)]
    return outside.to(device)


def _on_tensor_cores(hidden: Tensor, weight: Tensor) -> bool:
    """Whether products of these rows and weights are made of them as they are, with wide sums: on a GPU in bf16."""
    return hidden.device.type == "cuda" and hidden.dtype == weight.dtype == torch.bfloat16


def _halves(d: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """d as a sum of two tensors of a narrower dtype, whose error is 2^-17 of it in bf16."""
    high = d.to(kind)
    return high, (d - high).to(kind)


def _wide_logits(hidden: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
    """hidden [P, H], weight [V, H] -> [P, V] in `kind`; products of bf16 values are exact in float32."""
    if _on_tensor_cores(hidden, weight):
        return torch.mm(hidden, weight.t(), out_dtype=kind)
    return torch.nn.functional.linear(hidden.to(kind), weight.to(kind))


def _through(d: Tensor, weight: Tensor, hidden: Tensor, kind: torch.dtype) -> Tensor:
    """The gradient of hidden [P, H] from that of its logits d [P, V], in `kind`."""
    if _on_tensor_cores(hidden, weight):
        high, low = _halves(d, weight.dtype)
        return torch.mm(high, weight, out_dtype=kind).add_(torch.mm(low, weight, out_dtype=kind))
    return torch.mm(d, weight.to(kind))


def _outer(d: Tensor, hidden: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
    """The gradient of weight [V, H], in `kind`."""
    if _on_tensor_cores(hidden, weight):
        high, low = _halves(d, hidden.dtype)
        return torch.mm(high.t(), hidden, out_dtype=kind).add_(torch.mm(low.t(), hidden, out_dtype=kind))
    return torch.mm(d.t(), hidden.to(kind))


class _Logits(torch.autograd.Function):
    """`_wide_logits` with gradients, which are products of both halves of the one that arrives."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _wide_logits(hidden, weight, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        d_hidden = _through(grad, weight, hidden, grad.dtype).to(hidden.dtype) if needs_hidden else None
        return d_hidden, _outer(grad, hidden, weight, grad.dtype).to(weight.dtype) if needs_weight else None, None


def _from_table(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, kind: torch.dtype, outside: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = _Logits.apply(hidden, weight, kind)
    logits = logits if scale == 1.0 else logits * scale
    table = torch.log_softmax(logits if outside is None else logits.masked_fill(outside, -torch.inf), dim=-1)
    with torch.no_grad():
        p = table.exp()
        entropy = -(p * (table if outside is None else table.masked_fill(outside, 0.0))).sum(-1)
    return table.gather(1, targets[:, None])[:, 0], entropy


class _TargetLogprobs(torch.autograd.Function):
    """d logprob / d logit = scale (1 at the target - softmax); saves the log of the normalizer, one number a row."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        kind: torch.dtype,
        sampling_mask: SamplingMasks | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalizers = [], [], []
        for rows, chosen, outside in _runs(hidden, targets, weight.shape[0], sampling_mask):
            logits = _wide_logits(rows, weight, kind).mul_(scale)
            if outside is not None:
                logits.masked_fill_(outside, -torch.inf)
            normalizer = torch.logsumexp(logits, -1)
            logprobs.append(logits.gather(1, chosen[:, None])[:, 0] - normalizer)
            normalizers.append(normalizer)
            p = (logits - normalizer[:, None]).exp_()
            if outside is not None:
                logits.masked_fill_(outside, 0.0)
            entropies.append(normalizer - torch.linalg.vecdot(p, logits))
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalizers))
        ctx.scale, ctx.kind, ctx.sampling_mask = scale, kind, sampling_mask
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        kind, vocabulary = ctx.kind, weight.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None  # a frozen head needs no memory
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=kind)
        step = max(1, TABLE_ELEMENTS // vocabulary)
        for start in range(0, targets.numel(), step):
            here = slice(start, start + step)
            rows = hidden[here]
            d = _wide_logits(rows, weight, kind).mul_(ctx.scale).sub_(normalizers[here, None]).exp_()
            outside = _outside(ctx.sampling_mask, start, start + len(rows), vocabulary, hidden.device)
            if outside is not None:
                d.masked_fill_(outside, 0.0)
            each = grad[here].to(kind) * ctx.scale
            d.mul_(-each[:, None]).scatter_add_(1, targets[here, None], each[:, None])
            grad_hidden[here] = _through(d, weight, rows, kind)
            if grad_weight is not None:
                grad_weight += _outer(d, rows, weight, kind)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None
