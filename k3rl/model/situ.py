"""SiTU-GLU (k3.md 7): [b tanh(g/b) sigmoid(g)] * [c tanh(u/c)], b = 4, c = 25, in float32 or wider.

sigmoid takes the uncapped gate. The backward needs three bounded tensors instead of autograd's eight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3rl.kernels import limits
from k3rl.kernels.moe import situ as kernel
from k3rl.model.blocks import blockwise
from k3rl.model.fuse import fused, widened
from k3rl.model.norm import wide


def situ_parts(gate_up: Tensor, beta: float, linear_beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """gate_up [..., 2n], gate first -> tanh(g / beta), sigmoid(g), tanh(u / linear_beta), each [..., n]."""
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    tanh_gate, sigma, tanh_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(3))
    for g, u, t, s, v in blockwise(gate, up, tanh_gate, sigma, tanh_up):
        torch.mul(g, 1 / beta, out=t).tanh_()
        torch.sigmoid(g, out=s)
        torch.mul(u, 1 / linear_beta, out=v).tanh_()
    return tanh_gate, sigma, tanh_up


def situ_from_parts(parts: tuple[Tensor, Tensor, Tensor], beta: float, linear_beta: float) -> Tensor:
    """The activation from its three parts."""
    gate, sigma, up = parts
    out = torch.empty_like(gate)
    for result, t, s, v in blockwise(out, gate, sigma, up):
        torch.mul(t, s, out=result).mul_(v).mul_(beta * linear_beta)
    return out


def situ_alone(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """The activation in gate_up's dtype on a CPU, the bits of `situ_from_parts`; nothing is kept for a backward."""
    wider = gate_up.to(wide(gate_up.dtype))
    n = wider.shape[-1] // 2
    out = torch.empty(*wider.shape[:-1], n, dtype=wider.dtype, device=wider.device)
    for both, result in blockwise(wider, out):
        gate, up = both[..., :n], both[..., n:]
        torch.mul(gate, 1 / beta, out=result).tanh_().mul_(torch.sigmoid(gate))
        result.mul_(torch.mul(up, 1 / linear_beta).tanh_()).mul_(beta * linear_beta)
    return out.to(gate_up.dtype)


def situ_backward(grad: Tensor, parts: tuple[Tensor, Tensor, Tensor], beta: float, linear_beta: float) -> Tensor:
    """Gradient [..., n] of the activation -> gradient [..., 2n] of gate_up.

    With t = tanh(g/b), s = sigmoid(g), v = tanh(u/c), y = bc t s v:
    dy/dg = c v s [(1 - t^2) + b t (1 - s)] and dy/du = b t s (1 - v^2).
    """
    gate, sigma, up = parts
    n = gate.shape[-1]
    out = torch.empty(*gate.shape[:-1], 2 * n, dtype=gate.dtype, device=gate.device)
    for t, s, v, g, d_gate, d_up in blockwise(gate, sigma, up, grad.to(gate.dtype), out[..., :n], out[..., n:]):
        slope = torch.addcmul(t, t, s, value=-1).mul_(beta)  # b t (1 - s)
        slope.addcmul_(t, t, value=-1).add_(1.0)
        grad_sigma = g * s
        torch.mul(grad_sigma, v, out=d_gate).mul_(slope).mul_(linear_beta)
        grad_sigma.mul_(t).mul_(beta)
        torch.mul(v, v, out=slope).neg_().add_(1.0)
        torch.mul(slope, grad_sigma, out=d_up)
    return out


@fused
def situ_value(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """gate_up [..., 2n] on a GPU -> the activation [..., n] in the same dtype, without the parts."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    value = torch.tanh(gate / beta) * torch.sigmoid(gate) * torch.tanh(up / linear_beta)
    return (value * (beta * linear_beta)).to(gate_up.dtype)


@fused
def situ_gradient(grad: Tensor, gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`situ_backward` from gate_up itself: gradient [..., n] -> gradient [..., 2n] in gate_up's dtype."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    g, t, s, v = grad.to(gate.dtype), torch.tanh(gate / beta), torch.sigmoid(gate), torch.tanh(up / linear_beta)
    slope = (1 - t * t) + beta * t * (1 - s)
    d_gate, d_up = g * s * v * slope * linear_beta, g * s * t * beta * (1 - v * v)
    return torch.cat([d_gate, d_up], dim=-1).to(gate_up.dtype)


def situ_on_gpu(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`situ_value`, by one kernel where there is one."""
    if limits.SITU.takes(gate_up):
        return kernel.situ(gate_up, beta, linear_beta)
    return situ_value(gate_up, beta, linear_beta)


def situ_gradient_on_gpu(grad: Tensor, gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`situ_gradient`, by one kernel where there is one."""
    if limits.SITU.takes(gate_up, grad):
        return kernel.situ_gradient(grad, gate_up, beta, linear_beta)[0]
    return situ_gradient(grad, gate_up, beta, linear_beta)


class SiTUFunction(torch.autograd.Function):
    """On a GPU gate_up itself is kept, half the bytes of one of the three parts, and the parts are made again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
        if gate_up.device.type != "cpu":
            ctx.save_for_backward(gate_up)
            ctx.betas = (beta, linear_beta)
            return situ_on_gpu(gate_up, beta, linear_beta)
        parts = situ_parts(gate_up, beta, linear_beta)
        ctx.save_for_backward(*parts)
        ctx.betas = (beta, linear_beta)
        return situ_from_parts(parts, beta, linear_beta).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if grad.device.type != "cpu":
            return situ_gradient_on_gpu(grad, *ctx.saved_tensors, *ctx.betas), None, None
        return situ_backward(grad, ctx.saved_tensors, *ctx.betas).to(grad.dtype), None, None


def situ(gate_up: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """gate_up [..., 2n] with the gate first -> [..., n] in the same dtype."""
    if torch.is_grad_enabled():
        return SiTUFunction.apply(gate_up, beta, linear_beta)
    if gate_up.device.type != "cpu":
        return situ_on_gpu(gate_up, beta, linear_beta)
    return situ_alone(gate_up, beta, linear_beta)
