"""Helpers that every Triton kernel of this package goes through, so that the interpreter tells the truth on a CPU.

Triton's interpreter multiplies bf16 operands of a dot as raw integers and truncates on fp32 -> bf16; `dot` and
`to_bf16_rne` are right under both. No kernel uses `tl.dot` or `.to(tl.bfloat16)` directly (a lint test enforces it).
TRITON_INTERPRET must be set before this module is imported.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
# A decay of 2^LEAST_LOG2 is 0: fp32 ends at 2^-126 where denormals are flushed.
LEAST_LOG2 = tl.constexpr(-128.0)


def early() -> dict[str, bool]:
    """Launch options of a kernel that begins with `begin`: it may be launched while the one ahead of it still runs."""
    return {} if INTERPRET else {"launch_pdl": True}


@triton.jit
def dot(a, b, acc=None):
    """a @ b (+ acc) of bf16 or fp16 operands with an fp32 accumulator."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if acc is None:
        return tl.dot(a, b, out_dtype=tl.float32)
    else:
        return tl.dot(a, b, acc, out_dtype=tl.float32)


@triton.jit
def to_bf16_rne(x):
    """fp32 -> bf16, ties to even, NaN kept."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, (bits >> 16) | 0x40)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def begin():
    """In a kernel launched with `early`, before it reads and writes anything; `prefetch` alone may come first.

    Waits until the kernels ahead are done, and lets the next one be launched, which waits in the same way. Weights are
    no exception: the kernel ahead may be the one that wrote them.
    """
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def now(x):
    """fp32 x, made before what follows: the compiler would let it wait, and what it is made of stay in registers."""
    if INTERPRET:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def widen(x):
    """bf16 as fp32, made here: the compiler would make it once and keep twice the registers."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=False,
            pack=2,
        )


@triton.jit
def prefetch(pointer, SIZE: tl.constexpr):
    """Start to bring the SIZE bytes behind a scalar pointer (both multiples of 16) into the L2 cache."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "{.reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
            "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
            "=r,l,r",
            [pointer.to(tl.int64), SIZE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def exp2(x):
    """2^x of fp32, results below the normal range flushed to 0 (one instruction instead of four)."""
    if INTERPRET:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def exp_rate(A_log):
    """exp(A_log), cut off where a product with a gate would overflow (A_LOG_MOST of kda.py)."""
    return exp2(tl.minimum(A_log, 80.0) * LOG2E)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in fp32 to about 2 units in the last place, 0 and 1 at the infinities."""
    if INTERPRET:
        return 1.0 / (1.0 + tl.exp2(-x * LOG2E))
    else:
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; ex2.approx.ftz.f32 t, $1; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t;}",
            "=f,f",
            [-x * LOG2E],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in fp32 to about 3e-6 of its value, however small; 0 and infinity at the infinities."""
    t = exp2(-tl.abs(x) * LOG2E)
    # 1 + t would round away the digits of a small t: there the series.
    series = t * (1.0 - t * (0.5 - t * (0.33333333 - t * (0.25 - t * 0.2))))
    if INTERPRET:
        log = tl.log2(1.0 + t)
    else:
        log = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + t], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.maximum(x, 0.0) + tl.where(t < 0.0625, series, log * 0.6931471805599453)


@triton.jit
def log2_decay(z, rate, lower_bound):
    """log2 of a token's decay from its logit z (bias included) and rate = exp(A_log): lower_bound sigmoid(rate z), or
    without a bound (None) -rate softplus(z), cut off at LEAST_LOG2, so that no sum of such is infinite."""
    if lower_bound is None:
        return tl.maximum(softplus(z) * (-rate * LOG2E), LEAST_LOG2, propagate_nan=tl.PropagateNan.ALL)
    else:
        return sigmoid(z * rate) * (lower_bound * LOG2E)
