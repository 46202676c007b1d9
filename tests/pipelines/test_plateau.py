"""When a held-out loss counts as flat, and the learning rate that follows."""

from __future__ import annotations

import pytest

from k3rl.pipelines.configs import ScheduleConfig
from k3rl.pipelines.presets import sft
from k3rl.pipelines.sft import Course, Plateau


def test_a_loss_that_stops_falling_is_flat_after_patience_checks():
    plateau = Plateau(patience=2, min_gain=0.01)
    assert [plateau.update(loss) for loss in (2.0, 1.0, 0.995, 0.5, 0.499, 0.498)] == [False] * 5 + [True]


def test_small_gains_are_measured_against_the_best_loss_so_that_they_cannot_add_up_unseen():
    plateau = Plateau(patience=3, min_gain=0.1)
    assert [plateau.update(loss) for loss in (1.0, 0.95, 0.93, 0.5)] == [False] * 4


def test_the_rate_warms_up_stays_and_falls_to_its_final_fraction():
    config = sft().replace(decay_steps=4)
    warm = config.schedule.warmup_steps
    course = Course(config, None)
    assert course.lr_scale(0) == pytest.approx(1 / warm)
    assert course.lr_scale(warm) == course.lr_scale(500) == 1.0
    course.flat_at = 100
    falling = [course.lr_scale(100 + i) for i in range(4)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(config.schedule.final_fraction)


class Steps:
    """A stage and its data, of which a course asks what is spent and left."""

    tokens_per_batch = 50.0

    def __init__(self, trained: float = 0.0) -> None:
        self.totals = {"trained_tokens": trained}

    def steps_in_time(self):
        return None


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_that_falls_goes_over_all_steps_and_no_plateau_ends_it(kind):
    schedule = ScheduleConfig(kind=kind, warmup_steps=2, final_fraction=0.25)
    course = Course(sft().replace(schedule=schedule, max_steps=11), None)
    course.plan(0, Steps(), Steps())
    rates = [course.lr_scale(step) for step in range(11)]
    middle = 0.625  # half way from 1 to 1/4, for a line and for half a cosine
    assert (rates[0], rates[2], rates[6], rates[10]) == pytest.approx((0.5, 1.0, middle, 0.25))
    assert not course.waits_for_plateau
    assert [course.ended(step) for step in (10, 11)] == [False, True]


def test_a_falling_schedule_of_bounded_compute_ends_with_it():
    course = Course(sft().replace(schedule=ScheduleConfig(kind="cosine", warmup_steps=0)), compute=3 * 50.0 * 7)
    course.plan(0, Steps(), Steps())
    course.plan(3, Steps(trained=400.0), Steps())  # decided once: the rate must not jump
    assert [course.ended(step) for step in (6, 7)] == [False, True]


@pytest.mark.parametrize("decay_steps", [0, 3])
def test_a_constant_schedule_ends_after_its_decay_and_nothing_follows(decay_steps):
    course = Course(sft().replace(decay_steps=decay_steps, max_steps=100), None, flat_at=20)
    assert not course.ended(19 + decay_steps)
    assert course.ended(20 + decay_steps)
    assert course.ended(21 + decay_steps)
