from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every run and machine, and no deadline, because the cores are shared.
# HYPOTHESIS_PROFILE=default searches at random instead.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Files whose fixtures are long runs start first, so that no worker waits for the other at the end.
LONG = (
    "parallel/test_deepspeed.py",
    "pipelines/test_interrupts.py",
    "pipelines/test_quickstart.py",
    "pipelines/test_restart.py",
    "checkpoint/test_kill_and_resume.py",
    "kernels/test_interpreter.py",
    "pipelines/test_submit.py",
    "envs/compiler/test_compiler_hacks.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
