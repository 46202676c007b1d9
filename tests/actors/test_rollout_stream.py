"""Rollouts as a stream: nothing waits for a neighbour, and what is lost costs itself alone."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from k3rl.actors import (
    ActorLost,
    AnswerStreams,
    EnvironmentWorker,
    EpisodeJob,
    Mode,
    RewardWorker,
    RolloutWorkers,
    Schedule,
    TaskRef,
    WorkerPool,
)
from k3rl.envs.faults import FaultConfig
from k3rl.pipelines import EnvConfig
from k3rl.tokens import Tokenizer
from k3rl.types import Completion, Failed, FailureKind, SamplingParams, Scored, StopReason

TOOLS = """
import asyncio, os, pathlib, signal, time
from k3rl.envs import Env, Environment, Message, Observation, Rubric, StepResult, Task
from k3rl.types import Budgets, Scored

DIED = pathlib.Path(__file__).with_suffix(".died")
TURNS = 5


class Source:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        kind = {90: "slow", 91: "stops", 92: "kills", 93: "fails once"}.get(index, "quick")
        budgets = Budgets(wall_s=3.0) if level == 1 else Budgets()
        return Task(f"tools/{index}", "tools", (Message("user", "go"),), kind, budgets=budgets, data={"kind": kind})


class Tools(Env):
    async def reset(self, task, context):
        self.kind, self.turn = task.data["kind"], 0
        return Observation(task.messages)

    async def step(self, action):
        self.turn += 1
        if self.kind == "slow":
            await asyncio.sleep(1.0)
        if self.kind == "stops" and self.turn == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "kills" and self.turn == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.turn == TURNS:
            return StepResult(done=True, answer=f"{os.getpid()}")
        return StepResult(Observation((Message("user", "on"),)))


class Ranks(Rubric):
    def score_batch(self, items):
        with open(pathlib.Path(__file__).with_suffix(".graded"), "a") as log:
            log.write(f"{len(items)}\\n")
        return [Scored(1.0 / len(items)) for _ in items]


class Grader:
    compares = False

    def __call__(self, **_):
        return Ranks()


def environment():
    return Environment("tools", "has tools", Source(), Tools, Grader(), lambda task: "fine")
"""


class Quick(AnswerStreams):
    """Stands where a rollout actor stands: a valid message for every prompt, after a moment."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__()
        tokenizer = Tokenizer.builtin()
        close, sep, end = (tokenizer.special(name) for name in ("close", "sep", "end_of_msg"))
        said = (close, *tokenizer.encode("response"), sep, close, *tokenizer.encode("message"), sep, end)
        self._ids = (*tokenizer.encode("a"), *said)
        self._delay_s = delay_s
        self.begun = self.answered = self.cancelled = 0
        self.paused = False

    def begin(self, requests):
        self.begun += len(requests)
        return [asyncio.ensure_future(self._complete()) for _ in requests]

    def take_back(self, futures):
        self.cancelled += len(futures)
        super().take_back(futures)

    async def _complete(self):
        await asyncio.sleep(self._delay_s)
        while self.paused:
            await asyncio.sleep(0.01)
        self.answered += 1
        return Completion(self._ids, (-0.1,) * len(self._ids), StopReason.STOP, 1, 1)

    async def pause(self):
        self.paused = True

    async def resume(self):
        self.paused = False

    async def counted(self):
        return {name: getattr(self, name) for name in ("begun", "answered", "cancelled", "paused")}


@contextmanager
def rollout_workers(ray_cluster, folder: Path, *, workers=1, engines=1, delay_s=0.0, compares=False, **faults):
    """Real actors around engines that say the same to everyone."""
    module = folder / "tools.py"
    module.write_text(TOOLS)
    config = FaultConfig(**faults)
    env = EnvConfig(name=f"{module}:environment", faults=config)
    handles = [ray.remote(Quick).options(num_cpus=0).remote(delay_s) for _ in range(engines)]
    pools = [
        WorkerPool([make(i) for i in range(workers)], make)
        for make in (
            lambda i: (
                ray.remote(EnvironmentWorker).options(num_cpus=0).remote(env, *(handles[i::workers] or handles[:1]))
            ),
            lambda _: ray.remote(RewardWorker).options(num_cpus=0).remote(env),
        )
    ]
    made = RolloutWorkers(
        handles, *pools, env="tools", faults=config, compares=compares, timeout_s=ray_cluster.call_timeout_s
    )
    try:
        yield made
    finally:
        made.close()
        for pool in pools:
            pool.end()
        for handle in handles:
            ray.kill(handle)


def jobs_of(number: int, size: int, index: int | None = None, level: int | None = None) -> list[EpisodeJob]:
    task = TaskRef("train", number if index is None else index, 0, level)
    return [EpisodeJob(f"{number}-{k}", f"g{number}", task, 100 * number + k) for k in range(size)]


def waited(engine, name: str, wanted: int) -> bool:
    """Whether an engine has counted to this within half a minute, and no further."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and ray.get(engine.counted.remote())[name] < wanted:
        time.sleep(0.1)
    return ray.get(engine.counted.remote())[name] == wanted


PARAMS = SamplingParams(max_tokens=64)
SLOW, STOPS, KILLS = 90, 91, 92


def test_one_slow_tool_holds_a_synchronous_batch_and_not_an_asynchronous_one(ray_cluster, tmp_path):
    """Sixteen episodes of five turns, one of them with tools of a second."""

    def draw(number: int) -> list[EpisodeJob]:
        return jobs_of(number, 1, SLOW if number == 0 else None)

    with rollout_workers(ray_cluster, tmp_path) as rollouts:
        rollouts.run(jobs_of(99, 1), PARAMS)  # processes have started
        began = time.monotonic()
        rollouts.open(Schedule(Mode.SYNCHRONOUS, 16, 1), draw, PARAMS).take()
        synchronous_s = time.monotonic() - began
        began = time.monotonic()
        stream = rollouts.open(Schedule(Mode.ASYNCHRONOUS, 15, 1, max_off_policy_steps=1), draw, PARAMS)
        quick = stream.take()
        asynchronous_s = time.monotonic() - began
        assert "g0" not in [group.id for group in quick]
        assert asynchronous_s < 3 < 5 < synchronous_s
        aborts_at = [stream.published(version) for version in (1, 2)]
        assert aborts_at == [None, None]
        stream.take(timeout_s=30)
        counts = stream.take_counts()
        assert (counts["dropped_groups"], counts["aborted_episodes"]) == (1, 1), "the slow one is too old by now"


def test_a_time_budget_is_not_charged_for_a_slow_neighbour(ray_cluster, tmp_path):
    def draw(number: int) -> list[EpisodeJob]:
        return jobs_of(number, 1, SLOW if number == 0 else None, level=0 if number == 0 else 1)

    with rollout_workers(ray_cluster, tmp_path) as rollouts:
        stream = rollouts.open(Schedule(Mode.ASYNCHRONOUS, 4, 1, max_off_policy_steps=1), draw, PARAMS, wanted=4)
        reasons = {group.id: group.episodes[0].stop_reason for group in stream.take()}
    assert reasons == dict.fromkeys(("g0", "g1", "g2", "g3"), StopReason.ENV_DONE)


@pytest.mark.parametrize(("index", "kind"), [(STOPS, FailureKind.HUNG), (KILLS, FailureKind.DIED)])
def test_an_episode_that_takes_its_worker_along_costs_itself_alone(ray_cluster, tmp_path, index, kind):
    jobs = [*jobs_of(0, 1, index), *[job for n in range(1, 4) for job in jobs_of(n, 1)]]
    with rollout_workers(ray_cluster, tmp_path, workers=2, retries=0, deadline_s=6) as rollouts:
        groups = rollouts.run(jobs, PARAMS)
        metrics = {name: total for name, (total, _) in rollouts.take_metrics().pairs().items()}
    first, *others = [group.episodes[0].score for group in groups]
    assert isinstance(first, Failed)
    assert first.kind is kind
    assert [type(score) for score in others] == [Scored] * 3
    assert metrics[f"env/tools/failed_{kind}_attempts"] == 1
    assert 1 <= metrics["env/tools/replaced_actors"] <= 3


def test_requests_of_a_lost_worker_and_of_a_closed_stream_are_taken_back(ray_cluster, tmp_path):
    with rollout_workers(ray_cluster, tmp_path, delay_s=30.0) as rollouts:
        stream = rollouts.open(Schedule(Mode.SYNCHRONOUS, 3, 1), lambda n: jobs_of(n, 1), PARAMS)
        (engine,) = rollouts.engines

        assert waited(engine, "begun", 3)
        ray.kill(rollouts._environments.actors[0])
        assert waited(engine, "cancelled", 3)
        assert waited(engine, "begun", 4), "one cohort of suspects at a time"
        stream.close()
        assert waited(engine, "cancelled", 4)


def test_a_lost_engine_is_a_lost_actor_and_no_fault_of_the_environment(ray_cluster, tmp_path):
    with rollout_workers(ray_cluster, tmp_path, workers=2, delay_s=20.0) as rollouts:
        stream = rollouts.open(Schedule(Mode.SYNCHRONOUS, 4, 1), lambda n: jobs_of(n, 1), PARAMS)
        assert waited(rollouts.engines[0], "begun", 4)
        ray.kill(rollouts.engines[0])
        with pytest.raises(ActorLost, match="rollout actor 0 died"):
            stream.take()
        rollouts.engines.clear()


def test_a_worker_uses_all_engines_that_it_has_and_keeps_a_group_together(ray_cluster, tmp_path):
    with rollout_workers(ray_cluster, tmp_path, workers=1, engines=4) as rollouts:
        rollouts.run([job for n in range(4) for job in jobs_of(n, 2)], PARAMS)
        answered = [ray.get(engine.counted.remote())["answered"] for engine in rollouts.engines]
    assert answered == [2 * 5] * 4


@pytest.mark.parametrize("compares", [False, True])
def test_a_reward_that_compares_sees_the_whole_group_though_an_episode_was_lost_and_played_again(
    ray_cluster, tmp_path, compares
):
    with rollout_workers(ray_cluster, tmp_path, workers=2, compares=compares, retries=1) as rollouts:
        stream = rollouts.open(
            Schedule(Mode.ASYNCHRONOUS, 1, 4, max_off_policy_steps=1, in_flight=2, retries=1),
            lambda n: jobs_of(n, 4),
            PARAMS,
            wanted=1,
        )
        (group,) = stream.take()
    graded = [int(line) for line in (tmp_path / "tools.graded").read_text().split()]
    if compares:
        assert graded == [4]
        assert [episode.score.reward for episode in group.episodes] == [0.25] * 4
    else:
        assert max(graded) < 4, "each is graded as it ends"


def test_a_partial_phase_rests_its_engines_until_the_next_version(ray_cluster, tmp_path):
    def draw(number: int) -> list[EpisodeJob]:
        return jobs_of(number, 1, SLOW if number == 0 else None)

    with rollout_workers(ray_cluster, tmp_path) as rollouts:
        stream = rollouts.open(Schedule(Mode.PARTIAL, 4, 1, None, fraction=0.75), draw, PARAMS, wanted=8)
        first = stream.take(timeout_s=30)
        assert sorted(group.id for group in first) == ["g1", "g2", "g3"]
        (engine,) = rollouts.engines
        time.sleep(2)
        before = ray.get(engine.counted.remote())
        assert before["paused"]
        time.sleep(2)
        assert ray.get(engine.counted.remote())["answered"] == before["answered"]
        ray.get(engine.resume.remote())
        stream.published(1)
        assert len(stream.take(timeout_s=30)) >= 3


def test_who_waits_is_told_what_for(ray_cluster, tmp_path):
    with rollout_workers(ray_cluster, tmp_path, delay_s=60.0) as rollouts:
        stream = rollouts.open(Schedule(Mode.SYNCHRONOUS, 2, 1), lambda n: jobs_of(n, 1), PARAMS)
        assert waited(rollouts.engines[0], "begun", 2)
        with pytest.raises(ActorLost, match=r"0 of 2 groups are whole; episodes: 2 running \(worker 0: 2\)"):
            stream.take(timeout_s=0.5)


def test_what_drawing_raises_ends_the_stream(ray_cluster, tmp_path):
    def draw(number: int) -> list[EpisodeJob]:
        raise IndexError(f"there is no task {number}; os {os.name}")

    with rollout_workers(ray_cluster, tmp_path) as rollouts:
        stream = rollouts.open(Schedule(Mode.SYNCHRONOUS, 2, 1), draw, PARAMS)
        with pytest.raises(IndexError, match="no task 0"):
            stream.take()
