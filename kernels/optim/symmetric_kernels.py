"""Triton kernel of `symmetric`: a program has one tile on or above the diagonal and goes over the inner axis."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import dot, to_bf16_rne

DEPTH = 64
LAUNCH = {64: {"num_warps": 4, "num_stages": 4}, 128: {"num_warps": 8, "num_stages": 3}}


@triton.jit(do_not_specialize=["alpha", "beta", "gamma"])
def symmetric_kernel(
    p, out, r, k, p_n, p_r, p_k, alpha, beta, gamma,
    GROWS: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """alpha (P P' + beta P + gamma I). GROWS: whether there is more than the first of them; EVEN: whether r and k are
    whole numbers of tiles."""
    place = tl.program_id(0)
    # Tiles are numbered column by column down to the diagonal; the root may be one unit off.
    across = ((tl.sqrt(8.0 * place.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    across += ((across + 1) * (across + 2) // 2 <= place).to(tl.int32)
    across -= (across * (across + 1) // 2 > place).to(tl.int32)
    down = place - across * (across + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    p += matrix * p_n
    row, column, inner = down * TILE + tl.arange(0, TILE), across * TILE + tl.arange(0, TILE), tl.arange(0, DEPTH)
    upper = p + row[:, None] * p_r + inner[None, :] * p_k
    lower = p + column[:, None] * p_r + inner[None, :] * p_k
    inside = (row[:, None] < r) & (column[None, :] < r)
    if GROWS:  # the sum begins with it: behind the loop its tile would take as many registers as the sum
        own = tl.load(p + row[:, None] * p_r + column[None, :] * p_k, mask=inside, other=0.0)
        total = beta * own.to(tl.float32) + tl.where(row[:, None] == column[None, :], gamma, 0.0)
    else:
        total = tl.zeros([TILE, TILE], tl.float32)
    for start in tl.range(0, k, DEPTH):
        if EVEN:
            a, b = tl.load(upper), tl.load(lower)
        else:
            there = inner[None, :] < k - start
            a = tl.load(upper, mask=(row[:, None] < r) & there, other=0.0)
            b = tl.load(lower, mask=(column[:, None] < r) & there, other=0.0)
        total = dot(a, tl.trans(b), total)
        upper += DEPTH * p_k
        lower += DEPTH * p_k
    value = to_bf16_rne(total * alpha)
    out += matrix * r * r  # within a matrix 32 bits are enough
    tl.store(out + row[:, None] * r + column[None, :], value, mask=inside)
    if down != across:
        mirrored = (column[:, None] < r) & (row[None, :] < r)
        tl.store(out + column[:, None] * r + row[None, :], tl.trans(value), mask=mirrored)


def symmetric(p: torch.Tensor, out: torch.Tensor, alpha: float, beta: float, gamma: float) -> None:
    """See `k3rl.kernels.optim.symmetric.symmetric`."""
    n, r, k = p.shape
    if not n:
        return
    tile = 64 if r <= 64 else 128
    across = triton.cdiv(r, tile)
    symmetric_kernel[(across * (across + 1) // 2, n)](
        p, out, r, k, *p.stride(), float(alpha), beta / alpha, gamma / alpha,
        GROWS=beta != 0.0 or gamma != 0.0, EVEN=r % tile == 0 and k % DEPTH == 0, TILE=tile, DEPTH=DEPTH,
        **LAUNCH[tile],
    )  # fmt: skip
