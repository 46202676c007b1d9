"""One real local Ray for the actor tests that a worker has."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from k3rl.actors import ClusterConfig, start_ray

CONFIG = ClusterConfig(cpus=4, object_store_mb=200, learner_threads=1, rollout_threads=1, placement_deadline_s=30)
_running: list[ExitStack] = []


@pytest.fixture(scope="module")
def ray_cluster() -> ClusterConfig:
    if not _running:
        with ExitStack() as starting:
            starting.enter_context(start_ray(CONFIG))
            _running.append(starting.pop_all())
    return CONFIG


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ray ends with the last test of this folder, not of the session: one that waits takes a twentieth of a core."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        while _running:
            _running.pop().close()
