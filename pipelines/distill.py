"""On-policy distillation: the student samples, the teacher of the task's domain scores every token it sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from k3rl.actors import LearnerGroup
from k3rl.data import BatchPlan, PlayedGroup
from k3rl.parallel import Loss
from k3rl.pipelines.configs import DistillConfig
from k3rl.pipelines.curriculum import Curriculum
from k3rl.pipelines.stage import Stage
from k3rl.pipelines.start import teachers_of
from k3rl.types import Failed


class Distillation:
    """Distillation as an algorithm of the policy loop (`policy.Algorithm`)."""

    name = "distill"

    def __init__(self, config: DistillConfig) -> None:
        self._config = config
        self.loss: Loss = config.loss()

    def prepare(self, learner: LearnerGroup) -> None:
        learner.load_teachers(teachers_of(self._config), self._config.teacher)

    def regraded(self, groups: list[PlayedGroup], step: int) -> list[PlayedGroup]:
        return groups

    def batches(self, groups: Sequence[PlayedGroup], stage: Stage) -> list[BatchPlan]:
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


def distill_batches(groups: Sequence[PlayedGroup], config: DistillConfig) -> tuple[list[BatchPlan], list[list[str]]]:
    """Batches over all sampled tokens of whole episodes, and for each batch the task family of every sequence."""
    episodes = [e for group in groups for e in group.episodes if e.branches and not isinstance(e.score, Failed)]
    shares = [share for i in range(config.optimizer_steps) if (share := episodes[i :: config.optimizer_steps])]
    routes = bool(config.sampling.replay_routes)
    batches = [BatchPlan.of(share, [0.0] * len(share), routes=routes) for share in shares]
    return batches, [[episode.family for episode in share for _ in episode.sequences] for share in shares]
