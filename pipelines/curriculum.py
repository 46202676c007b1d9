"""The curriculum: which task comes next, families by their shares, levels where the policy is neither lost nor done."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from k3rl.actors import EpisodeJob, TaskRef
from k3rl.config import ConfigError
from k3rl.data import PlayedGroup
from k3rl.envs import TaskSource
from k3rl.pipelines.configs import EnvConfig
from k3rl.pipelines.rollout_metrics import reward_of

_FLOOR = 0.02  # a level that looks solved or hopeless is still drawn now and then
_MEMORY = 0.8  # how much of the old pass rate an update keeps


class Curriculum:
    """Draws groups of episodes. Levels are drawn in proportion to p(1 - p), p the level's recent pass rate.

    A train split that has an end is gone through again and again, each time in another order; so is each part of it
    where families or levels are drawn. All draws come from (seed, step), and `state`/`restore` carry pass rates, the
    places in finite splits and the families that are left out, so a resumed run draws the same.
    """

    def __init__(self, config: EnvConfig, seed: int, source: TaskSource | None = None) -> None:
        """source: asked how many tasks its train split has; None: without end."""
        self._given = {name: config.families[name] for name in sorted(config.families)}
        self._levels = config.levels
        self._seed = seed
        self._source = source
        self.pass_rates: dict[str, float] = {}
        self.left_out: tuple[str, ...] = ()
        self._drawn: dict[str, int] = {}  # tasks drawn of each finite part
        self._before: tuple[int, dict[str, int]] = (-1, {})  # the step drawn last, and `_drawn` before it

    def skip(self, families: Collection[str]) -> None:
        """Draws no more tasks of these families, unless none would remain."""
        left_out = tuple(name for name in self._given if name in families or name in self.left_out)
        if len(left_out) < len(self._given):
            self.left_out = left_out

    def jobs(self, step: int, groups: int, group_size: int, prefix: str) -> list[EpisodeJob]:
        """`groups` tasks, `group_size` episodes of each. Ids are unique within a run: `prefix` names the stage.

        Drawing the newest step again gives the same tasks. Raises ConfigError for a train split without a task.
        """
        if step == self._before[0]:
            self._drawn = dict(self._before[1])
        self._before = step, dict(self._drawn)
        rng = np.random.default_rng([self._seed, step])
        kept = {name: share for name, share in self._given.items() if name not in self.left_out}
        shares = np.array(list(kept.values())) / sum(kept.values())
        jobs = []
        for number in range(groups):
            family = str(rng.choice(list(kept), p=shares)) if kept else None
            level = self._draw_level(family, rng)
            index = self._index(step * groups + number, level, family)
            task = TaskRef("train", index, self._seed, level, family)
            group = f"{prefix}-{step}-{number}"
            for member in range(group_size):
                jobs.append(EpisodeJob(f"{group}-{member}", group, task, int(rng.integers(2**62))))
        return jobs

    def _index(self, number: int, level: int | None, family: str | None) -> int:
        """The index of the next task of this part of the split: `number` where it has no end."""
        length = None if self._source is None else self._source.length("train", level=level, family=family)
        if length is None:
            return number
        part = f"{'any' if family is None else family}/{'any' if level is None else level}"
        if length < 1:
            raise ConfigError(f"the train split has no task of {part} (family/level)", key="env", got=part)
        epoch, place = divmod(self._drawn.get(part, 0), length)
        self._drawn[part] = self._drawn.get(part, 0) + 1
        return int(np.random.default_rng([self._seed, epoch, length]).permutation(length)[place])

    def _draw_level(self, family: str | None, rng: np.random.Generator) -> int | None:
        levels = self._levels.get(family or "", ())
        if not levels:
            return None
        rates = np.array([self.pass_rates.get(f"{family}/{level}", 0.5) for level in levels])
        weights = np.maximum(rates * (1 - rates), _FLOOR)
        return int(rng.choice(levels, p=weights / weights.sum()))

    def update(self, groups: Iterable[PlayedGroup]) -> None:
        """Moves the pass rate of every level that was run, by the rewards that are trained on (a cheat has 0).

        A pass rate is a share: a reward below 0 or above 1 counts as 0 or 1. Episodes without a reward say nothing.
        """
        seen: dict[str, list[float]] = {}
        for group in groups:
            for episode in group.episodes:
                if (reward := reward_of(episode)) is not None:
                    seen.setdefault(f"{episode.family}/{episode.level}", []).append(min(1.0, max(0.0, reward)))
        for key, rewards in seen.items():
            mean = sum(rewards) / len(rewards)
            old = self.pass_rates.get(key)
            self.pass_rates[key] = mean if old is None else _MEMORY * old + (1 - _MEMORY) * mean

    def state(self) -> dict[str, Any]:
        return {
            "pass_rates": dict(self.pass_rates),
            "left_out": list(self.left_out),
            "drawn": dict(self._drawn),
            "before": [self._before[0], dict(self._before[1])],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; one of an older k3rl has pass rates only."""
        self.pass_rates = dict(state["pass_rates"])
        self.skip(state.get("left_out", ()))
        self._drawn = dict(state.get("drawn", {}))
        step, before = state.get("before", (-1, {}))
        self._before = step, dict(before)
