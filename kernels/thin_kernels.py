"""The Triton kernel of `thin`: a program for a strip of outputs and a run of inputs, all rows at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.thin import DEPTH
from k3rl.kernels.triton_ops import dot

LAUNCH = {"strip": 64, "num_warps": 4}


@triton.jit(do_not_specialize=["rows"])
def thin_kernel(
    x, matrix, sums, rows, x_t, outputs, width, ROWS: tl.constexpr, STRIP: tl.constexpr, DEPTH: tl.constexpr
):
    """outputs and width: multiples of STRIP and DEPTH."""
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)[:, None]
    depth = split * DEPTH + tl.arange(0, DEPTH)[None, :]
    w = tl.load(matrix + column[:, None] * width + depth)
    given = tl.load(x + row * x_t + depth, mask=row < rows, other=0.0)
    tl.store(sums + (split * rows + row) * outputs + column[None, :], dot(given, tl.trans(w)), mask=row < rows)


def parts(x, matrix):
    """Sums [P, N, b] float32 of `k3rl.kernels.thin.parts`."""
    n, (outputs, width) = len(x), matrix.shape
    sums = torch.empty(width // DEPTH, n, outputs, dtype=torch.float32, device=x.device)
    thin_kernel[(outputs // LAUNCH["strip"], width // DEPTH)](
        x, matrix, sums, n, x.stride(0), outputs, width, ROWS=max(16, triton.next_power_of_2(n)), DEPTH=DEPTH,
        STRIP=LAUNCH["strip"], num_warps=LAUNCH["num_warps"],
    )  # fmt: skip
    return sums
