"""RMSNorm over the last dimension followed by a sigmoid gate: the output norm of a KDA head.

    y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)

Norm first, then gate; the weight [D] is shared by all heads. `gated_norm_reference` is the definition, `gated_norm`
runs the Triton kernels on a GPU that they support. Source: k3 architecture section 2.1 step 9.
"""

from __future__ import annotations

import torch

from k3rl.kernels import limits


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """x, gate [..., D] of one shape, weight [D] -> y [..., D] in x's dtype; differentiable in all three.

    Statistics are taken in float32 or wider. Raises ValueError if the shapes do not fit.
    """
    if gate.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"gated_norm: gate must be {tuple(x.shape)} and weight {tuple(x.shape[-1:])} to fit x, got "
                         f"{tuple(gate.shape)} and {tuple(weight.shape)}")  # fmt: skip
    if limits.GATED_NORM.takes(x, gate):
        from k3rl.kernels.norm import gated_norm_kernels

        return gated_norm_kernels.gated_norm(x, gate, weight, eps)
    return gated_norm_reference(x, gate, weight, eps)


def gated_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """`gated_norm` in plain torch."""
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    h = x.to(wide)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    return (h * torch.sigmoid(gate.to(wide))).to(x.dtype)
