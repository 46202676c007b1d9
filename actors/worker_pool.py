"""Pools of workers: actors that run user code, each replaced by a fresh one where it hangs or dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray


class WorkerPool:
    """Workers of one role. `make(place)` starts one; without it none can be replaced (its calls then fail for good)."""

    def __init__(self, actors: Sequence[Any], make: Callable[[int], Any] | None = None) -> None:
        self.actors: list[Any] = list(actors)
        self.replaced = 0
        self._make = make

    def __len__(self) -> int:
        return len(self.actors)

    @property
    def can_replace(self) -> bool:
        """Whether `replace` starts another one."""
        return self._make is not None

    def replace(self, place: int) -> None:
        """Ends the worker at a place and starts another one there."""
        if self._make is None:
            return
        ray.kill(self.actors[place])
        self.actors[place] = self._make(place)
        self.replaced += 1

    def end(self) -> None:
        """Ends all of them."""
        for actor in self.actors:
            ray.kill(actor)
