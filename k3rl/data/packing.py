"""Fitting sequences of known lengths into bins of a token budget, and what a sequence costs."""

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


def sequence_costs(lengths: Sequence[int], pair: float) -> list[float]:
    """Work of each sequence in rows: row p of it costs 1 + pair * (p + 1), as a row attends to those before it."""
    return [length + pair * length * (length + 1) / 2 for length in lengths]


def balanced_fit(lengths: Sequence[int], budget: int, pair: float) -> list[list[int]]:
    """As many bins as `best_fit` fills, of costs as equal as can be had simply, in its form and order.

    The costliest sequence first, each into the bin of least cost that still has room, ties to the earlier one; the bins
    of `best_fit` where that leaves a sequence without room, or is worse. pair: see `sequence_costs`. Raises
    SequenceTooLong.
    """
    fitted, costs = best_fit(lengths, budget), sequence_costs(lengths, pair)
    bins: list[list[int]] = [[] for _ in fitted]
    load, room = [0.0] * len(bins), [budget] * len(bins)
    for index in sorted(range(len(lengths)), key=lambda index: (-costs[index], index)):
        open_bins = [place for place, left in enumerate(room) if left >= lengths[index]]
        if not open_bins:
            return fitted
        chosen = min(open_bins, key=lambda place: load[place])
        bins[chosen].append(index)
        load[chosen] += costs[index]
        room[chosen] -= lengths[index]
    if max(load, default=0.0) >= max((sum(costs[i] for i in members) for members in fitted), default=0.0):
        return fitted
    return sorted(sorted(members) for members in bins)
