"""When a held-out loss counts as flat, and the learning rate that follows."""

from __future__ import annotations

import pytest

from k3rl.pipelines.presets import sft
from k3rl.pipelines.sft import Plateau, lr_scale


def test_a_loss_that_stops_falling_is_flat_after_patience_checks():
    plateau = Plateau(patience=2, min_gain=0.01)
    assert [plateau.update(loss) for loss in (2.0, 1.0, 0.995, 0.5, 0.499, 0.498)] == [False] * 5 + [True]


def test_small_gains_are_measured_against_the_best_loss_so_that_they_cannot_add_up_unseen():
    plateau = Plateau(patience=3, min_gain=0.1)
    assert [plateau.update(loss) for loss in (1.0, 0.95, 0.93, 0.5)] == [False] * 4


def test_the_rate_warms_up_stays_and_falls_to_its_final_fraction():
    config = sft().replace(decay_steps=4)
    warm = config.schedule.warmup_steps
    assert lr_scale(0, None, config) == pytest.approx(1 / warm)
    assert lr_scale(warm, None, config) == lr_scale(500, None, config) == 1.0
    falling = [lr_scale(100 + i, 100, config) for i in range(4)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(config.schedule.final_fraction)
