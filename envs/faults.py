"""What becomes of an environment that misbehaves: typed outcomes, retries within limits, a circuit breaker.

An environment may raise, hang, flood, lie about its reward, or die with its process. Each gives `Failed` with a kind,
never a reward of 0. Such an episode is played again a few times; what keeps failing is counted, and when most of the
last attempts failed the breaker opens: the run stops with one message, or goes on without that part by config.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from k3rl.config import Config, K3Error, MissingResource
from k3rl.envs.base import Environment, Rubric
from k3rl.types import Episode, Failed, FailureKind, Score, Scored, Task

_BLAMELESS = (FailureKind.ENGINE, FailureKind.TRIPPED)


class FaultConfig(Config):
    """How much misbehaviour of an environment a run bears."""

    retries: int = Field(1, ge=0)
    """How many times an episode without a reward is played again."""
    call_s: float = Field(600.0, gt=0)
    """How long one call of the environment may take, such as one step."""
    blocked_s: float = Field(120.0, gt=0)
    """How long code of an environment may hold its actor without giving way before it is stopped, by force if need
    be."""
    deadline_s: float | None = Field(None, gt=0)
    """How long an actor may be silent, or take to grade, before it is ended and replaced. None: as long as `blocked_s`
    takes to end code that does not give way, and call_timeout_s for grades. How long an episode may take is said by its
    task's budgets."""
    breaker_window: int = Field(64, ge=1)
    """The breaker looks at so many of the last attempts."""
    breaker_attempts: int = Field(16, ge=1)
    """It does not open before it has seen so many."""
    breaker_share: float = Field(0.5, gt=0, le=1)
    """It opens when this share of them failed."""
    on_trip: Literal["stop", "go_on"] = "stop"
    """Stop the run, or go on without the part that tripped: a family of tasks where the mixture names families, else
    the environment. Stops all the same when nothing is left."""


class EnvironmentTripped(K3Error):
    """Most of the last attempts at an environment failed."""


class EngineFailed(RuntimeError):
    """The policy gave no tokens: the engine's fault, not the environment's."""


# ------------------------------------------------------------------------------------------------------- the breaker


class Breaker:
    """The last attempts at each part of an environment, and which parts are skipped."""

    def __init__(self, config: FaultConfig, env: str) -> None:
        self._config = config
        self._env = env
        self._attempts: dict[str | None, deque[Failed | None]] = {}
        self.open: dict[str | None, str] = {}  # part -> why

    def saw(self, part: str | None, score: Score) -> None:
        """One attempt. Raises EnvironmentTripped when it opens the breaker and the run is to stop."""
        failure = score if isinstance(score, Failed) else None
        if part in self.open or (failure is not None and failure.kind in _BLAMELESS):
            return
        seen = self._attempts.setdefault(part, deque(maxlen=self._config.breaker_window))
        seen.append(failure)
        failed = [one for one in seen if one is not None]
        if len(seen) < self._config.breaker_attempts or len(failed) < self._config.breaker_share * len(seen):
            return
        self.open[part] = self._message(part, failed, len(seen))
        if self._config.on_trip == "stop":
            raise EnvironmentTripped(self.open[part])

    def check(self, parts: Sequence[str | None]) -> None:
        """Raises EnvironmentTripped when all of these are skipped."""
        if parts and all(part in self.open for part in parts):
            raise EnvironmentTripped("\n".join(self.open[part] for part in dict.fromkeys(parts)))

    def tripped(self, part: str | None) -> Failed:
        """The score of an episode that is not played."""
        return Failed(f"skipped: {self.open[part].splitlines()[0]}", FailureKind.TRIPPED)

    def _message(self, part: str | None, failed: Sequence[Failed], seen: int) -> str:
        name = self._env if part is None else f"{self._env}, family {part}"
        kinds = Counter(str(one.kind) for one in failed)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        reasons = Counter(one.reason for one in failed).most_common(3)
        lines = [
            f"environment {name}: {len(failed)} of the last {seen} attempts gave no reward ({counts})",
            *(f"  {count} x {reason}" for reason, count in reasons),
            "Mend the environment (`k3rl env check` finds most faults), or set --env.faults.on-trip go_on to train "
            "without it; missing rewards are never trained on",
        ]
        return "\n".join(lines)


# -------------------------------------------------------------------------------------------------- honest scores


def honest(score: object, limits: tuple[float, float]) -> Score:
    """The score if it is one and its reward is a number within `limits`, else Failed."""
    if not isinstance(score, Score):
        return Failed(f"the grader gave a {type(score).__name__}, which is no score", FailureKind.BAD_REWARD)
    if not isinstance(score, Scored):
        return score
    try:
        reward = float(score.reward)
        finite = math.isfinite(reward) and all(math.isfinite(float(part)) for part in score.parts.values())
    except (TypeError, ValueError):
        reward, finite = math.nan, False
    if not finite:
        shown = score.reward if not math.isfinite(reward) else dict(score.parts)
        return Failed(f"the grader gave {shown!r:.200}; rewards and parts are finite numbers", FailureKind.BAD_REWARD)
    low, high = limits
    if not low <= reward <= high:
        return Failed(f"the reward {reward:g} is outside the declared [{low:g}, {high:g}]", FailureKind.BAD_REWARD)
    return replace(score, reward=reward)


def grade(environment: Environment, rubric: Rubric, items: Sequence[tuple[Task, Episode]]) -> list[Score]:
    """Honest scores, in order. Where a batch raises, each item is graded by itself, so that only its own fails.

    MissingResource is raised: no answer can be judged on this machine.
    """
    try:
        scores = rubric.score_episodes(items)
        if len(scores) != len(items):
            raise ValueError(f"the grader gave {len(scores)} scores for {len(items)} answers")
    except MissingResource:
        raise
    except Exception as error:  # a grader is user code; whatever it raises is its own failure
        if len(items) == 1:
            return [Failed(f"grader: {type(error).__name__}: {error}"[:500], FailureKind.RAISED)]
        return [grade(environment, rubric, [item])[0] for item in items]
    limits = environment.reward_limits
    return [honest(score, limits) for score in scores]
