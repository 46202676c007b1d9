"""Environments that misbehave: typed outcomes, honest scores, and when the breaker opens."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from k3rl.config import MissingResource
from k3rl.envs import Action, Env, EpisodeContext, Message, Observation, Rubric, StepResult, Task, make
from k3rl.envs.faults import Breaker, EnvironmentTripped, FaultConfig, grade, honest
from k3rl.envs.guard import FORKED, MAX_SAID_CHARS, BlockWatch, EnvironmentFault, GuardedEnv
from k3rl.types import Episode, Failed, FailureKind, Invalid, Score, Scored, StopReason

TASK = Task("t/0", "t", (Message("user", "x"),), "f", hidden={})
CONFIG = FaultConfig(call_s=0.3, blocked_s=0.2)


class Misbehaving(Env):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        return Observation(task.messages)

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(0)
        if self.fault == "spins":
            while True:
                try:
                    time.monotonic()
                except Exception:  # the fault itself: code that a raised deadline cannot stop
                    continue
        if self.fault == "waits":
            await asyncio.sleep(30)
        if self.fault == "floods":
            return FLOOD
        if self.fault == "raises timeout":
            raise TimeoutError("its own")
        return StepResult(done=True, answer="fine")


# Made beforehand: on a busy machine that alone may take longer than a step may hold its actor.
FLOOD = StepResult(Observation((Message("user", "x" * (MAX_SAID_CHARS + 1)),)))


def step(fault: str) -> StepResult:
    async def play() -> StepResult:
        watch = BlockWatch(CONFIG.blocked_s)
        env = GuardedEnv(Misbehaving(fault), CONFIG, watch)
        try:
            await env.reset(TASK, EpisodeContext())
            return await env.step(Action(Message("assistant", "y")))
        finally:
            await env.close()
            watch.close()

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("fault", "kind", "why"),
    [
        ("spins", FailureKind.HUNG, "held its actor for 0.2 s"),
        ("waits", FailureKind.HUNG, "no answer within 0.3 s"),
        ("floods", FailureKind.FLOODED, "characters in one step"),
    ],
)
def test_code_that_hangs_or_floods_costs_its_own_call(fault: str, kind: FailureKind, why: str) -> None:
    with pytest.raises(EnvironmentFault, match=why) as error:
        step(fault)
    assert error.value.kind is kind


def test_code_that_behaves_is_left_alone_and_its_own_errors_pass() -> None:
    assert step("").answer == "fine"
    with pytest.raises(TimeoutError, match="its own"):
        step("raises timeout")


def test_code_that_cannot_be_interrupted_ends_its_process() -> None:
    pid = os.fork()
    if pid == 0:
        os.close(2)
        watch = BlockWatch(0.1)
        with watch.step():
            time.sleep(30)  # an exception waits until it returns
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 77


def test_a_fork_that_code_of_an_environment_makes_does_not_play_on() -> None:
    children: list[int] = []

    class Forking(Misbehaving):
        async def step(self, action: Action) -> StepResult:
            pid = os.fork()
            if pid:
                children.append(pid)
            return StepResult(done=True, answer="fine")

    async def play() -> StepResult:
        watch = BlockWatch(5)
        try:
            return await GuardedEnv(Forking(""), CONFIG, watch).step(Action(Message("assistant", "")))
        finally:
            watch.close()

    assert asyncio.run(play()).answer == "fine"
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == FORKED


@pytest.mark.parametrize(
    ("score", "why"),
    [
        (Scored(math.nan), "finite"),
        (Scored(-math.inf), "finite"),
        (Scored(1.5), r"outside the declared \[0, 1\]"),
        (Scored(0.5, {"part": math.nan}), "finite"),
        (Scored(None), "finite"),  # type: ignore[arg-type]
        (0.5, "no score"),
    ],
)
def test_a_reward_that_lies_is_failed(score: Any, why: str) -> None:
    found = honest(score, (0.0, 1.0))
    assert isinstance(found, Failed)
    assert found.kind is FailureKind.BAD_REWARD
    assert re.search(why, found.reason)


def test_honest_scores_pass() -> None:
    for score in (Scored(0.0), Scored(1.0, {"a": 7.0}), Invalid("h", "e"), Failed("x")):
        assert honest(score, (0.0, 1.0)) == score
    assert honest(Scored(-3.0), (-5.0, 5.0)) == Scored(-3.0)


class Judge(Rubric):
    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        answers = [answer for _, answer in items]
        if "raise" in answers:
            raise ZeroDivisionError("half of nothing")
        if "missing" in answers:
            raise MissingResource("no compiler")
        if "short" in answers:
            return []
        return [Scored(float(answer)) for answer in answers]


def episode(answer: str) -> Episode:
    return Episode("e", "t/0", "t", "f", 0, (), StopReason.COMPLETED, Failed("not graded"), answer)


def test_a_grader_that_raises_costs_only_the_answers_it_raised_on() -> None:
    environment = dataclasses.replace(make("coding-lists"), reward_range=(0.0, 2.0))
    items = [(TASK, episode(answer)) for answer in ("1", "raise", "2", "3", "short")]
    one, raised, two, three, short = grade(environment, Judge(), items)
    assert (one, two) == (Scored(1.0), Scored(2.0))
    assert raised == Failed("grader: ZeroDivisionError: half of nothing", FailureKind.RAISED)
    assert isinstance(three, Failed)
    assert isinstance(short, Failed)
    assert "0 scores for 1 answers" in short.reason
    with pytest.raises(MissingResource, match="no compiler"):
        grade(environment, Judge(), [(TASK, episode("missing"))])


HUNG = Failed("no answer", FailureKind.HUNG)


def breaker(**settings: Any) -> Breaker:
    return Breaker(FaultConfig(breaker_window=8, breaker_attempts=4, breaker_share=0.5, **settings), "mine")


def test_the_breaker_opens_when_most_of_the_last_attempts_failed_and_says_so_once() -> None:
    one = breaker()
    for score in (HUNG, Scored(0.0), Scored(1.0), Invalid("h", "e"), Scored(1.0), HUNG, HUNG):
        one.saw("easy", score)
    with pytest.raises(EnvironmentTripped) as error:
        one.saw("easy", Failed("segmentation fault", FailureKind.DIED))
    text = str(error.value)
    assert text.startswith("environment mine, family easy: 4 of the last 8 attempts gave no reward (3 hung, 1 died)")
    assert "3 x no answer" in text
    assert "--env.faults.on-trip go_on" in text


def test_a_part_that_tripped_is_left_out_and_the_run_ends_when_nothing_is_left() -> None:
    one = breaker(on_trip="go_on")
    for _ in range(9):
        one.saw("hard", HUNG)
        one.saw("easy", Scored(0.0))
    assert list(one.open) == ["hard"]
    assert one.tripped("hard").kind is FailureKind.TRIPPED
    one.check(["hard", "easy"])
    with pytest.raises(EnvironmentTripped, match="family hard"):
        one.check(["hard", "hard"])


def test_the_engines_failures_are_not_the_environments() -> None:
    one = breaker()
    for _ in range(20):
        one.saw(None, Failed("engine gone", FailureKind.ENGINE))
    assert not one.open
