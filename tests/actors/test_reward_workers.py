"""How many answers a reward actor grades beside each other."""

from __future__ import annotations

import os

import pytest

from k3rl.actors.jobs import EpisodeJob, TaskRef
from k3rl.actors.reward import RewardWorker
from k3rl.data import EpisodeColumns, without_turns
from k3rl.envs import EnvConfig
from k3rl.types import Episode, Scored, StopReason

ENVIRONMENT = """
from k3rl.envs import Env, Environment, Message, Rubric, Task
from k3rl.types import Scored


class Source:
    splits = ("train", "heldout")

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        return Task(id="t", env="counted", messages=(Message("user", "x"),), family="f", hidden={})


class Counted(Rubric):
    def __init__(self, workers):
        self.workers = workers

    def score_batch(self, items):
        return [Scored(self.workers / 64) for _ in items]


def environment():
    return Environment(
        name="counted", description="", source=Source(), make_env=Env, oracle=lambda task: "", null=lambda task: "",
        grader=GRADER,
    )
"""
TAKES = "lambda provider='bwrap', workers=1: Counted(workers)"
TAKES_NONE = "lambda provider='bwrap': Counted(1)"


def graded_beside(tmp_path, grader: str, **options) -> float:
    path = tmp_path / f"counted_{'all' if grader == TAKES else 'one'}.py"
    path.write_text(ENVIRONMENT.replace("GRADER", grader))
    job = EpisodeJob("g/0", "g", TaskRef("train", 0, 0), 0)
    episode = Episode("g/0", "t", "counted", "f", 0, (), StopReason.COMPLETED, Scored(0.0), answer="a")
    worker = RewardWorker(EnvConfig(name=str(path)), **options)
    score = worker.grade([job], EpisodeColumns.of([episode]), [without_turns(episode)])["g/0"]
    return score.reward * 64


@pytest.mark.parametrize(("cores", "actors", "wanted"), [(2, 2, 1), (16, 2, 4), (16, 1, 8), (1, 4, 1)])
def test_reward_actors_share_half_of_the_cores(tmp_path, monkeypatch, cores, actors, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert graded_beside(tmp_path, TAKES, actors=actors) == wanted


def test_as_many_are_graded_as_a_run_asks_for_where_the_grader_can(tmp_path):
    assert graded_beside(tmp_path, TAKES, workers=5) == 5
    assert graded_beside(tmp_path, TAKES_NONE, workers=5) == 1
