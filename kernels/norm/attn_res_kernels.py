"""Triton kernels of `attn_res`: one launch each way, one read of memory for each source.

A program has whole rows. Forward keeps a running softmax over the sources, so that two rows are in registers however
many sources there are; the next source is asked for before the last one is summed. The running sum may come in two
parts, so that a decode step has no launch for their sum. Backward asks for all sources of a row before it sums, and
keeps them; too many it reads again, through the cache. The query's gradient leaves one row per program; `column_sums`
adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from k3rl.kernels.moe.mxfp8_kernels import keep, through
from k3rl.kernels.norm.rms_norm_kernels import column_sums
from k3rl.kernels.triton_ops import INTERPRET, LOG2E, begin, early, exp2, now, to_bf16_rne, widen

PER_WARP = 256
MOST_WARPS = (16, 8)  # forward, backward
HELD = 72  # elements of a row's sources that a thread of the backward may keep
EARLY = 24  # up to how many of them it asks for what is added to their gradients before it sums
PROGRAMS = 132 * 4
_BANK = 8


@triton.jit
def _plus2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _two_sums(a, b):
    """Sums of two rows by one exchange."""
    if INTERPRET:
        return tl.sum(a, axis=0), tl.sum(b, axis=0)
    else:
        return tl.reduce((a, b), 0, _plus2)


@triton.jit
def _source(I: tl.constexpr, COUNT: tl.constexpr, last, b0, b1, b2, b3, b4, b5, b6, b7):  # noqa: E741
    """The pointer of source I of COUNT, the running sum last."""
    if I == COUNT - 1:
        return last
    elif I == 0:
        return b0
    elif I == 1:
        return b1
    elif I == 2:
        return b2
    elif I == 3:
        return b3
    elif I == 4:
        return b4
    elif I == 5:
        return b5
    elif I == 6:
        return b6
    else:
        return b7


@triton.jit
def _query(norm, proj, column, valid, BF16: tl.constexpr):
    a = tl.load(norm + column, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(proj + column, mask=valid, other=0.0).to(tl.float32)
    return through(a * b, BF16)


@triton.jit(do_not_specialize=["n"])
def mix_kernel(
    last, b0, b1, b2, b3, b4, b5, b6, b7, norm, proj, gain, y, state, added, sums, running, n, eps, norm_eps,
    SOURCES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, SAVE: tl.constexpr,
    ADD: tl.constexpr, PARTS: tl.constexpr, FRESH: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """ADD or PARTS: the last source is last (FRESH: nothing) and an addend, and goes to `running` too.

    The addend is `added` (ADD) and the PARTS rows of sums [PARTS, n, WIDTH], if any, rounded.
    """
    begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    line = row * WIDTH
    query = _query(norm, proj, column, valid, BF16)
    following = tl.load(b0 + line + column, mask=valid, other=0.0).to(tl.float32)
    if ADD or PARTS:
        more = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PARTS):
            more += tl.load(sums + i * n * WIDTH + line + column, mask=valid, other=0.0)
        if ADD:
            more += tl.load(added + line + column, mask=valid, other=0.0).to(tl.float32)
        if PARTS:
            more = through(more, BF16)
    for i in tl.static_range(SOURCES):
        value = following
        if (ADD or PARTS) and i + 1 == SOURCES:
            value = more if FRESH else through(value + more, BF16)
            keep(running + line + column, value, valid, BF16)
        if i + 1 < SOURCES:
            pointer = _source(i + 1, SOURCES, last, b0, b1, b2, b3, b4, b5, b6, b7)
            following = tl.load(pointer + line + column, mask=valid, other=0.0).to(tl.float32)
        square, along = _two_sums(value * value, value * query)
        inverse = tl.rsqrt(square / WIDTH + eps)
        score = along * inverse * LOG2E
        if i == 0:
            most, total, mix = score, score * 0.0 + 1.0, value
        else:
            before = most
            most = tl.maximum(before, score)
            shrink, share = exp2(before - most), exp2(score - most)
            total = total * shrink + share
            mix = now(mix * shrink + value * share)
        if SAVE:
            tl.store(state + i * n + row, score)
            tl.store(state + (SOURCES + i) * n + row, inverse)
    whole = 1.0 / total
    if SAVE:
        tl.store(state + 2 * SOURCES * n + row, most)
        tl.store(state + (2 * SOURCES + 1) * n + row, whole)
    mix = mix * whole
    if NORMED:
        mix = through(mix, BF16)
        weight = tl.load(gain + column, mask=valid, other=0.0).to(tl.float32)
        mix = through(mix * tl.rsqrt(tl.sum(mix * mix, axis=0) / WIDTH + norm_eps), BF16) * weight
    keep(y + line + column, mix, valid, BF16)


@triton.jit(do_not_specialize=["n", "steps"])
def mix_gradient_kernel(
    grad, last, b0, b1, b2, b3, b4, b5, b6, b7, norm, proj, state, added, a0, a1, a2, a3, a4, a5, a6, a7,
    d_last, d0, d1, d2, d3, d4, d5, d6, d7, parts, n, steps,
    SOURCES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDED_LAST: tl.constexpr, ADDED: tl.constexpr,
    HOLD: tl.constexpr, EARLY: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    query = _query(norm, proj, column, valid, BF16)
    NARROW: tl.constexpr = BF16 and not HOLD  # rows that do not fit in registers: the query waits there in 16 bits
    query = to_bf16_rne(query) if NARROW else query
    d_query = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps
    for row in tl.range(first, tl.minimum(first + steps, n)):
        at = row * WIDTH + column
        g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
        most = tl.load(state + 2 * SOURCES * n + row)
        whole = tl.load(state + (2 * SOURCES + 1) * n + row)
        mean = 0.0
        values = ()
        alongs = ()
        addends = ()
        if HOLD:
            for i in tl.static_range(SOURCES):
                pointer = _source(i, SOURCES, last, b0, b1, b2, b3, b4, b5, b6, b7)
                values = values + (tl.load(pointer + at, mask=valid, other=0.0).to(tl.float32),)  # noqa: RUF005
        if EARLY:
            for i in tl.static_range(SOURCES):
                more = _source(i, SOURCES, added, a0, a1, a2, a3, a4, a5, a6, a7)
                addends = addends + (tl.load(more + at, mask=valid, other=0.0).to(tl.float32),)  # noqa: RUF005
        for i in tl.static_range(SOURCES):
            if HOLD:
                value = values[i]
            else:
                pointer = _source(i, SOURCES, last, b0, b1, b2, b3, b4, b5, b6, b7)
                value = tl.load(pointer + at, mask=valid, other=0.0).to(tl.float32)
            along = tl.sum(g * value, axis=0)
            along = along if HOLD else now(along)
            mean += exp2(tl.load(state + i * n + row) - most) * whole * along
            alongs = alongs + (along,)  # noqa: RUF005
        for i in tl.static_range(SOURCES):
            if HOLD:
                value = values[i]
            else:
                pointer = _source(i, SOURCES, last, b0, b1, b2, b3, b4, b5, b6, b7)
                value = tl.load(pointer + at, mask=valid, other=0.0).to(tl.float32)
            score = tl.load(state + i * n + row)
            inverse = tl.load(state + (SOURCES + i) * n + row)
            share = exp2(score - most) * whole
            pull = (alongs[i] - mean) * share * inverse
            # Scores are in log2 units.
            shrink = score * inverse * pull * (-1.0 / (LOG2E * WIDTH))
            d_query = now(d_query + value * pull)
            d = g * share + (widen(query) if NARROW else query) * pull + value * shrink
            target = _source(i, SOURCES, d_last, d0, d1, d2, d3, d4, d5, d6, d7)
            if EARLY:
                d += addends[i]
            elif (ADDED_LAST and i == SOURCES - 1) or (ADDED and i < SOURCES - 1):
                more = _source(i, SOURCES, added, a0, a1, a2, a3, a4, a5, a6, a7)
                d += tl.load(more + at, mask=valid, other=0.0).to(tl.float32)
            if i == SOURCES - 1:
                keep(target + at, d, valid, BF16)
            else:
                tl.store(target + at, d, mask=valid)
    tl.store(parts + tl.program_id(0).to(tl.int64) * WIDTH + column, d_query, mask=valid)


def _eight(rows: Sequence[torch.Tensor], other: torch.Tensor) -> list[torch.Tensor]:
    return [*rows, *[other] * (_BANK - len(rows))]


def _shape(last: torch.Tensor, most_warps: int) -> dict[str, int]:
    width = last.shape[1]
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": max(1, min(most_warps, block // PER_WARP))}


def mix(
    last: torch.Tensor, bank: Sequence[torch.Tensor], norm: torch.Tensor, proj: torch.Tensor, eps: float,
    weight: torch.Tensor | None, norm_eps: float, save: bool, added: torch.Tensor | None = None,
    sums: torch.Tensor | None = None, fresh: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`attn_res.mix`, and with `added` or sums [P, N, H] of `mix_sum`, whose running sum comes second.

    fresh: nothing but the shape of `last` counts.

    Saved in fp32: scores [S, N] in units of log 2, inverse RMS [S, N], the largest score [1, N], and one over the sum
    of the exponentials of scores less that [1, N].
    """
    last, bank = last.contiguous(), [row.contiguous() for row in bank]
    n, sources = last.shape[0], len(bank) + 1
    y = torch.empty_like(last)
    state = torch.empty(2 * sources + 2, n, dtype=torch.float32, device=last.device) if save else None
    running = None if added is None and sums is None else torch.empty_like(last)
    mix_kernel[(n,)](
        last, *_eight(bank, bank[0]), norm, proj, norm if weight is None else weight, y, bank[0] if state is None
        else state, last if added is None else added.contiguous(), bank[0] if sums is None else sums,
        y if running is None else running, n, eps, norm_eps, SOURCES=sources, NORMED=weight is not None, SAVE=save,
        ADD=added is not None, PARTS=0 if sums is None else len(sums), FRESH=fresh,
        BF16=last.dtype == torch.bfloat16, **_shape(last, MOST_WARPS[0]),
        **early(),
    )  # fmt: skip
    return y, state if running is None else running


def mix_gradient(
    grad: torch.Tensor, last: torch.Tensor, bank: Sequence[torch.Tensor], norm: torch.Tensor, proj: torch.Tensor,
    state: torch.Tensor, added: torch.Tensor | None, added_bank: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """`k3rl.kernels.norm.attn_res.mix_gradient`."""
    grad, last, bank = grad.contiguous(), last.contiguous(), [row.contiguous() for row in bank]
    n, width = last.shape
    steps = triton.cdiv(n, PROGRAMS)
    programs = triton.cdiv(n, steps)
    d_last, outs = torch.empty_like(last), [torch.empty_like(row) for row in bank]
    parts = torch.empty(programs, width, dtype=torch.float32, device=last.device)
    shape = _shape(last, MOST_WARPS[1])
    held = (len(bank) + 1) * shape["BLOCK"] // (32 * shape["num_warps"])
    early = held <= EARLY and added is not None and added_bank is not None
    more = bank if added_bank is None else [row.contiguous() for row in added_bank]
    mix_gradient_kernel[(programs,)](
        grad, last, *_eight(bank, bank[0]), norm, proj, state,
        last if added is None else added.contiguous(), *_eight(more, bank[0]),
        d_last, *_eight(outs, outs[0]), parts, n, steps, SOURCES=len(bank) + 1, ADDED_LAST=added is not None,
        ADDED=added_bank is not None,
        HOLD=held <= HELD, EARLY=early, BF16=last.dtype == torch.bfloat16, **shape,
    )  # fmt: skip
    d_norm, d_proj = column_sums(parts, norm, proj, dtype=norm.dtype)
    return d_norm, d_proj.view_as(proj), d_last, outs
