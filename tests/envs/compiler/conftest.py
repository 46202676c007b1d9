"""One grader for all tests of `compiler`: it keeps the driver and the baselines it measured."""

from __future__ import annotations

import dataclasses

import pytest

from k3rl.envs import compiler


@pytest.fixture(scope="session")
def environment():
    return compiler.environment()


@pytest.fixture(scope="session")
def grader(environment):
    rubric = environment.grader(workers=2)
    yield rubric
    rubric.close()


@pytest.fixture
def small_task(environment):
    """A training task of a level, judged on its first programs only, so that a test is quick."""

    def make(level: int, index: int = 0, cases: int = 1, split: str = "train"):
        task = environment.source.get(split, index, 0, level=level)
        return dataclasses.replace(task, hidden={**task.hidden, "cases": task.hidden["cases"][:cases]})

    return make
