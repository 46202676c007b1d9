"""Triton kernel of `add_groups`: reads the sum and the part, writes the sum, and nothing of groups without rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit(do_not_specialize=["size"])
def add_groups_kernel(total, part, ends, rows, size, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(1)
    stop = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    if stop > start:
        within = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at = group.to(tl.int64) * size + within
        value = tl.load(part + at, mask=within < size, other=0.0).to(tl.float32)
        held = tl.load(total + at, mask=within < size, other=0.0)
        tl.store(total + at, held + value, mask=within < size)
        if COUNTS:
            tl.store(rows + group, tl.load(rows + group) + stop - start, mask=tl.program_id(0) == 0)


def add_groups(total: torch.Tensor, part: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor | None) -> None:
    """total float32 [G, ...], part bf16 or float32; see `k3rl.kernels.moe.add_groups.add_groups`."""
    groups = len(total)
    if not total.numel():
        return
    size = total.numel() // groups
    counted = ends if rows is None else rows
    add_groups_kernel[(triton.cdiv(size, BLOCK), groups)](
        total, part, ends, counted, size, COUNTS=rows is not None, BLOCK=BLOCK, num_warps=8
    )
