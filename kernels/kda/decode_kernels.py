"""The Triton kernels of `kda_decode`: the state by tiles of V, read and written each token, or written every 16th.

One program per row and head. A lone program waits for memory twice (indices, everything else); then one exchange
between warps for both norms and k . q, one per tile of V for both sums over K. With kp = exp(G) k and qp = exp(G) q, G
the log decay since the stored state S:

    read and write   G is this token's (and S is scaled first): u = beta (v - S^T kp);   o = S^T qp + (k . q) u;
                     S <- diag(exp G) S + k u^T
    deferred         G runs from the chunk boundary; each row i since then is kept as k_i exp(-G_i) and u_i: 16 more
                     rows of the same products, S^T kp + sum_i u_i (k_i exp(-G_i) . kp), likewise qp. The 16th makes
                     S <- diag(exp G) (S + sum_i k_i exp(-G_i) u_i^T). No exponential per row; exp(80) is finite.

Read and write takes rows that wait in before it steps, so that the form may change from call to call. Gates without a
bound (lower_bound None) write the state as soon as a channel of it has decayed below 2^LEAST_PENDING, so that exp(-G_i)
of a row that waits stays finite: S <- diag(exp G) (S + sum_i k_i exp(-G_i) u_i^T) + k u^T.
Traffic per row and head: 128 KiB read and written; deferred 64 KiB read, 1 to 16 KiB of rows, a 16th of 64 KiB written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.kda.decode import CHUNK, PendingRows
from k3rl.kernels.kda.decode import LEAST_PENDING as _LEAST_PENDING
from k3rl.kernels.triton_ops import INTERPRET, begin, early, exp2, exp_rate, log2_decay, sigmoid, to_bf16_rne

# With pending rows: from this many rows x heads on writes are deferred. With fewer programs the time is a program's own
# chain of waits, which the read of the rows makes longer (measured at 768 and 1,536).
DEFERRED_FROM = 1536
# Programs a head: the first of PARTS with which all programs are no more than the multiprocessors, else one (measured
# at 12 to 96 heads and 1 to 16 rows: more than a multiprocessor's worth of programs is slower every time).
PARTS = (8, 4)
SPLIT_PROGRAMS = 132
TILE = 64
LEAST_PENDING = tl.constexpr(_LEAST_PENDING)


@triton.jit
def rounded(x, BF16: tl.constexpr):
    """To the precision in which prefill hands a tensor on, kept in fp32."""
    if BF16:
        x = to_bf16_rne(x).to(tl.float32)
    return x


@triton.jit
def store_as(pointer, value, mask, BF16: tl.constexpr):
    if BF16:
        tl.store(pointer, to_bf16_rne(value), mask=mask)
    else:
        tl.store(pointer, value, mask=mask)


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
def load_row(x, weight, at):
    """A new input at channels `at` and the four weights of its convolution."""
    w = weight + at * 4
    return tl.load(x + at), tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)


@triton.jit
def load_rows(q, k, v, wq, wk, wv, channel, at):
    """`load_row` of the three streams of a head whose first channel is `channel`."""
    return (
        load_row(q + channel, wq + channel * 4, at),
        load_row(k + channel, wk + channel * 4, at),
        load_row(v + channel, wv + channel * 4, at),
    )


@triton.jit
def load_gates(gate, beta, out_gate, A_log, dt_bias, norm_weight, head, channel, at):
    """The decay's logit and rate, beta's sigmoid, the output's gate and the norm's weight."""
    z = tl.load(gate + channel + at).to(tl.float32) + tl.load(dt_bias + channel + at).to(tl.float32)
    rate = exp_rate(tl.load(A_log + head).to(tl.float32))
    b = sigmoid(tl.load(beta + head).to(tl.float32))
    return z, rate, b, tl.load(out_gate + channel + at), tl.load(norm_weight + at)


@triton.jit
def load_past(old, at, width, live):
    """The three inputs before it, oldest first."""
    mask = live & (at >= 0)
    return (
        tl.load(old + at, mask=mask),
        tl.load(old + width + at, mask=mask),
        tl.load(old + 2 * width + at, mask=mask),
    )


@triton.jit
def convolve(row, past, BF16: tl.constexpr):
    """SiLU of the convolution, in the precision that prefill hands on."""
    c = row[1].to(tl.float32) * past[0].to(tl.float32)
    c += row[2].to(tl.float32) * past[1].to(tl.float32)
    c += row[3].to(tl.float32) * past[2].to(tl.float32)
    c += row[4].to(tl.float32) * row[0].to(tl.float32)
    return rounded(c * sigmoid(c), BF16)


@triton.jit
def normalized(q_row, q_past, k_row, k_past, scale, BF16: tl.constexpr):
    """The key, the scaled query, both convolved and of norm 1, and k . q."""
    qc, kc = convolve(q_row, q_past, BF16), convolve(k_row, k_past, BF16)
    qq, kk, kq = sums3(qc * qc, kc * kc, kc * qc)
    q_norm, k_norm = tl.rsqrt(qq + 1e-6) * scale, tl.rsqrt(kk + 1e-6)
    return kc * k_norm, qc * q_norm, kq * q_norm * k_norm


@triton.jit
def shift(row, past, new, at, width, keep, POOL_BF16: tl.constexpr):
    """Store the history of one stream moved on by one token."""
    tl.store(new + at, past[1], mask=keep & (at >= 0))
    tl.store(new + width + at, past[2], mask=keep & (at >= 0))
    store_as(new + 2 * width + at, row[0].to(tl.float32), keep & (at >= 0), POOL_BF16)


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
def bring_up_to_date(
    S, row_keys, row_updates, row_decay, source, first, count, at, D: tl.constexpr, ROWS: tl.constexpr
):
    """Columns `at` of a stored state S [D, BV] with the rows first .. count that wait beside it, if any."""
    if first < count:
        S = take_in(S, row_keys + source * ROWS * D, row_updates + source * ROWS * D, first, count, at, D)
        S *= exp2(tl.load(row_decay + source * D + tl.arange(0, D)))[:, None]
    return S


@triton.jit
def load_pending(
    row_keys, row_updates, row_decay, source, first, count, value,
    D: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows first .. count: which they are, keys, updates by tiles of V, running decay."""
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
    return waits, keys, updates, decay


@triton.jit
def write_deferred(
    S, U, u, k_row, kn, fade, new, row_keys, row_updates, source, target, first, count, full, at, waits, keep, moved,
    BOUNDED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The update of one tile of V as a new row, or, where that is due (`full`), all rows into the state."""
    if BOUNDED:
        full = count == ROWS - 1  # formed again, not held in a register
    tl.store(row_updates + (target * ROWS + count) * D + at, u, mask=keep & (at < D) & (full == 0))
    square = new + tl.arange(0, D)[:, None] * D + at[None, :]
    if keep & full:
        S = take_in(S, row_keys + source * ROWS * D, row_updates + source * ROWS * D, first, count, at, D)
        if BOUNDED:
            S = fade[:, None] * (S + k_row[:, None] * u[None, :])
        else:
            S = fade[:, None] * S + kn[:, None] * u[None, :]
        tl.store(square, S)
    elif moved:
        tl.store(square, S)
        to = (target * ROWS + tl.arange(0, ROWS))[:, None] * D + at[None, :]
        tl.store(row_updates + to, U, mask=waits)


@triton.jit
def is_due(G, count, lower_bound, ROWS: tl.constexpr):
    """Whether this token's state is to be written: the chunk is full, or (no bound) a channel has all but decayed."""
    full = count == ROWS - 1
    if lower_bound is None:
        full = full | (tl.min(G, axis=0) < LEAST_PENDING)
    return full


@triton.jit
def write_row(
    row_keys, row_decay, span, keys, k_row, G, target, place, waits, keep, moved, lower_bound,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The key and the decay of the new row, and where the rows now begin and end; place: first, count, full."""
    first, count, full = place
    if lower_bound is not None:
        full = count == ROWS - 1
    column = tl.arange(0, D)
    if moved:
        to = (target * ROWS + tl.arange(0, ROWS))[:, None] * D + column[None, :]
        tl.store(row_keys + to, keys, mask=waits & (full == 0))
    mask = keep & (full == 0) & (column < D)
    tl.store(row_keys + (target * ROWS + count) * D + column, k_row, mask=mask)
    tl.store(row_decay + target * D + column, G, mask=mask)
    after = 0 if lower_bound is not None else (count + 1) % ROWS
    tl.store(span + target * 2, tl.where(full, after, first), mask=keep)
    tl.store(span + target * 2 + 1, tl.where(full, after, count + 1), mask=keep)


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
    D: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    PENDING: tl.constexpr, DEFERRED: tl.constexpr, BF16: tl.constexpr, POOL_BF16: tl.constexpr,
):  # fmt: skip
    begin()
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, value = tl.arange(0, D), tl.arange(0, BV)
    square = column[:, None] * D + value[None, :]
    TILES: tl.constexpr = D // BV
    channel, width = head * D, 3 * H * D
    read = tl.load(read_index + row * read_stride).to(tl.int64)
    write = tl.load(write_index + row * write_stride).to(tl.int64)
    live, keep = read >= 0, (read >= 0) & (write >= 0)
    moved = keep & (write != read)
    slot, write = tl.maximum(read, 0), tl.maximum(write, 0)
    source, target = slot * H + head, write * H + head
    old, new = state_pool + source * D * D, state_pool + target * D * D
    past, out = conv_pool + slot * 3 * width + channel, y + (row * H + head) * D

    q_row, k_row, v_row = load_rows(q + row * q_t, k + row * k_t, v + row * v_t, wq, wk, wv, channel, column)
    z, rate, b, out_gate_row, norm_row = load_gates(
        gate + row * g_t, beta + row * b_t, out_gate + row * z_t, A_log, dt_bias, norm_weight, head, channel, column
    )
    q_past, k_past = load_past(past, column, width, live), load_past(past + H * D, column, width, live)
    v_past = load_past(past + 2 * H * D, column, width, live)
    if PENDING:
        first, count = tl.load(span + source * 2, live, 0), tl.load(span + source * 2 + 1, live, 0)
    tiles = ()
    for i in tl.static_range(TILES):
        tiles = tiles + (tl.load(old + i * BV + square, mask=live & (square >= 0)),)  # noqa: RUF005
    if DEFERRED:
        tl.debug_barrier()  # the state's loads before the wait for `first` and `count`
        waits, keys, updates, since = load_pending(
            row_keys, row_updates, row_decay, source, first, count, value, D, BV, ROWS
        )
    # All loads before all work: ptxas would move those of the state behind the convolution, which waits for others.
    tl.debug_barrier()
    if read < 0:
        return store_as(out + column, tl.zeros([D], tl.float32), column < D, BF16)

    kn, qn, kq = normalized(q_row, q_past, k_row, k_past, scale, BF16)
    G = log2_decay(z, rate, lower_bound)
    if DEFERRED:
        G += since
    fade = exp2(G)
    kp, qp = (kn * fade, qn * fade) if DEFERRED else (kn, qn)
    if DEFERRED:
        by_k, by_q = sums2(keys * kp[None, :], keys * qp[None, :], 1)
        new_key = kn * exp2(-G)
        full = is_due(G, count, lower_bound, ROWS)
    v_parts = cut(convolve(v_row, v_past, BF16), TILES)
    outs = ()
    for i in tl.static_range(TILES):
        S = tiles[i]
        if PENDING and not DEFERRED:
            S = bring_up_to_date(S, row_keys, row_updates, row_decay, source, first, count, i * BV + value, D, ROWS)
        if not DEFERRED:
            S *= fade[:, None]
        along_k, along_q = sums2(S * kp[:, None], S * qp[:, None], 0)
        if DEFERRED:
            more_k, more_q = sums2(updates[i] * by_k[:, None], updates[i] * by_q[:, None], 0)
            along_k, along_q = along_k + more_k, along_q + more_q
        u = b * (v_parts[i] - along_k)
        outs = outs + (along_q + kq * u,)  # noqa: RUF005
        if DEFERRED:
            write_deferred(
                S, updates[i], u, new_key, kn, fade, new, row_keys, row_updates, source, target, first, count, full,
                i * BV + value, waits, keep, moved, lower_bound is not None, D, ROWS,
            )  # fmt: skip
            if i == 0:  # asked for at the start, these two would not fit in registers beside all tiles
                out_gate_row = tl.load(out_gate + row * z_t + channel + column)
                norm_row = tl.load(norm_weight + column)
        else:
            tl.store(new + i * BV + square, S + kn[:, None] * u[None, :], mask=keep & (square >= 0))
    finish(outs, out, out_gate_row, norm_row, eps, D, TILES, BF16)

    # Every thread has read histories, span and decay by now; Triton may have loaded a vector in several layouts.
    tl.debug_barrier()
    to = conv_pool + write * 3 * width + channel
    shift(q_row, q_past, to, column, width, keep, POOL_BF16)
    shift(k_row, k_past, to + H * D, column, width, keep, POOL_BF16)
    shift(v_row, v_past, to + 2 * H * D, column, width, keep, POOL_BF16)
    if DEFERRED:
        place = (first, count, full)
        write_row(row_keys, row_decay, span, keys, new_key, G, target, place, waits, keep, moved, lower_bound, D, ROWS)
    elif PENDING:  # no row waits any more; the place in the chunk moves on, for steps that are deferred
        tl.store(span + target * 2 + tl.arange(0, 2), tl.full([2], (count + 1) % ROWS, tl.int32), mask=keep)


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
    for i in tl.static_range(D // BV):
        at = i * BV + tl.arange(0, BV)
        square = state_pool + source * D * D + tl.arange(0, D)[:, None] * D + at[None, :]
        S = bring_up_to_date(tl.load(square), row_keys, row_updates, row_decay, source, first, count, at, D, ROWS)
        tl.store(square, S)
    tl.debug_barrier()
    tl.store(span + source * 2, count)


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, D] whose rows are contiguous (a slice of a wider matrix is), copied only otherwise."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def kda_decode(
    q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_index, write_index, lower_bound, eps, pending: PendingRows | None = None,
):  # fmt: skip
    """`k3rl.kernels.kda.decode.kda_decode` in the form that is the faster one: D = 128, fp32 contiguous pools."""
    if state_pool.dtype != torch.float32 or not state_pool.is_contiguous() or not conv_pool.is_contiguous():
        raise ValueError(f"kda_decode: wants contiguous pools and a float32 state_pool, got {state_pool.dtype}, "
                         f"strides {state_pool.stride()} and {conv_pool.stride()}")  # fmt: skip
    programs = q.shape[0] * q.shape[1]
    deferred = pending is not None and programs >= DEFERRED_FROM
    args = (q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool)
    args += (read_index, write_index, lower_bound, eps, pending)
    parts = 1 if deferred else parts_of_a_head(programs)
    if parts > 1:
        from k3rl.kernels.kda import decode_split_kernels

        arrivals = decode_split_kernels.counters(q.device, programs)
        if arrivals is not None:
            return decode_split_kernels.step(*args, arrivals, parts)
    return step(*args, deferred)


def parts_of_a_head(programs: int) -> int:
    """How many programs work on a head when `programs` rows x heads are read and written."""
    return next((parts for parts in PARTS if programs * parts <= SPLIT_PROGRAMS), 1)


def arguments(
    q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_index, write_index, lower_bound, eps, pending: PendingRows | None,
):  # fmt: skip
    """The output, not filled, and what both kernels take: tensors, then numbers, then constants."""
    B, H, D = q.shape
    q, k, v, gate, out_gate = (contiguous_rows(x) for x in (q, k, v, gate, out_gate))
    beta = beta if beta.stride(1) == 1 else beta.contiguous()
    y = torch.empty(B, H, D, dtype=v.dtype, device=v.device)
    rows = [state_pool] * 3 + [read_index]  # not read
    if pending is not None:
        rows = [pending.keys, pending.updates, pending.decay, pending.span]
    weights = [w.contiguous() for w in conv_weights]
    tensors = [q, k, v, gate, beta, out_gate, *weights, A_log, dt_bias, norm_weight, conv_pool, state_pool]
    tensors += [read_index, write_index, y, *rows]
    numbers = [x.stride(0) for x in (q, k, v, gate, beta, out_gate, read_index, write_index)]
    numbers += [H, lower_bound, D**-0.5, eps]
    constants = {"D": D, "ROWS": CHUNK, "PENDING": pending is not None, "BF16": v.dtype == torch.bfloat16}
    return y, tensors, numbers, constants | {"POOL_BF16": conv_pool.dtype == torch.bfloat16, "num_warps": 4}


def step(*args, tile: int = TILE):
    """One step: the arguments of `arguments`, then whether the write is deferred;
    tile: values of V worked on at a time."""
    y, tensors, numbers, constants = arguments(*args[:-1])
    B, H, D = y.shape
    step_kernel[(H, B)](*tensors, *numbers, BV=min(tile, D), DEFERRED=args[-1], **constants, **early())
    return y


def flush(state_pool, pending: PendingRows, index) -> None:
    """`k3rl.kernels.kda.decode.flush_pending` by `flush_kernel`."""
    _, H, D, _ = state_pool.shape
    flush_kernel[(H, index.numel())](
        state_pool, pending.keys, pending.updates, pending.decay, pending.span, index, index.stride(0), H,
        D=D, BV=min(64, D), ROWS=CHUNK, num_warps=4,
    )  # fmt: skip
