"""The held-out measurement: tasks, seeds and batch shapes are always the same, so a checkpoint has one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3rl.actors import EpisodeJob, RolloutWorkers, TaskRef
from k3rl.config import ConfigError
from k3rl.envs import make
from k3rl.pipelines.configs import EnvConfig, EvalConfig
from k3rl.pipelines.rollout_metrics import TooManyFailures, check_failures, reward_of
from k3rl.types import Episode, SamplingParams, StopReason

_FAILURE_LIMIT = 0.02  # an evaluation with more missing rewards than this measures the sandbox, not the policy


@dataclass(frozen=True)
class Evaluation:
    """One checkpoint on the held-out tasks.

    splits: how many tasks of each split were run; a split that the environment does not have is not there.
    pass_at_1: mean reward at temperature 1 over the n rewards of the families that are trained; ci95: its interval
    (`interval`); greedy: mean reward at temperature 0; by_family: temperature 1, the kept-out family included;
    by_level: "family/level"; parsed: share of answers that are valid messages; missing: episodes without a reward.
    """

    pass_at_1: float
    ci95: tuple[float, float]
    greedy: float
    n: int
    by_family: dict[str, float]
    greedy_by_family: dict[str, float]
    by_level: dict[str, float]
    parsed: float
    missing: int
    splits: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Evaluation:
        return cls(**{**found, "ci95": tuple(found["ci95"])})

    def facts(self, env: str) -> dict[str, Any]:
        """What a model card says of it."""
        low, high = self.ci95
        return {
            "environment": env,
            "pass@1, temperature 1": f"{self.pass_at_1:.4f} (95 % interval {low:.4f} to {high:.4f}, n = {self.n})",
            "pass@1, greedy": f"{self.greedy:.4f}",
        }


def held_out(env: EnvConfig, config: EvalConfig, *, required: bool = True) -> dict[str, int]:
    """How many tasks of which split of this environment a measurement runs: what is asked for, where it is there.

    Without a split `heldout` there is nothing to measure a policy on: ConfigError, or nothing where not `required`.
    Raises what making the environment raises.
    """
    source = make(env.name, **env.args).source
    if "heldout" not in source.splits:
        if not required:
            return {}
        raise ConfigError(
            f"{env.name} has no split heldout to measure a policy on; it has {', '.join(source.splits)}",
            key="env.name",
            got=env.name,
        )
    tasks = {}
    for split, wanted in (("heldout", config.n), ("heldout_family", config.n_family)):
        if split in source.splits and wanted:
            length = source.length(split)
            tasks[split] = wanted if length is None else min(wanted, length)
    return tasks


def evaluate(rollouts: RolloutWorkers, checkpoint: str, config: EvalConfig, tasks: Mapping[str, int]) -> Evaluation:
    """Loads the checkpoint into the engines and measures it on `held_out` tasks. Raises TooManyFailures when rewards
    are missing."""
    rollouts.load(checkpoint)
    return measure(rollouts, config, tasks)


def measure(rollouts: RolloutWorkers, config: EvalConfig, tasks: Mapping[str, int]) -> Evaluation:
    """Measures whatever the engines serve now. Raises TooManyFailures, also when no episode has a reward."""
    sampled, greedy = (_run(rollouts, config, "heldout", tasks["heldout"], heat) for heat in (1.0, 0.0))
    few = tasks.get("heldout_family", 0)
    family, family_greedy = (_run(rollouts, config, "heldout_family", few, heat) for heat in (1.0, 0.0))
    rewards = _rewards(sampled)
    return Evaluation(
        pass_at_1=_mean(rewards),
        ci95=interval(rewards),
        greedy=_mean(_rewards(greedy)),
        n=len(rewards),
        by_family=_split(sampled + family, lambda e: e.family),
        greedy_by_family=_split(greedy + family_greedy, lambda e: e.family),
        by_level=_split(sampled + family, lambda e: f"{e.family}/{e.level}"),
        parsed=_mean([float(e.stop_reason is not StopReason.PARSE_ERROR) for e in sampled]),
        missing=sum(reward_of(e) is None for e in sampled + greedy + family + family_greedy),
        splits=dict(tasks),
    )


def _run(rollouts: RolloutWorkers, config: EvalConfig, split: str, n: int, temperature: float) -> list[Episode]:
    if n == 0:
        return []
    seeds = np.random.default_rng([config.seed, int(temperature > 0)]).integers(2**62, size=n)
    thinking = config.thinking, config.thinking_effort
    jobs = [
        EpisodeJob(name := f"eval-{split}-{i}", name, TaskRef(split, i, config.seed), int(seed), *thinking)
        for i, seed in enumerate(seeds)
    ]
    params = SamplingParams(temperature=temperature, max_tokens=config.max_tokens)
    groups = rollouts.run(jobs, params)
    check_failures(groups, _FAILURE_LIMIT)
    episodes = [episode for group in groups for episode in group.episodes]
    if split == "heldout" and not _rewards(episodes):
        raise TooManyFailures(f"none of {n} episodes of {split} has a reward, so there is nothing to measure")
    return episodes


def _rewards(episodes: Sequence[Episode]) -> list[float]:
    return [reward for reward in map(reward_of, episodes) if reward is not None]


def _split(episodes: Sequence[Episode], key: Any) -> dict[str, float]:
    members: dict[str, list[float]] = {}
    for episode in episodes:
        reward = reward_of(episode)
        if reward is not None:
            members.setdefault(key(episode), []).append(reward)
    return {name: _mean(values) for name, values in sorted(members.items())}


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else math.nan


def interval(rewards: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean reward: Wilson's where all are shares from 0 to 1, else from the bootstrap."""
    if all(0 <= reward <= 1 for reward in rewards):
        return wilson(sum(rewards), len(rewards))
    return bootstrap(rewards)


def bootstrap(rewards: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """The percentile interval, 95 %, of the means of as many rewards drawn from these; equal rewards give equal ends.

    The same rewards give the same interval.
    """
    values = np.asarray(rewards, np.float64)
    rng = np.random.default_rng(0)
    means = [float(values[rng.integers(len(values), size=len(values))].mean()) for _ in range(draws)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def wilson(passed: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a pass rate, 95 % by default."""
    if n == 0:
        return (math.nan, math.nan)
    rate = passed / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return (max(0.0, centre - half), min(1.0, centre + half))  # rounding may put 0 and 1 a bit outside
