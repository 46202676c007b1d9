"""A grader that lets a judge compare the answers of a group, in pairs and in both orders."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from k3rl.config import ConfigError
from k3rl.envs.base import Environment, Rubric
from k3rl.envs.config import JudgeConfig
from k3rl.envs.judge.endpoint import Endpoint, HTTPEndpoint, JudgeFailed
from k3rl.envs.judge.shown import Submission
from k3rl.envs.judge.tournament import Pair, bradley_terry, schedule, win_rates
from k3rl.envs.judge.verdict import Asking, Criterion, compare, write_rubric
from k3rl.tokens import shown_text
from k3rl.types import Episode, Failed, FailureKind, Score, Scored, Task


@dataclass(frozen=True)
class JudgeGrader:
    """An `Environment.grader`; see `judged`."""

    config: JudgeConfig
    gate: Callable[..., Rubric] | None = None
    endpoint: Endpoint | None = None

    @property
    def range(self) -> tuple[float, float]:
        """Rewards are win rates."""
        return (0.0, 1.0)

    @property
    def compares(self) -> bool:
        """Games are played between the answers of a group."""
        return True

    def __call__(self, provider: str = "bwrap", workers: int = 1) -> JudgeRubric:
        gate = None if self.gate is None else self.gate(provider=provider, workers=workers)
        return JudgeRubric(self.config, self.endpoint, gate)


def judged(
    *, gate: Callable[..., Rubric] | None = None, endpoint: Endpoint | None = None, **fields: Any
) -> JudgeGrader:
    """The grader of an environment whose answers a judge compares. fields: of `JudgeConfig`.

    gate: `Rubric.of(...)`, or another grader; an answer that it does not score above 0 keeps that score and meets
    nobody.
    """
    return JudgeGrader(JudgeConfig(**fields), gate, endpoint)


def with_judge(environment: Environment, config: JudgeConfig) -> Environment:
    """An environment whose answers this judge compares, once its own grader has scored them above 0.

    Raises ConfigError for one whose rewards come from what is done in an episode: there is no answer to compare.
    """
    if environment.judged_while_played:
        raise ConfigError(
            f"env.judge compares answers, and {environment.name} gives rewards while it is played; leave env.judge out",
            key="env.judge",
            got=config.model,
        )
    low, high = environment.reward_limits
    return replace(
        environment, grader=JudgeGrader(config, environment.grader), reward_range=(min(low, 0), max(high, 1))
    )


class JudgeRubric(Rubric):
    """Answers to the same task are a group. What the gate scores above 0 plays, or keeps that score where it is alone
    and there is no reference; all else keeps what the gate says. The reward is the share of games won, a tie is half of
    one.

    Where `task.hidden` has a text "reference", it plays too, unscored, so that a single answer can be judged. `parts`:
    games and too_long. Failed when the judge fails: without a rubric all of a group, else whoever lacks half of the
    games. Empty answers lose unread.
    """

    def __init__(self, config: JudgeConfig, endpoint: Endpoint | None = None, gate: Rubric | None = None) -> None:
        self._config = config
        self._gate = gate
        self._asking = Asking(endpoint or _endpoint(config), config.attempts, config.reads, config.shown_chars)
        self._pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix="k3rl-judge")
        self._rubric_of = lru_cache(maxsize=1024)(self._write_rubric)

    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        """One score per (task with hidden part, answer), in order."""
        return self._compared(items, None if self._gate is None else self._gate.score_batch(items))

    def score_episodes(self, items: Sequence[tuple[Task, Episode]]) -> list[Score]:
        """One score per (task with hidden part, episode), in order; the gate sees the episodes, the judge answers."""
        answers = [(task, episode.answer) for task, episode in items]
        return self._compared(answers, None if self._gate is None else self._gate.score_episodes(items))

    def _compared(self, items: Sequence[tuple[Task, str]], passed: Sequence[Score] | None) -> list[Score]:
        """passed: what the gate says; those that it lets through play."""
        gated: list[Score | None] = [None] * len(items)
        if passed is not None:
            gated = [None if isinstance(one, Scored) and one.reward > 0 else one for one in passed]
        groups: dict[str, list[int]] = {}
        for place, (task, _) in enumerate(items):
            if gated[place] is None:
                groups.setdefault(task.id, []).append(place)
        scores = dict(enumerate(gated))
        for places in groups.values():
            task = items[places[0]][0]
            if passed is not None and len(places) == 1 and not isinstance((task.hidden or {}).get("reference"), str):
                scores[places[0]] = passed[places[0]]  # nobody is left to compare it with
                continue
            scores |= zip(places, self._group(task, [items[place][1] for place in places]), strict=True)
        return [score if score is not None else Failed("not judged") for score in scores.values()]

    def close(self) -> None:
        """End the threads, and the gate."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._gate is not None:
            self._gate.close()

    # ------------------------------------------------------------------------------------------------- a group

    def _group(self, task: Task, answers: Sequence[str]) -> list[Score]:
        reference = (task.hidden or {}).get("reference")
        texts = [*answers, reference] if isinstance(reference, str) else list(answers)
        if len(texts) < 2:
            return [Failed("a judge compares: one answer alone, without a hidden reference, has no reward")]
        players = [Submission.of(text) for text in texts]
        long = self._too_long(task, players)
        pairs = schedule(len(players), self._config.opponents, f"{self._config.seed}/{task.id}")
        try:
            games, missing = self._games(task, players, long, pairs)
        except JudgeFailed as error:
            return [Failed(f"judge: {error}", FailureKind.DIED) for _ in answers]
        rate = win_rates if self._config.reward == "win_rate" else bradley_terry
        rewards = rate(len(players), games)
        scores: list[Score] = []
        for number in range(len(answers)):
            played = sum(number in pair for pair in games)
            reward = rewards[number]
            if reward is None or 2 * played < sum(number in pair for pair in pairs):
                reason = next((why for pair, why in missing.items() if number in pair), "it met nobody")
                scores.append(Failed(f"judge: {reason}", FailureKind.DIED))
            else:
                scores.append(Scored(reward, {"games": float(played), "too_long": float(long[number])}))
        return scores

    def _too_long(self, task: Task, players: Sequence[Submission]) -> list[bool]:
        given = task.data.get("length")
        reference = given if isinstance(given, int | float) else statistics.median(one.length for one in players)
        limit = max(self._config.length_ratio * reference, self._config.length_floor)
        return [one.length > limit for one in players]

    def _games(
        self, task: Task, players: Sequence[Submission], long: Sequence[bool], pairs: Sequence[Pair]
    ) -> tuple[dict[Pair, float], dict[Pair, str]]:
        """(results of the first of each pair, why others have none). Raises JudgeFailed without a rubric."""
        worth = [0 if one.empty else 1 if too else 2 for one, too in zip(players, long, strict=True)]
        games = {(i, j): 0.5 * (1 + (worth[i] > worth[j]) - (worth[i] < worth[j])) for i, j in pairs}
        open_ = [(i, j) for i, j in pairs if worth[i] == worth[j] == 2 and players[i] != players[j]]
        missing: dict[Pair, str] = {}
        if open_:
            request = "\n".join(shown_text(message.content) for message in task.messages)
            rubric = self._rubric_of(request)
            asked = [self._pool.submit(self._both_orders, request, rubric, players[i], players[j]) for i, j in open_]
            for pair, future in zip(open_, asked, strict=True):
                try:
                    games[pair] = future.result()
                except JudgeFailed as error:
                    del games[pair]
                    missing[pair] = str(error)
        return games, missing

    def _both_orders(self, request: str, rubric: Sequence[Criterion], one: Submission, other: Submission) -> float:
        """What `one` gets: the mean of the games in which it stands first and second."""
        first = compare(self._asking, request, rubric, one, other)
        second = compare(self._asking, request, rubric, other, one)
        return (self._result(*first) + 1 - self._result(*second)) / 2

    def _result(self, a: float, b: float) -> float:
        return 0.5 if abs(a - b) <= self._config.tie_margin else float(a > b)

    def _write_rubric(self, request: str) -> tuple[Criterion, ...]:
        return write_rubric(self._asking, request, self._config.advice)


def _endpoint(config: JudgeConfig) -> Endpoint:
    return HTTPEndpoint(
        config.base_url,
        config.model,
        key_variable=config.key_variable,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        timeout_s=config.timeout_s,
        attempts=config.attempts,
    )
