"""Triton kernel of `mxfp8`: a read and a write, the scale by bits, so that every step but the rounding is exact."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import INTERPRET, begin, early, to_bf16_rne

# What is added to the bits of the largest magnitude before its exponent is taken, by rule: a carry where the mantissa
# exceeds that of 448, none, half a unit of the third mantissa bit.
CARRY = {"ceil": 0x1FFFFF, "floor": 0, "even": 0x80000}
GROUPS = 32


@triton.jit
def _widened(x, BF16: tl.constexpr):
    """fp32 of bf16 or fp32; by bits in the interpreter, whose cast loses bf16 values below 2^-126."""
    if BF16 and INTERPRET:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def through(value, BF16: tl.constexpr):
    """fp32 as it comes back from memory: rounded to bf16 or as it is."""
    if BF16:
        return _widened(to_bf16_rne(value), True)
    else:
        return value


@triton.jit
def keep(pointer, value, mask, BF16: tl.constexpr):
    """Stores fp32 values as bf16 or as they are."""
    if BF16:
        tl.store(pointer, to_bf16_rne(value), mask=mask)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def rounded_blocks(x, CARRY: tl.constexpr, CLAMP: tl.constexpr):
    """fp32 [blocks, 32] -> MXFP8 values in fp32, NaN where a block has an inf or NaN. Scaled by half, as in mx.py.

    Or [blocks, 32, n], blocks along the second axis.
    """
    most = tl.expand_dims(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), 1)
    double = tl.minimum(tl.maximum(most + (CARRY - 0x3800000), 0x800000), 0x7F000000) & 0x7F800000
    half = x * (0x7F000000 - double).to(tl.float32, bitcast=True)
    # The power of two of each value, 2^-7 at least; 1.5 * 2^20 of them make the adder round to its third mantissa bit.
    power = tl.maximum(half.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C000000).to(tl.float32, bitcast=True)
    half = (half + power * 1572864.0) - power * 1572864.0
    if CLAMP:
        half = tl.minimum(tl.maximum(half, -224.0), 224.0)
    scale = tl.where(most < 0x7F800000, double, 0x7FC00000).to(tl.float32, bitcast=True)
    return half * scale


@triton.jit(do_not_specialize=["groups"])
def rounding_kernel(x, y, groups, CARRY: tl.constexpr, CLAMP: tl.constexpr, GROUPS: tl.constexpr, BF16: tl.constexpr):
    begin()
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    at = group * 32 + tl.arange(0, 32)[None, :]
    value = _widened(tl.load(x + at, mask=group < groups, other=0.0), BF16)
    keep(y + at, rounded_blocks(value, CARRY, CLAMP), group < groups, BF16)


def mxfp8(x: torch.Tensor, rule: str) -> torch.Tensor:
    """`k3rl.kernels.moe.mxfp8.mxfp8` by the kernel: x [..., n] bf16 or fp32, n a multiple of 32, not empty."""
    x = x.detach().contiguous()
    y = torch.empty_like(x)
    groups = x.numel() // 32
    rounding_kernel[(triton.cdiv(groups, GROUPS),)](
        x, y, groups, CARRY=CARRY[rule], CLAMP=rule != "ceil", GROUPS=GROUPS, BF16=x.dtype == torch.bfloat16,
        **early(),
    )  # fmt: skip
    return y
