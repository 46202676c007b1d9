"""Logprobs of target tokens from hidden rows, without the table of all logits.

A table of P targets and a vocabulary V is the largest tensor of a step: 8,192 targets of K3 take 5.4 GB, and its
gradients as much again. Here it exists for a slice of the vocabulary at a time, and is computed once more in the
backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from k3rl.kernels.sampling import RunningSoftmax, add_slice, slice_gradient
from k3rl.types import SamplingMasks

TABLE_ELEMENTS = 1 << 22  # a table up to this size is kept: computing it again costs more than its 16 MiB
_SLICE_BYTES = 48 << 20  # of a slice on a GPU: products of fewer columns than this gives run below its speed
_LEAST_COLUMNS = 256
_ROUNDED_BEYOND = 4096  # ids: gradients of the logits of larger vocabularies are products of one bf16 number, not two


def tile_elements(on_gpu: bool) -> int:
    """Logits that exist at a time, at most, where the table is larger than `TABLE_ELEMENTS`."""
    return _SLICE_BYTES // 4 if on_gpu else TABLE_ELEMENTS


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
    if targets.numel() * weight.shape[0] <= TABLE_ELEMENTS:
        outside = _Cut(sampling_mask, hidden.device).outside(0, len(targets), 0, weight.shape[0])
        return _from_table(hidden, weight, targets, scale, kind, outside)
    logprobs, entropy = _TargetLogprobs.apply(hidden, weight, targets, scale, kind, sampling_mask)
    return logprobs, entropy


class _Cut:
    """The sampling masks of P targets on the device, asked for one tile of their table at a time."""

    def __init__(self, masks: SamplingMasks | None, device: torch.device) -> None:
        self._masks, self._device = masks, device

    def outside(self, top: int, bottom: int, start: int, stop: int) -> Tensor | None:
        """bool [bottom - top, stop - start]: what these targets could not be; None when none of them has a set."""
        if self._masks is None:
            return None
        which = self._masks.which[top:bottom]
        cut = np.flatnonzero(which >= 0)
        if not cut.size:
            return None
        numbers, place = np.unique(which[cut], return_inverse=True)
        table = torch.ones(len(numbers), stop - start, dtype=torch.bool)
        for row, number in zip(table.unbind(), numbers.tolist(), strict=True):
            ids = torch.from_numpy(self._masks.set(number)).long() - start
            row[ids[(ids >= 0) & (ids < stop - start)]] = False
        outside = torch.zeros(len(which), stop - start, dtype=torch.bool)
        outside[torch.from_numpy(cut)] = table[torch.from_numpy(place)]
        return outside.to(self._device)


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
    """The gradient of weight [V, H], in `kind`, or rounded once more where d was."""
    if d.dtype != kind:
        return torch.mm(d.t(), hidden)
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
    """The table in tiles, columns outside and rows inside, so that each row of the head is read and its gradient
    written once. Saves the log of the normalizer, one number a row."""

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
        cut, tiles = _Cut(sampling_mask, hidden.device), _Tiles.of(hidden, weight)
        rows = tiles.rows(len(targets))
        running = [RunningSoftmax.empty(bottom - top, kind, hidden.device) for top, bottom in rows]
        for start, stop in tiles.columns(weight.shape[0]):
            for (top, bottom), own in zip(rows, running, strict=True):
                logits = _cut_logits(
                    hidden[top:bottom], weight[start:stop], kind, cut.outside(top, bottom, start, stop)
                )
                add_slice(own, logits, targets[top:bottom], start, scale)
                del logits  # before the next one is made
        normalizers = torch.cat([own.normalizer for own in running])
        ctx.save_for_backward(hidden, weight, targets, normalizers)
        ctx.scale, ctx.kind, ctx.cut, ctx.tiles = scale, kind, cut, tiles
        entropy = torch.cat([own.entropy for own in running])
        ctx.mark_non_differentiable(entropy)
        return torch.cat([own.target for own in running]) - normalizers, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        kind, rows, grad = ctx.kind, ctx.tiles.rows(len(targets)), grad.contiguous()
        grad_hidden = torch.zeros_like(hidden, dtype=kind) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # a frozen head needs no memory
        rounded = weight.shape[0] > _ROUNDED_BEYOND and _on_tensor_cores(hidden, weight)
        for start, stop in ctx.tiles.columns(weight.shape[0]):
            part, sums = weight[start:stop], None
            for top, bottom in rows:
                logits = _cut_logits(hidden[top:bottom], part, kind, ctx.cut.outside(top, bottom, start, stop))
                here = slice(top, bottom)
                numbers = targets[here], start, ctx.scale, normalizers[here], grad[here]
                d = slice_gradient(logits, *numbers, weight.dtype if rounded else kind)
                del logits
                if grad_hidden is not None:
                    _add_through(grad_hidden[here], d, part, hidden)
                if grad_weight is not None and len(rows) == 1:
                    grad_weight[start:stop] = _outer(d, hidden, weight, kind)
                elif grad_weight is not None:
                    own = _outer(d, hidden[here], weight, kind)
                    sums = own if sums is None else sums.add_(own)
                del d
            if grad_weight is not None and sums is not None:
                grad_weight[start:stop] = sums
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


class _Tiles(NamedTuple):
    """How the table of P targets and V ids is cut: rows and columns of a tile."""

    height: int
    width: int

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor) -> _Tiles:
        """All rows, and as many columns as the limit leaves, in whole 128; fewer rows where that is too few columns."""
        rows, vocabulary = max(1, len(hidden)), weight.shape[0]
        most = tile_elements(hidden.device.type == "cuda")
        least = min(vocabulary, _LEAST_COLUMNS)
        height = max(1, min(rows, most // least))
        width = max(1, most // height)
        return cls(height, min(vocabulary, width if width < 128 else width - width % 128))

    def rows(self, count: int) -> list[tuple[int, int]]:
        """(first, past the last) of each; at least one, maybe empty."""
        return [(top, min(count, top + self.height)) for top in range(0, max(1, count), self.height)]

    def columns(self, count: int) -> list[tuple[int, int]]:
        """(first, past the last) of each."""
        return [(start, min(count, start + self.width)) for start in range(0, count, self.width)]


def _cut_logits(hidden: Tensor, weight: Tensor, kind: torch.dtype, outside: Tensor | None) -> Tensor:
    """[P, w] in `kind`, -inf where a target could not be."""
    logits = _wide_logits(hidden, weight, kind)
    return logits if outside is None else logits.masked_fill_(outside, -torch.inf)


def _add_through(total: Tensor, d: Tensor, weight: Tensor, hidden: Tensor) -> None:
    """Adds the gradient of hidden [P, H] from that of a tile of its logits to `total`."""
    if d.dtype != total.dtype:
        torch.addmm(total, d, weight, out_dtype=total.dtype, out=total)
    else:
        total.add_(_through(d, weight, hidden, total.dtype))
