"""Each reward lands at its own sample, through the real environment and reward actors and a real sandbox."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from k3rl.actors import EnvironmentWorker, EpisodeJob, RewardWorker, RolloutWorkers, TaskRef, WorkerPool
from k3rl.envs import make
from k3rl.pipelines import EnvConfig
from k3rl.pipelines.presets import rl
from k3rl.pipelines.rl import policy_batches
from k3rl.tokens import Tokenizer
from k3rl.types import SamplingParams, Scored
from tests.actors.scripted_engines import ScriptedRollout

ENV = "coding-lists"
BAD = (
    "def f(a):\n return 1/0",
    "def f(a):\n while True: pass",
    "def f(a):\n print('x'*10**8)\n return a",
    "import os\nos._exit(0)",
    "def f(a):\n return [None]",
    "def f(a)\n return a",
    "def g(a):\n return a",
)


PLACES = (0, 3, 7)
TASK = TaskRef("train", 5, 0, level=2, family="list")


def _seed(place: int, sample: int) -> int:
    return 1000 + 100 * place + sample


@pytest.fixture(scope="module")
def good() -> str:
    environment = make(ENV)
    return environment.oracle(environment.source.get("train", 5, 0, level=2, family="list"))


@pytest.fixture(scope="module")
def rollouts(ray_cluster, good):
    """One engine, environment worker and reward worker; the engine gives the good program at a place of its group."""
    groups = {place: [*BAD[:place], good, *BAD[place:]] for place in PLACES}
    answers = {_seed(place, i): text for place, texts in groups.items() for i, text in enumerate(texts)}
    engine = ray.remote(ScriptedRollout).options(num_cpus=0).remote(answers)
    worker = ray.remote(EnvironmentWorker).options(num_cpus=0).remote(EnvConfig(name=ENV), engine)
    grader = ray.remote(RewardWorker).options(num_cpus=0).remote(EnvConfig(name=ENV))
    timeout_s = ray_cluster.call_timeout_s
    yield RolloutWorkers([engine], WorkerPool([worker]), WorkerPool([grader]), timeout_s=timeout_s)
    for actor in (engine, worker, grader):
        ray.kill(actor)


@pytest.mark.parametrize("place", PLACES)
def test_one_good_and_seven_bad_programs_get_their_rewards_at_their_own_samples(rollouts, good, place):
    jobs = [EpisodeJob(f"g{place}-{i}", f"g{place}", TASK, _seed(place, i)) for i in range(8)]
    [group] = rollouts.run(jobs, SamplingParams(max_tokens=48))

    assert [episode.id for episode in group.episodes] == [job.episode_id for job in jobs]
    assert [episode.score for episode in group.episodes if not isinstance(episode.score, Scored)] == []
    assert [episode.score.reward for episode in group.episodes] == [float(i == place) for i in range(8)]
    # and each advantage at the tokens of its own program
    [plan] = policy_batches([group], rl().replace(optimizer_steps=1))
    batch = plan.pack(ray.get([*plan.payloads]))
    tokenizer = Tokenizer.builtin()
    for start, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = batch.input_ids[start:stop][batch.loss_mask[start:stop]]
        text = tokenizer.decode(ids.tolist(), skip_special=True)
        expected = 7 / 8 if good in text else -1 / 8
        np.testing.assert_allclose(batch.advantages[start:stop][batch.loss_mask[start:stop]], expected, rtol=1e-6)
