"""The curriculum draws what the config asks for, from seed and step alone, where there is something to learn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.pipelines import EnvConfig
from k3rl.pipelines.curriculum import Curriculum
from k3rl.types import Episode, Failed, Group, Invalid, Scored, StopReason


class Finite:
    """A task source that has an end: so many tasks of each family."""

    splits = ("train",)

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes

    def length(self, split, *, level=None, family=None):
        return sum(self._sizes.values()) if family is None else self._sizes[family]


def curriculum(source=None, **config) -> Curriculum:
    return Curriculum(EnvConfig(**config), 3, source)


def indices(jobs) -> list[int]:
    return [job.task.index for job in jobs]


def episode(reward: float | None, level: int = 1, family: str = "list") -> Episode:
    score = Failed("no sandbox") if reward is None else Scored(reward)
    return Episode("e", "t", "env", family, level, (), StopReason.COMPLETED, score)


@given(step=st.integers(0, 500), groups=st.integers(1, 40), size=st.integers(1, 8))
def test_every_group_is_one_task_run_with_different_seeds(step, groups, size):
    jobs = curriculum().jobs(step, groups, size, "rl")
    assert len(jobs) == groups * size
    assert len({job.episode_id for job in jobs}) == len(jobs)
    assert len({job.sampling_seed for job in jobs}) == len(jobs)
    by_group = Counter(job.group_id for job in jobs)
    assert set(by_group.values()) == {size}
    assert len({(job.group_id, job.task) for job in jobs}) == groups


def test_the_same_seed_and_step_give_the_same_jobs_and_other_steps_give_others():
    assert curriculum().jobs(4, 8, 2, "rl") == curriculum().jobs(4, 8, 2, "rl")
    assert {job.task.index for job in curriculum().jobs(4, 8, 2, "rl")}.isdisjoint(
        job.task.index for job in curriculum().jobs(5, 8, 2, "rl")
    )


def test_families_come_in_their_shares():
    jobs = curriculum(families={"list": 0.75, "probe": 0.25}).jobs(0, 4000, 1, "rl")
    share = sum(job.task.family == "probe" for job in jobs) / len(jobs)
    assert share == pytest.approx(0.25, abs=0.03)  # four standard deviations of 4,000 draws


def test_levels_that_are_solved_or_hopeless_are_drawn_less():
    drawn = curriculum()
    for _ in range(30):
        drawn.update([Group("g", "t", (episode(1.0, 1), episode(0.0, 3), episode(1.0, 2), episode(0.0, 2)))])
    counts = Counter(j.task.level for j in drawn.jobs(0, 3000, 1, "rl") if j.task.family == "list")
    assert counts[2] > 4 * counts[1]
    assert counts[2] > 4 * counts[3]
    assert min(counts[1], counts[3]) > 0


def test_a_missing_reward_moves_no_pass_rate():
    drawn = curriculum()
    drawn.update([Group("g", "t", (episode(1.0), episode(1.0)))])
    before = dict(drawn.pass_rates)
    drawn.update([Group("g", "t", (episode(None), replace(episode(None), level=2)))])
    assert drawn.pass_rates == before == {"list/1": 1.0}


def test_a_restored_curriculum_draws_what_the_first_would_have_drawn():
    first, second = curriculum(), curriculum()
    first.update([Group("g", "t", (episode(0.0, 1), episode(1.0, 2)))])
    second.restore(first.state())
    assert first.jobs(9, 16, 2, "rl") == second.jobs(9, 16, 2, "rl")


def test_a_family_that_is_skipped_is_drawn_no_more_unless_it_is_the_last():
    both = curriculum(families={"list": 0.5, "probe": 0.5}, levels={})
    both.skip({"probe"})
    assert {job.task.family for job in both.jobs(0, 40, 1, "rl")} == {"list"}
    both.skip({"probe", "list"})
    assert {job.task.family for job in both.jobs(0, 40, 1, "rl")} == {"list"}


@given(length=st.integers(1, 12), groups=st.integers(1, 7))
def test_a_split_with_an_end_is_gone_through_whole_each_time_in_another_order(length, groups):
    drawn = curriculum(Finite(any=length), families={}, levels={})
    steps = -(-3 * length // groups)
    found = [index for step in range(steps) for index in indices(drawn.jobs(step, groups, 1, "rl"))][: 3 * length]
    epochs = [found[at : at + length] for at in range(0, 3 * length, length)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    assert length < 7 or epochs[0] != epochs[1]  # equal by chance in one of 5,040


def test_each_family_of_a_split_with_an_end_has_epochs_of_its_own():
    drawn = curriculum(Finite(list=5, probe=3), families={"list": 0.5, "probe": 0.5}, levels={})
    jobs = [job for step in range(20) for job in drawn.jobs(step, 4, 1, "rl")]
    for family, length in (("list", 5), ("probe", 3)):
        found = [job.task.index for job in jobs if job.task.family == family]
        for at in range(0, len(found) - length, length):
            assert sorted(found[at : at + length]) == list(range(length))


def test_a_resumed_run_goes_on_where_it_was_in_a_split_with_an_end_and_draws_the_newest_step_again():
    first, second = (curriculum(Finite(any=10), families={}, levels={}) for _ in range(2))
    before = [indices(first.jobs(step, 4, 1, "rl")) for step in range(2)]
    second.restore(first.state())
    assert indices(second.jobs(1, 4, 1, "rl")) == before[1]
    assert indices(second.jobs(2, 4, 1, "rl")) == indices(first.jobs(2, 4, 1, "rl"))


def test_a_family_that_was_left_out_stays_out_of_a_resumed_run():
    first, second = (curriculum(families={"list": 0.5, "probe": 0.5}, levels={}) for _ in range(2))
    first.skip({"probe"})
    second.restore(first.state())
    assert {job.task.family for job in second.jobs(0, 40, 1, "rl")} == {"list"}


def test_a_cheat_moves_the_pass_rate_as_the_reward_of_zero_that_it_trains_as():
    drawn = curriculum()
    drawn.update([Group("g", "t", (episode(1.0), replace(episode(1.0), score=Invalid("h", "e"))))])
    assert drawn.pass_rates == {"list/1": 0.5}


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8))
def test_a_pass_rate_is_a_share_whatever_the_rewards(rewards):
    drawn = curriculum()
    drawn.update([Group("g", "t", tuple(episode(reward) for reward in rewards))])
    assert 0 <= drawn.pass_rates["list/1"] <= 1
    drawn.jobs(0, 4, 1, "rl")
