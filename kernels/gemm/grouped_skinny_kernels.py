"""The Triton kernel of `grouped_skinny`: a program multiplies a strip of one expert's matrix with all rows of the
expert.

The matrix is the left operand, so that a strip of 64 outputs fills the rows of a warp group's product and the few rows
of the expert are its columns; strips stream through shared memory, STAGES steps ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import begin, dot, early, to_bf16_rne

STRIP = 64  # outputs a program
STAGES = {16: 2, 32: 3, 64: 3}  # by the rows of a pass, as measured: few stages, many programs at once
ROWS = (16, 64)  # an expert's rows a pass, at least and at most


@triton.jit
def grouped_skinny_kernel(
    rows, token, ends, matrices, out, width, outputs,
    GATHER: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """width and outputs: multiples of DEPTH and STRIP."""
    begin()
    expert = tl.program_id(1).to(tl.int64)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    depth = tl.arange(0, DEPTH)
    strip = matrices + (expert * outputs + column)[:, None] * width + depth[None, :]
    for start in tl.range(first, last, ROWS, num_stages=1):
        row = start + tl.arange(0, ROWS)
        here = row < last
        source = row.to(tl.int64)
        if GATHER:
            source = tl.load(token + row, mask=here, other=0)
        given = rows + source[:, None] * width + depth[None, :]
        total = tl.zeros([STRIP, ROWS], tl.float32)
        for k in tl.range(0, width, DEPTH, num_stages=STAGES):
            matrix = tl.load(strip + k)
            x = tl.load(given + k, mask=here[:, None], other=0.0)
            total = dot(matrix, tl.trans(x), total)
        to = out + row.to(tl.int64)[None, :] * outputs + column[:, None]
        if BF16:
            tl.store(to, to_bf16_rne(total), mask=here[None, :])
        else:
            tl.store(to, total, mask=here[None, :])


def product(rows, token, matrices, ends, *, stages: int | None = None, num_warps: int = 4):
    """`k3rl.kernels.gemm.grouped_skinny.product` by the kernel: bf16, widths that 64 divides."""
    experts, outputs, width = matrices.shape
    rows = rows.contiguous()
    count = len(rows) if token is None else len(token)
    out = torch.empty(count, outputs, dtype=rows.dtype, device=rows.device)
    # Twice the mean of an expert's rows holds nearly all of them in one pass.
    least, most = ROWS
    own = min(most, max(least, triton.next_power_of_2(triton.cdiv(2 * count, experts))))
    grouped_skinny_kernel[(outputs // STRIP, experts)](
        rows, rows if token is None else token, ends, matrices, out, width, outputs,
        GATHER=token is not None, ROWS=own, STRIP=STRIP, DEPTH=128 if width % 128 == 0 else 64,
        STAGES=stages or STAGES[own], BF16=out.dtype == torch.bfloat16, num_warps=num_warps, **early(),
    )  # fmt: skip
    return out
