"""Skinny GEMM: products of few rows with one matrix.

A product of 64 rows has too few tiles to fill a GPU. `split_k` splits it along what is summed and leaves the partial
sums to the kernel that reads them: the residual stream reads each result once, and its kernel adds them up
(`attn_res.mix_sum`). `product` is for everything that is read as it is: tiles of few rows, so that there are more of
them, and no cluster to wait for. `split_k_reference` in plain torch and torch's own product are the definitions. Sums
have one order, which does not depend on how many rows there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3rl.kernels import limits


class PartialSums(NamedTuple):
    """The sum over P of sums [P, N, b] float32 and base [N, b], if there is one, rounded once to `dtype`."""

    sums: torch.Tensor
    base: torch.Tensor | None
    dtype: torch.dtype

    def total(self) -> torch.Tensor:
        """[N, b]."""
        total = sum_partials(self.sums)
        return (total if self.base is None else total + self.base).to(self.dtype)


def sum_partials(sums: torch.Tensor) -> torch.Tensor:
    """Sums [P, ...] over P, in their order."""
    total = sums[0]
    for partial in sums[1:]:
        total = total + partial
    return total


def as_tensor(given: torch.Tensor | PartialSums) -> torch.Tensor:
    """The tensor, or the total of partial sums."""
    return given.total() if isinstance(given, PartialSums) else given


def split_k(x: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor | None = None) -> PartialSums:
    """x [N, a], matrix [b, a], base [N, b] -> base + x matrix', without gradient, for what `limits.SPLIT_K` takes."""
    if limits.SPLIT_K.takes(x, matrix):
        from k3rl.kernels.gemm import skinny_kernels

        return PartialSums(skinny_kernels.split_k(x, matrix), base, x.dtype)
    return split_k_reference(x, matrix, base)


def split_k_reference(x: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor | None = None) -> PartialSums:
    """`split_k` in plain torch."""
    wide, depth = torch.promote_types(x.dtype, torch.float32), limits.SPLIT_K.depth
    pieces = zip(x.to(wide).split(depth, -1), matrix.to(wide).split(depth, -1), strict=True)
    return PartialSums(torch.stack([rows @ strip.mT for rows, strip in pieces]), base, x.dtype)


def product(x: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., a], matrix [b, a], base [..., b] -> base + x matrix' [..., b], without gradient.

    base is added before the result is rounded, and may be overwritten.
    """
    if limits.SKINNY.takes(x, matrix, base):
        from k3rl.kernels.gemm import skinny_kernels

        return skinny_kernels.product(x, matrix, base)
    if base is None:
        return torch.nn.functional.linear(x, matrix)
    return base.addmm_(x, matrix.t())
