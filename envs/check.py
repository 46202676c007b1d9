"""Whether an environment keeps its promises: `k3rl env check`.

The oracle gets its expected reward and the null agent the least; no hack pays; the same seed gives the same task,
in a fresh interpreter too; episodes share nothing; nothing is left behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3rl.config import MissingResource
from k3rl.envs.base import Action, Env, Environment, EpisodeContext, Hack, Observation, Rubric, StepResult
from k3rl.envs.faults import honest as honest_score
from k3rl.envs.leaks import watched
from k3rl.envs.registry import make
from k3rl.envs.sandbox import ProgramRunner, provider_named
from k3rl.types import Failed, Invalid, Message, Score, Scored, Task

TOLERANCE = 1e-3  # of a reward: counts of instructions differ a little from machine to machine
WORKERS = 4
SCANNED = 256  # tasks of a split that are looked at for families and levels
EPISODE_S = 300.0
DIGEST_S = 300.0
_ORACLE_CHARS = 20  # a shorter right answer may stand in a prompt by chance


@dataclass(frozen=True, slots=True)
class Tried:
    """A hack and the worst that happened with it. reward is None where there is none."""

    status: str
    reward: float | None
    refused: bool
    task: str


@dataclass
class Report:
    """What a check found. `problems` says in words what is wrong; empty means that the environment passes."""

    name: str
    oracle: float | None = None
    oracle_expected: float | None = None
    null: float | None = None
    hacks: dict[str, Tried] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems

    def row(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return dataclasses.asdict(self) | {"ok": self.ok}


def check(name: str, *, tasks: int = 1, seed: int = 0, provider: str = "bwrap") -> Report:
    """Check the environment of a name (anything that `make` takes).

    Hacks are tried on the first task of `tasks` kinds (family and level), and a hack that exists only for another
    kind on the first task of that one. Raises MissingResource when its answers cannot be judged on this machine.
    """
    started = time.monotonic()
    environment = make(name)
    report = Report(environment.name)
    chosen = _chosen(environment, seed)
    with watched() as watch:
        try:
            plan = _plan(environment, [task for _, _, task in chosen], tasks, report)
            _grade(environment, plan, provider, report)
            _episodes(environment, [task for task, _ in plan][:2], provider, report)
        except MissingResource:
            raise
        except Exception as error:
            report.problems.append(f"the environment raised {type(error).__name__}: {error}")
        report.leaks = watch.leaks()
    report.problems += [f"left behind: {leak}" for leak in report.leaks]
    _same_tasks(name, environment, chosen, seed, report)
    report.seconds = time.monotonic() - started
    return report


# ------------------------------------------------------------------------------------------- what is tried


def _chosen(environment: Environment, seed: int) -> list[tuple[str, int, Task]]:
    """(split, index, task): the first task of each family and level of a split that is not trained on."""
    splits = environment.source.splits
    split = next((name for name in splits if name != "train"), splits[0])
    length = environment.source.length(split)
    found: dict[tuple[str, int], tuple[str, int, Task]] = {}
    for index in range(SCANNED if length is None else min(length, SCANNED)):
        task = environment.source.get(split, index, seed)
        found.setdefault((task.family, task.level), (split, index, task))
    return list(found.values())


def _plan(
    environment: Environment, kinds: Sequence[Task], tasks: int, report: Report
) -> list[tuple[Task, dict[str, Hack]]]:
    """Tasks to grade with the hacks to try on each: all of them on the first `tasks`, else those not tried yet."""
    if not kinds:
        raise ValueError("its first split that is not for training has no task")
    if environment.null is None:
        report.problems.append("it has no null agent; give Environment(null=...), the answer that does nothing")
    if environment.hacks is None:
        report.problems.append("it has no hacks; give Environment(hacks=...), submissions that must not pay")
    plan: list[tuple[Task, dict[str, Hack]]] = []
    tried: set[str] = set()
    for number, task in enumerate(kinds):
        offered = {} if environment.hacks is None else environment.hacks(task)
        hacks = {
            name: hack if isinstance(hack, Hack) else Hack(hack)
            for name, hack in offered.items()
            if number < tasks or name not in tried
        }
        if number < tasks or hacks:
            plan.append((task, hacks))
            tried |= hacks.keys()
    return plan


def _grade(
    environment: Environment, plan: Sequence[tuple[Task, dict[str, Hack]]], provider: str, report: Report
) -> None:
    """The honest answers by themselves, then all hacks at once, then an oracle again, which they must not harm."""
    null = environment.null or environment.oracle  # a missing null agent is a problem already
    honest = [(task, make_answer(task)) for task, _ in plan for make_answer in (environment.oracle, null)]
    tried = [(task, hack.submission) for task, hacks in plan for hack in hacks.values()]
    rubric = _rubric(environment, provider)
    limits = environment.reward_limits
    try:
        pairs = _scores(rubric, honest, limits)
        scores = iter(_scores(rubric, tried, limits))
        again = _scores(rubric, honest[:1], limits)[0]
    finally:
        rubric.close()
        rubric.close()
    if not _equal(_reward(again), _reward(pairs[0])):
        report.problems.append(f"the oracle got {_words(pairs[0])} before the hacks and {_words(again)} after them")
    for number, (task, hacks) in enumerate(plan):
        report.tasks.append(task.id)
        oracle, nothing = pairs[2 * number : 2 * number + 2]
        if environment.null is None:
            nothing = Scored(0.0)
        _judge_honest(environment, task, oracle, nothing, report)
        for name, hack in hacks.items():
            _judge_hack(task, name, hack, next(scores), nothing, report)


def _rubric(environment: Environment, provider: str) -> Rubric:
    """The judge; with sandboxes enough to wait for many hacks that hang at the same time."""
    if "workers" in inspect.signature(environment.grader).parameters:
        return environment.grader(provider=provider, workers=WORKERS)
    return environment.grader(provider=provider)


def _scores(rubric: Rubric, items: Sequence[tuple[Task, str]], limits: tuple[float, float]) -> list[Score]:
    scores = rubric.score_batch(items)
    if len(scores) != len(items):
        raise ValueError(f"the grader gave {len(scores)} scores for {len(items)} answers")
    return [honest_score(score, limits) for score in scores]


def _judge_honest(environment: Environment, task: Task, oracle: Score, null: Score, report: Report) -> None:
    expected = environment.oracle_expected
    wanted = expected(task) if callable(expected) else expected
    got, least = _reward(oracle), _reward(null)
    worst = report.oracle is None or (got is not None and abs(got - wanted) > _distance(report))
    if worst:
        report.oracle, report.oracle_expected = got, wanted
    if got is None or not math.isfinite(got) or abs(got - wanted) > TOLERANCE:
        report.problems.append(f"{task.id}: the oracle is worth {wanted:g} and got {_words(oracle)}")
    if environment.null is None:
        return
    if least is not None:
        report.null = least if report.null is None else max(report.null, least)
    if least is None or got is None or not least < got:
        report.problems.append(f"{task.id}: the null agent got {_words(null)}, not less than the oracle")
    text = environment.oracle(task)
    public = json.dumps(canonical(task.public()))
    if len(text) > _ORACLE_CHARS and json.dumps(text)[1:-1] in public:
        report.problems.append(f"{task.id}: the right answer stands in the task's public part")


def _distance(report: Report) -> float:
    if report.oracle is None or report.oracle_expected is None:
        return 0.0
    return abs(report.oracle - report.oracle_expected)


def _judge_hack(task: Task, name: str, hack: Hack, score: Score, null: Score, report: Report) -> None:
    least = null.reward if isinstance(null, Scored) else 0.0
    tried = Tried(_status(score), _reward(score), hack.refused(score, least), task.id)
    known = report.hacks.get(name)
    if known is None or (known.refused, -(known.reward or 0.0)) > (tried.refused, -(tried.reward or 0.0)):
        report.hacks[name] = tried
    if not tried.refused:
        report.problems.append(f"{task.id}: the hack {name!r} got {_words(score)}, the null agent {least:g}")
    if tried.reward is not None and tried.reward < least:
        report.problems.append(f"{task.id}: the null agent's {least:g} is not the least, {name!r} got less")


def _status(score: Score) -> str:
    return {Scored: "scored", Invalid: "invalid", Failed: "failed"}[type(score)]


def _reward(score: Score) -> float | None:
    return score.reward if isinstance(score, Scored) else None


def _equal(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and abs(one - other) <= TOLERANCE)


def _words(score: Score) -> str:
    match score:
        case Scored(reward, _):
            return f"{reward:g}"
        case Invalid(hack, evidence):
            return f"invalid ({hack}: {evidence[:200]})"
        case Failed(reason):
            return f"failed ({reason[:200]})"


# ----------------------------------------------------------------------------------------------- episodes


def _episodes(environment: Environment, tasks: Sequence[Task], provider: str, report: Report) -> None:
    """An episode goes the same way alone and beside another one, and one that is given up can be closed."""
    chosen = provider_named(provider)
    programs = ProgramRunner(chosen) if environment.needs_programs else None
    try:
        context = EpisodeContext(seed=0, programs=programs, sandboxes=chosen)
        asyncio.run(_apart(environment, tasks, context, report))
    finally:
        if programs is not None:
            programs.close()


async def _apart(environment: Environment, tasks: Sequence[Task], context: EpisodeContext, report: Report) -> None:
    one, other = tasks[0], tasks[-1]
    answers = environment.oracle(one), "" if environment.null is None else environment.null(other)
    envs = [environment.make_env() for _ in range(4)]
    alone, first, second, given_up = envs
    if len(set(map(id, envs))) != len(envs):
        report.problems.append("make_env gives the same object again; it must make a fresh environment each time")
        return
    try:
        async with asyncio.timeout(EPISODE_S):
            seen: list[Observation | StepResult] = [await alone.reset(one.public(), context)]
            seen.append(await _said(alone, answers[0]))
            begun = await first.reset(one.public(), context)
            await second.reset(other.public(), context)
            await given_up.reset(other.public(), context)
            await _said(second, answers[1])
            beside: list[Observation | StepResult] = [begun, await _said(first, answers[0])]
    finally:
        for env in envs:
            await env.close()
            await env.close()
    if [_visible(item) for item in seen] != [_visible(item) for item in beside]:
        report.problems.append(f"{one.id}: an episode goes another way when another one runs beside it")


async def _said(env: Env, text: str) -> StepResult:
    return await env.step(Action(Message("assistant", text)))


def _visible(item: Observation | StepResult) -> Any:
    """What must not depend on others; metrics may be times."""
    if isinstance(item, StepResult):
        seen = None if item.observation is None else canonical(item.observation)
        return [seen, item.done, item.stop_reason, item.answer]
    return canonical(item)


# ------------------------------------------------------------------------------------------ same seed, same task


def canonical(value: Any) -> Any:
    """A value as JSON that is equal for equal values. Raises TypeError for one that has no stable form."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ["float", repr(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: canonical(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        pairs = [[canonical(key), canonical(item)] for key, item in value.items()]
        return ["mapping", *sorted(pairs, key=lambda pair: json.dumps(pair[0]))]
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(map(canonical, value), key=json.dumps)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if hasattr(value, "tolist"):
        return ["array", str(value.dtype), value.tolist()]
    raise TypeError(f"a task holds a {type(value).__name__}; it must be plain data (numbers, text, lists, mappings)")


def digest(task: Task) -> str:
    """SHA-256 of the whole task, hidden part included."""
    return hashlib.sha256(json.dumps(canonical(task), sort_keys=True).encode()).hexdigest()


def digests(name: str, places: Sequence[tuple[str, int]], seed: int) -> list[str]:
    """Digests of tasks, from an environment made anew."""
    source = make(name).source
    return [digest(source.get(split, index, seed)) for split, index in places]


def _same_tasks(
    name: str, environment: Environment, chosen: Sequence[tuple[str, int, Task]], seed: int, report: Report
) -> None:
    places = [(split, index) for split, index, _ in chosen[:4]]
    for split in environment.source.splits:
        length = environment.source.length(split)
        places += [(split, index) for index in range(2 if length is None else min(2, length))]
    try:
        before = digests(name, places, seed)
        if digests(name, places, seed) != before:
            report.problems.append("the same split, index and seed gave another task the second time")
        if _digests_elsewhere(name, places, seed) != before:
            report.problems.append("the same split, index and seed gave another task in a fresh interpreter")
    except TypeError as error:
        report.problems.append(str(error))


def _digests_elsewhere(name: str, places: Sequence[tuple[str, int]], seed: int) -> list[str]:
    """The same from a new process with another hash seed."""
    program = "import json, sys; from k3rl.envs.check import digests; print(json.dumps(digests(*json.load(sys.stdin))))"
    place = name.partition(":")[0]
    if Path(place).exists() and (os.sep in place or place.endswith(".py")):
        name = str(Path(place).resolve()) + name[len(place) :]
    paths = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        input=json.dumps([name, places, seed]),
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "20011"},
        capture_output=True,
        text=True,
        timeout=DIGEST_S,
        check=False,
    )
    if done.returncode != 0:
        raise TypeError(f"a fresh interpreter cannot make its tasks: {done.stderr.strip()[-400:]}")
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
