"""The held-out measurement: tasks, seeds and batch shapes are always the same, so a checkpoint has one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from k3rl.actors import EpisodeJob, RolloutWorkers, TaskRef
from k3rl.config import ConfigError
from k3rl.data import EpisodeHeader
from k3rl.envs import make
from k3rl.pipelines.configs import EnvConfig, EvalConfig, RolloutStageConfig
from k3rl.pipelines.rollout_metrics import TooManyFailures, check_failures, reward_of
from k3rl.run import Accumulator
from k3rl.types import SamplingParams, StopReason

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


def run_evaluations(config: RolloutStageConfig) -> RunEvaluations:
    """Those of a stage. Raises ConfigError where `evaluation.every` is set and nothing is held out."""
    chosen = config.evaluation
    if chosen.every is None:
        return RunEvaluations(chosen, 0)
    return RunEvaluations(chosen, held_out(config.env, chosen.replace(n=chosen.every_n, n_family=0))["heldout"])


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


@dataclass
class RunEvaluations:
    """Evaluations of a run that goes on: when one is due, of what, and the best so far.

    tasks: held-out tasks of each; 0 for a run without.
    """

    config: EvalConfig
    tasks: int
    best: tuple[int, float] | None = None  # (trained steps, mean reward)

    def due(self, trained: int) -> bool:
        """Whether the weights after so many steps are to be measured."""
        return bool(self.tasks and self.config.every) and trained % (self.config.every or 1) == 0

    def notes(self) -> dict[str, Any]:
        """What a stage's result says of the best one."""
        return {} if self.best is None else {"best_evaluation": {"step": self.best[0], "mean": self.best[1]}}

    def state(self) -> list[float] | None:
        return None if self.best is None else list(self.best)

    def restore(self, state: Sequence[float] | None) -> None:
        self.best = None if state is None else (int(state[0]), state[1])

    def jobs(self, trained: int) -> list[EpisodeJob]:
        """The same tasks and seeds each time, under names of their own."""
        return [
            replace(job, episode_id=f"{job.episode_id}-{trained}", group_id=f"{job.group_id}-{trained}")
            for job in _jobs(self.config, "heldout", self.tasks, 1.0)
        ]

    def taken(self, env: str, trained: int, found: Sequence[float | None]) -> tuple[Accumulator, str]:
        """Metrics of one that is done, and what a person should read of it. found: reward of each episode, if any."""
        metrics, rewards = Accumulator(), [reward for reward in found if reward is not None]
        metrics.add(f"eval/{env}/step", trained)
        metrics.add(f"eval/{env}/missing", len(found) - len(rewards))
        if not rewards:
            return metrics, f"evaluation of step {trained}: no episode has a reward"
        mean, (low, high) = _mean(rewards), interval(rewards)
        metrics.add(f"eval/{env}/mean", sum(rewards), len(rewards))
        metrics.add(f"eval/{env}/pass_rate", sum(reward >= 1 for reward in rewards), len(rewards))
        metrics.add(f"eval/{env}/ci_low", low)
        metrics.add(f"eval/{env}/ci_high", high)
        if self.best is None or mean > self.best[1]:
            self.best = trained, mean
        metrics.add(f"eval/{env}/best_step", self.best[0])
        said = f"evaluation of step {trained}: {mean:.3f} ({low:.3f} to {high:.3f}, {len(rewards)} tasks)"
        return metrics, f"{said}; the best is that of step {self.best[0]}, {self.best[1]:.3f}"


def _jobs(config: EvalConfig, split: str, n: int, temperature: float) -> list[EpisodeJob]:
    seeds = np.random.default_rng([config.seed, int(temperature > 0)]).integers(2**62, size=n)
    thinking = config.thinking, config.thinking_effort
    return [
        EpisodeJob(name := f"eval-{split}-{i}", name, TaskRef(split, i, config.seed), int(seed), *thinking)
        for i, seed in enumerate(seeds)
    ]


def _run(rollouts: RolloutWorkers, config: EvalConfig, split: str, n: int, temperature: float) -> list[EpisodeHeader]:
    if n == 0:
        return []
    jobs = _jobs(config, split, n, temperature)
    params = SamplingParams(temperature=temperature, max_tokens=config.max_tokens)
    groups = rollouts.run(jobs, params)
    check_failures(groups, _FAILURE_LIMIT)
    episodes = [episode for group in groups for episode in group.episodes]
    if split == "heldout" and not _rewards(episodes):
        raise TooManyFailures(f"none of {n} episodes of {split} has a reward, so there is nothing to measure")
    return episodes


def _rewards(episodes: Sequence[EpisodeHeader]) -> list[float]:
    return [reward for reward in map(reward_of, episodes) if reward is not None]


def _split(episodes: Sequence[EpisodeHeader], key: Any) -> dict[str, float]:
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
    # Rounding may put an end a bit outside of [0, 1], or of a rate of 0 or 1 past it.
    return (min(max(0.0, centre - half), rate), max(min(1.0, centre + half), rate))
