"""SiTU-GLU, [b tanh(g/b) sigmoid(g)] * [c tanh(u/c)], with what stands beside it in an expert.

`situ` may round its result to MXFP8 in the same pass, as an expert's second product reads it. `situ_gradient` may take
the routing weight of each row, which scales the gradient that arrives, and give the weight's own gradient: the product
of that gradient with the activation, summed over the row. Source: k3 architecture sections 4 and 7.
"""

from __future__ import annotations

import torch

from k3rl.kernels import limits
from k3rl.kernels.moe.mxfp8 import mxfp8_reference


def situ(gate_up: torch.Tensor, beta: float, linear_beta: float, rule: str | None = None) -> torch.Tensor:
    """gate_up [..., 2n], gate first -> [..., n] in its dtype, without gradient; rule: of MXFP8 rounding, if any."""
    if limits.SITU.takes(gate_up):
        from k3rl.kernels.moe import situ_kernels

        return situ_kernels.situ(gate_up, beta, linear_beta, rule)
    return situ_reference(gate_up, beta, linear_beta, rule)


def situ_gradient(
    grad: torch.Tensor, gate_up: torch.Tensor, beta: float, linear_beta: float,
    weight: torch.Tensor | None = None, active: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """grad [..., n], gate_up [..., 2n] -> gradient [..., 2n] of gate_up, and row sums of grad * active, or None.

    weight [R, 1] scales the rows of grad first, rounded to their dtype before and after; active [R, n] is what the
    unit gave. The sums [R] are float32 or wider and of grad as it comes.
    """
    if limits.SITU.takes(gate_up, grad, *([] if active is None else [active])):
        from k3rl.kernels.moe import situ_kernels

        return situ_kernels.situ_gradient(grad, gate_up, beta, linear_beta, weight, active)
    return situ_gradient_reference(grad, gate_up, beta, linear_beta, weight, active)


def _parts(gate_up: torch.Tensor, beta: float, linear_beta: float) -> tuple[torch.Tensor, ...]:
    """tanh(g/b), sigmoid(g), tanh(u/c) in float32 or wider."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.tanh(gate / beta), torch.sigmoid(gate), torch.tanh(up / linear_beta)


def situ_reference(gate_up: torch.Tensor, beta: float, linear_beta: float, rule: str | None = None) -> torch.Tensor:
    """`situ` in plain torch."""
    t, s, v = _parts(gate_up, beta, linear_beta)
    value = (t * s * v * (beta * linear_beta)).to(gate_up.dtype)
    return value if rule is None else mxfp8_reference(value, rule)


def situ_gradient_reference(
    grad: torch.Tensor, gate_up: torch.Tensor, beta: float, linear_beta: float,
    weight: torch.Tensor | None = None, active: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`situ_gradient` in plain torch."""
    t, s, v = _parts(gate_up, beta, linear_beta)
    dots = None if active is None else (grad.to(t.dtype) * active.to(t.dtype)).sum(-1)
    if weight is not None:
        grad = grad * weight.to(grad.dtype)
    g = grad.to(t.dtype)
    d_gate = g * s * v * linear_beta * ((1 - t * t) + beta * t * (1 - s))
    d_up = g * s * t * beta * (1 - v * v)
    return torch.cat([d_gate, d_up], dim=-1).to(gate_up.dtype), dots
