"""Who meets whom, and what the games are worth. Pure; the order follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping

Pair = tuple[int, int]
_ROUNDS = 200
_TOLERANCE = 1e-10


def schedule(players: int, opponents: int | None, seed: str) -> list[Pair]:
    """Pairs (i, j) with i < j: all of them, or about `opponents` for each player, all connected with each other.

    Players stand in a circle in an order drawn from the seed; each meets the next ones.
    """
    if players < 2:
        return []
    order = list(range(players))
    random.Random(seed).shuffle(order)
    reach = players // 2 if opponents is None else max(1, min((opponents + 1) // 2, players // 2))
    pairs = {
        (min(one, other), max(one, other))
        for place, one in enumerate(order)
        for step in range(1, reach + 1)
        if (other := order[(place + step) % players]) != one
    }
    chosen = sorted(pairs)
    random.Random(f"{seed}/pairs").shuffle(chosen)
    return chosen


def win_rates(players: int, games: Mapping[Pair, float]) -> list[float | None]:
    """Mean result of each player, None without a game. games: (i, j) -> what i got, 1, 0 or between for a tie."""
    totals, counts = [0.0] * players, [0] * players
    for (i, j), result in games.items():
        totals[i] += result
        totals[j] += 1 - result
        counts[i] += 1
        counts[j] += 1
    return [total / count if count else None for total, count in zip(totals, counts, strict=True)]


def bradley_terry(players: int, games: Mapping[Pair, float]) -> list[float | None]:
    """Expected result of each player against one drawn from all others, None without a game.

    Strengths are fitted by Hunter's minorization (2004) with one tie against a player of strength 1 added to each, so
    that a player who won or lost everything has one too.
    """
    strengths = [1.0] * players
    played = {player for pair in games for player in pair}
    for _ in range(_ROUNDS):
        new = list(strengths)
        for i in played:
            wins, weight = 0.5, 1.0 / (strengths[i] + 1.0)
            for (a, b), result in games.items():
                if i in (a, b):
                    other = b if i == a else a
                    wins += result if i == a else 1 - result
                    weight += 1.0 / (strengths[i] + strengths[other])
            new[i] = wins / weight
        change = max((abs(a - b) / b for a, b in zip(new, strengths, strict=True)), default=0.0)
        strengths = new
        if change < _TOLERANCE:
            break
    return [_expected(i, strengths, played) if i in played else None for i in range(players)]


def _expected(i: int, strengths: list[float], played: set[int]) -> float:
    others = [j for j in played if j != i]
    return sum(strengths[i] / (strengths[i] + strengths[j]) for j in others) / len(others)
