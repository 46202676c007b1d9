"""Grouped skinny GEMM: few rows with many matrices, each run of rows in expert order times its expert's matrix.

What a decode step does with the routed experts. Every expert has a handful of rows, so that reading the matrices is all
the time it takes; a program reads a strip of one matrix once and multiplies all rows of that expert with it. Experts
without rows are not read. `product_reference` in plain torch is the definition. Nothing is read by the host.
"""

from __future__ import annotations

import torch

from k3rl.kernels import limits


def product(rows: torch.Tensor, token: torch.Tensor | None, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [N, a], matrices [E, b, a] -> [R, b]: row token[r] times the transposed matrix of the expert that owns r.

    token int64 [R], or None where `rows` are the R rows in expert order; ends int32 [E]: one past the last row of each
    expert, the last of them R. Sums in float32, results in the dtype of the rows.
    """
    count = len(rows) if token is None else len(token)
    if limits.GROUPED_SKINNY.takes(rows, count, matrices):
        from k3rl.kernels.gemm import grouped_skinny_kernels

        return grouped_skinny_kernels.product(rows, token, matrices, ends)
    return product_reference(rows, token, matrices, ends)


def product_reference(
    rows: torch.Tensor, token: torch.Tensor | None, matrices: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """`product` in plain torch: every matrix meets every row, which is right and slow."""
    given = rows if token is None else rows.index_select(0, token)
    wide = torch.promote_types(rows.dtype, torch.float32)
    every = torch.matmul(given.to(wide), matrices.to(wide).mT)
    number = torch.arange(len(given), dtype=ends.dtype, device=ends.device)
    mine = torch.searchsorted(ends, number, right=True)
    return every.gather(0, mine.view(1, -1, 1).expand(1, -1, every.shape[2])).squeeze(0).to(rows.dtype)
