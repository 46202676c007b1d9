"""Fitting sequences of known lengths into bins of a token budget."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from k3rl.config import K3Error


class SequenceTooLong(K3Error, ValueError):
    """A sequence that fits into no bin: its `index` and `name`, its `length` and the `budget`, in tokens."""

    def __init__(self, index: int, length: int, budget: int, name: str | None = None) -> None:
        super().__init__(
            f"sequence {index if name is None else name} has {length} tokens, more than the budget of {budget} tokens "
            "of one micro-batch; raise the budget (--trainer.micro-batch-tokens) or limit the length of sequences"
        )
        self._given = index, length, budget, name
        self.index = index
        self.length = length
        self.budget = budget

    def __reduce__(self) -> tuple[type[SequenceTooLong], tuple[int, int, int, str | None]]:
        return type(self), self._given


def best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Best-fit decreasing: bins of sequence indices, each bin's lengths summing to at most `budget` tokens.

    Longest sequences first, each into the fullest bin that still has room, ties to the earlier index and the
    earlier bin; so the result depends on the arguments alone. Every index occurs once; indices ascend inside a
    bin, bins ascend by their first index. Raises SequenceTooLong.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted: the fullest bins first
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if length > budget:
            raise SequenceTooLong(index, length, budget)
        place = bisect.bisect_left(room, (length, -1))
        if place < len(room):
            left, chosen = room.pop(place)
        else:
            left, chosen = budget, len(bins)
            bins.append([])
        bins[chosen].append(index)
        bisect.insort(room, (left - length, chosen))
    return sorted(sorted(chosen) for chosen in bins)
