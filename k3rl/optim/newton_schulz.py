"""Newton-Schulz orthogonalization of many equal-shaped blocks at once (k3.md 8.2).

Five steps of X <- aX + bAX + cA^2X with A = XX^T push every singular value of X / |X|_F towards 1. The polynomial is
evaluated as (aI + A(bI + cA)) X, so a step is three batched products and no addition of whole matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    if tall:
        x = x.mT.contiguous()
    a, b, c = COEFFICIENTS
    # Buffers for the whole iteration: fresh ones would be paged in anew at every product.
    gram = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    inner, outer, other = torch.empty_like(gram), torch.empty_like(gram), torch.empty_like(x)
    for _ in range(steps):
        torch.bmm(x, x.mT, out=gram)
        torch.mul(gram, c, out=inner).diagonal(dim1=-2, dim2=-1).add_(b)
        torch.bmm(gram, inner, out=outer).diagonal(dim1=-2, dim2=-1).add_(a)
        torch.bmm(outer, x, out=other)
        x, other = other, x
    return (x.mT if tall else x).to(blocks.dtype)


def update_scale(rows: int, columns: int) -> float:
    """0.2 * sqrt(max(rows, columns)): gives an orthogonal block [rows, columns] an RMS of 0.2 (k3.md 8.2, 8.3)."""
    return float(0.2 * max(rows, columns) ** 0.5)
