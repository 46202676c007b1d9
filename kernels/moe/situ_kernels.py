"""Triton kernels of `situ` and `situ_gradient`: each value read once, each result written once.

Both hyperbolic tangents share one reciprocal: a multiprocessor takes 16 exponentials or reciprocals a cycle, so that
six of them an element would cost more than its bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.moe.mxfp8_kernels import CARRY, keep, rounded_blocks, through
from k3rl.kernels.triton_ops import INTERPRET, LOG2E, begin, early, exp2, sigmoid

GROUPS = 32
GRADIENT = {"elements": 1024, "columns": 512, "num_warps": 4}


@triton.jit
def _reciprocal(x):
    """1 / x of fp32 to one unit in the last place."""
    if INTERPRET:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _decay(x):
    """exp(-2 x), within 2^-60 and 2^60, where tanh(x) has long been -1 or 1; a NaN stays one."""
    z = x * (-2.0 * LOG2E)
    z = tl.where(z > 60.0, 60.0, z)
    return exp2(tl.where(z < -60.0, -60.0, z))


@triton.jit
def _over(x, e):
    """tanh(x) (1 + e) with e = exp(-2 x). Near 0, where 1 - e cancels, by the series to x^9."""
    x2 = x * x
    series = 1.0 + x2 * (-0.33333333333 + x2 * (0.13333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854)))
    return tl.where(x2 < 0.09, x * series * (1.0 + e), 1.0 - e)


@triton.jit
def situ_value(gate, up, inverse_beta, inverse_linear, scale):
    """The unit of fp32 values; scale: beta * linear_beta."""
    t, v = gate * inverse_beta, up * inverse_linear
    e, f = _decay(t), _decay(v)
    both = _over(t, e) * _over(v, f) * _reciprocal((1.0 + e) * (1.0 + f))
    return both * sigmoid(gate) * scale


@triton.jit(do_not_specialize=["groups"])
def situ_kernel(
    gate_up, y, groups, inverse_beta, inverse_linear, scale,
    WIDTH: tl.constexpr, ROUND: tl.constexpr, CARRY: tl.constexpr, CLAMP: tl.constexpr, GROUPS: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    begin()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[:, None]
    at = group.to(tl.int64) * 32 + tl.arange(0, 32)[None, :]
    there = at + (group // (WIDTH // 32)).to(tl.int64) * WIDTH
    gate = tl.load(gate_up + there, mask=group < groups, other=0.0).to(tl.float32)
    up = tl.load(gate_up + there + WIDTH, mask=group < groups, other=0.0).to(tl.float32)
    value = situ_value(gate, up, inverse_beta, inverse_linear, scale)
    if ROUND:
        value = rounded_blocks(through(value, BF16), CARRY, CLAMP)
    keep(y + at, value, group < groups, BF16)


@triton.jit(do_not_specialize=["rows"])
def situ_gradient_kernel(
    grad, gate_up, routed, active, d_gate_up, dots, rows, inverse_beta, inverse_linear, gate_cap, up_cap,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WEIGHTED: tl.constexpr, DOTS: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    valid = row < rows
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if WEIGHTED:
        weight = through(tl.load(routed + row, mask=valid, other=0.0).to(tl.float32), BF16)
    for start in tl.range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        at = row * WIDTH + column
        there = row * (2 * WIDTH) + column
        g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + there, mask=valid, other=0.0).to(tl.float32)
        up = tl.load(gate_up + there + WIDTH, mask=valid, other=0.0).to(tl.float32)
        if DOTS:
            a = tl.load(active + at, mask=valid, other=0.0).to(tl.float32)
            total += g * a
        if WEIGHTED:
            g = through(g * weight, BF16)
        t, v, s = gate * inverse_beta, up * inverse_linear, sigmoid(gate)
        e, f = _decay(t), _decay(v)
        inverse = _reciprocal((1.0 + e) * (1.0 + f))
        t, v = _over(t, e) * (1.0 + f) * inverse, _over(v, f) * (1.0 + e) * inverse
        g = g * s
        slope = (1.0 - t * t) + gate_cap * t * (1.0 - s)
        keep(d_gate_up + there, g * v * up_cap * slope, valid, BF16)
        keep(d_gate_up + there + WIDTH, g * t * gate_cap * (1.0 - v * v), valid, BF16)
    if DOTS:
        place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(dots + place, tl.sum(total, axis=1), mask=place < rows)


def situ(gate_up: torch.Tensor, beta: float, linear_beta: float, rule: str | None) -> torch.Tensor:
    """`k3rl.kernels.moe.situ.situ` by the kernel: bf16 or fp32, n a multiple of 32, not empty."""
    gate_up = gate_up.detach().contiguous()
    width = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    groups = y.numel() // 32
    situ_kernel[(triton.cdiv(groups, GROUPS),)](
        gate_up, y, groups, 1 / beta, 1 / linear_beta, beta * linear_beta,
        WIDTH=width, ROUND=rule is not None, CARRY=CARRY[rule or "ceil"], CLAMP=rule not in (None, "ceil"),
        GROUPS=GROUPS, BF16=y.dtype == torch.bfloat16, **early(),
    )  # fmt: skip
    return y


def situ_gradient(
    grad: torch.Tensor, gate_up: torch.Tensor, beta: float, linear_beta: float,
    weight: torch.Tensor | None, active: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`k3rl.kernels.moe.situ.situ_gradient` by the kernel; the sums are float32."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    width = grad.shape[-1]
    rows = grad.numel() // width
    out = torch.empty_like(gate_up)
    dots = None if active is None else torch.empty(grad.shape[:-1], dtype=torch.float32, device=grad.device)
    columns = min(GRADIENT["columns"], width & -width)
    step = GRADIENT["elements"] // columns
    situ_gradient_kernel[(triton.cdiv(rows, step),)](
        grad, gate_up, grad if weight is None else weight.contiguous(), grad if active is None else active.contiguous(),
        out, grad if dots is None else dots, rows, 1 / beta, 1 / linear_beta, beta, linear_beta,
        WIDTH=width, COLUMNS=columns, ROWS=step, WEIGHTED=weight is not None, DOTS=dots is not None,
        BF16=grad.dtype == torch.bfloat16, num_warps=GRADIENT["num_warps"],
    )  # fmt: skip
    return out, dots
