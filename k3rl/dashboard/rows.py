"""Rows of a run's growing files as the dashboard keeps them: read once, from where the last read ended."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

LONGEST_LINE = 256 << 20
"""Bytes; a longer line is damaged, or not ours, and is skipped and counted."""


class EpisodeEntry(NamedTuple):
    """One row of the index of recorded episodes. reward None: it has none, or none that is finite. offset and bytes: of
    its piece of the stream."""

    id: str
    stage: str
    group: str
    t: float
    step: int
    attempt: int
    task: str
    env: str
    family: str
    level: int
    status: str
    reward: float | None
    stop_reason: str
    turns: int
    sampled_tokens: int
    offset: int
    bytes: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> EpisodeEntry:
        """From a row of stream.index.jsonl. Raises KeyError, TypeError, ValueError or OverflowError for others."""
        name = str(row["episode"])
        reward = row.get("reward")
        return cls(
            id=name,
            stage=stage_of(name),
            group=str(row.get("group") or name.rpartition("-")[0] or name),
            t=float(row["t"]),
            step=int(row["step"]),
            attempt=int(row.get("attempt", 1)),
            task=str(row["task"]),
            env=str(row["env"]),
            family=str(row["family"]),
            level=int(row["level"]),
            status=str(row["status"]),
            reward=None if reward is None or not math.isfinite(float(reward)) else float(reward),
            stop_reason=str(row["stop_reason"]),
            turns=int(row["turns"]),
            sampled_tokens=int(row["sampled_tokens"]),
            offset=int(row["offset"]),
            bytes=int(row["bytes"]),
        )


def stage_of(episode: str) -> str:
    """The stage that an episode's name begins with: "rl" of rl-40-3-0. Names of other makers are their own stage."""
    parts = episode.rsplit("-", 3)
    return parts[0] if len(parts) == 4 else "episodes"


class GrowingFile:
    """A file of JSON lines that is appended to: `more` gives what is new.

    A last line without its newline is left for the next call. A file that became shorter was replaced (a run that was
    started again with --clean): it is read from its start, and `on_replaced` is called first. Damaged lines are
    skipped and counted in `damaged`.
    """

    def __init__(self, path: Path, on_replaced: Callable[[], None]) -> None:
        self.path, self.offset, self.damaged = path, 0, 0
        self._on_replaced = on_replaced
        self._inode: int | None = None

    def more(self) -> Iterable[dict[str, Any]]:
        try:
            status = self.path.stat()
        except OSError:
            if self.offset:
                self._begin_again()
            return
        if status.st_size < self.offset or self._inode not in (None, status.st_ino):
            self._begin_again()
        self._inode = status.st_ino
        if status.st_size == self.offset:
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    row = json.loads(line) if len(line) <= LONGEST_LINE else None
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict):
                    yield row
                else:
                    self.damaged += 1

    def _begin_again(self) -> None:
        self.offset, self.damaged, self._inode = 0, 0, None
        self._on_replaced()


class Attempts:
    """Which rows of earlier attempts were gone over again by a later one, by stage.

    A resumed attempt starts at the step of its state; what earlier attempts recorded from that step on is replaced.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], int] = {}

    def saw(self, stage: str, attempt: int, step: int) -> bool:
        """Notes a row; whether that changes what is replaced."""
        place = (stage, attempt)
        if step >= self._first.get(place, step + 1):
            return False
        self._first[place] = step
        return attempt > 1

    def is_replaced(self, stage: str, attempt: int, step: int) -> bool:
        return any(of == stage and later > attempt and first <= step for (of, later), first in self._first.items())
