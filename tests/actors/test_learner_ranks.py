"""Two learner ranks under a real Ray: one is killed in the middle of a step, both end with its name, others go on."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from k3rl.actors import ActorLost, LearnerActor, LearnerGroup
from k3rl.checkpoint.train_state import TrainState
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy, LossInputs, LossOutput
from k3rl.model import K3Config
from k3rl.parallel import LearnerConfig, RankFailed, TrainerConfig

TINY = K3Config.named("k3-nano").replace(num_experts=4)
TIMEOUT_S = 60.0


class Rank(LearnerActor):
    """A learner that says which process it is, and what it is told to say of its next step."""

    def process(self) -> int:
        return os.getpid()

    def note(self, text: str) -> None:
        self.trainer.notes.append(text)


@dataclass(frozen=True)
class HangsIn:
    """Cross entropy that never comes back in one process, and says when it is there."""

    process: int
    sign: Path

    def __call__(self, inputs: LossInputs) -> LossOutput:
        if os.getpid() == self.process:
            self.sign.touch()
            time.sleep(10 * TIMEOUT_S)
        return CrossEntropy()(inputs)


def batch(seed: int) -> TrainBatch:
    rng, mask, zeros = np.random.default_rng(seed), np.arange(30) > 0, np.zeros(30, np.float32)
    return TrainBatch.pack([TrainSequence(f"s{n}", rng.integers(0, 400, 30), mask, zeros, zeros) for n in range(4)])


def ranks() -> LearnerGroup:
    learner = LearnerGroup([ray.remote(Rank).options(num_cpus=0.5).remote(1) for _ in range(2)], TIMEOUT_S)
    learner.create(TINY.to_dict(), TrainerConfig(expert_parallel=2), 0, LearnerConfig())
    return learner


def step(learner: LearnerGroup, seed: int) -> None:
    learner.trained(learner.start_training([batch(seed)], CrossEntropy()))


def saved(learner: LearnerGroup, directory: Path) -> dict[str, torch.Tensor]:
    learner.save_state(str(directory), {})
    learner.state_saved()
    return TrainState(directory).tensors()


@pytest.fixture(scope="module")
def learners():
    """A function that makes two ranks; all are ended with the fixture, for other files share their Ray."""
    made: list[LearnerGroup] = []

    def make() -> LearnerGroup:
        made.append(ranks())
        return made[-1]

    yield make
    for learner in made:
        for actor in learner.actors:
            ray.kill(actor)


@pytest.fixture(scope="module")
def story(ray_cluster, learners, tmp_path_factory):
    """What the survivor said, what the run said, how long it took, the states with and without the accident, notes of a
    step, and what `unheard` gives."""
    folder = tmp_path_factory.mktemp("ranks")
    first = learners()
    step(first, 1)
    saved(first, folder / "step_1")
    ray.get([actor.note.remote("told") for actor in first.actors])
    step(first, 2)
    told, first.notes = first.notes, []
    straight = saved(first, folder / "straight")

    victim = ray.get(first.actors[1].process.remote())
    started = first.start_training([batch(3)], HangsIn(victim, folder / "inside"))
    deadline = time.monotonic() + TIMEOUT_S
    while not (folder / "inside").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(ActorLost) as run:
        first.trained(started)
    with pytest.raises(ray.exceptions.RayTaskError) as survivor:
        ray.get(started[0], timeout=TIMEOUT_S)
    took = time.monotonic() - killed
    for actor in first.actors:
        ray.kill(actor)

    second = learners()
    second.load_state(str(folder / "step_1"))
    step(second, 2)
    again = saved(second, folder / "again")
    return survivor.value.cause, str(run.value), took, straight, again, told, unheard(second)


def unheard(learner: LearnerGroup) -> tuple[str, float]:
    """What the run is told of a killed rank by one that cannot say so, as it waits for its GPU: it is stopped here."""
    stopped, victim = (ray.get(actor.process.remote()) for actor in learner.actors)
    os.kill(stopped, signal.SIGSTOP)
    try:
        started = learner.start_training([batch(3)], CrossEntropy())
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(ActorLost) as run:
            learner.trained(started)
        return str(run.value), time.monotonic() - killed
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_the_rank_that_lives_ends_with_the_name_of_the_one_that_was_killed(story):
    survivor, _, took, *_ = story
    assert isinstance(survivor, RankFailed)
    assert survivor.rank == 1
    assert "rank 1 died" in str(survivor)
    assert took < TIMEOUT_S / 2


def test_the_run_is_told_which_actor_it_lost(story):
    assert story[1].startswith("the actor of learner.train of rank 1 died")


def test_what_ranks_note_of_a_step_reaches_the_run_once(story):
    assert story[-2] == ["told"]


def test_the_run_is_told_at_once_though_the_rank_before_it_says_nothing(story):
    told, took = story[-1]
    assert told.startswith("the actor of learner.train of rank 1 died")
    assert took < TIMEOUT_S / 4


def test_fresh_ranks_go_on_from_the_state_to_the_bits_of_ranks_that_nothing_happened_to(story):
    _, _, _, straight, again, *_ = story
    names = {name for name in straight if not name.startswith("rng/")}
    assert names
    assert names == {name for name in again if not name.startswith("rng/")}
    assert [name for name in names if not torch.equal(straight[name], again[name])] == []
