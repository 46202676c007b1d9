"""Figures of an evaluation."""

from __future__ import annotations

import math

import pytest

from k3rl.config import ConfigError
from k3rl.pipelines.configs import EnvConfig, EvalConfig
from k3rl.pipelines.evaluation import bootstrap, held_out, interval, measure, wilson
from k3rl.pipelines.rollout_metrics import TooManyFailures
from k3rl.types import Branch, Episode, Failed, FailureKind, Group, Scored, StopReason

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

    def __init__(self, score=lambda number: Scored(1.0)):
        self.asked, self._score = [], score

    def run(self, jobs, params):
        self.asked += [(job.task.split, params.temperature) for job in jobs]
        self.thought = {(job.thinking, job.thinking_effort) for job in jobs}
        return [Group(job.group_id, "t", (self.episode(job),)) for job in jobs]

    def episode(self, job):
        kind = job.task.split
        score = self._score(job.task.index)
        return Episode(job.episode_id, "t", "e", kind, 0, (Branch("b", ()),), StopReason.COMPLETED, score)


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
        assert wilson(0, n)[0] == 0, "the rate is in its own interval, however the sums round"
        assert wilson(n, n)[1] == 1


def test_rewards_beyond_0_and_1_have_the_interval_of_their_mean():
    found = measure(
        Recording(lambda n: Scored(-1.0 if n % 2 else 3.0)), EvalConfig(n=400, n_family=0), {"heldout": 400}
    )
    assert found.pass_at_1 == 1.0
    # the standard error of a mean of 400 values 2 away from it is 2 / 20; the bootstrap draws add noise to its ends
    assert found.ci95 == pytest.approx((1 - 1.96 * 0.1, 1 + 1.96 * 0.1), abs=0.03)


def test_equal_rewards_have_equal_intervals_each_time():
    assert bootstrap([-2.0, 5.0, 1.5]) == bootstrap([-2.0, 5.0, 1.5])
    assert bootstrap([2.5] * 4) == (2.5, 2.5)
    assert interval([0.0, 0.5, 1.0]) == wilson(1.5, 3)


def test_n_counts_the_rewards_that_the_interval_is_of():
    skipped = Failed("skipped", FailureKind.TRIPPED)
    found = measure(Recording(lambda n: skipped if n == 0 else Scored(1.0)), EvalConfig(n=8), {"heldout": 8})
    assert (found.n, found.missing) == (7, 2)
    assert found.ci95 == wilson(7, 7)


def test_a_measurement_without_any_reward_says_so():
    skipped = Failed("skipped", FailureKind.TRIPPED)
    with pytest.raises(TooManyFailures, match="none of 8 episodes of heldout has a reward"):
        measure(Recording(lambda n: skipped), EvalConfig(n=8), {"heldout": 8})


def test_a_measurement_thinks_as_it_is_told():
    rollouts = Recording()
    measure(rollouts, EvalConfig(n=2, n_family=0, thinking=True, thinking_effort="low"), {"heldout": 2})
    assert rollouts.thought == {(True, "low")}
    measure(rollouts, EvalConfig(n=2, n_family=0), {"heldout": 2})
    assert rollouts.thought == {(False, None)}
