"""One real local Ray for the actor tests that a worker has."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from k3rl.actors import AnswerStreams, ClusterConfig, EnvironmentWorker, EpisodeJob, start_ray
from k3rl.data import EpisodeColumns
from k3rl.types import Episode, SamplingParams

CONFIG = ClusterConfig(cpus=4, object_store_mb=200, learner_threads=1, rollout_threads=1, placement_deadline_s=30)
_running: list[ExitStack] = []


@pytest.fixture(scope="module")
def ray_cluster() -> ClusterConfig:
    if not _running:
        with ExitStack() as starting:
            starting.enter_context(start_ray(CONFIG))
            _running.append(starting.pop_all())
    return CONFIG


class InProcess:
    """Where the Ray handle of an engine's actor would stand; what goes to and fro is pickled as Ray would."""

    def __init__(self, actor: AnswerStreams) -> None:
        self.actor = actor
        self.sent: list[bytes] = []
        """Pickled requests of each call."""
        self.batches: list[int] = []
        """How many requests each call had."""

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


class Method:
    def __init__(self, handle: InProcess, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *arguments: Any) -> Any:
        call = getattr(self._handle.actor, self._name)
        if self._name == "answers":
            return self._streamed(call(*arguments))
        if self._name == "submit" and arguments[1]:
            self._handle.sent.append(pickle.dumps(arguments[1]))
            self._handle.batches.append(len(arguments[1]))
        return self._called(call, pickle.dumps(arguments))

    async def _called(self, call: Callable[..., Any], arguments: bytes) -> Any:
        return pickle.loads(pickle.dumps(await call(*pickle.loads(arguments))))

    async def _streamed(self, answers: Any) -> Any:
        async for found in answers:
            yield self._called(self._same, pickle.dumps((found,)))

    async def _same(self, value: Any) -> Any:
        return value


async def play(worker: EnvironmentWorker, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> list[Episode]:
    """Ungraded episodes of a worker that is called without Ray, in the order of their jobs, played in lockstep."""
    await worker.open("test")
    await worker.start([(job, 0) for job in jobs], sampling, True)
    ended: dict[str, Episode] = {}
    tokens = None
    async for found in worker.events():
        if isinstance(found, EpisodeColumns):
            tokens = found
        elif found and isinstance(found[0], Episode):
            ended |= {one.id: tokens.episode(place, one) for place, one in enumerate(found)}
            if len(ended) == len(jobs):
                break
    await worker.stop()
    return [ended[job.episode_id] for job in jobs]


@pytest.fixture(scope="session")
def in_process() -> type[InProcess]:
    return InProcess


@pytest.fixture(scope="session", name="play")
def play_without_ray() -> Callable[..., Any]:
    return play


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ray ends with the last test of this folder, not of the session: one that waits takes a twentieth of a core."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        while _running:
            _running.pop().close()
