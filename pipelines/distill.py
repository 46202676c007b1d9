"""On-policy distillation: the student samples, the teacher of the task's domain scores every token it sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from k3rl.actors import LearnerGroup
from k3rl.data import TrainBatch, from_episodes
from k3rl.parallel import Loss
from k3rl.pipelines.configs import DistillConfig
from k3rl.pipelines.curriculum import Curriculum
from k3rl.pipelines.stage import Stage
from k3rl.pipelines.start import teachers_of
from k3rl.types import Failed, Group


class Distillation:
    """Distillation as an algorithm of the policy loop (`policy.Algorithm`)."""

    name = "distill"

    def __init__(self, config: DistillConfig) -> None:
        self._config = config
        self.loss: Loss = config.loss()

    def prepare(self, learner: LearnerGroup) -> None:
        learner.load_teachers(teachers_of(self._config), self._config.teacher)

    def regraded(self, groups: list[Group], step: int) -> list[Group]:
        return groups

    def batches(self, groups: Sequence[Group], stage: Stage) -> list[TrainBatch]:
        learner, temperature = stage.session.fleet.learner, self._config.sampling.temperature
        batches, domains = distill_batches(groups, self._config)
        with stage.clock("teacher"):
            return [
                replace(batch, teacher_logprobs=learner.teacher_logprobs(batch, of, temperature))
                for batch, of in zip(batches, domains, strict=True)
            ]

    def shown(self, values: Mapping[str, float]) -> dict[str, float]:
        return {"KL": values["distill/kl_reverse"]} if "distill/kl_reverse" in values else {}

    def notes(self, curriculum: Curriculum) -> dict[str, Any]:
        return {"teachers": teachers_of(self._config)}


def distill_batches(groups: Sequence[Group], config: DistillConfig) -> tuple[list[TrainBatch], list[list[str]]]:
    """Batches over all sampled tokens of whole episodes, and for each batch the task family of every sequence."""
    episodes = [e for group in groups for e in group.episodes if e.branches and not isinstance(e.score, Failed)]
    families = {f"{e.id}/{branch.id}": e.family for e in episodes for branch in e.branches}
    shares = [share for i in range(config.optimizer_steps) if (share := episodes[i :: config.optimizer_steps])]
    routes = bool(config.sampling.replay_routes)
    batches = [from_episodes(share, {episode.id: 0.0 for episode in share}, routes=routes) for share in shares]
    return batches, [[families[name] for name in batch.sequence_ids] for batch in batches]
