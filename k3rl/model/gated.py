"""The gated unit of an MLP: what happens between the product that widens and the one that narrows.

Both kinds keep three tensors for a written-out backward, so that the routed experts can share one implementation.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from k3rl.kernels import limits
from k3rl.kernels.moe import situ as kernel
from k3rl.model.ablation import AblationConfig
from k3rl.model.blocks import blockwise
from k3rl.model.fuse import fused, widened
from k3rl.model.moe_grouped import dots, rounded, scaled
from k3rl.model.norm import wide
from k3rl.model.situ import (
    situ,
    situ_alone,
    situ_backward,
    situ_from_parts,
    situ_gradient_on_gpu,
    situ_on_gpu,
    situ_parts,
)

UnitParts = tuple[Tensor, Tensor, Tensor]


class GatedUnit(Protocol):
    """gate_up [..., 2n], gate first -> [..., n]. Parts and values are float32 or wider."""

    def parts(self, gate_up: Tensor) -> UnitParts:
        """What `value` and `backward` need, each [..., n]."""
        ...

    def value(self, parts: UnitParts) -> Tensor:
        """The activation from its parts."""
        ...

    def backward(self, grad: Tensor, parts: UnitParts) -> Tensor:
        """Gradient [..., n] of the activation -> gradient [..., 2n] of gate_up."""
        ...

    def activation(self, gate_up: Tensor, rule: str | None = None) -> Tensor:
        """The activation in the dtype of gate_up, without gradient or parts; rule: rounded to MXFP8 by that rule."""
        ...

    def gradient(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """`backward` for whoever kept gate_up instead of its parts, in its dtype."""
        ...

    def routed_gradient(self, grad: Tensor, gate_up: Tensor, weight: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """`gradient` of grad [R, n] times weight [R, 1], and the weight's gradient: row sums of grad * active [R]."""
        ...

    def __call__(self, gate_up: Tensor) -> Tensor:
        """The activation in the dtype of gate_up, with its gradient."""
        ...


class SiTU:
    """K3's unit (k3.md 7), bounded by beta * linear_beta."""

    def __init__(self, beta: float, linear_beta: float) -> None:
        self._betas = (beta, linear_beta)

    @property
    def betas(self) -> tuple[float, float]:
        """beta, linear_beta."""
        return self._betas

    def parts(self, gate_up: Tensor) -> UnitParts:
        return situ_parts(gate_up, *self._betas)

    def value(self, parts: UnitParts) -> Tensor:
        return situ_from_parts(parts, *self._betas)

    def backward(self, grad: Tensor, parts: UnitParts) -> Tensor:
        return situ_backward(grad, parts, *self._betas)

    def activation(self, gate_up: Tensor, rule: str | None = None) -> Tensor:
        if gate_up.device.type == "cpu":
            value = situ_alone(gate_up, *self._betas)
        elif rule is not None and limits.SITU.takes(gate_up):
            return kernel.situ(gate_up, *self._betas, rule)
        else:
            value = situ_on_gpu(gate_up, *self._betas)
        return value if rule is None else rounded(value, rule)

    def gradient(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        return situ_gradient_on_gpu(grad, gate_up, *self._betas)

    def routed_gradient(self, grad: Tensor, gate_up: Tensor, weight: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        if limits.SITU.takes(gate_up, grad, active):
            d_gate_up, sums = kernel.situ_gradient(grad, gate_up, *self._betas, weight, active)
            assert sums is not None
            return d_gate_up, sums.to(weight.dtype)
        return self.gradient(scaled(grad, weight), gate_up), dots(grad, active, weight)

    def __call__(self, gate_up: Tensor) -> Tensor:
        return situ(gate_up, *self._betas)


@fused
def swiglu_value(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2n] on a GPU -> the activation [..., n] in the same dtype, without the parts."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


@fused
def swiglu_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """`SwiGLU.backward` from gate_up itself: gradient [..., n] -> gradient [..., 2n] in gate_up's dtype."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    through = grad.to(gate.dtype) * s
    return torch.cat([through * up * (1 + gate * (1 - s)), through * gate], dim=-1).to(gate_up.dtype)


@fused
def swiglu_routed_gradient(grad: Tensor, gate_up: Tensor, weight: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """`SwiGLU.routed_gradient` in one pass."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    s, given = torch.sigmoid(gate), widened(grad)
    sums = (given * widened(active)).sum(-1)
    through = given * widened(weight) * s
    both = torch.cat([through * up * (1 + gate * (1 - s)), through * gate], dim=-1)
    return both.to(gate_up.dtype), sums.to(weight.dtype)


class SwiGLU:
    """silu(gate) * up, the common unit. Parts: gate, sigmoid(gate), up."""

    def parts(self, gate_up: Tensor) -> UnitParts:
        gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
        return gate.contiguous(), torch.sigmoid(gate), up.contiguous()

    def value(self, parts: UnitParts) -> Tensor:
        gate, sigma, up = parts
        out = torch.empty_like(gate)
        for result, g, s, u in blockwise(out, gate, sigma, up):
            torch.mul(g, s, out=result).mul_(u)
        return out

    def backward(self, grad: Tensor, parts: UnitParts) -> Tensor:
        """dy/dg = u s (1 + g (1 - s)) and dy/du = g s."""
        gate, sigma, up = parts
        n = gate.shape[-1]
        out = torch.empty(*gate.shape[:-1], 2 * n, dtype=gate.dtype, device=gate.device)
        for g, s, u, d, d_gate, d_up in blockwise(gate, sigma, up, grad.to(gate.dtype), out[..., :n], out[..., n:]):
            through = d * s
            torch.mul(through, g, out=d_up)
            slope = torch.addcmul(g, g, s, value=-1).add_(1.0)
            torch.mul(through, u, out=d_gate).mul_(slope)
        return out

    def activation(self, gate_up: Tensor, rule: str | None = None) -> Tensor:
        if gate_up.device.type == "cpu":
            value = self.value(self.parts(gate_up)).to(gate_up.dtype)
        else:
            value = swiglu_value(gate_up)
        return value if rule is None else rounded(value, rule)

    def gradient(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        return swiglu_gradient(grad, gate_up)

    def routed_gradient(self, grad: Tensor, gate_up: Tensor, weight: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        return swiglu_routed_gradient(grad, gate_up, weight, active)

    def __call__(self, gate_up: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _SwiGLU.apply(gate_up, self)
        return self.activation(gate_up)


class _SwiGLU(torch.autograd.Function):
    """On a GPU gate_up itself is kept, and the parts are made again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, unit: SwiGLU) -> Tensor:
        if gate_up.device.type != "cpu":
            ctx.save_for_backward(gate_up)
            return swiglu_value(gate_up)
        parts = unit.parts(gate_up)
        ctx.save_for_backward(*parts)
        ctx.unit = unit
        return unit.value(parts).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if grad.device.type != "cpu":
            return swiglu_gradient(grad, *ctx.saved_tensors), None
        return ctx.unit.backward(grad, ctx.saved_tensors).to(grad.dtype), None


def gated_unit(ablation: AblationConfig, beta: float, linear_beta: float) -> GatedUnit:
    """The unit that a configuration asks for."""
    return SwiGLU() if ablation.activation == "swiglu" else SiTU(beta, linear_beta)
