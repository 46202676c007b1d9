"""The curriculum: which task comes next, families by their shares, levels where the policy is neither lost nor done."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from k3rl.actors import EpisodeJob, TaskRef
from k3rl.pipelines.configs import EnvConfig
from k3rl.types import Group, Scored

_FLOOR = 0.02  # a level that looks solved or hopeless is still drawn now and then
_MEMORY = 0.8  # how much of the old pass rate an update keeps


class Curriculum:
    """Draws groups of episodes. Levels are drawn in proportion to p(1 - p), p the level's recent pass rate.

    All draws come from (seed, step), and `state`/`restore` carry the pass rates, so a resumed run draws the same.
    """

    def __init__(self, config: EnvConfig, seed: int) -> None:
        self._families = sorted(config.families)
        shares = np.array([config.families[name] for name in self._families])
        self._shares = shares / shares.sum()
        self._levels = config.levels
        self._seed = seed
        self.pass_rates: dict[str, float] = {}

    def skip(self, families: Collection[str]) -> None:
        """Draws no more tasks of these families, unless none would remain."""
        kept = [name for name in self._families if name not in families]
        if kept and kept != self._families:
            shares = np.array([share for name, share in zip(self._families, self._shares, strict=True) if name in kept])
            self._families, self._shares = kept, shares / shares.sum()

    def jobs(self, step: int, groups: int, group_size: int, prefix: str) -> list[EpisodeJob]:
        """`groups` tasks, `group_size` episodes of each. Ids are unique within a run: `prefix` names the stage."""
        rng = np.random.default_rng([self._seed, step])
        jobs = []
        for number in range(groups):
            family = str(rng.choice(self._families, p=self._shares)) if self._families else None
            level = self._draw_level(family, rng)
            task = TaskRef("train", step * groups + number, self._seed, level, family)
            group = f"{prefix}-{step}-{number}"
            for member in range(group_size):
                jobs.append(EpisodeJob(f"{group}-{member}", group, task, int(rng.integers(2**62))))
        return jobs

    def _draw_level(self, family: str | None, rng: np.random.Generator) -> int | None:
        levels = self._levels.get(family or "", ())
        if not levels:
            return None
        rates = np.array([self.pass_rates.get(f"{family}/{level}", 0.5) for level in levels])
        weights = np.maximum(rates * (1 - rates), _FLOOR)
        return int(rng.choice(levels, p=weights / weights.sum()))

    def update(self, groups: Iterable[Group]) -> None:
        """Moves the pass rate of every level that was run. Episodes without a reward say nothing."""
        seen: dict[str, list[float]] = {}
        for group in groups:
            for episode in group.episodes:
                if isinstance(episode.score, Scored):
                    seen.setdefault(f"{episode.family}/{episode.level}", []).append(episode.score.reward)
        for key, rewards in seen.items():
            mean = sum(rewards) / len(rewards)
            old = self.pass_rates.get(key)
            self.pass_rates[key] = mean if old is None else _MEMORY * old + (1 - _MEMORY) * mean

    def state(self) -> dict[str, Any]:
        return {"pass_rates": self.pass_rates}

    def restore(self, state: dict[str, Any]) -> None:
        self.pass_rates = dict(state["pass_rates"])
