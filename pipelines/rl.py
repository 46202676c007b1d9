"""Reinforcement learning: each group's rewards become advantages of the tokens that earned them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from k3rl.actors import LearnerGroup
from k3rl.data import BatchPlan, EpisodeHeader, PlayedGroup
from k3rl.losses import group_advantages
from k3rl.parallel import Loss
from k3rl.pipelines.configs import RLConfig
from k3rl.pipelines.curriculum import Curriculum
from k3rl.pipelines.rollout_metrics import reward_of
from k3rl.pipelines.stage import Stage

_SHOWN = {"flat groups": "group/frac_zero_std", "entropy": "policy/entropy/mean"}


class Reinforcement:
    """RL as an algorithm of the policy loop (`policy.Algorithm`)."""

    name = "rl"

    def __init__(self, config: RLConfig) -> None:
        self._config = config
        self.loss: Loss = config.objective.loss(config.correction.build())

    def prepare(self, learner: LearnerGroup) -> None:
        """The learner needs nothing but the policy."""

    def regraded(self, groups: list[PlayedGroup], step: int) -> list[PlayedGroup]:
        return shuffled(groups, self._config.seed, step) if self._config.shuffle_rewards else groups

    def batches(self, groups: Sequence[PlayedGroup], stage: Stage) -> list[BatchPlan]:
        return policy_batches(groups, self._config)

    def shown(self, values: Mapping[str, float]) -> dict[str, float]:
        return {label: values[key] for label, key in _SHOWN.items() if key in values}

    def notes(self, curriculum: Curriculum) -> dict[str, Any]:
        return {"pass_rates": curriculum.pass_rates}


def shuffled(groups: Sequence[PlayedGroup], seed: int, step: int) -> list[PlayedGroup]:
    """The groups with all scores of the batch permuted: the control in which rewards mean nothing."""
    scores = [episode.score for group in groups for episode in group.episodes]
    order = iter(np.random.default_rng([seed, step, 1]).permutation(len(scores)))
    return [replace(g, episodes=tuple(replace(e, score=scores[next(order)]) for e in g.episodes)) for g in groups]


def policy_batches(groups: Sequence[PlayedGroup], config: RLConfig) -> list[BatchPlan]:
    """One batch for each optimizer step, of whole groups in turn, of every episode that has a reward.

    Masking comes first, then baselines, then weights over all sampled tokens of the batch (k3.md 12.2): a group whose
    rewards are all equal has advantages of 0, counts in the weights, and is moved by the regularizer alone. Such groups
    are spread over the steps as those with a signal are. A step has at least one with a signal, because Muon would
    make a whole step of whatever small gradient the rest has; so there are fewer batches than asked for, or none, when
    too few groups have one.
    """
    live: list[list[tuple[EpisodeHeader, float]]] = []
    flat: list[list[tuple[EpisodeHeader, float]]] = []
    for group in groups:
        advantages = group_advantages([reward_of(e) for e in group.episodes], normalise=config.objective.normalise)
        pairs = zip(group.episodes, advantages, strict=True)
        known = [(episode, a) for episode, a in pairs if a is not None and episode.branches]
        (live if any(advantage for _, advantage in known) else flat).append(known)
    steps = min(config.optimizer_steps, len(live))
    batches = []
    for i in range(steps):
        own = [pair for known in (*live[i::steps], *flat[i::steps]) for pair in known]
        chosen, earned = [episode for episode, _ in own], [advantage for _, advantage in own]
        mode, routes = config.objective.token_weights, bool(config.sampling.replay_routes)
        batches.append(BatchPlan.of(chosen, earned, mode=mode, routes=routes))
    return batches
