"""Causal depthwise convolution of width 4 with SiLU, as on the q, k and v streams of a KDA layer.

    y_t[c] = silu(sum_j w[c, j] x_{t-3+j}[c]),  j = 0 .. 3,  w[c, 3] on the current token

Tokens before the start come from `history` (the last 3 raw inputs, oldest first) or are 0; packed sequences never see
each other. `short_conv_reference` is the definition; `short_conv` runs all streams in one Triton launch on a GPU.
Source: k3 architecture sections 2.1 step 2 and 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3rl.kernels import limits

WIDTH = 4


def short_conv(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *,
    history: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Convolve the streams xs, each [B, T, C], with weights, each [C, 4]; differentiable in xs and weights.

    history [n, 3, len(xs) * C]: the raw inputs before each of the n sequences, streams side by side, oldest first; it
    gets no gradient. cu_seqlens [n + 1] packs the sequences into B = 1; outputs past its end are 0.
    Returns the outputs in each stream's dtype and the new history [n, 3, len(xs) * C] in history's dtype (xs' if None).
    Raises ValueError on shapes that do not fit.
    """
    _check(xs, weights, history, cu_seqlens)
    if limits.SHORT_CONV.takes(xs):
        from k3rl.kernels.kda import short_conv_kernels

        return short_conv_kernels.short_conv(xs, weights, history, cu_seqlens)
    return _convolve(xs, weights, history, cu_seqlens), new_history(xs, history, cu_seqlens)


def short_conv_reference(xs, weights, *, history=None, cu_seqlens=None):
    """`short_conv` in plain torch."""
    _check(xs, weights, history, cu_seqlens)
    return _convolve(xs, weights, history, cu_seqlens), new_history(xs, history, cu_seqlens)


def _check(xs, weights, history, cu_seqlens) -> None:
    B, T, C = xs[0].shape
    n = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if any(x.shape != (B, T, C) for x in xs) or len(weights) != len(xs):
        raise ValueError(f"short_conv: every stream must be [B, T, C] = {(B, T, C)} with one weight each, got "
                         f"{[tuple(x.shape) for x in xs]} and {len(weights)} weights")  # fmt: skip
    if any(w.shape != (C, WIDTH) for w in weights):
        raise ValueError(f"short_conv: weights must be [C, 4] = {(C, WIDTH)}, got {[tuple(w.shape) for w in weights]}")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"short_conv: cu_seqlens packs sequences into one row, so B must be 1, got B = {B}")
    if history is not None and history.shape != (n, WIDTH - 1, C * len(xs)):
        raise ValueError(f"short_conv: history must be {(n, WIDTH - 1, C * len(xs))}, got {tuple(history.shape)}")


def positions(tokens: int, batch: int, cu_seqlens: torch.Tensor | None, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and position in it of each of batch * tokens rows; sequence n (one too many) for rows past the end."""
    if cu_seqlens is None:
        row = torch.arange(batch * tokens, device=device)
        return row // max(tokens, 1), row % max(tokens, 1)
    ends = cu_seqlens.to(device=device, dtype=torch.int64)
    row = torch.arange(tokens, device=device)
    sequence = torch.searchsorted(ends[1:], row, right=True)
    return sequence, row - ends[sequence.clamp(max=ends.numel() - 1)]


def _convolve(xs, weights, history, cu_seqlens) -> list[torch.Tensor]:
    B, T, C = xs[0].shape
    sequence, position = positions(T, B, cu_seqlens, xs[0].device)
    n = B if cu_seqlens is None else cu_seqlens.numel() - 1
    inside = (sequence < n)[:, None]
    row = torch.arange(B * T, device=xs[0].device)
    outputs = []
    for s, (x, weight) in enumerate(zip(xs, weights, strict=True)):
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        flat, w = x.reshape(B * T, C).to(wide), weight.to(wide)
        total = flat * w[:, 3]
        for back in (1, 2, 3):
            past = torch.where((position >= back)[:, None], flat[(row - back).clamp(min=0)], 0)
            if history is not None:
                stored = history[sequence.clamp(max=n - 1), (position - back + 3).clamp(0, 2), s * C : (s + 1) * C]
                past = torch.where((position < back)[:, None], stored.detach().to(wide), past)
            total = total + past * w[:, 3 - back]
        y = torch.where(inside, torch.nn.functional.silu(total), 0)
        outputs.append(y.to(x.dtype).view(B, T, C))
    return outputs


@torch.no_grad()
def new_history(xs, history, cu_seqlens) -> torch.Tensor:
    """The last 3 raw inputs of each sequence, reaching into the old history where it is shorter than 3."""
    B, T, C = xs[0].shape
    device = xs[0].device
    if cu_seqlens is None:
        ends = torch.arange(1, B + 1, device=device) * T
        lengths = torch.full((B,), T, device=device)
    else:
        ends = cu_seqlens[1:].to(device=device, dtype=torch.int64)
        lengths = ends - cu_seqlens[:-1].to(device=device, dtype=torch.int64)
    if history is None:
        history = xs[0].new_zeros(ends.numel(), WIDTH - 1, C * len(xs))
    back = torch.arange(3, 0, -1, device=device)  # oldest first
    fresh = back <= lengths[:, None]
    if T == 0:
        return history.clone()
    source = torch.where(fresh, ends[:, None] - back, 0).clamp(max=B * T - 1)
    # A row that is still in the old history has moved `length` places towards the front.
    old = (3 - back + lengths[:, None]).clamp(max=2)
    taken = torch.cat([x.reshape(B * T, C)[source] for x in xs], -1).to(history.dtype)
    kept = history.gather(1, old[..., None].expand(-1, -1, history.shape[-1]))
    return torch.where(fresh[..., None], taken, kept)
