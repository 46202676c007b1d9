"""Rows of tokens in the order of their experts: what each assignment reads, and what it reads times its weight."""

from __future__ import annotations

import torch

from k3rl.kernels import limits


def gather_rows(
    rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """rows [N, b], index int64 [R] -> rows at index [R, b] and the same times weight [R, 1], or None; no gradient.

    The weight is rounded to the dtype of the rows first, the product after.
    """
    if limits.GATHER_ROWS.takes(rows, index):
        from k3rl.kernels.moe import gather_rows_kernels

        return gather_rows_kernels.gather_rows(rows, index, weight)
    return gather_rows_reference(rows, index, weight)


def gather_rows_reference(
    rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`gather_rows` in plain torch."""
    found = rows.index_select(0, index)
    return found, None if weight is None else found * weight.to(rows.dtype)
