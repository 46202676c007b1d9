"""Triton kernels of `rms_norm`: rows of n held whole. Forward 2 rows of memory, backward 3.

The weight's gradient leaves one row per program; `column_sums` adds them in a fixed order, so that a repeated run is
bit-identical.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.moe.mxfp8_kernels import keep, through
from k3rl.kernels.triton_ops import begin, early

FORWARD = {"elements": 1024, "per_warp": 512}
BACKWARD = {"elements": 4096, "num_warps": 8, "programs": 132 * 2, "stages": 3}
SUMS = {"rows": 256, "columns": 16}


@triton.jit(do_not_specialize=["n"])
def normed_kernel(
    x, gain, y, r, n, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BF16: tl.constexpr
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = row * WIDTH + column
    valid = (row < n) & (column < WIDTH)
    weight = tl.load(gain + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)[:, None]
    keep(y + at, through(value * inverse, BF16) * weight, valid, BF16)
    tl.store(r + row, inverse, mask=row < n)


@triton.jit(do_not_specialize=["n", "steps"])
def normed_gradient_kernel(
    grad, x, gain, r, dx, parts, n, steps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BF16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(gain + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * ROWS
    for step in tl.range(0, steps, num_stages=STAGES):
        row = first + step * ROWS + tl.arange(0, ROWS)[:, None]
        at = row * WIDTH + column
        valid = (row < n) & (column < WIDTH)
        inverse = tl.load(r + row, mask=row < n, other=0.0)
        normed = tl.load(x + at, mask=valid, other=0.0).to(tl.float32) * inverse
        g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
        d_weight += g * normed
        g = g * weight
        along = tl.sum(g * normed, axis=1)[:, None] / WIDTH
        keep(dx + at, (g - normed * along) * inverse, valid, BF16)
    place = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, BLOCK)
    tl.store(parts + place, tl.sum(d_weight, axis=0), mask=tl.arange(0, BLOCK) < WIDTH)


@triton.jit(do_not_specialize=["count"])
def column_sums_kernel(
    parts, left, right, out, out_right, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRODUCTS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Sums over rows of parts [count, WIDTH] fp32: themselves, or times right and times left."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(parts + row * WIDTH + column[None, :], mask=(row < count) & valid[None, :], other=0.0)
    value = tl.sum(total, axis=0)
    if PRODUCTS:
        a = tl.load(left + column, mask=valid, other=0.0).to(tl.float32)
        b = tl.load(right + column, mask=valid, other=0.0).to(tl.float32)
        keep(out + column, value * b, valid, BF16)
        keep(out_right + column, value * a, valid, BF16)
    else:
        keep(out + column, value, valid, BF16)


def column_sums(parts: torch.Tensor, *factors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """parts [P, n] fp32 -> (sums [n],); with factors a, b [n]: the gradients of both from that of a * b."""
    count, width = parts.shape
    outs = tuple(torch.empty(width, dtype=dtype, device=parts.device) for _ in range(max(1, len(factors))))
    left, right = factors or (parts, parts)
    column_sums_kernel[(triton.cdiv(width, SUMS["columns"]),)](
        parts, left, right, outs[0], outs[-1], count, WIDTH=width, ROWS=SUMS["rows"], COLUMNS=SUMS["columns"],
        PRODUCTS=bool(factors), BF16=dtype == torch.bfloat16,
    )  # fmt: skip
    return outs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`k3rl.kernels.norm.rms_norm.rms_norm` by the kernel: x and weight of one dtype, n at most 8192; r is fp32."""
    x = x.contiguous()
    width = x.shape[-1]
    n, block = x.numel() // width, triton.next_power_of_2(width)
    rows = max(1, FORWARD["elements"] // block)
    y, r = torch.empty_like(x), torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    normed_kernel[(triton.cdiv(n, rows),)](
        x, weight, y, r, n, eps, WIDTH=width, BLOCK=block, ROWS=rows, BF16=x.dtype == torch.bfloat16,
        num_warps=max(1, min(8, rows * block // FORWARD["per_warp"])), **early(),
    )  # fmt: skip
    return y, r


def rms_norm_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`k3rl.kernels.norm.rms_norm.rms_norm_gradient` by the kernels."""
    grad, x, r = grad.contiguous(), x.contiguous(), r.contiguous()
    n, width = x.shape
    block = triton.next_power_of_2(width)
    rows = max(1, BACKWARD["elements"] // block)
    programs = max(1, min(BACKWARD["programs"], triton.cdiv(n, rows)))
    steps = triton.cdiv(triton.cdiv(n, rows), programs)
    dx, parts = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
    normed_gradient_kernel[(programs,)](
        grad, x, weight, r, dx, parts, n, steps, WIDTH=width, BLOCK=block, ROWS=rows,
        BF16=x.dtype == torch.bfloat16, STAGES=BACKWARD["stages"], num_warps=BACKWARD["num_warps"],
    )  # fmt: skip
    return dx, column_sums(parts, dtype=weight.dtype)[0]
