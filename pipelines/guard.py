"""The drift guard: says when a policy leaves what it was trained from or for, and stops the run where it is told to.

Each step gives four numbers, averaged over the last `guard.window` steps:

    guard/kl          mean KL(sampler to learner) of trained tokens, nats (`mismatch/kl/mean`)
    guard/entropy     entropy of the learner's distribution, as a share of that of the first `window` steps
    guard/length      sampled tokens of a turn, as a multiple of that of the first `window` steps
    guard/part_share  share of the largest named part in the sum of all parts of the rewards (by magnitude)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3rl.data import PlayedGroup
from k3rl.pipelines.configs import GuardConfig
from k3rl.run import Accumulator, RunStopped
from k3rl.types import Scored

_SOURCES = {"kl": "mismatch/kl/mean", "entropy": "policy/entropy/mean", "length": "response_length/mean"}
_ADVICE = {
    "kl": "lower the rates or max_off_policy_steps, replay routes, or set correction.type",
    "entropy": "lower the rates, or raise sampling.temperature or the number of tasks",
    "length": "look at long and short answers (`k3rl tail`), and at what the reward pays for",
    "part_share": "look at what earns that part (`k3rl tail`), and weigh the parts anew",
}


class Drifted(RunStopped):
    """The policy drifted beyond a limit of `guard`; the state of the step is saved."""


@dataclass(frozen=True)
class Drift:
    """One limit that is passed. name: of the key below `guard`."""

    name: str
    value: float
    limit: float
    what: str

    def __str__(self) -> str:
        return f"{self.what} is {self.value:.3g}, beyond guard.{self.name} {self.limit:g}"


def drifted(drifts: Sequence[Drift], stage: str, step: int) -> Drifted:
    """The error that ends a run after `step`, at these limits."""
    listed = "\n".join(f"  {drift}\n    {_ADVICE[drift.name]}" for drift in drifts)
    return Drifted(
        f"{stage} drifted and was stopped after step {step}, whose state is saved:\n{listed}\n"
        "Go on from before the drift with --resume --resume-from previous (or step_N) and other keys, or from here "
        "with another limit, or with guard.at_limit warn"
    )


class Guard:
    """Looks at the metrics of each step. `state` and `restore` carry what it compares with."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._last: dict[str, list[float]] = {}
        self._first: dict[str, list[float]] = {}
        self._said: set[str] = set()

    def look(self, values: Mapping[str, float], groups: Sequence[PlayedGroup]) -> tuple[list[Drift], Accumulator]:
        """The limits that are passed after this step, and the numbers behind them."""
        seen = {name: values[source] for name, source in _SOURCES.items() if source in values}
        if (share := largest_part_share(groups)) is not None:
            seen["part_share"] = share[1]
        for name, value in seen.items():
            if len(self._first.setdefault(name, [])) < self._config.window:
                self._first[name].append(value)
            self._last[name] = [*self._last.get(name, []), value][-self._config.window :]
        metrics, drifts = Accumulator(), []
        part = "" if share is None else share[0]
        for name, value in self._numbers().items():
            metrics.add(f"guard/{name}", value)
            if (drift := self._beyond(name, value, part)) is not None:
                drifts.append(drift)
        metrics.add("guard/passed_limits", len(drifts))
        return drifts, metrics

    def news(self, drifts: Sequence[Drift]) -> list[str]:
        """What a person should read: a limit when it is passed, and once more when the policy is back."""
        names = {drift.name for drift in drifts}
        notes = [f"warning: {drift}; {_ADVICE[drift.name]}" for drift in drifts if drift.name not in self._said]
        notes += [f"back within guard.{name}" for name in sorted(self._said - names)]
        self._said = names
        return notes

    def _numbers(self) -> dict[str, float]:
        """The guard's numbers that can be known by now."""
        found = {}
        for name, last in self._last.items():
            mean, first = sum(last) / len(last), self._first[name]
            if name in ("kl", "part_share"):
                found[name] = mean
            elif len(first) == self._config.window and sum(first) > 0:
                found[name] = mean * len(first) / sum(first)
        return found

    def _beyond(self, name: str, value: float, part: str) -> Drift | None:
        limit = getattr(self._config, name)
        if limit is None or len(self._last[name]) < self._config.window:
            return None
        match name:
            case "kl":
                passed, what = value > limit, "mean KL(sampler to learner) in nats"
            case "entropy":
                passed, what = value < limit, "entropy as a share of that of the first steps"
            case "length":
                passed = not 1 / limit <= value <= limit
                what = "length of turns as a multiple of that of the first steps"
            case _:
                began = sum(self._first[name]) / len(self._first[name])
                passed, what = value > limit >= began, f"the share of the reward's part {part!r}"
        return Drift(name, value, limit, what) if passed else None

    def state(self) -> dict[str, Any]:
        return {"first": self._first, "last": self._last, "said": sorted(self._said)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`; one of an older k3rl has nothing to compare with."""
        self._first, self._last = ({k: list(v) for k, v in state.get(key, {}).items()} for key in ("first", "last"))
        self._said = set(state.get("said", ()))


def largest_part_share(groups: Sequence[PlayedGroup]) -> tuple[str, float] | None:
    """The part of the rewards that is largest by the sum of its magnitudes, and its share in the sum of all.

    None where rewards have fewer than two parts, or all of them are zero.
    """
    sums: dict[str, float] = {}
    for group in groups:
        for episode in group.episodes:
            if isinstance(episode.score, Scored):
                for name, value in episode.score.parts.items():
                    sums[name] = sums.get(name, 0.0) + abs(value)
    total = sum(sums.values())
    if len(sums) < 2 or total == 0:
        return None
    name = max(sums, key=lambda part: sums[part])
    return name, sums[name] / total
