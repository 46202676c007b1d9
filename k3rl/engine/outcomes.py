"""Requests that ended and have not been handed out, and calls that wait for some of them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence

from k3rl.engine.protocol import EngineError, Outcome
from k3rl.types import Completion

Step = Callable[[], list[tuple[int, Outcome]]]


class Outcomes:
    """Outcomes by request, in the order in which they came. One thread may add while another one takes."""

    def __init__(self) -> None:
        self._ended: collections.deque[tuple[int, Outcome]] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self._ended)

    def add(self, ended: Iterable[tuple[int, Outcome]]) -> None:
        """Keeps outcomes for the next `take`."""
        self._ended.extend(ended)

    def take(self) -> list[tuple[int, Outcome]]:
        """All that came since the last call."""
        taken = []
        while self._ended:
            taken.append(self._ended.popleft())
        return taken

    def wait_for(self, numbers: Sequence[int], step: Step) -> list[Completion]:
        """Calls `step` until these requests have ended -> their completions; those of others are kept.

        Raises the EngineError that ended the first of those which one ended.
        """
        found: dict[int, Outcome] = {}
        while not found.keys() >= set(numbers):
            found.update(step())
        mine = [found.pop(number) for number in numbers]
        self.add(found.items())
        completions = []
        for outcome in mine:
            if isinstance(outcome, EngineError):
                raise outcome
            completions.append(outcome)
        return completions
