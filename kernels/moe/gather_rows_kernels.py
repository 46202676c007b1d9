"""Triton kernel of `gather_rows`: rows come from the cache, each result is written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.moe.mxfp8_kernels import keep, through

ELEMENTS = 2048


@triton.jit(do_not_specialize=["count"])
def gather_kernel(
    rows, index, routed, out, scaled, count, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    valid = row < count
    there = tl.load(index + row, mask=valid, other=0)
    value = tl.load(rows + there * WIDTH + column, mask=valid, other=0.0)
    tl.store(out + row * WIDTH + column, value, mask=valid)
    if WEIGHTED:
        weight = through(tl.load(routed + row, mask=valid, other=0.0).to(tl.float32), BF16)
        keep(scaled + row * WIDTH + column, value.to(tl.float32) * weight, valid, BF16)


def gather_rows(
    rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`k3rl.kernels.moe.gather_rows.gather_rows` by the kernel: bf16 or fp32, b a multiple of 32."""
    rows, index = rows.detach().contiguous(), index.contiguous()
    width, count = rows.shape[1], len(index)
    out = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
    scaled = None if weight is None else torch.empty_like(out)
    columns = min(512, width & -width)
    step = ELEMENTS // columns
    gather_kernel[(triton.cdiv(count, step), width // columns)](
        rows, index, rows if weight is None else weight.detach().contiguous(), out, out if scaled is None else scaled,
        count, WIDTH=width, COLUMNS=columns, ROWS=step, WEIGHTED=weight is not None,
        BF16=rows.dtype == torch.bfloat16,
    )  # fmt: skip
    return out, scaled
