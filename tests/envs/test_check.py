"""`env check`: what it finds in environments that break a promise, each beside the honest one; and what it watches."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3rl.envs import Env, Environment, EpisodeContext, Hack, Message, Observation, Rubric, StepResult, Task, registry
from k3rl.envs.check import Report, canonical, check, digest
from k3rl.envs.gateway import ProgramHarness
from k3rl.envs.harness import WorkspaceSpec
from k3rl.envs.leaks import watched
from k3rl.envs.sandbox.cgroups import Cgroups
from k3rl.envs.scaffold import write_package
from k3rl.types import Failed, Invalid, Scored

SECRET = "def f(a):\n return sorted(a)"
NAMES_A_GROUP = (
    "from pathlib import Path; from k3rl.envs.sandbox.cgroups import Cgroups\n"
    "print(Cgroups(2, {'memory': Path('/')}).named().all_folders()[0].name)"
)
SLEEPER = "import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(60)"


class Source:
    splits = ("train", "heldout")

    def __init__(self, **data: Any) -> None:
        self.data = data

    def length(self, split: str, **_: Any) -> int | None:
        return None if split == "train" else 4

    def get(self, split: str, index: int, seed: int = 0, **_: Any) -> Task:
        return Task(
            id=f"{split}/{seed}/{index}",
            env="tried",
            messages=(Message("user", f"task {index}"),),
            family=f"kind {index % 2}",
            data={key: value() if callable(value) else value for key, value in self.data.items()},
            hidden={"answer": SECRET},
        )


class Plain(Env):
    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        return Observation(task.messages)

    async def step(self, action: Any) -> StepResult:
        return StepResult(done=True, answer=action.message.content)


class Shared(Plain):
    turns = itertools.count()

    async def step(self, action: Any) -> StepResult:
        return StepResult(done=True, answer=f"{action.message.content}{next(self.turns)}")


class Stumbling(Plain):
    async def step(self, action: Any) -> StepResult:
        raise OSError("no such server")


class Clipping(Plain):
    async def step(self, action: Any) -> StepResult:
        return StepResult(done=True, answer=action.message.content[:5])


class Judge(Rubric):
    def __init__(self, provider: str = "bwrap") -> None:
        self.seen: list[str] = []

    def worth(self, task: Task, answer: str) -> Any:
        return Scored(float(answer == SECRET))

    def score_batch(self, items: Any) -> list[Any]:
        return [self.worth(task, answer) for task, answer in items]


class Careless(Judge):
    def worth(self, task: Task, answer: str) -> Any:
        self.seen.append(answer)
        right = answer == SECRET and "poison" not in self.seen
        return Scored(float(right or "PASS" in answer))


class Dying(Judge):
    def worth(self, task: Task, answer: str) -> Any:
        return Failed("sandbox died") if answer == "poison" else super().worth(task, answer)


class Leaking(Judge):
    def worth(self, task: Task, answer: str) -> Any:
        tempfile.mkstemp()
        return super().worth(task, answer)


class Orphaning(Judge):
    def worth(self, task: Task, answer: str) -> Any:
        if answer == SECRET:
            subprocess.run([sys.executable, "-c", SLEEPER], check=True, stdin=subprocess.DEVNULL)
        return super().worth(task, answer)


class Raising(Judge):
    def score_batch(self, items: Any) -> list[Any]:
        raise ZeroDivisionError("three and a half")


ONE = Plain()
HONEST = Environment(
    name="tried",
    description="a subject",
    source=Source(),
    make_env=Plain,
    grader=Judge,
    oracle=lambda task: SECRET,
    null=lambda task: "",
    hacks=lambda task: {"poison": "poison", "claim": Hack("PASS")},
)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """The report of HONEST with these fields; a registered environment does not exist in a fresh interpreter, so
    that comparison is made with this one."""
    from k3rl.envs import check as module

    monkeypatch.setattr(module, "_digests_elsewhere", module.digests)
    monkeypatch.setattr("k3rl.envs.leaks.SETTLE_S", 0.2)

    def report(**fields: Any) -> Report:
        monkeypatch.setattr(registry, "_registered", {"tried": lambda: dataclasses.replace(HONEST, **fields)})
        return check("tried")

    return report


def test_an_honest_environment_passes(checked: Callable[..., Report]) -> None:
    report = checked()
    assert (report.problems, report.leaks, report.ok) == ([], [], True)
    assert (report.oracle, report.oracle_expected, report.null) == (1.0, 1.0, 0.0)
    row = report.row()
    assert row["hacks"]["claim"] == {"status": "scored", "reward": 0.0, "refused": True, "task": "heldout/0/0"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"oracle_expected": 0.5}, "the oracle is worth 0.5 and got 1"),
        ({"oracle_expected": lambda task: 0.25}, "the oracle is worth 0.25 and got 1"),
        ({"oracle": lambda task: "wrong answer"}, "the oracle is worth 1 and got 0"),
        ({"oracle": None}, "it has no oracle; give Environment(oracle=...)"),
        (
            {"make_env": Stumbling},
            "an episode of the oracle agent broke: failed (environment: OSError: no such server)",
        ),
        ({"make_env": Clipping}, "the right answer, acted out, got 0 (env_done); it is worth 1"),
        ({"null": lambda task: SECRET}, "the null agent got 1"),
        ({"null": None}, "no null agent"),
        ({"hacks": None}, "no hacks"),
        ({"grader": Careless}, "the hack 'claim' got 1, the null agent 0"),
        ({"grader": Careless}, "the oracle got 1 before the hacks and 0 after them"),
        ({"grader": Dying}, "the hack 'poison' got failed (sandbox died)"),
        ({"grader": Raising}, "the environment raised ZeroDivisionError: three and a half"),
        ({"grader": Leaking}, "left behind: file tmp"),
        ({"grader": Orphaning}, "left behind: process"),
        ({"make_env": Shared}, "another one runs beside it"),
        ({"make_env": lambda: ONE}, "the same object again"),
        ({"source": Source(again=itertools.count().__next__)}, "another task the second time"),
        ({"source": Source(thing=object)}, "a task holds a object"),
        ({"source": Source(peek=SECRET)}, "the right answer stands in the task's public part"),
        ({"hacks": lambda task: {task.family: SECRET}}, "the hack 'kind 1' got 1"),
    ],
)
def test_a_broken_promise_is_said(checked: Callable[..., Report], fields: dict[str, Any], said: str) -> None:
    report = checked(**fields)
    assert not report.ok
    assert said in "\n".join(report.problems)


def test_an_oracle_that_is_not_there_is_named_with_its_reason_and_everything_else_is_tried(
    checked: Callable[..., Report],
) -> None:
    report = checked(oracle=None, no_oracle="nobody solved it yet")
    assert (report.problems, report.oracle, report.null) == ([], None, 0.0)
    assert report.absent == {"oracle": "tried has no right answer to show: nobody solved it yet"}
    assert {row["who"] for row in report.episodes} == {"null"}
    assert [tried.refused for tried in report.hacks.values()] == [True, True]


def test_the_oracle_is_graded_on_every_kind_of_task(checked: Callable[..., Report]) -> None:
    report = checked(oracle=lambda task: SECRET if task.family == "kind 0" else "a guess")
    assert report.tasks == ["heldout/0/0", "heldout/0/1"]
    assert (report.oracle, report.oracle_expected) == (0.0, 1.0)
    assert report.problems == [
        "heldout/0/1: the oracle is worth 1 and got 0",
        "heldout/0/1: the null agent got 0, not less than the oracle",
    ]


def test_a_program_is_played_through_the_gateway(
    checked: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3rl.envs.leaks.SETTLE_S", 5.0)  # what starts commands lingers for a moment
    program = (
        "import json, os, urllib.request\nbody = json.dumps({'messages': [{'role': 'user', 'content': 'say it'}]})\n"
        "ask = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body.encode(), "
        "{'Content-Type': 'application/json'})\n"
        "print(json.load(urllib.request.urlopen(ask))['choices'][0]['message']['content'], end='')\n"
    )

    def harness(text: str) -> Callable[[], ProgramHarness]:
        return lambda: ProgramHarness(
            lambda task: ["python3", "-c", text], lambda task: WorkspaceSpec({}, ()), answer="stdout"
        )

    report = checked(make_harness=harness(program))
    assert report.problems == []
    assert [(row["who"], row["reward"]) for row in report.episodes] == [("oracle", 1.0), ("oracle", 1.0), ("null", 0.0)]
    report = checked(make_harness=harness("raise SystemExit(3)"))
    assert "an episode of the oracle agent broke: failed (program: it ended with status 3" in report.problems[0]


@pytest.mark.parametrize(
    ("hack", "score", "refused"),
    [
        (Hack("x"), Invalid("forged", "y"), True),
        (Hack("x"), Failed("died"), False),
        (Hack("x"), Scored(0.0), True),
        (Hack("x"), Scored(0.1), True),
        (Hack("x"), Scored(0.11), False),
        (Hack("x", "hardcode", 0.4), Scored(0.4), True),
        (Hack("x", "hardcode", 0.4), Scored(0.5), False),
        (Hack("x", "cheat", 0.4), Scored(0.4), False),
        (Hack("x", "hardcode", 0.4), Failed("died"), False),
    ],
)
def test_refused_is_invalid_or_no_better_than_nothing_or_the_visible_share(hack, score, refused) -> None:
    assert hack.refused(score, null_reward=0.1) is refused


def test_a_written_package_passes_its_own_checks_and_tests(tmp_path: Path) -> None:
    folder = tmp_path / "word-order"
    write_package("word-order", folder)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_equal_tasks_have_equal_digests_and_others_do_not() -> None:
    one, same, other = Source(a={2, 1, 3}), Source(a={3, 2, 1}), Source(a={1, 2})
    assert digest(one.get("train", 0)) == digest(same.get("train", 0)) != digest(other.get("train", 0))
    assert canonical({"b": 1, 2: b"\x00"}) == canonical({2: b"\x00", "b": 1})
    assert canonical([float("nan")]) == canonical([float("nan")])


def test_a_watch_sees_files_and_descriptors_and_forgets_them_when_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3rl.envs.leaks.SETTLE_S", 0.1)
    before = tempfile.gettempdir()
    with watched() as watch:
        assert watch.leaks() == []
        with tempfile.NamedTemporaryFile() as file:
            kinds = {leak.split()[0] for leak in watch.leaks()}
            assert kinds == {"file", "descriptor"}
            assert Path(file.name).parent == Path(tempfile.gettempdir())
        assert watch.leaks() == []
    assert tempfile.gettempdir() == before


def test_a_watch_counts_the_control_groups_of_its_own_work_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("k3rl.envs.leaks.MOUNT", tmp_path)
    monkeypatch.setattr("k3rl.envs.leaks.SETTLE_S", 0.1)
    groups = Cgroups(2, {"memory": tmp_path})
    with watched() as watch:
        other = subprocess.run(
            [sys.executable, "-c", NAMES_A_GROUP], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True
        ).stdout.decode()
        (tmp_path / other.strip()).mkdir()
        assert watch.leaks() == []
        (mine,) = groups.named().all_folders()
        mine.mkdir()
        assert watch.leaks() == [f"cgroup {mine}"]
        child = subprocess.run([sys.executable, "-c", NAMES_A_GROUP], capture_output=True).stdout.decode().strip()
        (tmp_path / child).mkdir()
        assert set(watch.leaks()) == {f"cgroup {mine}", f"cgroup {tmp_path / child}"}
