"""A sum over calls of one matrix for each group, where a call leaves the matrices of empty groups undefined.

Grouped products of weight gradients write nothing for an expert without rows; what lies there may be NaN.
"""

from __future__ import annotations

import torch

from k3rl.kernels import limits


def add_groups(total: torch.Tensor, part: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """total [G, ...] += part [G, ...] in place for the groups that have rows; rows int32 [G] += how many, if given.

    ends: int32 [G], the row behind each group's last one. The host waits for nothing. Raises ValueError if shapes do
    not fit or a tensor is not contiguous.
    """
    if total.shape != part.shape or ends.shape != total.shape[:1]:
        raise ValueError(f"add_groups: total {tuple(total.shape)}, part {tuple(part.shape)} and ends "
                         f"{tuple(ends.shape)} do not fit")  # fmt: skip
    if not (total.is_contiguous() and part.is_contiguous()):
        raise ValueError("add_groups: total and part must be contiguous")
    if limits.ADD_GROUPS.takes(total, part):
        from k3rl.kernels.moe import add_groups_kernels

        add_groups_kernels.add_groups(total, part, ends, rows)
        return
    add_groups_reference(total, part, ends, rows)


def add_groups_reference(
    total: torch.Tensor, part: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """`add_groups` in plain torch."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    there = (counts > 0).view(-1, *(1,) * (total.dim() - 1))
    total.add_(torch.where(there, part, part.new_zeros(())))
    if rows is not None:
        rows.add_(counts)
