"""Whether an environment keeps its promises: `k3rl env check`.

The oracle gets its expected reward and the null agent the least, for every kind of task; no hack pays; episodes that
act out the right answer and nothing end as they should, and share nothing; the same seed gives the same task, in a
fresh interpreter too; nothing is left behind. What an environment does not have is named with the reason.
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
from k3rl.envs.base import Environment, EpisodeContext, Hack, NoOracle, Rubric
from k3rl.envs.faults import grade as graded
from k3rl.envs.faults import honest as honest_score
from k3rl.envs.leaks import watched
from k3rl.envs.played import Says, acted, conduct, play
from k3rl.envs.registry import make
from k3rl.envs.rollout import gradable
from k3rl.envs.sandbox import ProgramRunner, provider_named
from k3rl.types import Episode, Failed, Invalid, Score, Scored, Task

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
    """What a check found. `problems` says in words what is wrong; empty means that the environment passes.

    oracle: the reward farthest from what was expected of it; null: the greatest of the null agent. None: there is
    none, and `absent` says why. tasks: those whose right answer was graded. episodes: those that were played.
    """

    name: str
    oracle: float | None = None
    oracle_expected: float | None = None
    null: float | None = None
    hacks: dict[str, Tried] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    episodes: list[dict[str, Any]] = field(default_factory=list)
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


def check(
    name: str,
    *,
    tasks: int = 1,
    seed: int = 0,
    provider: str = "bwrap",
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Check the environment of a name and its options (anything that `make` takes).

    The oracle and the null agent are graded on the first task of every kind (family and level). Hacks are tried on the
    first of `tasks` kinds, and a hack that exists only for another kind on the first task of that one. Raises
    MissingResource when its answers cannot be judged on this machine.
    """
    started = time.monotonic()
    options = dict(options or {})
    environment = make(name, **options)
    report = Report(environment.name)
    try:  # before the watch: what a source holds is held as long as the environment
        chosen = _chosen(environment, seed)
    except MissingResource:
        raise
    except Exception as error:
        report.problems.append(f"its tasks cannot be made: {type(error).__name__}: {error}")
        return report
    with watched() as watch:
        try:
            plan = _plan(environment, [task for _, _, task in chosen], tasks, report)
            two = _two(environment, chosen, seed)
            rubric = _rubric(environment, provider)
            try:
                if not environment.judged_while_played:
                    _grade(environment, plan, rubric, report)
                _episodes(environment, plan, two, provider, rubric, report)
            finally:
                rubric.close()
                rubric.close()
        except MissingResource:
            raise
        except Exception as error:
            report.problems.append(f"the environment raised {type(error).__name__}: {error}")
        report.leaks = watch.leaks()
    report.problems += [f"left behind: {leak}" for leak in report.leaks]
    _same_tasks(name, options, environment, chosen, seed, report)
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
    """A task of each kind with the hacks to try on it: all of them on the first `tasks`, else those not tried yet."""
    if not kinds:
        raise ValueError("its first split that is not for training has no task")
    if environment.oracle is None and environment.oracle_turn is None:
        report.absent["oracle"] = environment.no_oracle
        if not environment.no_oracle:
            report.problems.append("it has no oracle; give Environment(oracle=...), or no_oracle=..., the reason")
    if environment.null is None and not environment.judged_while_played:
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
        plan.append((task, hacks))
        tried |= hacks.keys()
    return plan


def _two(environment: Environment, chosen: Sequence[tuple[str, int, Task]], seed: int) -> tuple[Task, Task]:
    """Two tasks to be played beside each other: of two kinds, else two of one kind, else one task twice."""
    split, index, first = chosen[0]
    if len(chosen) > 1:
        return first, chosen[1][2]
    length = environment.source.length(split)
    more = length is None or index + 1 < length
    return first, environment.source.get(split, index + 1, seed) if more else first


def _grade(
    environment: Environment, plan: Sequence[tuple[Task, dict[str, Hack]]], rubric: Rubric, report: Report
) -> None:
    """The honest answers by themselves, then all hacks at once, then an oracle again, which they must not harm."""
    right = [_right_answer(environment, task, report) for task, _ in plan]
    nothing = ["" if environment.null is None else environment.null(task) for task, _ in plan]
    honest = [(task, answer) for (task, _), answer in zip(plan, right, strict=True) if answer is not None]
    tried = [(task, hack.submission) for task, hacks in plan for hack in hacks.values()]
    limits = environment.reward_limits
    oracles = _scores(rubric, honest, limits)
    nulls = _scores(rubric, list(zip([task for task, _ in plan], nothing, strict=True)), limits)
    scores = iter(_scores(rubric, tried, limits))
    again = _scores(rubric, honest[:1], limits)
    if again and not _equal(_reward(again[0]), _reward(oracles[0])):
        before, after = _words(oracles[0]), _words(again[0])
        report.problems.append(f"the oracle got {before} before the hacks and {after} after them")
    found = iter(oracles)
    for (task, hacks), answer, null in zip(plan, right, nulls, strict=True):
        report.tasks.append(task.id)
        null = Scored(0.0) if environment.null is None else null
        _judge_honest(environment, task, None if answer is None else next(found), null, report)
        if answer is not None and _is_public(task, answer):
            report.problems.append(f"{task.id}: the right answer stands in the task's public part")
        for name, hack in hacks.items():
            _judge_hack(task, name, hack, next(scores), null, report)


def _is_public(task: Task, answer: str) -> bool:
    return len(answer) > _ORACLE_CHARS and json.dumps(answer)[1:-1] in json.dumps(canonical(task.public()))


def _right_answer(environment: Environment, task: Task, report: Report) -> str | None:
    try:
        return environment.right_answer(task)
    except NoOracle as error:
        report.absent["oracle"] = str(error)
        return None


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


def _judge_honest(environment: Environment, task: Task, oracle: Score | None, null: Score, report: Report) -> None:
    """oracle: None where nobody knows the right answer."""
    wanted = _wanted(environment, task)
    least, got = _reward(null), None if oracle is None else _reward(oracle)
    if oracle is not None:
        worst = report.oracle_expected is None or (got is not None and abs(got - wanted) > _distance(report))
        if worst:
            report.oracle, report.oracle_expected = got, wanted
        if not _equal(got, wanted):
            report.problems.append(f"{task.id}: the oracle is worth {wanted:g} and got {_words(oracle)}")
    if least is not None and (environment.null is not None or environment.judged_while_played):
        report.null = least if report.null is None else max(report.null, least)
    if isinstance(null, Failed) and environment.judged_while_played:
        report.absent["null"] = null.reason
    elif least is None or (got is not None and not least < got):
        report.problems.append(f"{task.id}: the null agent got {_words(null)}, not less than the oracle")


def _wanted(environment: Environment, task: Task) -> float:
    expected = environment.oracle_expected
    return expected(task) if callable(expected) else expected


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


def _episodes(
    environment: Environment,
    plan: Sequence[tuple[Task, dict[str, Hack]]],
    two: tuple[Task, Task],
    provider: str,
    rubric: Rubric,
    report: Report,
) -> None:
    """Whole episodes, by the way of a run: they end as they should, alone and beside another one."""
    chosen = provider_named(provider)
    programs = ProgramRunner(chosen) if environment.needs_programs else None
    try:
        context = EpisodeContext(seed=0, programs=programs, sandboxes=chosen)
        asyncio.run(_all_episodes(environment, plan, two, context, rubric, report))
    finally:
        if programs is not None:
            programs.close()


async def _all_episodes(
    environment: Environment,
    plan: Sequence[tuple[Task, dict[str, Hack]]],
    two: tuple[Task, Task],
    context: EpisodeContext,
    rubric: Rubric,
    report: Report,
) -> None:
    await _apart(environment, two, context, rubric, report)
    if environment.judged_while_played:
        await _judged_while_played(environment, plan, context, rubric, report)


async def _apart(
    environment: Environment, two: tuple[Task, Task], context: EpisodeContext, rubric: Rubric, report: Report
) -> None:
    """An episode goes the same way alone and beside another one, and one that is abandoned can be closed."""
    one, other = two
    if environment.make_harness is None:
        envs = [environment.make_env(), environment.make_env()]
        if envs[0] is envs[1]:
            report.problems.append("make_env gives the same object again; it must make a fresh environment each time")
            return
        async with asyncio.timeout(EPISODE_S):
            try:
                await envs[0].reset(other.public(), context)
            finally:
                for env in (*envs, *envs):
                    await env.close()
    alone, row = await _played(environment, one, "oracle", context, rubric, report)
    (beside, *rows), (_, *more) = await asyncio.gather(
        _played(environment, one, "oracle", context, rubric, report),
        _played(environment, other, "null", context, rubric, report),
    )
    report.episodes += [row, *rows, *more]
    if conduct(alone) != conduct(beside):
        report.problems.append(f"{one.id}: an episode goes another way when another one runs beside it")


async def _played(
    environment: Environment, task: Task, who: str, context: EpisodeContext, rubric: Rubric, report: Report
) -> tuple[Episode, dict[str, Any]]:
    """An episode of the oracle or the null agent and its row for the report; notes what is wrong with it."""
    says = _oracle_says(environment, task) if who == "oracle" else None
    who, says = ("null", _null_says(environment, task)) if says is None else (who, says)
    episode, score = await _episode(environment, task, says, context, rubric)
    row: dict[str, Any] = {
        "task": task.id,
        "who": who,
        "stop_reason": str(episode.stop_reason),
        "status": _status(score),
    }
    turns = sum(len(branch.turns) for branch in episode.branches)
    row |= {"turns": turns, "reward": _reward(score)}
    if not gradable(episode):
        report.problems.append(f"{task.id}: an episode of the {who} agent broke: {_words(score)}")
    elif who == "oracle" and environment.make_harness is None:  # what becomes of an answer is up to a program
        wanted = _wanted(environment, task)
        if not _equal(_reward(score), wanted):
            report.problems.append(
                f"{task.id}: the right answer, acted out, got {_words(score)} ({episode.stop_reason}); it is worth "
                f"{wanted:g}"
            )
    return episode, row


async def _episode(
    environment: Environment, task: Task, says: Says, context: EpisodeContext, rubric: Rubric
) -> tuple[Episode, Score]:
    async with asyncio.timeout(EPISODE_S):
        episode = await play(environment, task, says, context)
    if not gradable(episode):
        return episode, episode.score
    return episode, (await asyncio.to_thread(graded, environment, rubric, [(task, episode)]))[0]


def _oracle_says(environment: Environment, task: Task) -> Says | None:
    """None where nobody knows the right answer."""
    turn = environment.oracle_turn
    if turn is not None:
        return lambda said, tools: turn(task, said)
    try:
        return acted(environment.right_answer(task))
    except NoOracle:
        return None


def _null_says(environment: Environment, task: Task) -> Says:
    return acted("" if environment.null is None else environment.null(task))


async def _judged_while_played(
    environment: Environment,
    plan: Sequence[tuple[Task, dict[str, Hack]]],
    context: EpisodeContext,
    rubric: Rubric,
    report: Report,
) -> None:
    """The oracle, the null agent and the hacks where a reward comes from what is done, not from an answer."""
    for task, hacks in plan:
        report.tasks.append(task.id)
        _, null = await _episode(environment, task, _null_says(environment, task), context, rubric)
        says = _oracle_says(environment, task)
        oracle = None if says is None else (await _episode(environment, task, says, context, rubric))[1]
        _judge_honest(environment, task, oracle, null, report)
        for name, hack in hacks.items():
            _, score = await _episode(environment, task, acted(hack.submission), context, rubric)
            _judge_hack(task, name, hack, score, null, report)


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


def digests(name: str, options: Mapping[str, Any], places: Sequence[tuple[str, int]], seed: int) -> list[str]:
    """Digests of tasks, from an environment made anew."""
    source = make(name, **options).source
    return [digest(source.get(split, index, seed)) for split, index in places]


def _same_tasks(
    name: str,
    options: Mapping[str, Any],
    environment: Environment,
    chosen: Sequence[tuple[str, int, Task]],
    seed: int,
    report: Report,
) -> None:
    places = [(split, index) for split, index, _ in chosen[:4]]
    try:
        for split in environment.source.splits:
            length = environment.source.length(split)
            places += [(split, index) for index in range(2 if length is None else min(2, length))]
        before = digests(name, options, places, seed)
        if digests(name, options, places, seed) != before:
            report.problems.append("the same split, index and seed gave another task the second time")
        if _digests_elsewhere(name, options, places, seed) != before:
            report.problems.append("the same split, index and seed gave another task in a fresh interpreter")
    except TypeError as error:
        report.problems.append(str(error))


def _digests_elsewhere(
    name: str, options: Mapping[str, Any], places: Sequence[tuple[str, int]], seed: int
) -> list[str]:
    """The same from a new process with another hash seed."""
    program = "import json, sys; from k3rl.envs.check import digests; print(json.dumps(digests(*json.load(sys.stdin))))"
    place = name.partition(":")[0]
    if Path(place).exists() and (os.sep in place or place.endswith(".py")):
        name = str(Path(place).resolve()) + name[len(place) :]
    paths = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        input=json.dumps([name, options, places, seed]),
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
