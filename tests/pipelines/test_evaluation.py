"""Figures of an evaluation."""

from __future__ import annotations

import math

import pytest

from k3rl.config import ConfigError
from k3rl.pipelines.configs import EnvConfig, EvalConfig
from k3rl.pipelines.evaluation import held_out, measure, wilson
from k3rl.types import Branch, Episode, Group, Scored, StopReason

TRAIN_ONLY = """
import dataclasses
from k3rl.envs import make

def environment():
    lists = make("coding-lists")
    class Source:
        splits = ("train",)
        length = lists.source.length
        get = lists.source.get
    return dataclasses.replace(lists, source=Source())
"""


class Recording:
    """Stands where the rollout workers stand; keeps what was asked for."""

    def __init__(self):
        self.asked = []

    def run(self, jobs, params):
        self.asked += [(job.task.split, params.temperature) for job in jobs]
        return [Group(job.group_id, "t", (self.episode(job),)) for job in jobs]

    def episode(self, job):
        kind = job.task.split
        return Episode(job.episode_id, "t", "e", kind, 0, (Branch("b", ()),), StopReason.COMPLETED, Scored(1.0))


@pytest.mark.parametrize(
    ("env", "wanted", "tasks"),
    [
        ("coding-lists", EvalConfig(n=6, n_family=4), {"heldout": 6, "heldout_family": 4}),
        ("coding-lists", EvalConfig(n=6, n_family=0), {"heldout": 6}),
        ("compiler", EvalConfig(n=512, n_family=128), {"heldout": 96}),
    ],
)
def test_only_splits_and_tasks_that_are_there_are_run(env, wanted, tasks):
    assert held_out(EnvConfig(name=env), wanted) == tasks
    rollouts = Recording()
    found = measure(rollouts, wanted, tasks)
    assert {split for split, _ in rollouts.asked} == set(tasks)
    assert len(rollouts.asked) == 2 * sum(tasks.values())
    assert (found.n, found.splits, found.missing) == (tasks["heldout"], tasks, 0)
    assert set(found.by_family) == set(tasks)


def test_an_environment_with_nothing_held_out_is_named_where_a_measurement_is_all_that_was_asked(tmp_path):
    (tmp_path / "own.py").write_text(TRAIN_ONLY)
    env = EnvConfig(name=str(tmp_path / "own.py"))
    assert held_out(env, EvalConfig(), required=False) == {}
    with pytest.raises(ConfigError, match="has no split heldout to measure a policy on; it has train"):
        held_out(env, EvalConfig())


def test_the_interval_matches_the_quadratic_it_solves():
    # the bounds are the rates p with (rate - p)^2 = z^2 p (1 - p) / n
    for passed, n in ((3, 10), (256, 512), (0, 40), (40, 40)):
        for bound in wilson(passed, n):
            assert (passed / n - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / n, abs=1e-12)


def test_nothing_measured_has_no_interval():
    assert all(math.isnan(bound) for bound in wilson(0, 0))


def test_no_interval_leaves_the_rates_that_are_possible():
    for n in range(1, 600):
        assert wilson(0, n)[0] >= 0
        assert wilson(n, n)[1] <= 1
