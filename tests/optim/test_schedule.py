"""The learning-rate factor as a pure function of the step."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.optim import Schedule

KINDS = ("constant", "linear", "cosine")


def test_warmup_rises_in_equal_parts_and_never_from_zero() -> None:
    schedule = Schedule("cosine", 4, 100)
    assert [schedule.at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_and_linear_end_at_the_final_fraction() -> None:
    for kind in ("linear", "cosine"):
        schedule = Schedule(kind, 10, 60, final_fraction=0.1)
        assert schedule.at(59) == pytest.approx(0.1)
        assert schedule.at(1000) == pytest.approx(0.1)
        middle = 10 + 49 / 2  # between two steps, so compare the mean of its neighbours
        assert (schedule.at(math.floor(middle)) + schedule.at(math.ceil(middle))) / 2 == pytest.approx(0.55, abs=1e-9)


def test_constant_stays_at_one() -> None:
    assert {Schedule("constant", 0, 10).at(step) for step in range(20)} == {1.0}


@given(
    kind=st.sampled_from(KINDS),
    warmup=st.integers(0, 30),
    total=st.integers(1, 60),
    final=st.floats(0, 1),
)
def test_the_factor_stays_in_range_and_never_rises_after_warmup(
    kind: str, warmup: int, total: int, final: float
) -> None:
    schedule = Schedule(kind, warmup, total, final_fraction=final)
    factors = [schedule.at(step) for step in range(total + 5)]
    assert all(0 <= factor <= 1 for factor in factors)
    after = factors[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert all(factor >= final - 1e-12 for factor in after)
    assert factors == [schedule.at(step) for step in range(total + 5)]


def test_impossible_schedules_are_refused() -> None:
    for arguments in (("steps", 0, 10), ("cosine", -1, 10), ("cosine", 0, 0)):
        with pytest.raises(ValueError, match=r"must be|wanted"):
            Schedule(*arguments)
    with pytest.raises(ValueError, match="final_fraction"):
        Schedule("cosine", 0, 10, final_fraction=1.5)
    with pytest.raises(ValueError, match="count from 0"):
        Schedule("cosine", 0, 10).at(-1)
