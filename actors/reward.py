"""The reward worker: grades episodes with tasks that it draws itself, so hidden parts never travel."""

from __future__ import annotations

from collections.abc import Sequence

from k3rl.actors.jobs import EpisodeJob, Tasks
from k3rl.envs import EnvConfig, grade, made
from k3rl.types import Episode, Score


class RewardWorker:
    """A synchronous Ray actor without torch, owning one grader and its sandbox."""

    def __init__(self, env: EnvConfig) -> None:
        self._environment = made(env)
        self._tasks = Tasks(self._environment.source)
        self._grader = self._environment.grader(provider=env.local_sandbox)

    def grade(self, jobs: Sequence[EpisodeJob], *played: Sequence[Episode]) -> dict[str, Score]:
        """The score of each job's episode, by its id. played: lists that have these episodes, and may have others."""
        episodes = {episode.id: episode for part in played for episode in part}
        items = [(self._tasks.get(job.task), episodes[job.episode_id]) for job in jobs]
        scores = grade(self._environment, self._grader, items)
        return {job.episode_id: score for job, score in zip(jobs, scores, strict=True)}
