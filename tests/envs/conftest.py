"""Shared parts: one program runner and one rubric in real bubblewrap, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from k3rl.envs.coding import ProgramRubric
from k3rl.envs.sandbox import ProgramLimits, ProgramRunner, provider_named

LIMITS = ProgramLimits(wall_s=1.5, cpu_s=1)


@pytest.fixture(scope="session")
def runner() -> Iterator[ProgramRunner]:
    with ProgramRunner(provider_named("bwrap"), workers=2, limits=LIMITS) as programs:
        yield programs


@pytest.fixture(scope="session")
def rubric() -> Iterator[ProgramRubric]:
    programs = ProgramRubric("bwrap", workers=2, limits=LIMITS)
    yield programs
    programs.close()
