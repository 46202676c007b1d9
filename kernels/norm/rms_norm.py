"""RMSNorm over the last axis: y = (x r) cast to x's dtype, times the weight, with r = 1 / sqrt(mean(x^2) + eps)."""

from __future__ import annotations

import torch

from k3rl.kernels import limits


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n], weight [n] -> y [..., n] in x's dtype and r [..., 1] in float32 or wider, without gradient."""
    if limits.RMS_NORM.takes(x, weight):
        from k3rl.kernels.norm import rms_norm_kernels

        return rms_norm_kernels.rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def rms_norm_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of y, x [N, n], weight [n], r [N, 1] -> gradients of x [N, n] and of the weight [n] in their dtypes."""
    if limits.RMS_NORM.takes(x, weight) and grad.dtype == x.dtype:
        from k3rl.kernels.norm import rms_norm_kernels

        return rms_norm_kernels.rms_norm_gradient(grad, x, weight, r)
    return rms_norm_gradient_reference(grad, x, weight, r)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` in plain torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    r = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * r).to(x.dtype) * weight, r


def rms_norm_gradient_reference(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_gradient` in plain torch."""
    normed, g, w = x.to(r.dtype) * r, grad.to(r.dtype), weight.to(r.dtype)
    along = (g * normed * w).mean(-1, keepdim=True)
    return ((g * w - normed * along) * r).to(x.dtype), (g * normed).sum(0).to(weight.dtype)
