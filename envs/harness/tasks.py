"""Tasks of a source as they are asked of an agent with tools."""

from __future__ import annotations

from collections.abc import Callable

from k3rl.envs.base import TaskSource
from k3rl.types import Task


class ChangedTasks:
    """The tasks of another source, each changed by a function: equal places still give equal tasks."""

    def __init__(self, source: TaskSource, change: Callable[[Task], Task]) -> None:
        self._source = source
        self._change = change

    @property
    def splits(self) -> tuple[str, ...]:
        return self._source.splits

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """As the source says."""
        return self._source.length(split, level=level, family=family)

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """The task, changed."""
        return self._change(self._source.get(split, index, seed, level=level, family=family))
