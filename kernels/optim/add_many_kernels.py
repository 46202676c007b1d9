"""Triton kernel of `add_many`: a program picks the address of its tensor among the arguments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.optim.add_many import BLOCK, TENSORS


@triton.jit
def add_many_kernel(
    total, table,
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, p16, p17, p18, p19, p20, p21, p22,
    p23, p24, p25, p26, p27, p28, p29, p30, p31,
    STEP: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """STEP: a divisor of every size."""
    row = table + tl.program_id(0) * 4
    slot, first, left, place = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    address = p0.to(tl.int64)
    address = tl.where(slot == 1, p1.to(tl.int64), address)
    address = tl.where(slot == 2, p2.to(tl.int64), address)
    address = tl.where(slot == 3, p3.to(tl.int64), address)
    address = tl.where(slot == 4, p4.to(tl.int64), address)
    address = tl.where(slot == 5, p5.to(tl.int64), address)
    address = tl.where(slot == 6, p6.to(tl.int64), address)
    address = tl.where(slot == 7, p7.to(tl.int64), address)
    address = tl.where(slot == 8, p8.to(tl.int64), address)
    address = tl.where(slot == 9, p9.to(tl.int64), address)
    address = tl.where(slot == 10, p10.to(tl.int64), address)
    address = tl.where(slot == 11, p11.to(tl.int64), address)
    address = tl.where(slot == 12, p12.to(tl.int64), address)
    address = tl.where(slot == 13, p13.to(tl.int64), address)
    address = tl.where(slot == 14, p14.to(tl.int64), address)
    address = tl.where(slot == 15, p15.to(tl.int64), address)
    address = tl.where(slot == 16, p16.to(tl.int64), address)
    address = tl.where(slot == 17, p17.to(tl.int64), address)
    address = tl.where(slot == 18, p18.to(tl.int64), address)
    address = tl.where(slot == 19, p19.to(tl.int64), address)
    address = tl.where(slot == 20, p20.to(tl.int64), address)
    address = tl.where(slot == 21, p21.to(tl.int64), address)
    address = tl.where(slot == 22, p22.to(tl.int64), address)
    address = tl.where(slot == 23, p23.to(tl.int64), address)
    address = tl.where(slot == 24, p24.to(tl.int64), address)
    address = tl.where(slot == 25, p25.to(tl.int64), address)
    address = tl.where(slot == 26, p26.to(tl.int64), address)
    address = tl.where(slot == 27, p27.to(tl.int64), address)
    address = tl.where(slot == 28, p28.to(tl.int64), address)
    address = tl.where(slot == 29, p29.to(tl.int64), address)
    address = tl.where(slot == 30, p30.to(tl.int64), address)
    address = tl.where(slot == 31, p31.to(tl.int64), address)
    if BF16:
        part = tl.multiple_of(address, 16).to(tl.pointer_type(tl.bfloat16))
    else:
        part = tl.multiple_of(address, 16).to(tl.pointer_type(tl.float32))
    within = tl.arange(0, BLOCK)
    valid = within < tl.multiple_of(left, STEP)
    value = tl.load(part + tl.multiple_of(first, BLOCK) + within, mask=valid, other=0.0).to(tl.float32)
    to = total + tl.multiple_of(place, STEP) + within
    tl.store(to, tl.load(to, mask=valid, other=0.0) + value, mask=valid)


def add_many(total: torch.Tensor, parts, table) -> None:
    """See `k3rl.kernels.optim.add_many.add_many`; parts are contiguous and aligned."""
    for number, blocks in enumerate(table.blocks):
        own = parts[number * TENSORS : (number + 1) * TENSORS]
        if len(blocks):
            add_many_kernel[(len(blocks),)](
                total, blocks, *own, *[own[0]] * (TENSORS - len(own)),
                STEP=table.step, BLOCK=BLOCK, BF16=own[0].dtype == torch.bfloat16, num_warps=8,
            )  # fmt: skip
