"""The Triton kernel of `kda_decode`: one program per row and head steps the whole 128 x 128 fp32 state.

Both reductions over K, S^T (alpha k) and
S^T (alpha q), come from that one copy, since o = S_new^T q = S^T (alpha q) + (k . q) delta with
delta = beta (v - S^T (alpha k)), S_new = diag(alpha) S + k delta^T. A lane owns 4 neighbouring values of V and a warp
whole rows, so that the sums over K stay in a thread until one exchange between warps.
Traffic: 128 KiB per row and head, all else is below 3 KiB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import LOG2E, exp2, exp_rate, sigmoid, to_bf16_rne

# Up to this many rows x heads the state is loaded before anything else: registers are free, waiting is not.
FEW_PROGRAMS = 264
# What `kda_decode_step.step` gets: TILES without pending rows (None: `decode_kernel` runs instead), DEFERRED with them.
TILES: dict | None = None
DEFERRED: dict = {"tile": 32, "ahead": 1, "maxnreg": 168}


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
def _convolve(x_pointer, weight, conv_pool, read, at, first, width, BF16: tl.constexpr):
    """SiLU of the convolution at channels `at` of one stream."""
    old = conv_pool + read * 3 * width + first + at
    w = weight + at * 4
    c = tl.load(w).to(tl.float32) * tl.load(old).to(tl.float32)
    c += tl.load(w + 1).to(tl.float32) * tl.load(old + width).to(tl.float32)
    c += tl.load(w + 2).to(tl.float32) * tl.load(old + 2 * width).to(tl.float32)
    c += tl.load(w + 3).to(tl.float32) * tl.load(x_pointer).to(tl.float32)
    return rounded(c * sigmoid(c), BF16)


@triton.jit
def _shift_history(q, k, v, conv_pool, read, write, at, width, store, POOL_BF16: tl.constexpr):
    """Move the histories of the three streams on by one token, from the read to the write slot.

    The slots are usually the same one, and Triton may load a vector in several layouts: hence after all convolutions,
    with a barrier between the last load and the first store.
    """
    third = width // 3
    old = conv_pool + read * 3 * width + at
    new = conv_pool + write * 3 * width + at
    q2, k2, v2 = tl.load(old + width), tl.load(old + width + third), tl.load(old + width + 2 * third)
    q1, k1, v1 = tl.load(old + 2 * width), tl.load(old + 2 * width + third), tl.load(old + 2 * width + 2 * third)
    q0, k0, v0 = tl.load(q).to(tl.float32), tl.load(k).to(tl.float32), tl.load(v).to(tl.float32)
    tl.debug_barrier()
    tl.store(new, q2, mask=store)
    tl.store(new + third, k2, mask=store)
    tl.store(new + 2 * third, v2, mask=store)
    tl.store(new + width, q1, mask=store)
    tl.store(new + width + third, k1, mask=store)
    tl.store(new + width + 2 * third, v1, mask=store)
    store_as(new + 2 * width, q0, store, POOL_BF16)
    store_as(new + 2 * width + third, k0, store, POOL_BF16)
    store_as(new + 2 * width + 2 * third, v0, store, POOL_BF16)


@triton.jit
def _advance(S, new_state, square, alpha, kn, qn, kq, b, vc, keep):
    """Step BV columns S [D, BV] of the state and write them to a slot; returns their o [BV] before rounding."""
    S = S * alpha[:, None]
    delta = b * (vc - tl.sum(S * kn[:, None], axis=0))
    o = tl.sum(S * qn[:, None], axis=0) + kq * delta
    tl.store(new_state + square, S + kn[:, None] * delta[None, :], mask=keep[:, None])
    return o


@triton.jit
def decode_kernel(
    q, k, v, gate, beta, out_gate, wq, wk, wv, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_index, write_index, y,
    q_t, k_t, v_t, g_t, b_t, z_t, read_stride, write_stride, H, lower_bound, scale, eps,
    D: tl.constexpr, BF16: tl.constexpr, POOL_BF16: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, D)
    at = head * D + column
    read = tl.load(read_index + row * read_stride).to(tl.int64)
    write = tl.load(write_index + row * write_stride).to(tl.int64)
    out = y + row * H * D + at
    if read < 0:
        store_as(out, tl.zeros([D], tl.float32), column < D, BF16)
        return
    BV: tl.constexpr = D // 2
    value = tl.arange(0, BV)
    square = column[:, None] * D + value[None, :]
    old = state_pool + (read * H + head) * D * D
    if EARLY:
        Sa = tl.load(old + square)
        Sb = tl.load(old + BV + square)
    keep = (column < D) & (write >= 0)
    write = tl.maximum(write, 0)
    width = 3 * H * D
    qc = _convolve(q + row * q_t + at, wq, conv_pool, read, at, 0, width, BF16)
    kc = _convolve(k + row * k_t + at, wk, conv_pool, read, at, H * D, width, BF16)
    rate = exp_rate(tl.load(A_log + head).to(tl.float32))
    z = tl.load(gate + row * g_t + at).to(tl.float32) + tl.load(dt_bias + at).to(tl.float32)
    alpha = exp2(sigmoid(z * rate) * (lower_bound * LOG2E))
    b = sigmoid(tl.load(beta + row * b_t + head).to(tl.float32))
    qn = qc * (tl.rsqrt(tl.sum(qc * qc, axis=0) + 1e-6) * scale)
    kn = kc * tl.rsqrt(tl.sum(kc * kc, axis=0) + 1e-6)
    kq = tl.sum(kn * qn, axis=0)

    # Two halves of V, one after the other: half the registers, so twice the programs to hide each other's waits.
    low = head * D + value
    high = low + BV
    va = _convolve(v + row * v_t + low, wv, conv_pool, read, low, 2 * H * D, width, BF16)
    vb = _convolve(v + row * v_t + high, wv, conv_pool, read, high, 2 * H * D, width, BF16)
    new = state_pool + (write * H + head) * D * D
    if not EARLY:
        Sa = tl.load(old + square)
    oa = rounded(_advance(Sa, new, square, alpha, kn, qn, kq, b, va, keep), BF16)
    if not EARLY:
        Sb = tl.load(old + BV + square)
    ob = rounded(_advance(Sb, new + BV, square, alpha, kn, qn, kq, b, vb, keep), BF16)
    rstd = tl.rsqrt((tl.sum(oa * oa, axis=0) + tl.sum(ob * ob, axis=0)) / D + eps)
    ga = sigmoid(tl.load(out_gate + row * z_t + low).to(tl.float32))
    gb = sigmoid(tl.load(out_gate + row * z_t + high).to(tl.float32))
    out = y + row * H * D
    store_as(out + low, oa * rstd * tl.load(norm_weight + value).to(tl.float32) * ga, value < D, BF16)
    store_as(out + high, ob * rstd * tl.load(norm_weight + BV + value).to(tl.float32) * gb, value < D, BF16)
    _shift_history(
        q + row * q_t + at, k + row * k_t + at, v + row * v_t + at, conv_pool, read, write, at, width, keep, POOL_BF16
    )


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, D] whose rows are contiguous (a slice of a wider matrix is), copied only otherwise."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def kda_decode(
    q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_index, write_index, lower_bound, eps, pending=None,
):  # fmt: skip
    """`k3rl.kernels.kda_decode.kda_decode` by the kernel that is the faster one: D = 128, fp32 contiguous pools."""
    if state_pool.dtype != torch.float32 or not state_pool.is_contiguous() or not conv_pool.is_contiguous():
        raise ValueError(f"kda_decode: wants contiguous pools and a float32 state_pool, got {state_pool.dtype}, "
                         f"strides {state_pool.stride()} and {conv_pool.stride()}")  # fmt: skip
    args = (q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool)
    args += (read_index, write_index, lower_bound, eps)
    if pending is None and TILES is None:
        return halves(*args)
    from k3rl.kernels import kda_decode_step

    return kda_decode_step.step(*args, pending, **(TILES if pending is None else DEFERRED))


def halves(
    q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_index, write_index, lower_bound, eps, early: bool | None = None, num_warps: int = 4, **options,
):  # fmt: skip
    """`kda_decode` by `decode_kernel`."""
    B, H, D = q.shape
    q, k, v, gate, out_gate = (contiguous_rows(x) for x in (q, k, v, gate, out_gate))
    beta = beta if beta.stride(1) == 1 else beta.contiguous()
    y = torch.empty(B, H, D, dtype=v.dtype, device=v.device)
    decode_kernel[(H, B)](
        q, k, v, gate, beta, out_gate, *(w.contiguous() for w in conv_weights), A_log, dt_bias, norm_weight,
        conv_pool, state_pool, read_index, write_index, y,
        *(x.stride(0) for x in (q, k, v, gate, beta, out_gate)), read_index.stride(0), write_index.stride(0),
        H, lower_bound, D**-0.5, eps,
        D=D, BF16=v.dtype == torch.bfloat16, POOL_BF16=conv_pool.dtype == torch.bfloat16,
        EARLY=B * H <= FEW_PROGRAMS if early is None else early, num_warps=num_warps, **options,
    )  # fmt: skip
    return y
