"""Products of matrices with their own transposes, and what Newton-Schulz makes of them, in one pass.

    out = alpha P P' + beta P + gamma I   (beta is 0, or P is square and symmetric)

The result is symmetric: each tile above the diagonal is made once and written twice. `symmetric_reference` is the
definition.
"""

from __future__ import annotations

import torch

from k3rl.kernels import limits


def symmetric(
    p: torch.Tensor, out: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0
) -> torch.Tensor:
    """p [n, r, k], a view of a transpose maybe, into out [n, r, r], contiguous and no part of p, with float32 sums.

    Raises ValueError if shapes do not fit.
    """
    n, r, k = p.shape
    if out.shape != (n, r, r) or not out.is_contiguous() or (beta != 0.0 and k != r):
        raise ValueError(f"symmetric: p {tuple(p.shape)} does not fit out {tuple(out.shape)} with beta = {beta}")
    if limits.SYMMETRIC.takes(p):
        from k3rl.kernels.optim import symmetric_kernels

        symmetric_kernels.symmetric(p, out, alpha, beta, gamma)
        return out
    return out.copy_(symmetric_reference(p, alpha, beta, gamma))


def symmetric_reference(p: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> torch.Tensor:
    """`symmetric` in plain torch, in float32 or wider, rounded once."""
    wide = p.to(torch.promote_types(p.dtype, torch.float32))
    found = alpha * (wide @ wide.mT)
    if beta != 0.0:
        found += beta * wide
    found.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return found.to(p.dtype)
