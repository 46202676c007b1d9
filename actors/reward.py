"""The reward worker: grades episodes with tasks that it draws itself, so hidden parts never travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3rl.actors.jobs import EpisodeJob, Tasks
from k3rl.envs import NOT_GRADED, EnvConfig, gradable, grade, make
from k3rl.types import Episode, Failed


class RewardWorker:
    """A synchronous Ray actor without torch, owning one grader and its sandbox."""

    def __init__(self, env: EnvConfig) -> None:
        self._environment = make(env.name, **env.args)
        self._tasks = Tasks(self._environment.source)
        self._grader = self._environment.grader(provider=env.sandbox)

    def grade(self, jobs: Sequence[EpisodeJob], episodes: Sequence[Episode]) -> list[Episode]:
        """The episodes with their scores, in order. An episode that the infrastructure broke stays Failed, and a score
        that is no honest one becomes so."""
        by_id = {job.episode_id: job for job in jobs}
        live = [episode for episode in episodes if gradable(episode)]
        tasks = [self._tasks.get(by_id[episode.id].task) for episode in live]
        scores = grade(self._environment, self._grader, list(zip(tasks, live, strict=True)))
        scored = {episode.id: score for episode, score in zip(live, scores, strict=True)}
        return [replace(e, score=scored[e.id]) if e.id in scored else _failed(e) for e in episodes]


def _failed(episode: Episode) -> Episode:
    if episode.score != NOT_GRADED:
        return episode
    return replace(episode, score=Failed(f"the episode ended as {episode.stop_reason} and has no answer to grade"))
