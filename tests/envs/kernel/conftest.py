"""One judge of kernels in real bubblewrap, and tasks made small."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from k3rl.envs.kernel import KernelLadder, KernelRubric
from k3rl.types import Task


@pytest.fixture(scope="session")
def grader() -> Iterator[KernelRubric]:
    judge = KernelRubric("bwrap", workers=2)
    yield judge
    judge.close()


@pytest.fixture(scope="session")
def small_task() -> Callable[[str], Task]:
    """A training task of a family with one hidden small shape and one whose cost counts; the same one each time."""
    made: dict[str, Task] = {}

    def task(family: str) -> Task:
        if family not in made:
            whole = KernelLadder().get("train", 0, family=family)
            assert whole.hidden is not None
            cut = {name: whole.hidden[name][:1] for name in ("small", "counted")}
            made[family] = dataclasses.replace(whole, hidden={**whole.hidden, **cut})
        return made[family]

    return task
