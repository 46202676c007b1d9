"""Which engine an episode of an environment worker asks for its next turn: the arithmetic of it, without Ray.

The episodes of a group begin on one engine, which computes their prompt once, and an episode stays where its
conversation is kept. Where that engine has no row free and another has many, the other takes the conversation, whose
tokens it computes anew: rows that stand idle cost more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


def home_engines(engines: int, worker: int, workers: int) -> list[int]:
    """Numbers of the engines on which the episodes of a worker begin: its share, or, of more workers than engines, one
    that several workers share. Each engine is of somebody."""
    return list(range(worker, engines, workers)) or [worker % engines]


@dataclass
class Place:
    """Where an episode is. group: whose episodes begin together; engine: its number."""

    group: str
    engine: int


class EnginePlaces:
    """The engines of a worker's episodes.

    home: numbers of those on which episodes begin. engines: how many there are in all. rows: requests that one decodes
    at a time, until it says so itself; None: no episode moves.
    """

    def __init__(self, home: Sequence[int], engines: int, rows: int | None = None) -> None:
        self.home, self._moves = list(home), rows is not None
        self._rows = [rows or 1] * engines
        self.moved = 0
        """Conversations that another engine took, in all."""
        self._episodes: Counter[int] = Counter()  # that are at an engine
        self._group: dict[str, tuple[int, int]] = {}  # engine on which its episodes begin, and how many of them live
        self._asking = [0] * engines  # requests of this worker's that have no answer
        self._others = [0] * engines  # of everybody else, when the engine was asked last

    def begin(self, group: str) -> Place:
        """The place of a new episode: the engine of its group, or the one of `home` that has fewest."""
        fewest = min(self.home, key=lambda number: (self._episodes[number], number))
        engine, living = self._group.get(group, (fewest, 0))
        self._group[group] = engine, living + 1
        self._episodes[engine] += 1
        return Place(group, engine)

    def leave(self, place: Place) -> None:
        """An episode does not go on."""
        self._episodes[place.engine] -= 1
        engine, living = self._group.pop(place.group)
        if living > 1:
            self._group[place.group] = engine, living - 1

    def load(self, engine: int) -> int:
        """Requests that an engine has, as far as is known here."""
        return self._asking[engine] + self._others[engine]

    def told(self, engine: int, load: int, asking: int, rows: int | None = None) -> None:
        """An engine has said how many requests it had, when `asking` of them were this worker's, and its rows."""
        self._others[engine] = max(0, load - asking)
        self._rows[engine] = rows or self._rows[engine]

    def _full(self, engine: int) -> bool:
        return self.load(engine) >= self._rows[engine]

    def asking(self, engine: int) -> int:
        """Requests of this worker that an engine has."""
        return self._asking[engine]

    @property
    def crowded(self) -> bool:
        """Whether an engine of this worker has no row free, so that it is of use to know what others do."""
        return self._moves and any(map(self._full, self.home))

    def ask(self, place: Place, *, stay: bool = False) -> bool:
        """An episode asks for a turn at `place`, which may change; True where another engine takes it.

        It moves from an engine without a free row to the one with fewest requests for its rows, if at most half of
        these are taken: what moves is computed again, so it must not move to and fro. stay: it may not.
        """
        moves = self._moves and not stay and self._full(place.engine)
        if moves:
            best = min(range(len(self._asking)), key=lambda number: (self.load(number) / self._rows[number], number))
            moves = best != place.engine and 2 * (self.load(best) + 1) <= self._rows[best]
            if moves:
                self._episodes[place.engine] -= 1
                self._episodes[best] += 1
                place.engine = best
                self.moved += 1
        self._asking[place.engine] += 1
        return moves

    def answered(self, engine: int) -> None:
        """A request that was asked of an engine is over."""
        self._asking[engine] -= 1
