"""The curriculum draws what the config asks for, from seed and step alone, where there is something to learn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.pipelines import EnvConfig
from k3rl.pipelines.curriculum import Curriculum
from k3rl.types import Episode, Failed, Group, Scored, StopReason


def curriculum(**config) -> Curriculum:
    return Curriculum(EnvConfig(**config), seed=3)


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
