"""What a driver asks an environment actor to play."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskRef:
    """Names one task without holding it: a task source gives the same task for the same reference.

    level and family pin what is drawn; None leaves it to the source's own mixture.
    """

    split: str
    index: int
    seed: int
    level: int | None = None
    family: str | None = None


@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """One episode to play: which task, under which ids, with which sampling seed."""

    episode_id: str
    group_id: str
    task: TaskRef
    sampling_seed: int
