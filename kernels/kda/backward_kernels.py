"""Chunked KDA backward on Hopper: three Triton kernels over the tiles that the forward left (see kda_forward).

With R = v - k_in S (before the solve), u = solve R, Z = dR = solve^T du, dS the gradient of the state a chunk leaves:

    `reverse_scan` (per sequence, head and tile of V, serial, state transposed in registers, as in the forward)
        du = A^T do + k_out dS;   dv = Z = solve^T du;   dS <- diag(decay) dS + q_in^T do - k_in^T Z
    `state_gradients` (one program per chunk and head, all in parallel)
        dq_in = do S^T;  dk_in = -Z S^T;  dk_out = u dS^T;  dA = do u^T;  dP = -Z u^T;  dbeta = Z . u / beta
    `input_gradients` (likewise): from those to the raw q, k, gate; apart, since together they do not fit in registers.

(I + L) u = beta R makes dL = -(I + L)^-T du u^T, so the inverse itself needs no gradient. q enters only as
q exp(G), k as k exp(G) in rows and k exp(-G) in columns, hence dG = q dq + k (dk of rows - dk of columns): its reverse
running sum inside the chunk, with the decay of the state, is the gradient of the log decay. The pair (i, i) is kept out
of it: its two terms cancel exactly. Every exponential is anchored as in the forward. Sums over chunks (dA_log,
ddt_bias) leave one row per chunk, added up by torch, so that a repeated run is bit-identical.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3rl.kernels.kda.forward_kernels import (
    block_vectors,
    decay_to_middle,
    flatten,
    load_rows,
    split_pairs,
    tile_offsets,
)
from k3rl.kernels.triton_ops import (
    LEAST_LOG2,
    LOG2E,
    dot,
    exp2,
    exp_rate,
    log2_decay,
    now,
    prefetch,
    sigmoid,
    to_bf16_rne,
)


@triton.jit
def reverse_scan_kernel(
    q_in, k_in, k_out, A, solve, decay, do, dv, dS_end, dS0, dstates, chunk_offset, chunk_start, chunk_len,
    do_t, do_h, dv_t, dv_h, H,
    HAS_DS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(chunk_offset + sequence)
    last = tl.load(chunk_offset + sequence + 1)
    rows = tl.arange(0, C)
    keys = tl.arange(0, K)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    state_at = (sequence * H + head).to(tl.int64) * K * V + keys[None, :] * V + values[:, None]
    if HAS_DS:  # noqa: SIM108
        dS = tl.load(dS_end + state_at).to(tl.float32)
    else:
        dS = tl.zeros([BV, K], tl.float32)
    square = rows[:, None] * C + rows[None, :]
    flat = rows[:, None] * K + keys[None, :]
    t0 = tl.load(chunk_start + first, mask=first < last, other=0)
    end = t0
    if first < last:
        end = tl.load(chunk_start + last - 1) + tl.load(chunk_len + last - 1)
    fade = tl.load(decay + ((last - 1) * H + head).to(tl.int64) * K + keys, mask=keys < K * (first < last), other=0.0)
    for step in tl.range(0, last - first, num_stages=STAGES):
        chunk = last - 1 - step
        tile = (chunk * H + head).to(tl.int64)
        following = (tl.maximum(chunk - 1, first) * H + head).to(tl.int64)
        fade_next = tl.load(decay + following * K + keys)
        token = t0 + (chunk - first) * C + rows
        inside = (token < end)[:, None]
        at = token.to(tl.int64)[:, None]
        do_tile = tl.trans(tl.load(do + at * do_t + head * do_h + values[None, :], mask=inside, other=0.0))
        A_tile = tl.load(A + tile * C * C + square)
        k_out_tile = tl.load(k_out + tile * C * K + flat)
        solve_tile = tl.load(solve + tile * C * C + square)
        q_in_tile = tl.load(q_in + tile * C * K + flat)
        k_in_tile = tl.load(k_in + tile * C * K + flat)
        dS16 = to_bf16_rne(dS)
        tl.store(dstates + tile * K * V + values[:, None] * K + keys[None, :], dS16)
        du = dot(dS16, tl.trans(k_out_tile), dot(do_tile, A_tile))
        Z = dot(to_bf16_rne(du), solve_tile)
        tl.store(dv + at * dv_t + head * dv_h + values[None, :], tl.trans(to_bf16_rne(Z)), mask=inside)
        dS = dot(do_tile, q_in_tile, dS * fade[None, :])
        dS = dot(to_bf16_rne(-Z), k_in_tile, dS)
        fade = fade_next
    tl.store(dS0 + state_at, dS)


@triton.jit
def unflatten(x, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """What `flatten` of kda_forward made, back as [C // BLOCK, K, BLOCK]."""
    return tl.permute(tl.reshape(x, [C // BLOCK, BLOCK, K]), (0, 2, 1))


@triton.jit
def split_gradients(
    dq, dk, dG, q, k, to_split, second, pairs, dA, dP, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """dq, dk and dG with what the pairs add that a split separates: the backward of `split_products`.

    second [blocks, 1, BLOCK] or smaller: the rows behind their split.
    """
    nothing = to_bf16_rne(tl.zeros([C, C], tl.float32))
    dA_part = tl.where(pairs, dA, nothing)
    dP_part = tl.where(pairs, dP, nothing)
    across = exp2(to_split)
    column = to_bf16_rne(k * across)
    q_row = to_bf16_rne(q * across)
    from_A = unflatten(dot(dA_part, flatten(column, C, K, C, BLOCK)), K, C, BLOCK)
    dq += from_A * across
    dG += from_A * q_row.to(tl.float32)
    # Rows behind a split and columns before it: one product each, of disjoint rows.
    turned = dot(tl.trans(dA_part), flatten(q_row, C, K, C, BLOCK))
    turned = dot(tl.trans(dP_part), flatten(column, C, K, C, BLOCK), turned)
    turned = unflatten(dot(dP_part, flatten(column, C, K, C, BLOCK), turned), K, C, BLOCK)
    dk += turned * across
    dG += tl.where(second, turned, -turned) * column.to(tl.float32)
    return dq, dk, dG


@triton.jit
def anchored_gradients(q, k, inside, dA, dP, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """dq, dk and dG from the pairs inside each block of 16: the backward of `anchored_products`."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    nothing = to_bf16_rne(tl.zeros([C, C], tl.float32))
    same = (i // BLOCK == j // BLOCK) & (j < i)
    dA_part = tl.where(same, dA, nothing)
    dP_part = tl.where(same, dP, nothing)
    rise = exp2(inside)
    q_row = to_bf16_rne(q * rise)
    k_row = to_bf16_rne(k * rise)
    fall = exp2(-inside)
    column = to_bf16_rne(k * fall)
    from_A = unflatten(dot(dA_part, flatten(column, C, K, C, BLOCK)), K, C, BLOCK)
    dq = from_A * rise
    dG = from_A * q_row.to(tl.float32)
    from_P = unflatten(dot(dP_part, flatten(column, C, K, C, BLOCK)), K, C, BLOCK)
    dk = from_P * rise
    dG += from_P * k_row.to(tl.float32)
    turned = dot(tl.trans(dA_part), flatten(q_row, C, K, C, BLOCK))
    turned = unflatten(dot(tl.trans(dP_part), flatten(k_row, C, K, C, BLOCK), turned), K, C, BLOCK)
    dk += turned * fall
    dG -= turned * column.to(tl.float32)
    return dq, dk, dG


@triton.jit
def halved_gradients(dq, dk, dG, q, k, inside, dA, dP, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """dq, dk and dG with the pairs inside each block of BLOCK rows: the backward of `halved_products`."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    for level in tl.static_range(1, 4):
        second = (tl.arange(0, BLOCK)[None, None, :] // (BLOCK >> level)) % 2 == 1
        to_split = decay_to_middle(inside, BLOCK >> level, K, C, BLOCK)
        pairs = split_pairs(i, j, BLOCK >> level)
        dq, dk, dG = split_gradients(dq, dk, dG, q, k, to_split, second, pairs, dA, dP, K, C, BLOCK)
    return dq, dk, dG


@triton.jit
def pair_gradients(
    q, k, inside, total, dA, dP, BOUNDED: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of q, of k and of G, [blocks, K, BLOCK], from dA and dP [C, C] bf16 off the diagonal.

    G's gradient is taken from the rounded operands of the products, so that what a pair (i, j) adds at i it takes away
    at j to the last bit of the operands: the running sum over later rows would otherwise collect their roundings.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    block = tl.arange(0, C // BLOCK)[:, None, None]
    if BOUNDED:
        dq, dk, dG = anchored_gradients(q, k, inside, dA, dP, K, C, BLOCK)
    else:
        dq = tl.zeros([C // BLOCK, K, BLOCK], tl.float32)
        dk = dq
        dG = dq
    second = block % 2 == 1
    to_split = tl.where(second, inside, total[:, :, None] - inside)
    dq, dk, dG = split_gradients(dq, dk, dG, q, k, to_split, second, split_pairs(i, j, BLOCK), dA, dP, K, C, BLOCK)
    if C == 4 * BLOCK:
        _, _, middle, _ = block_vectors(total, C, BLOCK)
        second = block >= 2
        to_split = tl.where(second, inside, total[:, :, None] - inside) + middle[:, :, None]
        pairs = split_pairs(i, j, 2 * BLOCK)
        dq, dk, dG = split_gradients(dq, dk, dG, q, k, to_split, second, pairs, dA, dP, K, C, BLOCK)
    if not BOUNDED:
        dq, dk, dG = halved_gradients(dq, dk, dG, q, k, inside, dA, dP, K, C, BLOCK)
    return dq, dk, dG


@triton.jit
def state_gradients_kernel(
    v, beta, o, do, updates, dv, states, dstates, decay, chunk_start, chunk_len,
    dq_in, dk_in, dk_out, dA_out, dP_out, dbeta, fading, along,
    v_t, v_h, b_t, b_h, o_t, o_h, do_t, do_h, dv_t, dv_h, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    n = tl.load(chunk_len + chunk)
    tile = (chunk * H + head).to(tl.int64)
    if EARLY:
        prefetch(states + tile * K * V, K * V * 2)
        prefetch(dstates + tile * K * V, K * V * 2)
    if n == 0:
        return
    columns = tl.arange(0, K)
    rows = tl.arange(0, C)
    at = (tl.load(chunk_start + chunk) + rows).to(tl.int64)
    value = tl.arange(0, V)
    valid = (rows < n)[:, None]
    do_tile = tl.load(do + at[:, None] * do_t + head * do_h + value[None, :], mask=valid, other=0.0)
    Z = tl.load(dv + at[:, None] * dv_t + head * dv_h + value[None, :], mask=valid, other=0.0)
    u = tl.load(updates + tile * C * V + rows[:, None] * V + value[None, :])
    o_tile = tl.load(o + at[:, None] * o_t + head * o_h + value[None, :], mask=valid, other=0.0)
    v_tile = tl.load(v + at[:, None] * v_t + head * v_h + value[None, :], mask=valid, other=0.0)
    b_raw = tl.load(beta + at * b_t + head * b_h, mask=rows < n, other=0.0).to(tl.float32)
    if EARLY:
        tl.debug_barrier()  # ptxas would move loads behind the products that wait for others
    square = tile * C * C + rows[:, None] * C + rows[None, :]
    tl.store(dA_out + square, to_bf16_rne(dot(do_tile, tl.trans(u))))
    tl.store(dP_out + square, to_bf16_rne(-dot(Z, tl.trans(u))))

    # What lies along the normalised q and k, for their norms: q . dq = do . o and k . dk = 2 Z . u / beta - Z . v.
    tl.store(along + tile * 2 * C + rows, tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), axis=1))
    b = sigmoid(b_raw)
    # u is proportional to beta: where beta underflows, Z is 0 as well and so are the gradients.
    per_beta = tl.sum(Z.to(tl.float32) * u.to(tl.float32), axis=1)
    per_beta = tl.where(b > 1e-30, per_beta / tl.maximum(b, 1e-30), 0.0)
    along_k = 2.0 * per_beta - tl.sum(Z.to(tl.float32) * v_tile.to(tl.float32), axis=1)
    tl.store(along + tile * 2 * C + C + rows, along_k)
    tl.store(dbeta + at * H + head, per_beta * sigmoid(-b_raw), mask=rows < n)

    flat = tile * C * K + rows[:, None] * K + columns[None, :]
    state = tile * K * V + value[:, None] * K + columns[None, :]
    S = tl.load(states + state)
    tl.store(dq_in + flat, tl.trans(to_bf16_rne(dot(tl.trans(S), tl.trans(do_tile)))))
    tl.store(dk_in + flat, tl.trans(to_bf16_rne(-dot(tl.trans(S), tl.trans(Z)))))
    dS = tl.load(dstates + state)
    tl.store(dk_out + flat, tl.trans(to_bf16_rne(dot(tl.trans(dS), tl.trans(u)))))
    faded = tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=0)
    tl.store(fading + tile * K + columns, faded * tl.load(decay + tile * K + columns))


@triton.jit
def gate_gradients(dg, g, z, rate, lower_bound):
    """Gradients of the logit z and, of each element, of log(rate), from that of the log decay; g its log2."""
    if lower_bound is None:
        # Where a decay is 0 nothing depends on it; a rounding left over from later rows would be times the rate.
        dg = tl.where(g > LEAST_LOG2, dg, 0.0)
        return dg * -rate * sigmoid(z), dg * g * (1.0 / LOG2E)
    else:
        # 1 - s from the other side: near saturation the difference would keep no digit.
        dz = dg * (lower_bound * rate) * sigmoid(z * rate) * sigmoid(-z * rate)
        return dz, dz * z


@triton.jit
def input_gradients_kernel(
    q, k, gate, A_log, dt_bias, dq_in, dk_in, dk_out, dA_in, dP_in, fading, norms, along, chunk_start, chunk_len,
    dq, dk, dgate, dbias_rows, drate_rows,
    q_t, q_h, k_t, k_h, g_t, g_h, H, lower_bound, scale,
    K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    n = tl.load(chunk_len + chunk)
    tile = (chunk * H + head).to(tl.int64)
    if EARLY:
        prefetch(dq_in + tile * C * K, C * K * 2)
        prefetch(dk_in + tile * C * K, C * K * 2)
        prefetch(dk_out + tile * C * K, C * K * 2)
        prefetch(dA_in + tile * C * C, C * C * 2)
        prefetch(dP_in + tile * C * C, C * C * 2)
        prefetch(norms + tile * 2 * C, 2 * C * 4)
        prefetch(along + tile * 2 * C, 2 * C * 4)
    first = part * KB
    columns = first + tl.arange(0, KB)
    if n == 0:
        tl.store(dbias_rows + tile * K + columns, tl.zeros([KB], tl.float32))
        tl.store(drate_rows + tile * K + columns, tl.zeros([KB], tl.float32))
        return
    t0 = tl.load(chunk_start + chunk)
    rows = tl.arange(0, C)
    rate = exp_rate(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * K + columns).to(tl.float32)
    z = load_rows(gate + first, t0, n, head, g_t, g_h, -float("inf"), KB, C, BLOCK).to(tl.float32) + bias[None, :, None]
    q_rows = load_rows(q + first, t0, n, head, q_t, q_h, 0.0, KB, C, BLOCK)
    k_rows = load_rows(k + first, t0, n, head, k_t, k_h, 0.0, KB, C, BLOCK)
    if EARLY:
        tl.debug_barrier()
    g = log2_decay(z, rate, lower_bound)
    inside = tl.cumsum(g, axis=2)
    total = tl.sum(g, axis=2)
    in_block = tl.arange(0, C // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    q_norm = tl.load(norms + tile * 2 * C + in_block)[:, None, :]
    k_norm = tl.load(norms + tile * 2 * C + C + in_block)[:, None, :]
    qn = q_rows.to(tl.float32) * (q_norm * scale)
    kn = k_rows.to(tl.float32) * k_norm
    square = tile * C * C + rows[:, None] * C + rows[None, :]
    dA, dP = tl.load(dA_in + square), tl.load(dP_in + square)
    dq_n, dk_n, dG = pair_gradients(qn, kn, inside, total, dA, dP, lower_bound is not None, KB, C, BLOCK)
    _, flat = tile_offsets(K, KB, C, BLOCK)
    flat += tile * C * K + first
    # Registers: sums are made now, and what the end needs is asked for again there, not held.
    dq_n, dk_n, dG = now(dq_n), now(dk_n), now(dG)
    before, after, _, _ = block_vectors(total, C, BLOCK)
    since_start = exp2(inside + before[:, :, None])
    from_state = tl.load(dq_in + flat).to(tl.float32) * since_start
    dq_n += from_state
    dG += qn * from_state
    from_state = tl.load(dk_in + flat).to(tl.float32) * since_start
    dk_n += from_state
    dG += kn * from_state
    from_state = tl.load(dk_out + flat).to(tl.float32) * exp2((after + total)[:, :, None] - inside)
    dk_n += from_state
    from_state *= kn
    if lower_bound is None:
        # The chunk's last row leaves undecayed: its two terms cancel, and beside them strong decays have no digits.
        from_state = tl.where(tile_offsets(K, KB, C, BLOCK)[0] < n - 1, from_state, 0.0)
    dG -= from_state

    # The decay of the whole chunk, then the reverse running sum inside it.
    ending = tl.load(fading + tile * K + columns) + tl.sum(tl.sum(from_state, axis=2), axis=0)
    block_sum = tl.sum(dG, axis=2)
    later = tl.sum(block_sum, axis=0)[None, :] - tl.cumsum(block_sum, axis=0)
    dg = (block_sum + later + ending[None, :])[:, :, None] - tl.cumsum(dG, axis=2) + dG
    dz, drate = gate_gradients(dg, g, z, rate, lower_bound)
    t0, n = tl.load(chunk_start + chunk), tl.load(chunk_len + chunk)
    columns = (part + (n >> 31)) * KB + tl.arange(0, KB)  # n is not negative: the same columns, formed again
    row, to = tile_offsets(H * K, KB, C, BLOCK)
    to += t0.to(tl.int64) * H * K + head * K + first
    tl.store(dgate + to, to_bf16_rne(dz), mask=row < n)
    # A row past the end has z = -inf and slope 0.
    tl.store(drate_rows + tile * K + columns, tl.sum(tl.sum(tl.where(row < n, drate, 0.0), axis=2), axis=0))
    tl.store(dbias_rows + tile * K + columns, tl.sum(tl.sum(dz, axis=2), axis=0))

    diagonal = tl.load(dA_in + tile * C * C + in_block * (C + 1)).to(tl.float32)[:, None, :]
    dq_n += diagonal * kn
    dk_n += diagonal * qn
    q_norm = tl.load(norms + tile * 2 * C + in_block)[:, None, :]
    k_norm = tl.load(norms + tile * 2 * C + C + in_block)[:, None, :]
    along_q = tl.load(along + tile * 2 * C + in_block)[:, None, :] / scale
    along_k = tl.load(along + tile * 2 * C + C + in_block)[:, None, :]
    # x -> y = norm x has dx = norm (dy - y (y . dy)); q also carries the scale, which cancels in y (y . dy).
    tl.store(dq + to, to_bf16_rne((dq_n * scale - qn * along_q) * q_norm), mask=row < n)
    tl.store(dk + to, to_bf16_rne((dk_n - kn * along_k) * k_norm), mask=row < n)
