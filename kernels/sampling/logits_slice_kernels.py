"""Triton kernels of `logits_slice`: a program a row, which reads its columns once.

The gradient in bf16 takes the memory of the float32 logits: a program reads a tile whole before it writes half of it,
and what it writes lies in tiles that it has read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3rl.kernels.triton_ops import to_bf16_rne

if TYPE_CHECKING:
    from k3rl.kernels.sampling.logits_slice import RunningSoftmax

LAUNCH = {"COLUMNS": 1024, "num_warps": 4}


@triton.jit(do_not_specialize=["width", "start"])
def add_slice_kernel(
    logits, targets, most, total, weighted, target, width, row_stride, start, scale, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(most + row)
    summed = tl.load(total + row)
    dotted = tl.load(weighted + row)
    for first in tl.range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + row * row_stride + column, mask=column < width, other=float("-inf")) * scale
        higher = tl.maximum(top, tl.max(x, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(x - base)
        shrink = tl.exp(top - base)
        summed = summed * shrink + tl.sum(p, axis=0)
        dotted = dotted * shrink + tl.sum(tl.where(p > 0.0, x, 0.0) * p, axis=0)
        top = higher
    tl.store(most + row, top)
    tl.store(total + row, summed)
    tl.store(weighted + row, dotted)
    place = tl.load(targets + row) - start
    if (place >= 0) & (place < width):
        tl.store(target + row, tl.load(logits + row * row_stride + place) * scale)


@triton.jit(do_not_specialize=["width", "start"])
def slice_gradient_kernel(
    logits, out, targets, normalizer, grad, width, row_stride, out_stride, start, scale,
    COLUMNS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    each = tl.load(grad + row) * scale
    level = tl.load(normalizer + row)
    place = tl.load(targets + row) - start
    for first in tl.range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + row * row_stride + column, mask=column < width, other=float("-inf"))
        d = tl.where(column == place, each, 0.0) - each * tl.exp(x * scale - level)
        tl.debug_barrier()  # every warp has read its part of the tile
        if BF16:
            tl.store(out + row * out_stride + column, to_bf16_rne(d), mask=column < width)
        else:
            tl.store(out + row * out_stride + column, d, mask=column < width)


def add_slice(running: RunningSoftmax, logits: Tensor, targets: Tensor, start: int, scale: float) -> None:
    rows, width = logits.shape
    if rows:
        add_slice_kernel[(rows,)](
            logits, targets, running.most, running.total, running.weighted, running.target,
            width, logits.stride(0), start, scale, **LAUNCH,
        )  # fmt: skip


def slice_gradient(
    logits: Tensor, targets: Tensor, start: int, scale: float, normalizer: Tensor, grad: Tensor, dtype: torch.dtype
) -> Tensor:
    rows, width = logits.shape
    narrow = dtype == torch.bfloat16
    out = logits.view(torch.bfloat16)[:, :width] if narrow else logits
    if rows:
        slice_gradient_kernel[(rows,)](
            logits, out, targets, normalizer, grad.to(logits.dtype).contiguous(), width, logits.stride(0),
            out.stride(0), start, scale, BF16=narrow, **LAUNCH,
        )  # fmt: skip
    return out
