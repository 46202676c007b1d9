"""Figures of an evaluation."""

from __future__ import annotations

import math

import pytest

from k3rl.pipelines.evaluation import wilson


def test_the_interval_matches_the_quadratic_it_solves():
    # the bounds are the rates p with (rate - p)^2 = z^2 p (1 - p) / n
    for passed, n in ((3, 10), (256, 512), (0, 40), (40, 40)):
        for bound in wilson(passed, n):
            assert (passed / n - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / n, abs=1e-12)


def test_nothing_measured_has_no_interval():
    assert all(math.isnan(bound) for bound in wilson(0, 0))
