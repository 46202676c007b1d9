"""User code that raises costs its own episodes, typed, and nothing else."""

from __future__ import annotations

import pytest
import ray

from k3rl.actors import EnvironmentWorker, EpisodeJob, RewardWorker, RolloutWorkers, TaskRef, WorkerPool
from k3rl.envs.faults import EnvironmentTripped, FaultConfig
from k3rl.pipelines import EnvConfig
from k3rl.pipelines.rollout_metrics import TooManyFailures, check_failures
from k3rl.types import Failed, FailureKind, SamplingParams, Scored
from tests.actors.scripted_engines import Echo

BROKEN = """
from k3rl.envs import Env, Environment, Message, Observation, Rubric, StepResult, Task
from k3rl.types import Scored


class Source:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        if index == 3:
            raise OSError("the task file is gone")
        return Task(f"broken/{index}", "broken", (Message("user", "say a"),), "broken", data={"index": index})


class Broken(Env):
    async def reset(self, task, context):
        if task.data["index"] == 1:
            raise RuntimeError("no such server")
        self.index = task.data["index"]
        return Observation(task.messages)

    async def step(self, action):
        if self.index == 2:
            raise ValueError("cannot step")
        return StepResult(done=True, answer="fine")


class Grader(Rubric):
    def score_batch(self, items):
        return [Scored(1.0) for _ in items]


def environment():
    return Environment("broken", "raises", Source(), Broken, lambda **_: Grader(), lambda task: "fine")
"""


HOSTILE = """
import math, os, pathlib
from k3rl.envs import Env, Environment, Message, Observation, Rubric, StepResult, Task
from k3rl.types import Scored

SEEN = pathlib.Path(__file__).with_suffix(".seen")
GONE = pathlib.Path(__file__).with_suffix(".gone")
DEAD = pathlib.Path(__file__).with_suffix(".dead")


class Source:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        kind = ("dies once", "nan", "flaky", "grader dies once")[index]
        return Task(f"hostile/{index}", "hostile", (Message("user", "say a"),), kind, hidden={"kind": kind})


class Hostile(Env):
    async def reset(self, task, context):
        self.kind = task.family
        return Observation(task.messages)

    async def step(self, action):
        if self.kind == "dies once" and not GONE.exists():
            GONE.write_text("x")
            os.kill(os.getpid(), 9)
        if self.kind == "flaky" and not SEEN.exists():
            SEEN.write_text("x")
            raise ConnectionError("at first")
        return StepResult(done=True, answer="fine")


class Grader(Rubric):
    def score_batch(self, items):
        if any(task.family == "grader dies once" for task, _ in items) and not DEAD.exists():
            DEAD.write_text("x")
            os.kill(os.getpid(), 9)
        return [Scored(math.nan if task.family == "nan" else 1.0) for task, _ in items]


def environment():
    return Environment("hostile", "misbehaves", Source(), Hostile, lambda **_: Grader(), lambda task: "fine")
"""


WORSE = """
import asyncio, math, os, time
from k3rl.envs import Env, Environment, Message, Observation, Rubric, StepResult, Task
from k3rl.types import Scored

KINDS = ("hangs", "blocks", "floods", "forks", "is infinite", "is too much", "is no number", "is fine")


class Source:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        return Task(f"worse/{index}", "worse", (Message("user", "say a"),), KINDS[index], hidden={})


class Worse(Env):
    async def reset(self, task, context):
        self.kind = task.family
        return Observation(task.messages)

    async def step(self, action):
        if self.kind == "hangs":
            await asyncio.sleep(600)
        while self.kind == "blocks":
            time.sleep(0.01)
        if self.kind == "forks" and os.fork() == 0:
            return StepResult(done=True, answer="of a child")
        return StepResult(done=True, answer="x" * 50_000_000 if self.kind == "floods" else "fine")


class Grader(Rubric):
    def score_batch(self, items):
        worth = {"is infinite": math.inf, "is too much": 7.0, "is no number": "all"}
        return [Scored(worth.get(task.family, 1.0)) for task, _ in items]


def environment():
    return Environment("worse", "misbehaves", Source(), Worse, lambda **_: Grader(), lambda task: "fine")
"""


def pools(env, engine) -> tuple[WorkerPool, WorkerPool]:
    """One environment worker and one reward worker, each replaced when it is lost."""

    def worker(_):
        return ray.remote(EnvironmentWorker).options(num_cpus=0).remote(env, engine)

    def grader(_):
        return ray.remote(RewardWorker).options(num_cpus=0).remote(env)

    return WorkerPool([worker(0)], worker), WorkerPool([grader(0)], grader)


@pytest.fixture(scope="module")
def group(ray_cluster, tmp_path_factory):
    """Five episodes of an environment whose tasks 1, 2 and 3 break in reset, in step and when drawn."""
    module = tmp_path_factory.mktemp("env") / "broken.py"
    module.write_text(BROKEN)
    env = EnvConfig(name=f"{module}:environment")
    jobs = [EpisodeJob(f"e{i}", "g", TaskRef("train", i, 0), i) for i in range(5)]
    engine = ray.remote(Echo).options(num_cpus=0).remote()
    worker = ray.remote(EnvironmentWorker).options(num_cpus=0).remote(env, engine)
    grader = ray.remote(RewardWorker).options(num_cpus=0).remote(env)
    timeout_s = ray_cluster.call_timeout_s
    rollouts = RolloutWorkers([engine], WorkerPool([worker]), WorkerPool([grader]), timeout_s=timeout_s)
    [graded] = rollouts.run(jobs, SamplingParams())
    for actor in (engine, worker, grader):
        ray.kill(actor)
    return graded


def test_each_failure_is_its_own_episodes_and_never_a_zero(group):
    assert [type(episode.score) for episode in group.episodes] == [Scored, Failed, Failed, Failed, Scored]
    assert [str(episode.score.reason) for episode in group.episodes if isinstance(episode.score, Failed)] == [
        "environment: RuntimeError: no such server",
        "environment: ValueError: cannot step",
        "OSError: the task file is gone",
    ]


def test_a_share_of_failures_within_the_limit_lets_the_run_go_on(group):
    check_failures([group], limit=0.6)
    with pytest.raises(TooManyFailures, match="3 of 5"):
        check_failures([group], limit=0.5)


def test_hostile_episodes_are_typed_retried_counted_and_trip_the_breaker(ray_cluster, tmp_path):
    module = tmp_path / "hostile.py"
    module.write_text(HOSTILE)
    faults = FaultConfig(retries=1, call_s=0.5, blocked_s=0.4, breaker_attempts=8, breaker_share=0.6)
    engine = ray.remote(Echo).options(num_cpus=0).remote()

    environments, rewards = pools(EnvConfig(name=f"{module}:environment", faults=faults), engine)
    rollouts = RolloutWorkers(
        [engine], environments, rewards, faults=faults, env="hostile", timeout_s=ray_cluster.call_timeout_s
    )
    jobs = [EpisodeJob(f"e{i}", f"g{i}", TaskRef("train", i, 0), i) for i in range(4)]
    scores = [group.episodes[0].score for group in rollouts.run(jobs, SamplingParams())]
    assert [score.kind if isinstance(score, Failed) else score.reward for score in scores] == [
        1.0,  # run again in a fresh process
        FailureKind.BAD_REWARD,
        1.0,  # the second attempt
        1.0,  # graded again by a fresh worker
    ]
    counted = {key.removeprefix("env/hostile/"): value for key, (value, _) in rollouts.take_metrics().pairs().items()}
    assert counted["retried_attempts"] in (2, 3)  # the one that was killed counts where it was the last to run
    assert counted["failed_bad_reward_attempts"] == 2
    assert counted["replaced_actors"] == 2
    with pytest.raises(EnvironmentTripped, match="gave no reward"):
        rollouts.run([EpisodeJob(f"n{i}", "n", TaskRef("train", 1, 0), i) for i in range(6)], SamplingParams())
    for pool in (environments, rewards):
        pool.end()
    ray.kill(engine)


def test_what_hangs_blocks_floods_forks_or_lies_is_typed_and_the_others_are_paid(ray_cluster, tmp_path):
    module = tmp_path / "worse.py"
    module.write_text(WORSE)
    faults = FaultConfig(retries=0, call_s=1.0, blocked_s=1.0, breaker_attempts=1000)
    engine = ray.remote(Echo).options(num_cpus=0).remote()

    environments, rewards = pools(EnvConfig(name=f"{module}:environment", faults=faults), engine)
    rollouts = RolloutWorkers(
        [engine], environments, rewards, faults=faults, env="worse", timeout_s=ray_cluster.call_timeout_s
    )
    jobs = [EpisodeJob(f"e{i}", f"g{i}", TaskRef("train", i, 0), i) for i in range(8)]
    scores = [group.episodes[0].score for group in rollouts.run(jobs, SamplingParams())]
    assert [score.kind if isinstance(score, Failed) else score.reward for score in scores] == [
        FailureKind.HUNG,
        FailureKind.HUNG,
        FailureKind.FLOODED,
        1.0,  # its child does not go on
        FailureKind.BAD_REWARD,
        FailureKind.BAD_REWARD,
        FailureKind.BAD_REWARD,
        1.0,
    ]
    for pool in (environments, rewards):
        pool.end()
    ray.kill(engine)
