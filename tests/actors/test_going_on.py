"""Episodes of an environment that can be paused go on where they stood when their worker is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from k3rl.actors import EnvironmentWorker, EpisodeJob, RewardWorker, RolloutWorkers, TaskRef, WorkerPool, fetched
from k3rl.actors.schedule import Mode, Schedule
from k3rl.envs import EnvConfig, EpisodeState, FaultConfig, KeptState
from k3rl.pipelines import RLConfig
from k3rl.pipelines.rollout_buffer import RolloutBuffer
from k3rl.types import SamplingParams, Scored
from tests.actors.scripted_engines import Echo

TURNS = 6
MODULE = f"""
import asyncio, json, os, pathlib
from k3rl.envs import Env, Environment, Message, Observation, Rubric, StepResult, Task

HERE = pathlib.Path(__file__).parent


class Source:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        return Task(f"long/{{index}}", "long", (Message("user", "go"),), "f", data={{"pauses": index % 2 == 0}})


class Long(Env):
    async def reset(self, task, context):
        self.task, self.seen = task, []
        return Observation(task.messages)

    async def step(self, action):
        self.seen.append(os.getpid())
        (HERE / "pids").joinpath(str(os.getpid())).touch()
        while len(self.seen) == 3 and not (HERE / "go").exists():
            await asyncio.sleep(0.01)
        if len(self.seen) == {TURNS}:
            return StepResult(done=True, answer=json.dumps(self.seen))
        return StepResult(Observation((Message("user", "and then"),)))

    async def snapshot(self):
        if not self.task.data["pauses"]:
            return await super().snapshot()
        return json.dumps(self.seen).encode()

    async def restore(self, task, context, snapshot):
        self.task, self.seen = task, json.loads(snapshot)


def good(answer):
    return 1.0


def environment():
    return Environment("long", "many turns", Source(), Long, Rubric.of(good), lambda task: "fine")
"""


def jobs_of(number: int) -> list[EpisodeJob]:
    return [EpisodeJob(f"e{number}-{n}", f"g{number}", TaskRef("train", number, 0), n) for n in range(2)]


@pytest.fixture(scope="module")
def played(ray_cluster, tmp_path_factory):
    """(states when a worker was killed, groups of a second stream that goes on, its counts, the worker's pid)."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "long.py").write_text(MODULE)
    (folder / "pids").mkdir()
    env = EnvConfig(name=f"{folder}/long.py", faults=FaultConfig())
    engine = ray.remote(Echo).options(num_cpus=0).remote()
    schedule = Schedule(Mode.ASYNCHRONOUS, groups=2, group_size=2, max_off_policy_steps=1)

    def workers() -> RolloutWorkers:
        worker = ray.remote(EnvironmentWorker).options(num_cpus=0).remote(env, engine)
        grader = ray.remote(RewardWorker).options(num_cpus=0).remote(env)
        return RolloutWorkers([engine], WorkerPool([worker]), WorkerPool([grader]), env="long", timeout_s=60)

    first = workers()
    stream = first.open(schedule, jobs_of, SamplingParams(), wanted=2, version=5, keep_s=0.0)
    states, deadline = {}, time.monotonic() + 60
    while [len(EpisodeState.from_bytes(s).branches[0].turns) for s in states.values()] != [2, 2]:
        assert time.monotonic() < deadline, states
        time.sleep(0.05)
        states = stream.states()
    next_group, drawn = stream.drawn()
    [killed] = [int(path.name) for path in (folder / "pids").iterdir()]
    os.kill(killed, signal.SIGKILL)
    first.close()
    (folder / "go").touch()
    second = workers()
    again = second.open(
        schedule, jobs_of, SamplingParams(), wanted=2, next_group=next_group, version=1, drawn=drawn,
        going_on=states, keep_s=0.0,
    )  # fmt: skip
    groups, counts = fetched(again.take(timeout_s=60), 60), again.take_counts()
    second.close()
    ray.kill(engine)
    return states, groups, counts, killed


def test_what_can_be_paused_goes_on_and_the_rest_begins_anew(played):
    states, groups, _, killed = played
    assert set(states) == {"e0-0", "e0-1"}
    by_id = {episode.id: episode for group in groups for episode in group.episodes}
    assert set(by_id) == {"e0-0", "e0-1", "e1-0", "e1-1"}
    for name, episode in by_id.items():
        assert isinstance(episode.score, Scored), episode.score
        assert len(episode.branches[0].turns) == TURNS
        pids = json.loads(episode.answer)
        assert len(pids) == TURNS
        assert pids.count(killed) == (2 if name in states else 0)


def test_both_are_counted(played):
    counts = played[2]
    assert (counts["continued_episodes"], counts["replayed_episodes"]) == (2, 2)


def test_a_training_state_has_what_is_remembered_with_versions_that_follow_the_weights(played, tmp_path):
    """The folder of a state, written and read by two buffers; a torn file is said and its episode played again."""
    said: list[str] = []
    session = SimpleNamespace(fleet=None, begun=0, progress=SimpleNamespace(note=said.append))
    stage = SimpleNamespace(session=session, step=3, name="rl", saved_rollouts=None, total_steps=9)
    config = RLConfig(max_staleness=0, rollouts={"mode": "asynchronous"})
    buffer = RolloutBuffer(stage, config, None, None)
    drawn = [(0, jobs_of(0)), (1, jobs_of(1))]
    buffer._stream = SimpleNamespace(drawn=lambda: (2, drawn), states=lambda: played[0])
    buffer._filled, buffer._published = True, {"version": 5.0}
    saved = json.loads(json.dumps(buffer.save(tmp_path / "in_flight-step_3-ab", 3, "hash")))

    stage.saved_rollouts = tmp_path, saved
    resumed = RolloutBuffer(stage, config, None, None)
    assert resumed._resumed == (2, drawn)
    sampled_by = EpisodeState.from_bytes(played[0]["e0-0"]).first_version
    found = resumed._going_on_at(1)
    assert EpisodeState.from_bytes(found["e0-0"]).first_version == sampled_by - 4  # the saved weights: 5 then, 1 now
    assert said == []

    next(Path(tmp_path / "in_flight-step_3-ab").glob("0.episode")).write_bytes(b"torn")
    assert len(RolloutBuffer(stage, config, None, None)._going_on_at(1)) == 1
    assert said == ["rl: the states of 1 episodes cannot be read; these are played again"]


def test_states_are_due_now_and_then_and_never_again_from_an_environment_that_has_none():
    now = [0.0]
    kept = KeptState(30.0, clock=lambda: now[0])
    due = []
    for second in range(100):
        now[0] = float(second)
        if kept.due:
            due.append(second)
            kept.keep(SimpleNamespace(second=second))
    assert due == [30, 60, 90]
    assert kept.state.second == 90
    now[0] = 1000.0
    assert kept.due
    kept.stop()
    assert not kept.due
