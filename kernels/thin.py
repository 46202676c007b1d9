"""Products of few rows with one matrix, left as partial sums for the kernel that reads them.

A product of 64 rows has too few tiles to fill a GPU, and a launch that adds up the parts of a split one costs as much
as it gains. The residual stream reads each result once, so its kernel adds them up (`attn_res.mix_sum`).
`parts_reference` in plain torch is the definition. Sums have one order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3rl.kernels import dispatch

MOST_ROWS = 64
DEPTH = 128  # inputs of a part
MOST_PARTS = 16


class Parts(NamedTuple):
    """The sum over P of sums [P, N, b] float32 and base [N, b], if there is one, rounded once to `dtype`."""

    sums: torch.Tensor
    base: torch.Tensor | None
    dtype: torch.dtype

    def total(self) -> torch.Tensor:
        """[N, b]."""
        total = added_up(self.sums)
        return (total if self.base is None else total + self.base).to(self.dtype)


def added_up(sums: torch.Tensor) -> torch.Tensor:
    """Sums [P, ...] over P, in their order."""
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    return total


def whole(given: torch.Tensor | Parts) -> torch.Tensor:
    """The tensor, or what parts are together."""
    return given.total() if isinstance(given, Parts) else given


def takes(x: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether the kernel multiplies rows x [N, a] with matrix [b, a]."""
    outputs, width = matrix.shape
    fits = 0 < len(x) <= MOST_ROWS and width % DEPTH == 0 and width // DEPTH <= MOST_PARTS and outputs % 64 == 0
    fits = fits and x.stride(-1) == 1 and matrix.is_contiguous()
    return fits and dispatch.use_kernel("thin", x, matrix, float32_rows=False)


def parts(x: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor | None = None) -> Parts:
    """x [N, a], matrix [b, a], base [N, b] -> base + x matrix', without gradient. See `takes`."""
    if takes(x, matrix):
        from k3rl.kernels import thin_kernels

        return Parts(thin_kernels.parts(x, matrix), base, x.dtype)
    return parts_reference(x, matrix, base)


def parts_reference(x: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor | None = None) -> Parts:
    """`parts` in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    pieces = zip(x.to(wide).split(DEPTH, -1), matrix.to(wide).split(DEPTH, -1), strict=True)
    return Parts(torch.stack([rows @ strip.mT for rows, strip in pieces]), base, x.dtype)
