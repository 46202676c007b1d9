"""Reward functions: arguments by name, how values make a reward, and that nothing they do becomes a 0."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.config import ConfigError
from k3rl.envs import RewardFunction, Rubric, reward
from k3rl.envs.harness import answer_from
from k3rl.envs.rubric import FunctionRubric
from k3rl.envs.rubric_values import decode, encode
from k3rl.types import (
    Branch,
    Episode,
    Failed,
    FailureKind,
    Invalid,
    Message,
    Scored,
    StopReason,
    Task,
    Turn,
)

TASK = Task("t/0", "t", (Message("user", "say y"),), "f", data={"n": 2}, hidden={"want": "y"}, seed=7)


def right(answer: str, hidden: dict[str, Any]) -> bool:
    return answer == hidden["want"]


@reward(weight=0.25)
async def short(answer: str) -> float:
    await asyncio.sleep(0)
    return 1.0 / len(answer)


@reward(kind="gate")
def said_anything(answer: str) -> bool:
    return bool(answer)


@reward(kind="mul", range=(0.0, 2.0))
def doubled(data: dict[str, Any]) -> Any:
    return np.float32(data["n"])


@reward(kind="metric", range=(-100.0, 100.0))
def length(answer: str) -> int:
    return -len(answer)


def every_argument(
    task: Task, answer: str, parsed: Any, files: Any, data: Any, hidden: Any, episode: Any, messages: Any, info: Any
) -> float:
    assert isinstance(task, Task)
    assert task.hidden == hidden == {"want": "y"}
    assert (data, parsed) == ({"n": 2}, {"files": {"a.txt": "hi", "../b": "no"}})
    assert files == {"a.txt": "hi"}
    assert episode.branches[0].turns[0].sampled_ids == (1, 2)
    assert episode.stop_reason is StopReason.COMPLETED
    assert episode.branches[0].turns[0].routes.dtype == np.int16
    assert messages == (Message("user", "say y"), Message("assistant", "y"))
    assert info["stop_reason"] == "completed"
    assert (info["task_id"], info["seed"]) == ("t/0", 7)
    return 0.5


def in_a_sandbox(sandbox: Any, other: int = 3) -> float:
    done = sandbox.run(["cat", "a.txt"])
    sandbox.write("b.txt", "x")
    return float(done.stdout == b"hi" and sandbox.read("b.txt") == b"x" and other == 3)


@reward(timeout_s=0.3)
def hangs_in_c(answer: str) -> float:
    import ctypes

    ctypes.CDLL(None).pause()
    return 1.0


@reward(timeout_s=0.8, memory_bytes=2**30)
def misbehaves(answer: str) -> Any:
    """Does what the answer says."""
    match answer:
        case "hang":
            return hangs_in_c(answer)
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            os._exit(0)
        case "flood":
            while True:
                print("x" * 100_000)
        case "swallow":
            return len(bytearray(4 * 2**30))
    return {"nan": math.nan, "inf": math.inf, "above": 1.01, "text": "1.0"}.get(answer)


def forks(info: Any, answer: str) -> Any:
    if answer == "cheat":
        return Invalid("empty_claim", "it says so")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(answer).write_text(str(os.getpid()))
            time.sleep(60)
        return 1.0
    while not os.path.exists(answer) or not Path(answer).read_text():
        time.sleep(0.01)
    return 0.25


@reward(timeout_s=0.3)
def hangs_at_first(answer: str) -> float:
    if os.path.exists(f"{answer}.seen"):
        return 1.0
    Path(f"{answer}.seen").write_text("x")
    return hangs_in_c(answer)


def score(answer: str, *functions: Any, episode: Episode | None = None) -> Any:
    with contextlib.closing(Rubric.of(*functions)()) as rubric:
        if episode is None:
            return rubric.score_batch([(TASK, answer)])[0]
        return rubric.score_episodes([(TASK, episode)])[0]


def test_a_reward_is_the_sum_times_the_factors_behind_the_gates() -> None:
    with contextlib.closing(Rubric.of(length, doubled, right, short, said_anything)(workers=2)) as rubric:
        scores = rubric.score_batch([(TASK, answer) for answer in ("y", "nope", "", "y")])
    good = Scored(2.5, {"said_anything": 1.0, "length": -1.0, "doubled": 2.0, "right": 1.0, "short": 1.0})
    assert scores[0] == scores[3] == good
    assert scores[1] == Scored(0.125, {**good.parts, "length": -4.0, "right": 0.0, "short": 0.25})
    assert scores[2] == Scored(0.0, {"said_anything": 0.0, "length": 0.0})  # a gate that is shut ends it


def test_functions_get_what_they_name() -> None:
    files = answer_from({"a.txt": "hi", "../b": "no"})
    turn = Turn((0,), (1, 2), (-0.5, -0.5), StopReason.STOP, 0, 0, routes=np.zeros((2, 1, 1), np.int16))
    episode = Episode(
        *("e", "t/0", "t", "f", 0, (Branch("e/0", (turn,)),), StopReason.COMPLETED, Failed("not graded"), files),
        messages=(Message("user", "say y"), Message("assistant", "y")),
    )
    assert score("", every_argument, episode=episode) == Scored(0.5, {"every_argument": 0.5})
    assert score(files, in_a_sandbox) == Scored(1.0, {"in_a_sandbox": 1.0})


FAULTS = {
    "hang": (FailureKind.HUNG, "no value after 0.8 s"),
    "raise": (FailureKind.RAISED, "KeyError: 'no such thing'"),
    "nan": (FailureKind.BAD_REWARD, "gave nan"),
    "inf": (FailureKind.BAD_REWARD, "gave inf"),
    "above": (FailureKind.BAD_REWARD, "gave 1.01, outside its range [0, 1]"),
    "text": (FailureKind.BAD_REWARD, "gave str"),
    "nothing": (FailureKind.BAD_REWARD, "gave NoneType"),
    "flood": (FailureKind.FLOODED, "printed more than"),
    "exit": (FailureKind.DIED, "its process ended: exit status 0"),
    "swallow": (FailureKind.RAISED, "MemoryError"),
}


def test_a_task_without_a_hidden_part_is_graded_by_functions_that_do_not_ask_for_one() -> None:
    bare = dataclasses.replace(TASK, hidden=None)
    for functions, refused in (((short, doubled), False), ((short, right), True)):
        with contextlib.closing(Rubric.of(*functions)()) as rubric:
            if refused:
                with pytest.raises(ValueError, match="without its hidden part"):
                    rubric.score_batch([(bare, "yes!")])
            else:
                assert rubric.score_batch([(bare, "yes!")]) == [Scored(0.125, {"short": 0.25, "doubled": 2.0})]


def test_what_goes_wrong_is_failed_with_the_name_of_the_function_and_never_a_zero() -> None:
    with contextlib.closing(Rubric.of(right, misbehaves)()) as rubric:
        scores = rubric.score_batch([(TASK, fault) for fault in FAULTS])
    for found, (kind, why) in zip(scores, FAULTS.values(), strict=True):
        assert isinstance(found, Failed)
        assert found.kind is kind
        assert found.reason.startswith("reward function misbehaves: ")
        assert why in found.reason


def test_a_worker_goes_on_after_a_call_that_hung_and_leaves_no_process(tmp_path: Path) -> None:
    file = str(tmp_path / "pid")
    rubric = Rubric.of(forks, hangs_at_first)()
    assert isinstance(rubric.score_batch([(TASK, file)])[0], Failed)
    assert not os.path.exists(f"/proc/{Path(file).read_text()}")
    assert rubric.score_batch([(TASK, file)])[0] == Scored(1.25, {"forks": 0.25, "hangs_at_first": 1.0})
    assert rubric.score_batch([(TASK, "cheat")])[0] == Invalid("empty_claim", "it says so")
    rubric.close()
    rubric.close()


def test_an_argument_that_nobody_has_is_refused_at_once_with_all_names() -> None:
    def wrong(anwser: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"no argument 'anwser'; did you mean 'answer'") as error:
        Rubric.of(wrong)
    assert all(f"  {name} " in str(error.value) for name in ("task", "files", "hidden", "info", "sandbox"))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Rubric.of(), "at least one"),
        (lambda: Rubric.of(lambda answer: 1.0), "top level of a .py file"),
        (lambda: Rubric.of(right, right), "two reward functions"),
        (lambda: Rubric.of(length), "every function is a metric"),
        (lambda: RewardFunction(right, kind="sum"), "choose gate, add, mul or metric"),  # type: ignore[arg-type]
        (lambda: RewardFunction(right, range=(1.0, 0.0)), "smaller one first"),
        (lambda: RewardFunction(right, kind="mul", range=(-1.0, 1.0)), "must not go below 0"),
        (lambda: RewardFunction(right, kind="gate", weight=2.0), "only `add` has a weight"),
        (lambda: RewardFunction(right, timeout_s=0), "above 0"),
    ],
)
def test_a_rubric_that_cannot_work_is_refused_when_it_is_made(make: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()


def test_the_declared_range_of_the_whole_follows_from_its_parts() -> None:
    grader = Rubric.of(RewardFunction(right, weight=-2.0), short, doubled, said_anything, length)
    assert grader.range == (-4.0, 0.5)
    assert Rubric.of(said_anything).range == (0.0, 1.0)


def test_a_module_that_cannot_be_loaded_elsewhere_is_said(tmp_path: Path) -> None:
    from k3rl.envs import make

    (tmp_path / "odd.py").write_text(
        "from pathlib import Path\nseen = Path(__file__).with_suffix('.seen')\n"
        "if seen.exists():\n    raise OSError('only once')\nseen.touch()\n"
        "from k3rl.envs import Rubric\ndef fine(answer):\n    return 1.0\ngrader = Rubric.of(fine)\n"
        "import dataclasses\nfrom k3rl.envs import make\n"
        "environment = dataclasses.replace(make('coding-lists'), grader=grader)\n"
    )
    rubric = make(f"{tmp_path}/odd.py").grader()
    assert isinstance(rubric, FunctionRubric)
    found = rubric.score_batch([(TASK, "y")])[0]
    rubric.close()
    assert isinstance(found, Failed)
    assert "only once" in found.reason


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_values_cross_to_the_other_process_unchanged(value: Any) -> None:
    assert repr(decode(json.loads(json.dumps(encode(value))))) == repr(value)


def test_only_plain_values_cross() -> None:
    assert decode(encode(dataclasses.replace(TASK, hidden={1: {2.5, "a"}}))).hidden == {1: {2.5, "a"}}
    with pytest.raises(TypeError, match="not plain data"):
        encode({"a": object()})
