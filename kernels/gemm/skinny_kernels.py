"""The Triton kernels of `skinny`: a program for a strip of outputs, and a run of inputs with all rows (split-K), or all
inputs with some rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels import limits
from k3rl.kernels.triton_ops import begin, dot, early, to_bf16_rne

SPLIT_K_LAUNCH = {"strip": 64, "num_warps": 4}
SKINNY_LAUNCH = {"strip": 64, "depth": 128, "stages": 4, "num_warps": 4}


@triton.jit(do_not_specialize=["rows"])
def split_k_kernel(
    x, matrix, sums, rows, x_t, outputs, width, ROWS: tl.constexpr, STRIP: tl.constexpr, DEPTH: tl.constexpr
):
    """outputs and width: multiples of STRIP and DEPTH."""
    begin()
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)[:, None]
    depth = split * DEPTH + tl.arange(0, DEPTH)[None, :]
    w = tl.load(matrix + column[:, None] * width + depth)
    given = tl.load(x + row * x_t + depth, mask=row < rows, other=0.0)
    tl.store(sums + (split * rows + row) * outputs + column[None, :], dot(given, tl.trans(w)), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    x, matrix, base, y, rows, outputs, x_t,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """WIDTH: a multiple of DEPTH; EVEN: outputs are one of STRIP; ADD: base [rows, outputs] is added."""
    begin()
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here, there = (row < rows)[:, None], (column < outputs)[:, None]
    depth = tl.arange(0, DEPTH)[None, :]
    strip = matrix + column.to(tl.int64)[:, None] * WIDTH + depth
    given = x + row.to(tl.int64)[:, None] * x_t + depth
    total = tl.zeros([STRIP, ROWS], tl.float32)
    for k in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        w = tl.load(strip + k) if EVEN else tl.load(strip + k, mask=there, other=0.0)
        total = dot(w, tl.trans(tl.load(given + k, mask=here, other=0.0)), total)
    mask = (row < rows)[None, :] & there
    at = row.to(tl.int64)[None, :] * outputs + column[:, None]
    if ADD:
        total += tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, to_bf16_rne(total), mask=mask)


def split_k(x, matrix):
    """Sums [P, N, b] float32 of `k3rl.kernels.gemm.skinny.split_k`."""
    n, (outputs, width), depth = len(x), matrix.shape, limits.SPLIT_K.depth
    sums = torch.empty(width // depth, n, outputs, dtype=torch.float32, device=x.device)
    split_k_kernel[(outputs // SPLIT_K_LAUNCH["strip"], width // depth)](
        x, matrix, sums, n, x.stride(0), outputs, width, ROWS=max(16, triton.next_power_of_2(n)), DEPTH=depth,
        STRIP=SPLIT_K_LAUNCH["strip"], num_warps=SPLIT_K_LAUNCH["num_warps"], **early(),
    )  # fmt: skip
    return sums


def rows_of_a_tile(rows: int, outputs: int) -> int:
    """Few, so that there are many programs; more where there are many anyway. As measured."""
    if rows <= 16:
        return 16
    return 32 if rows <= 64 and outputs <= 4096 else 64


def product(x, matrix, base=None):
    """`k3rl.kernels.gemm.skinny.product` by the kernel: bf16."""
    n, (outputs, width) = len(x), matrix.shape
    own = SKINNY_LAUNCH
    y = torch.empty(n, outputs, dtype=x.dtype, device=x.device)
    rows, depth = rows_of_a_tile(n, outputs), min(own["depth"], width & -width)
    skinny_kernel[(triton.cdiv(outputs, own["strip"]), triton.cdiv(n, rows))](
        x, matrix, y if base is None else base.contiguous(), y, n, outputs, x.stride(0),
        WIDTH=width, ROWS=rows, STRIP=own["strip"], DEPTH=depth, STAGES=own["stages"],
        EVEN=outputs % own["strip"] == 0, ADD=base is not None, num_warps=own["num_warps"], **early(),
    )  # fmt: skip
    return y
