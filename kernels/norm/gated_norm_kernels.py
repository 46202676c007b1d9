"""Triton kernels of `gated_norm`: one pass over the rows each way, ROWS rows of D a step.

Forward reads x and gate and writes y (3 rows of D), backward reads x, gate, dy and writes dx, dgate (5 rows); the
weight's gradient leaves one row per program, added up by torch, so that a repeated run is bit-identical.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import INTERPRET, sigmoid, to_bf16_rne

ROWS_FORWARD = 32
BACKWARD = {"rows": 64, "programs": 132, "stages": 3, "num_warps": 16}


@triton.jit
def _store(pointer, value, mask, BF16: tl.constexpr):
    if BF16:
        tl.store(pointer, to_bf16_rne(value), mask=mask)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def _plus2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _two_sums(a, b):
    """Sums over the columns of two tiles by one exchange between the lanes of a row."""
    if INTERPRET:
        return tl.sum(a, axis=1), tl.sum(b, axis=1)
    else:
        return tl.reduce((a, b), 1, _plus2)


@triton.jit(do_not_specialize=["n"])
def forward_kernel(x, gate, weight, y, n, eps, D: tl.constexpr, ROWS: tl.constexpr, BF16: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, D)[None, :]
    at = row * D + column
    h = tl.load(x + at, mask=row < n, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=row < n, other=0.0).to(tl.float32)
    w = tl.load(weight + column).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / D + eps)[:, None]
    _store(y + at, h * rstd * w * sigmoid(g), row < n, BF16)


@triton.jit(do_not_specialize=["n", "steps"])
def backward_kernel(
    x, gate, weight, dy, dx, dgate, dweight_rows, n, eps, steps,
    D: tl.constexpr, ROWS: tl.constexpr, BF16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D)[None, :]
    w = tl.load(weight + column).to(tl.float32)
    dw = tl.zeros([ROWS, D], tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * ROWS
    for step in tl.range(0, steps, num_stages=STAGES):
        row = first + step * ROWS + tl.arange(0, ROWS)[:, None]
        at = row * D + column
        h = tl.load(x + at, mask=row < n, other=0.0).to(tl.float32)
        g = sigmoid(tl.load(gate + at, mask=row < n, other=0.0).to(tl.float32))
        d = tl.load(dy + at, mask=row < n, other=0.0).to(tl.float32)
        # d of the normed row before the weight; the weight's and the gate's gradients use the un-gated value.
        dn = d * g
        square, along = _two_sums(h * h, dn * w * h)
        rstd = tl.rsqrt(square / D + eps)
        h = h * rstd[:, None]
        along = along * rstd
        dw += dn * h
        dn = dn * w
        _store(dgate + at, dn * h * (1.0 - g), row < n, BF16)
        _store(dx + at, (dn - h * (along / D)[:, None]) * rstd[:, None], row < n, BF16)
    tl.store(dweight_rows + tl.program_id(0) * D + tl.arange(0, D), tl.sum(dw, axis=0))


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps):
        shape = x.shape
        x, gate = x.contiguous(), gate.contiguous()
        y = torch.empty_like(x)
        n = x.numel() // shape[-1]
        if n:
            forward_kernel[(triton.cdiv(n, ROWS_FORWARD),)](
                x, gate, weight, y, n, eps, D=shape[-1], ROWS=ROWS_FORWARD, BF16=x.dtype == torch.bfloat16, num_warps=4
            )
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, gate, weight = ctx.saved_tensors
        dx, dgate, dweight = backward(x, gate, weight, dy.contiguous(), ctx.eps, **BACKWARD)
        return dx, dgate, dweight.to(weight.dtype), None


def backward(x, gate, weight, dy, eps, *, rows: int, programs: int, stages: int, num_warps: int):
    """dx, dgate (contiguous, x's dtype) and dweight [D] fp32."""
    D = x.shape[-1]
    n = x.numel() // D
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    programs = max(1, min(programs, triton.cdiv(n, rows)))
    steps = triton.cdiv(triton.cdiv(n, rows), programs)
    parts = torch.empty(programs, D, dtype=torch.float32, device=x.device)
    backward_kernel[(programs,)](
        x, gate, weight, dy, dx, dgate, parts, n, eps, steps,
        D=D, ROWS=rows, BF16=x.dtype == torch.bfloat16, STAGES=stages, num_warps=num_warps,
    )  # fmt: skip
    return dx, dgate, parts.sum(0)


def gated_norm(x, gate, weight, eps):
    """`k3rl.kernels.norm.gated_norm.gated_norm` by the kernels: D a power of two, bf16 or fp32."""
    return _GatedNorm.apply(x, gate, weight, eps)
