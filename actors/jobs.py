"""What a driver asks an environment worker to run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from k3rl.data import EpisodeHeader, header_of
from k3rl.envs import TaskSource
from k3rl.packed import Record
from k3rl.types import Episode, Failed, StopReason, Task


@dataclass(frozen=True, slots=True)
class TaskRef(Record):
    """Names one task without holding it: a task source gives the same task for the same reference.

    level and family pin what is drawn; None leaves it to the source's own mixture.
    """

    split: str
    index: int
    seed: int
    level: int | None = None
    family: str | None = None


class Tasks:
    """Tasks by reference, hidden parts included; the episodes of a group share one draw."""

    def __init__(self, source: TaskSource, keep: int = 256) -> None:
        self._source = source
        self.get = lru_cache(maxsize=keep)(self._get)

    def _get(self, ref: TaskRef) -> Task:
        return self._source.get(ref.split, ref.index, ref.seed, level=ref.level, family=ref.family)


@dataclass(frozen=True, slots=True)
class EpisodeJob(Record):
    """One episode to run: which task, under which ids, with which sampling seed.

    thinking: assistant turns have a think channel; thinking_effort: low, high or max.
    """

    episode_id: str
    group_id: str
    task: TaskRef
    sampling_seed: int
    thinking: bool = False
    thinking_effort: str | None = None

    def failed_header(self, env: str, score: Failed) -> EpisodeHeader:
        """The header of `failed`."""
        return header_of(self.failed(env, score))

    def failed(self, env: str, score: Failed) -> Episode:
        """The episode of this job that the infrastructure broke, or that was not run."""
        return Episode(
            id=self.episode_id,
            task_id=f"{self.task.split}/{self.task.index}",
            env=env,
            family=self.task.family or "unknown",
            level=self.task.level or 0,
            branches=(),
            stop_reason=StopReason.INFRA_ERROR,
            score=score,
        )
