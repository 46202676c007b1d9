"""Chunked KDA forward on Hopper: two Triton kernels, 32 tokens a chunk.

`prepare` (one program per chunk and head, all in parallel) turns raw q, k, gate, beta into what the scan needs, with
G the running sum of the log decay inside the chunk, G_end its last row:

    q_in = q exp(G) [C,K]     k_out = k exp(G_end - G) [C,K]     decay = exp(G_end) [K]
    A[i,j] = q_i . k_j exp(G_i - G_j), j <= i [C,C]              solve = (I + L)^-1 diag(beta) [C,C]
    k_in = k exp(G) [C,K]                                        L[i,j] = beta_i k_i . k_j exp(G_i - G_j), j < i

`scan` (one program per sequence, head and tile of V, serial over chunks) keeps the state transposed, S^T [V, K], in
registers, so that every product has V on its long side and feeds the next one from registers:

    u^T = (v^T - S^T k_in^T) solve^T;   o^T = S^T q_in^T + u^T A^T;   S^T <- S^T diag(decay) + u^T k_out

exp(G_i - G_j) is never formed as exp(G_i) exp(-G_j), which would overflow: a chunk is split in halves and these in
halves, and pairs (i, j) that a split separates use the sum of decays on either side of it, both at most 0. Gates with a
bound are split down to blocks of 16, inside of which the anchor is the block's first row (within exp(75) for a bound of
-5, and never a later token); gates without one (lower_bound None) down to single rows, by blocks of 8 whose rows a
thread holds. (I + L)^-1 grows by doubling, block by block:
X <- X - X L_split X, whose factors are true inverses, so that half precision does not cancel.
Traffic per token and head: 7 rows of 128 bf16 in `prepare`, 6 in `scan`. Source: Kimi Linear section 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3rl.kernels.triton_ops import (
    INTERPRET,
    LOG2E,
    dot,
    exp2,
    exp_rate,
    log2_decay,
    now,
    sigmoid,
    to_bf16_rne,
)

CHUNK = 32


# Counts that vary from call to call are not specialised: each would multiply the compiled variants.
@triton.jit(do_not_specialize=["n", "most"])
def chunk_table_kernel(
    ends, start, length, offset, sequence_out, rest_out, n, most, C,
    WHERE: tl.constexpr, N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Chunk tables of packed sequences from ends [n + 1]; every program takes CHUNKS entries and all sequences.

    WHERE: also the sequence of each chunk (-1 - sequence if it starts one) and the tokens of it after the chunk.
    """
    sequence = tl.arange(0, N)
    inside = sequence < n
    first = tl.load(ends + sequence, mask=inside, other=0).to(tl.int32)
    last = tl.load(ends + sequence + 1, mask=inside, other=0).to(tl.int32)
    chunks = (last - first + C - 1) // C
    until = tl.cumsum(chunks, axis=0)
    if tl.program_id(0) == 0:
        tl.store(offset, 0)
        tl.store(offset + 1 + sequence, until, mask=inside)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    # The sequence whose chunks include this one; none for the entries past the last chunk.
    mine = (chunk[:, None] < until[None, :]) & (chunk[:, None] >= (until - chunks)[None, :]) & inside[None, :]
    at = tl.sum(tl.where(mine, first[None, :] + (chunk[:, None] - (until - chunks)[None, :]) * C, 0), axis=1)
    end = tl.sum(tl.where(mine, last[None, :], 0), axis=1)
    tl.store(start + chunk, at, mask=chunk < most)
    size = tl.minimum(end - at, C)
    tl.store(length + chunk, size, mask=chunk < most)
    if WHERE:
        which = tl.sum(tl.where(mine, sequence[None, :], 0), axis=1)
        starts = tl.sum(tl.where(mine & (chunk[:, None] == (until - chunks)[None, :]), 1, 0), axis=1)
        tl.store(sequence_out + chunk, tl.where(starts == 1, -1 - which, which), mask=chunk < most)
        tl.store(rest_out + chunk, end - at - size, mask=chunk < most)


@triton.jit(do_not_specialize=["n", "tokens"])
def zero_tail_kernel(x, ends, n, tokens, row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Zero the rows [row elements each, contiguous] of x from ends[n] on."""
    end = tl.load(ends + n).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    if first + ROWS <= end:
        return
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    for token in range(0, ROWS):
        t = first + token
        tl.store(x + t * row + at, tl.zeros([WIDTH], x.dtype.element_ty), mask=(at < row) & (t >= end) & (t < tokens))


@triton.jit
def split_pairs(i, j, size: tl.constexpr):
    """Pairs whose row lies in the second and whose column in the first half of the same block of 2 * size."""
    return (i // (2 * size) == j // (2 * size)) & ((i // size) % 2 == 1) & ((j // size) % 2 == 0)


@triton.jit
def block_vectors(total, C: tl.constexpr, BLOCK: tl.constexpr):
    """From the log2 decay of each block [blocks, K]: sums before, after, to the chunk's middle, of all."""
    block = tl.arange(0, C // BLOCK)[:, None]
    before = tl.cumsum(total, axis=0) - total
    whole = tl.sum(total, axis=0)
    # Blocks 0 1 | 2 3: what lies between a block and the middle of the chunk.
    second = tl.sum(tl.where(block == 1, total, 0.0), axis=0)
    third = tl.sum(tl.where(block == 2, total, 0.0), axis=0)
    middle = tl.where(block == 0, second[None, :], tl.where(block == 3, third[None, :], 0.0))
    return before, whole[None, :] - before - total, middle, whole


@triton.jit
def decay_to_middle(inside, SIZE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """log2 decay between each row and the middle of its 2 SIZE rows, at most 0, [blocks, K, BLOCK].

    inside: log2 decay from the start of the block through the row, so that the last row before the middle has 0.
    """
    rows = tl.reshape(inside, [C // BLOCK, K, BLOCK // (2 * SIZE), 2 * SIZE])
    last = tl.arange(0, 2 * SIZE)[None, None, None, :] == SIZE - 1
    # Its value is picked as bits: a sum of integers with zeros is compiled away, for a thread holds all rows.
    middle = tl.sum(tl.where(last, rows.to(tl.int32, bitcast=True), 0), axis=3, keep_dims=True)
    return tl.reshape(-tl.abs(rows - middle.to(tl.float32, bitcast=True)), [C // BLOCK, K, BLOCK])


@triton.jit
def split_products(
    A, P, q, k, to_split, pairs, SIZE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """A and P with the products of the pairs that a split separates; to_split: log2 decay between it and each row.

    All pairs [C, C] for SIZE = C, else those inside blocks of SIZE rows, [C // SIZE, SIZE, SIZE].
    """
    across = exp2(to_split)
    columns = flatten(to_bf16_rne(k * across), SIZE, K, C, BLOCK)
    A = tl.where(pairs, dot(flatten(to_bf16_rne(q * across), SIZE, K, C, BLOCK), tl.trans(columns)), A)
    P = tl.where(pairs, dot(columns, tl.trans(columns)), P)
    return A, P


@triton.jit
def anchored_products(A, P, q, k, inside, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """A and P [C, C] with the pairs inside each block of 16, anchored on its first row: bounded gates only."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    rise = exp2(inside)
    columns = tl.trans(flatten(to_bf16_rne(k * exp2(-inside)), C, K, C, BLOCK))
    same = i // BLOCK == j // BLOCK
    # In this order, and with `now` in `prepare_kernel`, everything fits in 168 registers.
    P = tl.where(same & (j < i), dot(flatten(to_bf16_rne(k * rise), C, K, C, BLOCK), columns), P)
    A = tl.where(same & (j <= i), dot(flatten(to_bf16_rne(q * rise), C, K, C, BLOCK), columns), A)
    return A, P


@triton.jit
def halved_products(q, k, inside, to_split, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """A and P of the pairs inside blocks of 2 BLOCK rows, for gates without a bound; the rest of [C, C] is 0.

    A split into halves of BLOCK rows, whose `to_split` is given, and splits of these down to single rows separate each
    pair once. Nothing decays from a row to itself.
    """
    SIZE: tl.constexpr = 2 * BLOCK
    i = tl.arange(0, SIZE)[None, :, None]
    j = tl.arange(0, SIZE)[None, None, :]
    A, P = split_products(0.0, 0.0, q, k, to_split, split_pairs(i, j, BLOCK), SIZE, K, C, BLOCK)
    for level in tl.static_range(1, 4):
        to_split = decay_to_middle(inside, BLOCK >> level, K, C, BLOCK)
        A, P = split_products(A, P, q, k, to_split, split_pairs(i, j, BLOCK >> level), SIZE, K, C, BLOCK)
    itself = tl.reshape(tl.sum(q * k, axis=1), [C // SIZE, SIZE])
    A = tl.where(i == j, itself[:, :, None], A)
    return on_diagonal(A, C, SIZE), on_diagonal(P, C, SIZE)


@triton.jit
def on_diagonal(x, C: tl.constexpr, SIZE: tl.constexpr):
    """Blocks [C // SIZE, SIZE, SIZE] on the diagonal of a [C, C] of zeros."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    wide = tl.broadcast_to(tl.reshape(x, [C // SIZE, SIZE, 1, SIZE]), [C // SIZE, SIZE, C // SIZE, SIZE])
    return tl.where(i // SIZE == j // SIZE, tl.reshape(wide, [C, C]), 0.0)


@triton.jit
def pair_products(
    q, k, inside, total, middle, BOUNDED: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """A = q_i . k_j exp(G_i - G_j) for j <= i and P = k_i . k_j exp(G_i - G_j) for j < i, both [C, C] fp32.

    q, k [blocks, K, BLOCK] normalised; log2 decays: inside [blocks, K, BLOCK] from the start of the block through the
    row, total [blocks, K] of each block, middle [blocks, K] between the block and the chunk's middle. BOUNDED: a block
    decays by less than 2^126, so that it has one anchor.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    block = tl.arange(0, C // BLOCK)[:, None, None]
    to_end = total[:, :, None] - inside
    to_split = tl.where(block % 2 == 1, inside, to_end)
    if BOUNDED:
        A, P = split_products(0.0, 0.0, q, k, to_split, split_pairs(i, j, BLOCK), C, K, C, BLOCK)
        A, P = anchored_products(A, P, q, k, inside, K, C, BLOCK)
    else:
        A, P = halved_products(q, k, inside, to_split, K, C, BLOCK)
    if C == 4 * BLOCK:
        to_split = tl.where(block >= 2, inside, to_end) + middle[:, :, None]
        A, P = split_products(A, P, q, k, to_split, split_pairs(i, j, 2 * BLOCK), C, K, C, BLOCK)
    return A, P


@triton.jit
def unit_lower_inverse(L, C: tl.constexpr):
    """(I + L)^-1 of a strictly lower L [C, C] with entries of order 1, products in fp16 with fp32 sums."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    X = tl.where(i == j, 1.0, tl.where(split_pairs(i, j, 1), -L, 0.0))
    for level in tl.static_range(1, 6):
        if (2 << level) <= C:
            between = tl.where(split_pairs(i, j, 1 << level), -L, 0.0).to(tl.float16)
            X16 = X.to(tl.float16)
            X = dot(X16, dot(between, X16).to(tl.float16), X)
    return X


@triton.jit
def tile_offsets(stride, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Row numbers and row * stride + column of a [C, K] tile, seen as [C // BLOCK, K, BLOCK].

    The axis order and the contiguity of K // 32 make Triton spread a warp over all columns and give each thread whole
    stretches of rows: sums along a block need little communication, and vectors per block stay small.
    """
    row = tl.arange(0, C // BLOCK)[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    column = tl.max_contiguous(tl.arange(0, K), K // 32)[None, :, None]
    return row, row * stride + column


@triton.jit
def load_rows(pointer, t0, n, head, stride_t, stride_h, other, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Rows t0 .. t0 + n of one head, [C // BLOCK, K, BLOCK], `other` past n. Only the base offset needs 64 bits."""
    row, offsets = tile_offsets(stride_t, K, C, BLOCK)
    base = pointer + t0.to(tl.int64) * stride_t + head * stride_h
    return tl.load(base + offsets, mask=row < n, other=other)


@triton.jit
def prefetch_rows(pointer, t0, n, head, stride_t, stride_h, K: tl.constexpr, C: tl.constexpr):
    """Start to bring rows of 2-byte elements that `load_rows` will read into the L2 cache; n > 0."""
    if not INTERPRET:
        row = tl.minimum(tl.arange(0, C), n - 1)[:, None]
        line = tl.arange(0, K // 64)[None, :] * 64
        at = pointer + t0.to(tl.int64) * stride_t + head * stride_h + row * stride_t + line
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [at.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def flatten(x, SIZE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """[C // BLOCK, K, BLOCK] as rows [C, K] for SIZE = C, else as [C // SIZE, SIZE, K]."""
    rows = tl.permute(x, (0, 2, 1))
    return tl.reshape(rows, [C, K]) if SIZE == C else tl.reshape(rows, [C // SIZE, SIZE, K])


@triton.jit
def inverse_norm(x):
    """1 / sqrt(sum x^2 + 1e-6) of the rows of [blocks, K, BLOCK]: [blocks, BLOCK]."""
    return tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)


@triton.jit
def prepare_kernel(
    q, k, gate, beta, A_log, dt_bias, chunk_start, chunk_len, q_in, k_in, k_out, A_out, solve_out, decay_out, norms,
    q_t, q_h, k_t, k_h, g_t, g_h, b_t, b_h, H, lower_bound, scale,
    SAVE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    n = tl.load(chunk_len + chunk)
    if n == 0:
        return
    t0 = tl.load(chunk_start + chunk)
    if EARLY:
        prefetch_rows(k, t0, n, head, k_t, k_h, K, C)
        prefetch_rows(q, t0, n, head, q_t, q_h, K, C)
    rows = tl.arange(0, C)
    i = rows[:, None]
    j = rows[None, :]
    tile = (chunk * H + head).to(tl.int64)
    rate = exp_rate(tl.load(A_log + head).to(tl.float32))
    columns = tl.arange(0, K)
    bias = tl.load(dt_bias + head * K + columns).to(tl.float32)
    # Past the end the gate is -inf, hence the decay exp(0).
    g = load_rows(gate, t0, n, head, g_t, g_h, -float("inf"), K, C, BLOCK).to(tl.float32)
    if lower_bound is None:
        g = log2_decay(g + bias[None, :, None], rate, None)
    else:
        g = sigmoid(g * rate + (bias * rate)[None, :, None]) * (lower_bound * LOG2E)
    inside = tl.cumsum(g, axis=2)
    total = tl.sum(g, axis=2)
    before, after, middle, whole = block_vectors(total, C, BLOCK)
    tl.store(decay_out + tile * K + columns, exp2(whole))

    k_tile = load_rows(k, t0, n, head, k_t, k_h, 0.0, K, C, BLOCK).to(tl.float32)
    k_norm = inverse_norm(k_tile)
    at = tl.arange(0, C // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if SAVE:
        tl.store(norms + tile * 2 * C + C + at, k_norm)
    q_raw = load_rows(q, t0, n, head, q_t, q_h, 0.0, K, C, BLOCK)
    k_tile *= k_norm[:, None, :]
    _, flat = tile_offsets(K, K, C, BLOCK)
    since_start = exp2(inside + before[:, :, None])
    tl.store(k_in + tile * C * K + flat, to_bf16_rne(k_tile * since_start))
    until_end = exp2((after + total)[:, :, None] - inside)
    tl.store(k_out + tile * C * K + flat, to_bf16_rne(k_tile * until_end))
    q_tile = q_raw.to(tl.float32)
    q_norm = inverse_norm(q_tile)
    if SAVE:
        tl.store(norms + tile * 2 * C + at, q_norm)
    q_tile *= (q_norm * scale)[:, None, :]
    tl.store(q_in + tile * C * K + flat, to_bf16_rne(q_tile * since_start))

    if SAVE:
        q_tile = now(q_tile)
    A, P = pair_products(q_tile, k_tile, inside, total, middle, lower_bound is not None, K, C, BLOCK)
    square = tile * C * C + i * C + j
    tl.store(A_out + square, to_bf16_rne(A))
    # Past the end beta is -inf, hence 0.
    b = tl.load(beta + (t0 + rows).to(tl.int64) * b_t + head * b_h, mask=rows < n, other=-float("inf"))
    b = sigmoid(b.to(tl.float32))
    tl.store(solve_out + square, to_bf16_rne(unit_lower_inverse(P * b[:, None], C) * b[None, :]))


@triton.jit
def _split(x):
    """fp32 as a sum of two bf16 tiles, to 2^-16."""
    high = to_bf16_rne(x)
    return high, to_bf16_rne(x - high.to(tl.float32))


@triton.jit
def scan_kernel(
    q_in, k_in, k_out, A, solve, decay, v, o, S0, S_end, states, updates, chunk_offset, chunk_start, chunk_len, wanted,
    v_t, v_h, o_t, o_h, H,
    HAS_S0: tl.constexpr, SAVE: tl.constexpr, TRANSITION: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(chunk_offset + sequence)
    last = tl.load(chunk_offset + sequence + 1)
    if TRANSITION and wanted is not None:
        # Columns that nobody reads: no chunk is worked on. Leaving the program here would cost 45 registers.
        last = tl.where(tl.program_id(0) * BV < tl.load(wanted + sequence), last, first)
    rows = tl.arange(0, C)
    keys = tl.arange(0, K)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    state_at = (sequence * H + head).to(tl.int64) * K * V + keys[None, :] * V + values[:, None]
    if TRANSITION:
        # Tiles past V hold the columns of the transition: the end state from the unit matrix with v = 0.
        state_at = (sequence * H + head).to(tl.int64) * K * (V + K) + tl.where(
            values[:, None] < V,
            keys[None, :] * V + values[:, None],
            K * V + keys[None, :] * K + values[:, None] - V,
        )
        S = tl.where(values[:, None] == keys[None, :] + V, 1.0, 0.0)
    elif HAS_S0:
        S = tl.load(S0 + state_at).to(tl.float32)
    else:
        S = tl.zeros([BV, K], tl.float32)
    square = rows[:, None] * C + rows[None, :]
    flat = rows[:, None] * K + keys[None, :]
    t0 = tl.load(chunk_start + first, mask=first < last, other=0)
    end = t0
    if first < last:
        end = tl.load(chunk_start + last - 1) + tl.load(chunk_len + last - 1)
    fade = tl.load(decay + (first * H + head).to(tl.int64) * K + keys, mask=keys < K * (first < last), other=0.0)
    for chunk in tl.range(first, last, num_stages=STAGES):
        tile = (chunk * H + head).to(tl.int64)
        following = (tl.minimum(chunk + 1, last - 1) * H + head).to(tl.int64)
        fade_next = tl.load(decay + following * K + keys)
        token = t0 + (chunk - first) * C + rows
        v_tile = tl.load(
            v + token.to(tl.int64)[:, None] * v_t + head * v_h + values[None, :],
            mask=(token < end)[:, None] & (values < V)[None, :],
            other=0.0,
        )
        k_in_tile = tl.load(k_in + tile * C * K + flat)
        solve_tile = tl.load(solve + tile * C * C + square)
        if not TRANSITION:
            q_in_tile = tl.load(q_in + tile * C * K + flat)
            A_tile = tl.load(A + tile * C * C + square)
        k_out_tile = tl.load(k_out + tile * C * K + flat)
        S16 = to_bf16_rne(S)
        if SAVE:
            tl.store(states + tile * K * V + values[:, None] * K + keys[None, :], S16)
        rest = tl.trans(v_tile).to(tl.float32) - dot(S16, tl.trans(k_in_tile))
        # The two products on the way into the state take their left operand in two pieces: rounding it once to bf16
        # in each would put the final state past 3e-3 when it decays slowly.
        rest_high, rest_low = _split(rest)
        u = dot(rest_low, tl.trans(solve_tile), dot(rest_high, tl.trans(solve_tile)))
        u16, u_low = _split(u)
        if SAVE:
            tl.store(updates + tile * C * V + rows[:, None] * V + values[None, :], tl.trans(u16))
        if not TRANSITION:
            out = dot(u16, tl.trans(A_tile), dot(S16, tl.trans(q_in_tile)))
            tl.store(
                o + token.to(tl.int64)[:, None] * o_t + head * o_h + values[None, :],
                tl.trans(to_bf16_rne(out)),
                mask=(token < end)[:, None],
            )
        S = dot(u_low, k_out_tile, dot(u16, k_out_tile, S * fade[None, :]))
        fade = fade_next
    tl.store(S_end + state_at, S)


@triton.jit
def merge_kernel(
    ends, S0, starts, segment_offset, H, HAS_S0: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):
    """Start state of each segment of a sequence, S <- M S + S_end, from what `scan_kernel` with TRANSITION left."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    keys = tl.arange(0, K)
    at = keys[:, None] * V + (tl.program_id(0) * BV + tl.arange(0, BV))[None, :]
    if HAS_S0:
        S = tl.load(S0 + (sequence * H + head).to(tl.int64) * K * V + at).to(tl.float32)
    else:
        S = tl.zeros([K, BV], tl.float32)
    for segment in tl.range(tl.load(segment_offset + sequence), tl.load(segment_offset + sequence + 1), num_stages=1):
        tile = (segment * H + head).to(tl.int64)
        tl.store(starts + tile * K * V + at, S)
        M_high, M_low = _split(tl.load(ends + tile * (V + K) * K + K * V + keys[:, None] * K + keys[None, :]))
        S_high, S_low = _split(S)
        S = tl.load(ends + tile * (V + K) * K + at)
        S = dot(M_high, S_high, dot(M_high, S_low, dot(M_low, S_high, S)))
