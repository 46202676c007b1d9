"""Tasks of `coding-repair`: a repository with one or two mistakes, and a report of what users see.

"train" has no end and draws from three repositories, without one mistake of each; "heldout" has those mistakes and
a fourth repository. Hidden calls judge: for every mistake at least one of them goes wrong while it is left, and calls
that were right must stay right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from k3rl.envs.coding.repair.package import Call, Trusted, with_mistakes
from k3rl.envs.coding.repair.repositories import REPOSITORIES, Mistake, Repository
from k3rl.types import Budgets, Message, Task

NAME = "coding-repair"
SPLITS = ("train", "heldout")
HELDOUT_TASKS = 64
HIDDEN_CALLS = 24
VISIBLE_CALLS = 6
LEVELS = (1, 2)
BUDGETS = Budgets(turns=40, tokens=16_384, tool_calls=60, wall_s=3600.0, virtual_s=900.0)
_TRIES = 500


class Repairs:
    """The task source. `family` is the repository, `level` the number of mistakes."""

    splits = SPLITS

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """None for "train"."""
        _choices(split, family)
        return None if split == "train" else HELDOUT_TASKS

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """The task with its hidden part. ValueError: no such split, family or level; IndexError: past the end."""
        repositories = _choices(split, family)
        if level is not None and level not in LEVELS:
            raise ValueError(f"{NAME} has no level {level}; it has {', '.join(map(str, LEVELS))}")
        if index < 0 or (split != "train" and index >= HELDOUT_TASKS):
            raise IndexError(f"{NAME} {split} has {HELDOUT_TASKS} tasks; there is no number {index}")
        narrowed = f"/{family or 'any'}-{level or 'any'}" if family or level else ""
        name = f"{NAME}/{split}/{seed}/{index}{narrowed}"
        rng = random.Random(name)
        repository = repositories[index % len(repositories)]
        chosen = level or LEVELS[index // len(repositories) % len(LEVELS)]
        while True:
            task = _task(repository, _mistakes(repository, split, chosen, rng), name, seed, rng)
            if task is not None:
                return task


def _choices(split: str, family: str | None) -> list[Repository]:
    if split not in SPLITS:
        raise ValueError(f"{NAME} has no split {split!r}; it has {', '.join(SPLITS)}")
    offered = [one for one in REPOSITORIES.values() if split != "train" or not one.held_out]
    found = [one for one in offered if family in (None, one.name)]
    if not found:
        raise ValueError(f"{NAME} {split} has no family {family!r}; it has {', '.join(one.name for one in offered)}")
    return found


def _mistakes(repository: Repository, split: str, level: int, rng: random.Random) -> list[Mistake]:
    """`level` mistakes; in a repository that is trained on, the last one is kept for "heldout", always there."""
    if repository.held_out:
        return rng.sample(repository.mistakes, level)
    *common, kept = repository.mistakes
    if split == "train":
        return rng.sample(common, level)
    return [kept, *rng.sample(common, level - 1)]


def _task(repository: Repository, mistakes: Sequence[Mistake], name: str, seed: int, rng: random.Random) -> Task | None:
    """The task of these mistakes, None when no call was found that shows one of them."""
    right, broken = Trusted(repository.files), Trusted(with_mistakes(repository, mistakes))
    examples, hidden = [], []
    for mistake in mistakes:
        rest = Trusted(with_mistakes(repository, [mistake]))
        functions = [f"{repository.name}.{function}" for function in mistake.calls]
        shown = _telling(repository, functions, right, broken, rng)
        if shown is None:
            return None
        examples.append((mistake, shown))
        for function in functions:
            judged = _telling(repository, [function], right, rest, rng)
            if judged is not None and judged != shown:
                hidden.append(judged)
        if not any(call[0] in functions for call in hidden):
            return None
    every = [f"{repository.name}.{function}" for function in repository.calls]
    hidden += [_call(repository, rng.choice(every), rng) for _ in range(HIDDEN_CALLS - len(hidden))]
    rng.shuffle(hidden)
    visible = _agreeing(repository, every, right, broken, rng)
    files = with_mistakes(repository, mistakes)
    files |= {"README.md": f"# {repository.name}\n\nThis package {repository.about}.\n"}
    files |= {f"tests/test_{repository.name}.py": _tests(repository.name, visible, right)}
    return Task(
        id=name,
        env=NAME,
        messages=(Message("user", _request(repository, examples, right, broken)),),
        family=repository.name,
        level=len(mistakes),
        domain="code",
        budgets=BUDGETS,
        data={"files": files, "artifacts": [f"{repository.name}/*.py"]},
        hidden={
            "files": {mistake.path: repository.files[mistake.path] for mistake in mistakes},
            "calls": hidden,
            "wanted": [right(call)[1] for call in hidden],
            "examples": [[call, right(call)[1]] for _, call in examples],
        },
        seed=seed,
    )


def _call(repository: Repository, function: str, rng: random.Random) -> list[Any]:
    return [function, repository.calls[function.partition(".")[2]](rng)]


def _telling(
    repository: Repository, functions: Sequence[str], right: Trusted, wrong: Trusted, rng: random.Random
) -> list[Any] | None:
    """A call whose result is not the same in both, None when none is found."""
    for _ in range(_TRIES):
        call = _call(repository, rng.choice(functions), rng)
        if right(call) != wrong(call):
            return call
    return None


def _agreeing(
    repository: Repository, functions: Sequence[str], right: Trusted, wrong: Trusted, rng: random.Random
) -> list[Call]:
    """Calls that the mistakes do not change, for the tests that come with the repository."""
    found: list[Call] = []
    for _ in range(_TRIES):
        call = _call(repository, rng.choice(functions), rng)
        if right(call) == wrong(call) and len(found) < VISIBLE_CALLS:
            found.append(call)
    return found


def _tests(package: str, calls: Sequence[Call], right: Trusted) -> str:
    """A unittest file that passes before and after the repair."""
    modules = sorted({str(name).rpartition(".")[0] for name, _ in calls})
    lines = ["import unittest", "", *(f"import {module}" for module in modules), "", ""]
    lines += [f"class Test{package.capitalize()}(unittest.TestCase):"]
    for number, call in enumerate(calls):
        lines += [
            f"    def test_{number}(self):",
            f"        self.assertEqual({_written(call)}, {right(call)[1]!r})",
            "",
        ]
    return "\n".join([*lines, "", 'if __name__ == "__main__":', "    unittest.main()", ""])


def _written(call: Call) -> str:
    name, arguments = call
    return f"{name}({', '.join(map(repr, arguments))})"


def _request(repository: Repository, examples: Sequence[tuple[Mistake, Call]], right: Trusted, broken: Trusted) -> str:
    """The report."""
    reports = []
    for mistake, call in examples:
        kind, got = broken(call)
        given = f"gives {got!r}" if kind == "value" else f"raises {got}"
        reports.append(f"- {mistake.symptom}: {_written(call)} {given} and should give {right(call)[1]!r}")
    return "\n".join(
        [
            f"The Python package `{repository.name}` in your workspace {repository.about}. Users report:",
            *reports,
            f"Repair it. Files matching {repository.name}/*.py are judged, by hidden tests of the whole package; "
            f"`python3 -m unittest tests/test_{repository.name}.py` runs those that come with it.",
        ]
    )
