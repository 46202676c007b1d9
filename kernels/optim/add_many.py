"""Values of many tensors added to one flat tensor, in which each has its place: a few launches, nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3rl.kernels import limits

TENSORS = 32  # of one launch: their addresses are its arguments
BLOCK = 8192  # elements that one program adds
_ALIGNED = 16  # bytes of an address that is read whole


class Table:
    """Where the tensors of these sizes lie in a flat one, end to end: which part of which tensor a program adds.

    blocks: int64 [programs, 4] of each launch: tensor, first element in it, elements that are left, place in the sum.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = list(sizes)
        self.blocks: list[torch.Tensor] = []
        place, aligned = 0, True
        for first in range(0, len(self.sizes), TENSORS):
            rows = []
            for number, size in enumerate(self.sizes[first : first + TENSORS]):
                aligned = aligned and size % 8 == 0
                rows += [(number, at, size - at, place + at) for at in range(0, size, BLOCK)]
                place += size
            self.blocks.append(torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(device))
        self.step = 8 if aligned else 1  # a divisor of every size


def add_many(total: torch.Tensor, parts: Sequence[torch.Tensor], table: Table) -> None:
    """total [n] += the parts, whose sizes and order are the table's, each in its place; the host waits for nothing.

    Raises ValueError if sizes do not fit.
    """
    if [part.numel() for part in parts] != table.sizes or total.shape != (sum(table.sizes),):
        raise ValueError(f"add_many: {len(parts)} parts of {sum(part.numel() for part in parts)} numbers do not fit a "
                         f"table of {len(table.sizes)} and a sum of shape {tuple(total.shape)}")  # fmt: skip
    if limits.ADD_MANY.takes(total, parts):
        from k3rl.kernels.optim import add_many_kernels

        add_many_kernels.add_many(total, [aligned(part) for part in parts], table)
        return
    add_many_reference(total, parts)


def aligned(part: torch.Tensor) -> torch.Tensor:
    """The same values without gaps, at an address that is read whole."""
    part = part.contiguous()
    return part if part.data_ptr() % _ALIGNED == 0 else part.clone()


def add_many_reference(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """`add_many` in plain torch."""
    if parts:
        total.add_(torch.cat([part.reshape(-1) for part in parts]))
