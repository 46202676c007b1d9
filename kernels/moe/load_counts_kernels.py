"""Triton kernel of `load_counts`. Sums are of integers, so their order does not matter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import INTERPRET

ELEMENTS = 2048  # of a tile of tokens and experts


@triton.jit
def _divided(a, b):
    """Rounded to nearest, as torch divides."""
    if INTERPRET:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit(do_not_specialize=["n"])
def load_counts_kernel(
    scores, cutoff, bias, valid, counts, loads, counted, seen, changed, nan, n, experts,
    E: tl.constexpr, TOKENS: tl.constexpr, BINS: tl.constexpr, VALID: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, E)
    real = expert < experts
    own = tl.load(bias + expert, mask=real, other=0.0)
    high = tl.max(tl.where(real, own, float("-inf")), axis=0).to(tl.float64)
    least = tl.min(tl.where(real, own, float("inf")), axis=0).to(tl.float64)
    low, width = (least - 1.0).to(tl.float32), ((high - least + 2.0) / BINS).to(tl.float32)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < n
    if VALID:
        there = there & (tl.load(valid + token, mask=there, other=0) != 0)
    inside = there[:, None] & real[None, :]
    score = tl.load(scores + token[:, None] * experts + expert[None, :], mask=inside, other=0.0)
    limit = tl.load(cutoff + token, mask=there, other=0.0)[:, None]
    over = (score + own[None, :] > limit) & inside
    tl.atomic_add(loads + expert, tl.sum(over.to(tl.int32), axis=0).to(tl.int64), mask=real)
    position = _divided((limit - score) - low, tl.broadcast_to(width, (TOKENS, E)))
    odd = (position != position) & inside
    if tl.sum(tl.sum(odd.to(tl.int32), axis=1), axis=0) > 0:
        tl.store(nan, 1)
    place = tl.minimum(tl.maximum(tl.floor(position), 0.0), BINS - 1.0)
    place = tl.where(odd, 0.0, place).to(tl.int32)
    tl.atomic_add(counts + expert[None, :] * BINS + place, inside.to(tl.int32), mask=inside)
    if tl.program_id(0) == 0:
        before = tl.where(tl.load(seen) != 0, tl.load(counted + expert, mask=real, other=0.0), own)
        if tl.sum(((before != own) & real).to(tl.int32), axis=0) > 0:
            tl.store(changed, 1)
        tl.store(counted + expert, before, mask=real)
        tl.store(seen, 1)


def count(scores, cutoff, bias, valid, sums) -> None:
    """See `k3rl.kernels.moe.load_counts.count`."""
    n, experts = scores.shape
    size = max(16, triton.next_power_of_2(experts))
    tokens = max(1, ELEMENTS // size)
    flags = [flag.view(torch.uint8) for flag in (sums.seen, sums.changed, sums.nan)]
    load_counts_kernel[(triton.cdiv(n, tokens),)](
        scores.contiguous(), cutoff.contiguous(), bias.contiguous(), flags[0] if valid is None else
        valid.contiguous().view(torch.uint8), sums.counts, sums.loads, sums.bias, *flags, n, experts,
        E=size, TOKENS=tokens, BINS=sums.counts.shape[1], VALID=valid is not None, num_warps=4,
    )  # fmt: skip
