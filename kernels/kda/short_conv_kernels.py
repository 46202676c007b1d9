"""Triton kernels of `short_conv`: strips of tokens by COLUMNS channels, the last rows kept in registers.

A program walks down its strip and reads every row once (3 rows of halo aside), so that forward moves 2 and backward 3
elements per input element. Backward recomputes the pre-activation from x, row by row; the weight's gradient leaves one
row per strip, added up by torch, so that a repeated run is bit-identical.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.kda.autograd import Chunks, TableCache, capturing, packed_chunks, zero_tail
from k3rl.kernels.triton_ops import sigmoid, to_bf16_rne

# Tokens a strip, columns a program.
FORWARD = {"strip": 64, "columns": 512, "num_warps": 4, "stages": 2}
BACKWARD = {"strip": 256, "columns": 512, "num_warps": 4, "stages": 3}


@triton.jit
def _pick(stream, a, b, c):
    """The pointer of stream 0, 1 or 2."""
    chosen = a
    if stream == 1:
        chosen = b
    if stream == 2:
        chosen = c
    return chosen


@triton.jit
def _before(x, history, t0, back, at_start, slot, column, valid, stride_t, width, HAS_HISTORY: tl.constexpr):
    """Row t0 - back of a strip: from the sequence, or from the history if the strip starts it (fp32)."""
    past = tl.load(x + (t0 - back) * stride_t + column, mask=valid & (at_start == 0), other=0.0).to(tl.float32)
    if HAS_HISTORY:
        past += tl.load(history + (slot * 3 + 3 - back) * width + column, mask=valid & (at_start == 1), other=0.0).to(
            tl.float32
        )
    return past


@triton.jit
def _weights(w, column, valid):
    """The four weights [C, 4] of each column."""
    return (
        tl.load(w + column * 4, mask=valid, other=0.0).to(tl.float32),
        tl.load(w + column * 4 + 1, mask=valid, other=0.0).to(tl.float32),
        tl.load(w + column * 4 + 2, mask=valid, other=0.0).to(tl.float32),
        tl.load(w + column * 4 + 3, mask=valid, other=0.0).to(tl.float32),
    )


@triton.jit
def _store_as(pointer, value, mask, BF16: tl.constexpr):
    if BF16:
        tl.store(pointer, to_bf16_rne(value), mask=mask)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def _silu_store(pointer, c, mask, BF16: tl.constexpr):
    _store_as(pointer, c * sigmoid(c), mask, BF16)


@triton.jit
def _row_of(x, dy, mask):
    """One row of the inputs and of the gradients, fp32."""
    return tl.load(x, mask=mask, other=0.0).to(tl.float32), tl.load(dy, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _through_silu(c, up):
    """The gradient of silu(c)."""
    s = sigmoid(c)
    return up * s * (1.0 + c * (1.0 - s))


@triton.jit
def forward_kernel(
    x_a, x_b, x_c, w_a, w_b, w_c, y_a, y_b, y_c, history, chunk_start, chunk_len, chunk_sequence,
    x_t, channels, width,
    HAS_HISTORY: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(1)
    stream = tl.program_id(2)
    n = tl.load(chunk_len + strip)
    if n == 0:
        return
    x, w, y = _pick(stream, x_a, x_b, x_c), _pick(stream, w_a, w_b, w_c), _pick(stream, y_a, y_b, y_c)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < channels
    t0 = tl.load(chunk_start + strip).to(tl.int64)
    # -1 - sequence where the strip is the first one of its sequence.
    sequence = tl.load(chunk_sequence + strip)
    at_start = (sequence < 0).to(tl.int32)
    slot = tl.where(sequence < 0, -1 - sequence, sequence).to(tl.int64)
    w0, w1, w2, w3 = _weights(w, column, valid)
    past = history + stream * channels
    x3 = _before(x, past, t0, 3, at_start, slot, column, valid, x_t, width, HAS_HISTORY)
    x2 = _before(x, past, t0, 2, at_start, slot, column, valid, x_t, width, HAS_HISTORY)
    x1 = _before(x, past, t0, 1, at_start, slot, column, valid, x_t, width, HAS_HISTORY)
    # Four rows a step: their loads are in flight together.
    for row in tl.range(0, n, 4, num_stages=STAGES):
        base = x + (t0 + row) * x_t + column
        to = y + (t0 + row) * channels + column
        xa = tl.load(base, mask=valid, other=0.0).to(tl.float32)
        xb = tl.load(base + x_t, mask=valid & (row + 1 < n), other=0.0).to(tl.float32)
        xc = tl.load(base + 2 * x_t, mask=valid & (row + 2 < n), other=0.0).to(tl.float32)
        xd = tl.load(base + 3 * x_t, mask=valid & (row + 3 < n), other=0.0).to(tl.float32)
        _silu_store(to, w0 * x3 + w1 * x2 + w2 * x1 + w3 * xa, valid, BF16)
        _silu_store(to + channels, w0 * x2 + w1 * x1 + w2 * xa + w3 * xb, valid & (row + 1 < n), BF16)
        _silu_store(to + 2 * channels, w0 * x1 + w1 * xa + w2 * xb + w3 * xc, valid & (row + 2 < n), BF16)
        _silu_store(to + 3 * channels, w0 * xa + w1 * xb + w2 * xc + w3 * xd, valid & (row + 3 < n), BF16)
        x3, x2, x1 = xb, xc, xd


@triton.jit
def backward_kernel(
    xa, xb, xc, wa, wb, wc, dya, dyb, dyc, dxa, dxb, dxc, dweight_rows, history,
    chunk_start, chunk_len, chunk_sequence, chunk_rest,
    x_t, dy_t, channels, width,
    HAS_HISTORY: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(1)
    stream = tl.program_id(2)
    n = tl.load(chunk_len + strip)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < channels
    x, w = _pick(stream, xa, xb, xc), _pick(stream, wa, wb, wc)
    dy, dx = _pick(stream, dya, dyb, dyc), _pick(stream, dxa, dxb, dxc)
    t0 = tl.load(chunk_start + strip).to(tl.int64)
    # -1 - sequence where the strip is the first one of its sequence.
    sequence = tl.load(chunk_sequence + strip)
    at_start = (sequence < 0).to(tl.int32)
    slot = tl.where(sequence < 0, -1 - sequence, sequence).to(tl.int64)
    # Tokens of the same sequence after this strip: their dy reaches back into it, 3 rows at most.
    rest = tl.load(chunk_rest + strip)
    w0, w1, w2, w3 = _weights(w, column, valid)
    nothing = tl.zeros([COLUMNS], tl.float32)
    x3, x2, x1 = nothing, nothing, nothing
    d3, d2, d1 = nothing, nothing, nothing
    g0, g1, g2, g3 = nothing, nothing, nothing, nothing
    if n > 0:
        past = history + stream * channels
        x3 = _before(x, past, t0, 3, at_start, slot, column, valid, x_t, width, HAS_HISTORY)
        x2 = _before(x, past, t0, 2, at_start, slot, column, valid, x_t, width, HAS_HISTORY)
        x1 = _before(x, past, t0, 1, at_start, slot, column, valid, x_t, width, HAS_HISTORY)
    # Four rows a step: their loads are in flight together. No value is handed on unchanged from one carried name to the
    # next: Triton 3.6 takes such values for equal when they start as the same constant, and pipelines no such loop.
    for row in tl.range(0, tl.where(n > 0, n + 3, 0), 4, num_stages=STAGES):
        from_x = x + (t0 + row) * x_t + column
        from_dy = dy + (t0 + row) * dy_t + column
        to = dx + (t0 + row - 3) * channels + column
        left = n - row
        ra, ua = _row_of(from_x, from_dy, valid & (left + rest > 0))
        rb, ub = _row_of(from_x + x_t, from_dy + dy_t, valid & (left + rest > 1))
        rc, uc = _row_of(from_x + 2 * x_t, from_dy + 2 * dy_t, valid & (left + rest > 2))
        rd, ud = _row_of(from_x + 3 * x_t, from_dy + 3 * dy_t, valid & (left + rest > 3))
        da = _through_silu(w0 * x3 + w1 * x2 + w2 * x1 + w3 * ra, ua)
        db = _through_silu(w0 * x2 + w1 * x1 + w2 * ra + w3 * rb, ub)
        dc = _through_silu(w0 * x1 + w1 * ra + w2 * rb + w3 * rc, uc)
        dd = _through_silu(w0 * ra + w1 * rb + w2 * rc + w3 * rd, ud)
        _store_as(to, w3 * d3 + w2 * d2 + w1 * d1 + w0 * da, valid & (row > 0), BF16)
        _store_as(to + channels, w3 * d2 + w2 * d1 + w1 * da + w0 * db, valid & (row > 0) & (left > -2), BF16)
        _store_as(to + 2 * channels, w3 * d1 + w2 * da + w1 * db + w0 * dc, valid & (row > 0) & (left > -1), BF16)
        _store_as(to + 3 * channels, w3 * da + w2 * db + w1 * dc + w0 * dd, valid & (left > 0), BF16)
        ma, mb = tl.where(left > 0, da, 0.0), tl.where(left > 1, db, 0.0)
        mc, md = tl.where(left > 2, dc, 0.0), tl.where(left > 3, dd, 0.0)
        g0 += ma * x3 + mb * x2 + mc * x1 + md * ra
        g1 += ma * x2 + mb * x1 + mc * ra + md * rb
        g2 += ma * x1 + mb * ra + mc * rb + md * rc
        g3 += ma * ra + mb * rb + mc * rc + md * rd
        x3, x2, x1, d3, d2, d1 = rb, rc, rd, db, dc, dd
    to = dweight_rows + (strip * tl.num_programs(2) + stream).to(tl.int64) * 4 * channels + column
    tl.store(to, g0, mask=valid)
    tl.store(to + channels, g1, mask=valid)
    tl.store(to + 2 * channels, g2, mask=valid)
    tl.store(to + 3 * channels, g3, mask=valid)


@triton.jit(do_not_specialize=["tokens"])
def history_kernel(
    x_a, x_b, x_c, ends, history, new, tokens, x_t, channels, width,
    PACKED: tl.constexpr, HAS_HISTORY: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """One of the last three raw inputs of one sequence and stream, out of the old history where that is reached."""
    sequence = tl.program_id(2).to(tl.int64)
    place = tl.program_id(1) % 3
    stream = tl.program_id(1) // 3
    first = sequence * tokens
    last = first + tokens
    if PACKED:
        first = tl.load(ends + sequence).to(tl.int64)
        last = tl.load(ends + sequence + 1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < channels
    token = last - 3 + place
    x = _pick(stream, x_a, x_b, x_c)
    value = tl.load(x + token * x_t + column, mask=valid & (token >= first), other=0.0).to(tl.float32)
    to = stream * channels + column
    if HAS_HISTORY:
        # A row that is still in the old history has moved by the sequence's length towards the front.
        old = history + (sequence * 3 + place + last - first) * width + to
        value += tl.load(old, mask=valid & (token < first), other=0.0).to(tl.float32)
    to += (sequence * 3 + place) * width
    if BF16:
        tl.store(new + to, to_bf16_rne(value), mask=valid)
    else:
        tl.store(new + to, value, mask=valid)


@torch.no_grad()
def new_history(xs, history, cu_seqlens) -> torch.Tensor:
    """`k3rl.kernels.kda.short_conv.new_history` by one launch."""
    B, T, C = xs[0].shape
    n = B if cu_seqlens is None else cu_seqlens.numel() - 1
    flat, stride = _rows([x.detach() for x in xs])
    like = xs[0] if history is None else history
    new = torch.empty(n, 3, C * len(xs), dtype=like.dtype, device=like.device)
    columns = min(1024, triton.next_power_of_2(C))
    history_kernel[(triton.cdiv(C, columns), 3 * len(xs), n)](
        *_three(flat), flat[0] if cu_seqlens is None else cu_seqlens, like, new, T, stride, C, C * len(xs),
        PACKED=cu_seqlens is not None, HAS_HISTORY=history is not None, COLUMNS=columns,
        BF16=new.dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return new


_fixed = TableCache()


def strips(B: int, T: int, cu_seqlens, device, size: int) -> Chunks:
    """Strips of at most `size` tokens of one sequence."""
    if cu_seqlens is not None:
        return packed_chunks(cu_seqlens, T, size, where=True)

    def make() -> Chunks:
        return packed_chunks(torch.arange(B + 1, dtype=torch.int32, device=device) * T, B * T, size, where=True)

    return _fixed.get((B, T, device, size), make, capturing(device))


def _three(tensors):
    return [tensors[min(s, len(tensors) - 1)] for s in range(3)]


def _rows(tensors):
    """Each [B, T, C] as rows [B * T, C] with one common row stride and contiguous channels."""
    flat = [x.flatten(0, 1) for x in tensors]
    if any(x.stride(1) != 1 or x.stride(0) != flat[0].stride(0) for x in flat):
        flat = [x.contiguous() for x in flat]
    return flat, flat[0].stride(0)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, history, cu_seqlens, count, *tensors):
        xs, weights = tensors[:count], [w.contiguous() for w in tensors[count:]]
        B, T, C = xs[0].shape
        rows, stride = _rows(xs)
        ys = [zero_tail(torch.empty(B, T, C, dtype=x.dtype, device=x.device), cu_seqlens) for x in xs]
        table = strips(B, T, cu_seqlens, xs[0].device, FORWARD["strip"])
        launch_forward(rows, stride, weights, ys, history, table, **FORWARD)
        ctx.save_for_backward(history, *xs, *weights)
        ctx.count, ctx.ends = count, cu_seqlens
        return tuple(ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys):
        history, *tensors = ctx.saved_tensors
        cu_seqlens = ctx.ends
        xs, weights = tensors[: ctx.count], tensors[ctx.count :]
        rows, stride = _rows(xs)
        table = strips(*xs[0].shape[:2], cu_seqlens, xs[0].device, BACKWARD["strip"])
        dxs = [zero_tail(torch.empty_like(x, memory_format=torch.contiguous_format), cu_seqlens) for x in xs]
        dws = launch_backward(rows, stride, weights, _rows(dys), dxs, history, table, **BACKWARD)
        return None, None, None, *dxs, *(dw.to(w.dtype) for dw, w in zip(dws, weights, strict=True))


def launch_forward(
    rows, stride, weights, ys, history, table: Chunks, *, columns: int, num_warps: int, stages: int, **_,
):  # fmt: skip
    """Fill ys from rows [tokens, C]."""
    C = rows[0].shape[-1]
    forward_kernel[(triton.cdiv(C, columns), table.count, len(rows))](
        *_three(rows), *_three(weights), *_three(ys), rows[0] if history is None else history,
        table.start, table.length, table.sequence, stride, C, C * len(rows),
        HAS_HISTORY=history is not None, COLUMNS=columns, BF16=rows[0].dtype == torch.bfloat16,
        STAGES=stages, num_warps=num_warps,
    )  # fmt: skip


def launch_backward(
    rows, stride, weights, dys, dxs, history, table: Chunks,
    *, columns: int, num_warps: int, stages: int, **_,
):  # fmt: skip
    """Fill dxs; returns the weights' gradients [C, 4] fp32."""
    C = rows[0].shape[-1]
    parts = torch.empty(table.count, len(rows), 4, C, dtype=torch.float32, device=rows[0].device)
    backward_kernel[(triton.cdiv(C, columns), table.count, len(rows))](
        *_three(rows), *_three(weights), *_three(dys[0]), *_three(dxs), parts,
        rows[0] if history is None else history, table.start, table.length, table.sequence, table.rest,
        stride, dys[1], C, C * len(rows),
        HAS_HISTORY=history is not None, COLUMNS=columns, BF16=rows[0].dtype == torch.bfloat16,
        STAGES=stages, num_warps=num_warps,
    )  # fmt: skip
    return list(parts.sum(0).transpose(1, 2).contiguous().unbind())


def short_conv(xs, weights, history, cu_seqlens):
    """`k3rl.kernels.kda.short_conv.short_conv` by the kernels: up to 3 streams, bf16 or fp32."""
    history, cu_seqlens = (None if x is None else x.contiguous() for x in (history, cu_seqlens))
    return list(_ShortConv.apply(history, cu_seqlens, len(xs), *xs, *weights)), new_history(xs, history, cu_seqlens)
