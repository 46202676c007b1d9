"""How the sequences of a global batch are dealt to ranks.

Losses are sums whose weights belong to the whole global batch, so gradients are summed, never averaged, and the
result does not depend on how many ranks there are beyond the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of sequences for each rank, balanced by tokens; a rank may get none.

    Longest first, each to the rank with the fewest tokens; equal inputs give equal shares.
    """
    members: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = load.index(min(load))
        members[rank].append(index)
        load[rank] += lengths[index]
    return [sorted(chosen) for chosen in members]
