"""How the sequences of a global batch are balanced over ranks.

Losses are sums whose weights belong to the whole global batch, so gradients are summed, never averaged, and the
result does not depend on how many ranks there are beyond the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence


def balanced_shares(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of sequences for each rank, balanced by what each costs (`sequence_costs`); a rank may get none.

    Costliest first, each to the rank with the least; equal inputs give equal shares.
    """
    members: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = load.index(min(load))
        members[rank].append(index)
        load[rank] += costs[index]
    return [sorted(chosen) for chosen in members]
