"""Newton-Schulz orthogonalization of many equal-shaped blocks at once (k3.md 8.2).

Five steps of X <- aX + bAX + cA^2X with A = XX^T push every singular value of X / |X|_F towards 1. The polynomial is
evaluated as (aI + A(bI + cA)) X, so a step is three batched products and no addition of whole matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3rl.kernels import limits
from k3rl.kernels.optim import symmetric
from k3rl.optim.classify import BASE_WIDTH

if TYPE_CHECKING:
    from k3rl.optim.config import Scaling

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def newton_schulz(blocks: Tensor, *, steps: int = STEPS, dtype: torch.dtype | None = None) -> Tensor:
    """Blocks [n, r, c] -> near-orthogonal blocks [n, r, c] in the dtype of `blocks`.

    dtype: that of the products; None keeps the input's. The normalization is done in the input's dtype before that,
    from each block scaled by its largest magnitude, so norms of 1e-20 and 1e20 neither vanish nor overflow. A block
    of zeros gives zeros. Blocks with more rows than columns are worked on transposed.
    """
    if blocks.numel() == 0:
        return blocks.clone()
    x = blocks / blocks.abs().amax((-2, -1), keepdim=True).clamp_min_(torch.finfo(blocks.dtype).tiny)
    # The largest entry is now 1, so the norm is at least 1, or 0 for a block of zeros, which stays zero.
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min_(1.0))
    if dtype is not None:
        x = x.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = iterated(x.mT.contiguous() if tall else x, steps)
    return (x.mT if tall else x).to(blocks.dtype)


def iterated(x: Tensor, steps: int = STEPS) -> Tensor:
    """The steps alone, on blocks [n, r, c] whose norms are at most 1, in their dtype; x is used up."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]  # then the small Gram matrix is on the right
    if x.device.type != "cpu" and limits.SYMMETRIC.takes(x):
        return _iterated_by_kernel(x, steps, tall)
    # Buffers for the whole iteration: fresh ones would be paged in anew at every product.
    gram = x.new_empty(x.shape[0], min(x.shape[1:]), min(x.shape[1:]))
    inner, outer, other = torch.empty_like(gram), torch.empty_like(gram), torch.empty_like(x)
    # Off the CPU a pass costs more than the reads of a small matrix, and is one rounding less in bf16.
    once = None if x.device.type == "cpu" else b * torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device)
    for _ in range(steps):
        torch.bmm(*((x.mT, x) if tall else (x, x.mT)), out=gram)
        if once is None:
            torch.mul(gram, c, out=inner).diagonal(dim1=-2, dim2=-1).add_(b)
        else:
            torch.add(once, gram, alpha=c, out=inner)
        torch.bmm(gram, inner, out=outer).diagonal(dim1=-2, dim2=-1).add_(a)
        torch.bmm(*((x, outer) if tall else (outer, x)), out=other)
        x, other = other, x
    return x


def _iterated_by_kernel(x: Tensor, steps: int, tall: bool) -> Tensor:
    """`iterated` where one kernel makes A and another aI + bA + cA^2, each rounded once."""
    a, b, c = COEFFICIENTS
    gram = x.new_empty(x.shape[0], min(x.shape[1:]), min(x.shape[1:]))
    outer, other = torch.empty_like(gram), torch.empty_like(x)
    for _ in range(steps):
        symmetric.symmetric(x.mT if tall else x, gram)
        symmetric.symmetric(gram, outer, c, b, a)
        torch.bmm(*((x, outer) if tall else (outer, x)), out=other)
        x, other = other, x
    return x


def update_scale(rows: int, columns: int, scaling: Scaling = "rms") -> float:
    """What an orthogonal block [rows, columns] is multiplied with, beside the learning rate.

    "rms": 0.2 * sqrt(max(rows, columns)), which gives it an RMS of 0.2 (k3.md 8.2, 8.3). "width": sqrt(64 / columns)
    times that, which keeps the ratio to fresh weights (RMS 1 / sqrt(columns)) the same at every width.
    """
    share = (BASE_WIDTH / columns) ** 0.5 if scaling == "width" else 1.0
    return float(0.2 * max(rows, columns) ** 0.5 * share)
