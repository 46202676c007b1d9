"""`k3rl env {list,grade}`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3rl.cli import unknown
from k3rl.cli_words import Parser, print_json
from k3rl.config import ConfigError, MissingResource
from k3rl.envs import Environment, make, names
from k3rl.run.recorder import score_row
from k3rl.run.terminal import visible
from k3rl.types import Failed, Score, Task

USAGE = """\
usage: k3rl env list [--json]
       k3rl env grade ENV SUBMISSION --task N [--split heldout] [--seed 0] [--json]"""


def env(words: Sequence[str]) -> int:
    """The `k3rl env` command."""
    if not words or words[0] in ("--help", "-h"):
        print(USAGE)
        return 0
    actions = {"list": _list, "grade": _grade}
    if words[0] not in actions:
        raise unknown("env command", words[0], actions)
    return actions[words[0]](words[1:])


def _list(words: Sequence[str]) -> int:
    parser = Parser("env list", "Names the environments that are shipped, registered or installed.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    found = [_about(_environment(name)) for name in names()]
    if arguments.json:
        print_json({"environments": found})
        return 0
    for about in found:
        sizes = "  ".join(f"{split} {'endless' if n is None else n}" for split, n in about["splits"].items())
        print(f"{about['name']}   {about['description']}\n    {sizes}")
    return 0


def _about(environment: Environment) -> dict[str, Any]:
    splits = {split: environment.source.length(split) for split in environment.source.splits}
    about = {"name": environment.name, "description": environment.description, "domain": environment.domain}
    return about | {"version": environment.version, "splits": splits}


def _grade(words: Sequence[str]) -> int:
    parser = Parser("env grade", "Scores one answer to one task, as a run would.")
    parser.add_argument("env", help="a name from `k3rl env list`, or package.module:Object")
    parser.add_argument("submission", help="the file that holds the answer, or - for standard input")
    parser.add_argument("--task", type=int, required=True, metavar="N", help="index of the task in its split")
    parser.add_argument("--split", default="heldout", help="default: heldout")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    environment = _environment(arguments.env)
    task = _task(environment, arguments.split, arguments.task, arguments.seed)
    score = _score(environment, task, _read(arguments.submission))
    result = result_of(score) | {"task": task.id}
    if arguments.json:
        print_json(result)
    else:
        reward = "no reward" if result["reward"] is None else f"reward {result['reward']:g}"
        print(f"{task.id}: {result['status']}, {reward}")
        for name, value in result["parts"].items():
            print(f"  {name} {value:g}")
        if result["evidence"]:
            print(f"  {visible(result['evidence'])}")
    return 1 if isinstance(score, Failed) else 0


def result_of(score: Score) -> dict[str, Any]:
    """status, reward (None where there is none), parts, evidence (why there is none), and the hack by name."""
    row = score_row(score)
    return {
        "status": row["status"],
        "reward": row.get("reward"),
        "parts": row.get("parts", {}),
        "evidence": row.get("evidence") or row.get("reason"),
        "hack": row.get("hack"),
    }


def _environment(name: str) -> Environment:
    try:
        return make(name)
    except TypeError as error:
        raise ConfigError(str(error), key="env", got=name, wanted=f"one of {', '.join(names())}") from None


def _task(environment: Environment, split: str, index: int, seed: int) -> Task:
    if split not in environment.source.splits:
        raise unknown(f"split of {environment.name}", split, environment.source.splits)
    length = environment.source.length(split)
    if index < 0 or (length is not None and index >= length):
        wanted = "at least 0" if length is None else f"0 to {length - 1}"
        raise ConfigError(f"--task is {index}; {split} of {environment.name} wants {wanted}", key="--task", got=index)
    return environment.source.get(split, index, seed)


def _read(place: str) -> str:
    try:
        return sys.stdin.read() if place == "-" else Path(place).read_text(encoding="utf-8")
    except OSError as error:
        raise MissingResource(f"cannot read the submission {place}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place} is not UTF-8 text: {error}", key="submission", got=place) from None


def _score(environment: Environment, task: Task, answer: str) -> Score:
    rubric = environment.grader()
    try:
        return rubric.score_batch([(task, answer)])[0]
    finally:
        rubric.close()
