"""The Triton kernels of `kda_decode` by tiles of V: the state read and written, or deferred.

One program per row and head. All loads that the indices allow are issued first, so that a lone program waits for memory
twice (indices, everything else); then one exchange between warps for both norms and k . q, one per tile of V for both
sums over K. With kp = exp(G) k and qp = exp(G) q, G the log decay since the stored state S:

    read and write   G is this token's (and S is scaled first): u = beta (v - S^T kp);   o = S^T qp + (k . q) u;
                     S <- diag(exp G) S + k u^T
    deferred         G runs from the chunk boundary; each row i since then is kept as k_i exp(-G_i) and u_i: 16 more
                     rows of the same products, S^T kp + sum_i u_i (k_i exp(-G_i) . kp), likewise qp. The 16th makes
                     S <- diag(exp G) (S + sum_i k_i exp(-G_i) u_i^T). No exponential per row; exp(80) is finite.

Traffic per row and head: 128 KiB read and written; deferred 64 KiB read, 1 to 16 KiB of rows, a 16th of 64 KiB written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.kda_decode import CHUNK, PendingRows
from k3rl.kernels.kda_decode_kernels import contiguous_rows, rounded, store_as
from k3rl.kernels.triton_ops import INTERPRET, LOG2E, exp2, exp_rate, sigmoid


@triton.jit
def _plus2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _plus3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sums2(a, b, axis: tl.constexpr):
    """Two sums along an axis by one exchange."""
    if INTERPRET:
        return tl.sum(a, axis=axis), tl.sum(b, axis=axis)
    else:
        return tl.reduce((a, b), axis, _plus2)


@triton.jit
def sums3(a, b, c):
    """Three sums of vectors by one exchange."""
    if INTERPRET:
        return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0)
    else:
        return tl.reduce((a, b, c), 0, _plus3)


@triton.jit
def load_taps(x, weight, old, at, width, TILED: tl.constexpr):
    """The inputs of the convolution of channels `at`, oldest first, and its weights: 4 vectors or a tile [4, D] each.

    Triton takes a load of fewer elements than a program has threads for cheap, and repeats it with all that follows in
    every layout that the tiles of the state ask for: hence tiles where there are more than 4 warps.
    """
    if TILED:
        tap = tl.arange(0, 4)[:, None]
        past = tl.load(old + tap * width + at[None, :], mask=tap < 3, other=0.0).to(tl.float32)
        past += tl.load(x + at[None, :] + 0 * tap, mask=tap == 3, other=0.0).to(tl.float32)
        return past, tl.load(weight + at[None, :] * 4 + tap).to(tl.float32)
    else:
        w = weight + at * 4
        return (
            (tl.load(old + at), tl.load(old + width + at), tl.load(old + 2 * width + at), tl.load(x + at)),
            (tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)),
        )


@triton.jit
def convolve(taps, BF16: tl.constexpr, TILED: tl.constexpr):
    """SiLU of the convolution, in the precision that prefill hands on."""
    past, w = taps
    if TILED:
        c = tl.sum(past * w, axis=0)
    else:
        c = w[0].to(tl.float32) * past[0].to(tl.float32)
        for i in tl.static_range(1, 4):
            c += w[i].to(tl.float32) * past[i].to(tl.float32)
    return rounded(c * sigmoid(c), BF16)


@triton.jit
def shift(streams, new, at, width, keep, POOL_BF16: tl.constexpr, TILED: tl.constexpr):
    """Store the histories of q, k and v moved on by one token."""
    for s in tl.static_range(3):
        to = new + s * (width // 3) + at
        past = streams[s][0]
        if TILED:
            tap = tl.arange(0, 4)[:, None]
            store_as(to[None, :] + (tap - 1) * width, past, keep & (tap > 0), POOL_BF16)
        else:
            tl.store(to, past[1], mask=keep & (at >= 0))
            tl.store(to + width, past[2], mask=keep & (at >= 0))
            store_as(to + 2 * width, past[3].to(tl.float32), keep & (at >= 0), POOL_BF16)


@triton.jit
def load_gate(gate, bias, at, TILED: tl.constexpr):
    """gate + bias, fp32; as for `load_taps`, by tiles where a vector would be loaded again and again."""
    if TILED:
        which = tl.arange(0, 4)[:, None]
        z = tl.load(gate + at[None, :] + 0 * which, mask=which == 0, other=0.0).to(tl.float32)
        return tl.sum(z + tl.load(bias + at[None, :] + 0 * which, mask=which == 1, other=0.0).to(tl.float32), axis=0)
    else:
        return tl.load(gate + at).to(tl.float32) + tl.load(bias + at).to(tl.float32)


@triton.jit
def cut(x, PARTS: tl.constexpr):
    """A vector as a tuple of 1, 2 or 4 equal pieces, in order."""
    if PARTS == 1:
        return (x,)
    else:
        low, high = tl.split(tl.trans(tl.reshape(x, [2, x.shape[0] // 2])))
        return cut(low, PARTS // 2) + cut(high, PARTS // 2)


@triton.jit
def paste(pieces, PARTS: tl.constexpr):
    """The inverse of `cut`."""
    if PARTS == 1:
        return pieces[0]
    elif PARTS == 2:
        return tl.reshape(tl.trans(tl.join(pieces[0], pieces[1])), [2 * pieces[0].shape[0]])
    else:
        return paste((paste((pieces[0], pieces[1]), 2), paste((pieces[2], pieces[3]), 2)), 2)


@triton.jit
def take_in(S, keys, updates, first, count, value, D: tl.constexpr):
    """S [D, BV] plus the outer products of the rows first .. count."""
    column = tl.arange(0, D)
    for i in tl.range(first, count, num_stages=1):
        S += tl.load(keys + i * D + column)[:, None] * tl.load(updates + i * D + value)[None, :]
    return S


@triton.jit
def load_pending(
    row_keys, row_updates, row_decay, span, source, value,
    D: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows that a slot and head's state has not taken in: bounds, keys, updates by tiles of V, running decay."""
    first = tl.load(span + source * 2)
    count = tl.load(span + source * 2 + 1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, D)
    waits = ((row >= first) & (row < count))[:, None]
    tile = (source * ROWS + row)[:, None] * D
    keys = tl.load(row_keys + tile + column[None, :], mask=waits, other=0.0)
    updates = ()
    for i in tl.static_range(D // BV):
        at = i * BV + value[None, :]
        updates = updates + (tl.load(row_updates + tile + at, mask=waits, other=0.0),)  # noqa: RUF005
    decay = tl.load(row_decay + source * D + column, mask=column < D * (first < count), other=0.0)
    return first, count, waits, keys, updates, decay


@triton.jit
def write_deferred(
    S, U, u, k_row, fade, new, row_keys, row_updates, source, target, first, count, at, waits, keep, moved,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The update of one tile of V as a new row, or, where the row fills the chunk, all rows into the state."""
    full = count == ROWS - 1
    tl.store(row_updates + (target * ROWS + count) * D + at, u, mask=keep & (at < D) & (full == 0))
    square = new + tl.arange(0, D)[:, None] * D + at[None, :]
    if keep & full:
        S = take_in(S, row_keys + source * ROWS * D, row_updates + source * ROWS * D, first, count, at, D)
        tl.store(square, fade[:, None] * (S + k_row[:, None] * u[None, :]))
    elif moved:
        tl.store(square, S)
        to = (target * ROWS + tl.arange(0, ROWS))[:, None] * D + at[None, :]
        tl.store(row_updates + to, U, mask=waits)


@triton.jit
def write_row(
    row_keys, row_decay, span, keys, k_row, G, target, first, count, waits, keep, moved,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The key and the decay of the new row, and where the rows now begin and end."""
    full = count == ROWS - 1
    column = tl.arange(0, D)
    if moved:
        to = (target * ROWS + tl.arange(0, ROWS))[:, None] * D + column[None, :]
        tl.store(row_keys + to, keys, mask=waits & (full == 0))
    mask = keep & (full == 0) & (column < D)
    tl.store(row_keys + (target * ROWS + count) * D + column, k_row, mask=mask)
    tl.store(row_decay + target * D + column, G, mask=mask)
    tl.store(span + target * 2, tl.where(full, 0, first), mask=keep)
    tl.store(span + target * 2 + 1, tl.where(full, 0, count + 1), mask=keep)


@triton.jit
def finish(outs, out, gate, weight, eps, D: tl.constexpr, TILES: tl.constexpr, BF16: tl.constexpr):
    """The gated norm of a row's outputs, stored."""
    column = tl.arange(0, D)
    o = rounded(paste(outs, TILES), BF16)
    o *= tl.rsqrt(tl.sum(o * o, axis=0) / D + eps)
    store_as(out + column, o * weight.to(tl.float32) * sigmoid(gate.to(tl.float32)), column < D, BF16)


@triton.jit
def step_kernel(
    q, k, v, gate, beta, out_gate, wq, wk, wv, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_index, write_index, y, row_keys, row_updates, row_decay, span,
    q_t, k_t, v_t, g_t, b_t, z_t, read_stride, write_stride, H, lower_bound, scale, eps,
    D: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr, DEFERRED: tl.constexpr,
    TILED: tl.constexpr, BF16: tl.constexpr, POOL_BF16: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, D)
    value = tl.arange(0, BV)
    TILES: tl.constexpr = D // BV
    read = tl.load(read_index + row * read_stride).to(tl.int64)
    write = tl.load(write_index + row * write_stride).to(tl.int64)
    out = y + (row * H + head) * D
    if read < 0:
        store_as(out + column, tl.zeros([D], tl.float32), column < D, BF16)
        return
    keep = write >= 0
    moved = keep & (write != read)
    write = tl.maximum(write, 0)
    source, target = read * H + head, write * H + head
    width = 3 * H * D

    square = column[:, None] * D + value[None, :]
    old = state_pool + source * D * D
    new = state_pool + target * D * D
    tiles = ()
    for i in tl.static_range(AHEAD):
        tiles = tiles + (tl.load(old + i * BV + square),)  # noqa: RUF005
    channel = head * D
    past = conv_pool + read * 3 * width + channel
    q_taps = load_taps(q + row * q_t + channel, wq + channel * 4, past, column, width, TILED)
    k_taps = load_taps(k + row * k_t + channel, wk + channel * 4, past + H * D, column, width, TILED)
    z = load_gate(gate + row * g_t + channel, dt_bias + channel, column, TILED)
    rate = exp_rate(tl.load(A_log + head).to(tl.float32))
    b = sigmoid(tl.load(beta + row * b_t + head).to(tl.float32))
    v_taps = load_taps(v + row * v_t + channel, wv + channel * 4, past + 2 * H * D, column, width, TILED)
    out_gate_row = tl.load(out_gate + row * z_t + channel + column)
    norm_row = tl.load(norm_weight + column)
    if DEFERRED:
        first, count, waits, keys, updates, since = load_pending(
            row_keys, row_updates, row_decay, span, source, value, D, BV, ROWS
        )

    qc = convolve(q_taps, BF16, TILED)
    kc = convolve(k_taps, BF16, TILED)
    qq, kk, kq = sums3(qc * qc, kc * kc, kc * qc)
    q_norm = tl.rsqrt(qq + 1e-6) * scale
    k_norm = tl.rsqrt(kk + 1e-6)
    kq *= q_norm * k_norm
    kn = kc * k_norm
    G = sigmoid(z * rate) * (lower_bound * LOG2E)
    if DEFERRED:
        G += since
    fade = exp2(G)
    kp, qp = kn, qc * q_norm
    if DEFERRED:
        kp, qp = kp * fade, qp * fade
        by_k, by_q = sums2(keys * kp[None, :], keys * qp[None, :], 1)
        k_row = kn * exp2(-G)
    v_parts = cut(convolve(v_taps, BF16, TILED), TILES)
    outs = ()
    for i in tl.static_range(TILES):
        S = tiles[i] if i < AHEAD else tl.load(old + i * BV + square)
        if not DEFERRED:
            S *= fade[:, None]
        along_k, along_q = sums2(S * kp[:, None], S * qp[:, None], 0)
        if DEFERRED:
            more_k, more_q = sums2(updates[i] * by_k[:, None], updates[i] * by_q[:, None], 0)
            along_k += more_k
            along_q += more_q
        u = b * (v_parts[i] - along_k)
        outs = outs + (along_q + kq * u,)  # noqa: RUF005
        if DEFERRED:
            write_deferred(
                S, updates[i], u, k_row, fade, new, row_keys, row_updates, source, target, first, count,
                i * BV + value, waits, keep, moved, D, ROWS,
            )  # fmt: skip
        else:
            tl.store(new + i * BV + square, S + kn[:, None] * u[None, :], mask=keep & (square >= 0))
    finish(outs, out, out_gate_row, norm_row, eps, D, TILES, BF16)

    # Every thread has read histories, span and decay by now; Triton may have loaded a vector in several layouts.
    tl.debug_barrier()
    to = conv_pool + write * 3 * width + channel
    shift((q_taps, k_taps, v_taps), to, column, width, keep, POOL_BF16, TILED)
    if DEFERRED:
        write_row(row_keys, row_decay, span, keys, k_row, G, target, first, count, waits, keep, moved, D, ROWS)


@triton.jit
def flush_kernel(
    state_pool, row_keys, row_updates, row_decay, span, index, index_stride, H,
    D: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Bring the state of one slot and head up to date with its rows, and forget them."""
    head = tl.program_id(0)
    slot = tl.load(index + tl.program_id(1).to(tl.int64) * index_stride).to(tl.int64)
    if slot < 0:
        return
    source = slot * H + head
    first = tl.load(span + source * 2)
    count = tl.load(span + source * 2 + 1)
    if first == count:
        return
    column = tl.arange(0, D)
    fade = exp2(tl.load(row_decay + source * D + column))
    for i in tl.static_range(D // BV):
        at = i * BV + tl.arange(0, BV)
        square = state_pool + source * D * D + column[:, None] * D + at[None, :]
        S = take_in(tl.load(square), row_keys + source * ROWS * D, row_updates + source * ROWS * D, first, count, at, D)
        tl.store(square, fade[:, None] * S)
    tl.debug_barrier()
    tl.store(span + source * 2, count)


def step(
    q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_index, write_index, lower_bound, eps, pending: PendingRows | None = None,
    tile: int = 64, ahead: int = 1, num_warps: int = 4, maxnreg: int | None = None,
):  # fmt: skip
    """`k3rl.kernels.kda_decode.kda_decode` by `step_kernel`: D = 128, fp32 contiguous pools and rows.

    tile: values of V a program works on at a time; ahead: tiles of the state loaded before anything else.
    """
    B, H, D = q.shape
    q, k, v, gate, out_gate = (contiguous_rows(x) for x in (q, k, v, gate, out_gate))
    beta = beta if beta.stride(1) == 1 else beta.contiguous()
    y = torch.empty(B, H, D, dtype=v.dtype, device=v.device)
    rows = [state_pool] * 3 + [read_index]  # not read
    if pending is not None:
        rows = [pending.keys, pending.updates, pending.decay, pending.span]
    step_kernel[(H, B)](
        q, k, v, gate, beta, out_gate, *(w.contiguous() for w in conv_weights), A_log, dt_bias, norm_weight,
        conv_pool, state_pool, read_index, write_index, y, *rows,
        *(x.stride(0) for x in (q, k, v, gate, beta, out_gate)), read_index.stride(0), write_index.stride(0),
        H, lower_bound, D**-0.5, eps,
        D=D, BV=min(tile, D), ROWS=CHUNK, AHEAD=min(ahead, max(1, D // tile)), DEFERRED=pending is not None,
        TILED=num_warps > 4, BF16=v.dtype == torch.bfloat16, POOL_BF16=conv_pool.dtype == torch.bfloat16,
        num_warps=num_warps, maxnreg=maxnreg,
    )  # fmt: skip
    return y


def flush(state_pool, pending: PendingRows, index) -> None:
    """`k3rl.kernels.kda_decode.flush_pending` by `flush_kernel`."""
    _, H, D, _ = state_pool.shape
    flush_kernel[(H, index.numel())](
        state_pool, pending.keys, pending.updates, pending.decay, pending.span, index, index.stride(0), H,
        D=D, BV=min(64, D), ROWS=CHUNK, num_warps=4,
    )  # fmt: skip
