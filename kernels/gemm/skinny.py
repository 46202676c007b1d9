"""Products of few rows with one matrix.

A product of 64 rows has too few tiles to fill a GPU. `parts` splits it along what is summed and leaves the partial sums
to the kernel that reads them: the residual stream reads each result once, and its kernel adds them up
(`attn_res.mix_sum`). `product` is for everything that is read as it is: tiles of few rows, so that there are more of
them, and no cluster to wait for. `parts_reference` in plain torch and torch's own product are the definitions. Sums
have one order, which does not depend on how many rows there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3rl.kernels import dispatch

MOST_ROWS = 64
MOST_SUMS = 1 << 13  # of one part: more are slower to write and to read again than a product that is whole
DEPTH = 128  # inputs of a part
MOST_PARTS = 16


class _Most(NamedTuple):
    """The largest matrix that `product` is faster with than the library: every tile of rows reads it again."""

    nbytes: int
    outputs: int


PRODUCTS = {16: _Most(1 << 30, 1 << 30), 64: _Most(16 << 20, 8192), 256: _Most(4 << 20, 2048)}
"""By the most rows; as measured."""


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
    fits = fits and len(x) * outputs <= MOST_SUMS
    fits = fits and x.stride(-1) == 1 and matrix.is_contiguous()
    return fits and dispatch.use_kernel("thin", x, matrix, float32_rows=False)


def parts(x: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor | None = None) -> Parts:
    """x [N, a], matrix [b, a], base [N, b] -> base + x matrix', without gradient. See `takes`."""
    if takes(x, matrix):
        from k3rl.kernels.gemm import skinny_kernels

        return Parts(skinny_kernels.parts(x, matrix), base, x.dtype)
    return parts_reference(x, matrix, base)


def multiplies(x: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether `product` multiplies rows x [N, a] with matrix [b, a] by its kernel."""
    if x.device.type == "cpu" or x.dim() != 2 or not x.dtype == matrix.dtype == torch.bfloat16:
        return False
    outputs, width = matrix.shape
    most = next((most for rows, most in PRODUCTS.items() if len(x) <= rows), _Most(0, 0))
    fits = len(x) > 0 and matrix.nbytes <= most.nbytes and 64 <= outputs <= most.outputs and width % 64 == 0
    fits = fits and x.stride(-1) == 1 and x.stride(0) % 8 == 0 and matrix.is_contiguous()
    return fits and dispatch.use_kernel("thin", x, matrix, float32_rows=False)


def product(x: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., a], matrix [b, a], base [..., b] -> base + x matrix' [..., b], without gradient.

    base is added before the result is rounded, and may be overwritten.
    """
    if multiplies(x, matrix) and (base is None or len(x) <= MOST_ROWS):
        from k3rl.kernels.gemm import skinny_kernels

        return skinny_kernels.product(x, matrix, base)
    if base is None:
        return torch.nn.functional.linear(x, matrix)
    return base.addmm_(x, matrix.t())


def parts_reference(x: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor | None = None) -> Parts:
    """`parts` in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    pieces = zip(x.to(wide).split(DEPTH, -1), matrix.to(wide).split(DEPTH, -1), strict=True)
    return Parts(torch.stack([rows @ strip.mT for rows, strip in pieces]), base, x.dtype)
