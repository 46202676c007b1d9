"""The reward worker: grades episodes with tasks that it draws itself, so hidden parts never travel."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Sequence
from typing import Any

from k3rl.actors.jobs import EpisodeJob, Tasks
from k3rl.data import EpisodeColumns
from k3rl.envs import EnvConfig, grade, made
from k3rl.types import Episode, Score


class RewardWorker:
    """A synchronous Ray actor without torch, owning one grader and its sandbox."""

    def __init__(self, env: EnvConfig, workers: int | None = None, actors: int = 1) -> None:
        """workers: answers that are graded beside each other; None: as many as this machine has cores for, half of
        which are left to others and the rest divided by `actors`."""
        self._environment = made(env)
        self._tasks = Tasks(self._environment.source)
        many = {"workers": workers or max(1, len(os.sched_getaffinity(0)) // (2 * actors))}
        taken = many if "workers" in inspect.signature(self._environment.grader).parameters else {}
        self._grader = self._environment.grader(provider=env.local_sandbox, **taken)

    def grade(self, jobs: Sequence[EpisodeJob], *played: Any) -> dict[str, Score]:
        """The score of each job's episode, by its id.

        played: in turns, tokens and words of payloads (`Payload`) that have these episodes, and may have others.
        """
        wanted = {job.episode_id for job in jobs}
        episodes: dict[str, Episode] = {}
        for tokens, words in zip(played[::2], played[1::2], strict=True):
            episodes |= _found(tokens, words, wanted)
        items = [(self._tasks.get(job.task), episodes[job.episode_id]) for job in jobs]
        scores = grade(self._environment, self._grader, items)
        return {job.episode_id: score for job, score in zip(jobs, scores, strict=True)}


def _found(tokens: EpisodeColumns, words: Sequence[Episode], wanted: Collection[str]) -> dict[str, Episode]:
    """Those episodes of a payload that are wanted, by id."""
    return {one.id: tokens.episode(place, one) for place, one in enumerate(words) if one.id in wanted}
