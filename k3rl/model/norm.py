"""RMSNorm over the last axis (k3.md 3, end): float32 or wider inside, cast, then times the weight."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from k3rl.kernels import limits
from k3rl.kernels.norm import rms_norm as kernel
from k3rl.model.blocks import blockwise
from k3rl.model.fuse import fused, widened


@cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of internal upcasts: float32, or `dtype` where that is wider."""
    return torch.promote_types(dtype, torch.float32)


@cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, kept as a size-1 axis. x is float32 or wider."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.dtype, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()


@fused
def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., n], weight [n] -> `rms_norm` in x's dtype and 1 / sqrt(mean(x^2) + eps) [..., 1]."""
    x_wide = widened(x)
    r = (x_wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x_wide * r).to(x.dtype) * weight, r


@fused
def normed_backward(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight of `normed`'s first result, rows [N, n]; that of the weight in r's dtype."""
    x_hat, g, w = x.to(r.dtype) * r, grad.to(r.dtype), weight.to(r.dtype)
    along = (g * x_hat * w).mean(-1, keepdim=True)
    return ((g * w - x_hat * along) * r).to(x.dtype), (g * x_hat).sum(0)


def normed_on_gpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`normed`, by one kernel where there is one."""
    return kernel.rms_norm(x, weight, eps) if limits.RMS_NORM.takes(x, weight) else normed(x, weight, eps)


class RMSNormFunction(torch.autograd.Function):
    """y = x * r * w with r = 1 / sqrt(mean(x^2) + eps). Saves x and r only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.device.type != "cpu":
            out, r = normed_on_gpu(x, weight, eps)
            ctx.save_for_backward(x, weight, r)
            return out
        x_wide = x.to(wide(x.dtype))
        r = inverse_rms(x_wide, eps)
        ctx.save_for_backward(x, weight, r)
        return (x_wide * r).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, r = ctx.saved_tensors
        width, kind = x.shape[-1], r.dtype
        flat_x, flat_grad, flat_r = x.reshape(-1, width), grad.reshape(-1, width), r.view(-1, 1)
        if x.device.type != "cpu":
            if limits.RMS_NORM.takes(x, weight) and grad.dtype == x.dtype:
                grad_x, grad_weight = kernel.rms_norm_gradient(flat_grad, flat_x, weight, flat_r)
                return grad_x.view(x.shape), grad_weight, None
            grad_x, grad_weight = normed_backward(flat_grad, flat_x, weight, flat_r)
            return grad_x.view(x.shape), grad_weight.to(weight.dtype), None
        grad_x, grad_weight = torch.empty_like(flat_x), torch.zeros(width, dtype=kind, device=x.device)
        w = weight.to(kind)
        for value, g, inverse, out in blockwise(flat_x, flat_grad, flat_r, grad_x):
            x_hat, g = value.to(kind) * inverse, g.to(kind)
            product = g * x_hat
            grad_weight += product.sum(0)
            along = torch.mv(product, w).unsqueeze(-1).div_(-width)
            out.copy_(x_hat.mul_(along).addcmul_(g, w).mul_(inverse))
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n], weight [n] -> [..., n] in x's dtype."""
    if torch.is_grad_enabled():
        return RMSNormFunction.apply(x, weight, eps)
    if x.device.type != "cpu":
        return normed_on_gpu(x, weight, eps)[0]
    x_wide = x.to(wide(x.dtype))
    return (x_wide * inverse_rms(x_wide, eps)).to(x.dtype).mul_(weight)


class RMSNorm(nn.Module):
    """Root mean square normalisation with a weight [width]."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)
