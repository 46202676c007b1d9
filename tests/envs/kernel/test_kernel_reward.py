"""What a cost is worth: the formula, its ends, and what is not believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.envs.kernel.reward import implausible, reward

EXPERTS = st.floats(1e-6, 1e12)
SHARES = st.floats(0.01, 0.99)
TIMES = st.floats(0.01, 100.0)


@given(EXPERTS, SHARES, TIMES, TIMES)
def test_dearer_is_worth_less_and_every_right_kernel_something(expert, share, one, other) -> None:
    floor = share * expert
    cheap, dear = sorted((max(one * expert, floor), max(other * expert, floor)))
    assert 0.0 < reward(dear, expert, floor) <= reward(cheap, expert, floor) <= 1.0
    if dear > cheap * (1 + 1e-6):
        assert reward(dear, expert, floor) < reward(cheap, expert, floor)


@given(EXPERTS, SHARES)
def test_one_half_at_the_expert_and_one_at_the_floor_without_a_step(expert, share) -> None:
    floor = share * expert
    assert reward(expert, expert, floor) == 0.5
    assert reward(floor, expert, floor) == 1.0
    # The slope is at most 0.5 / (1 - share) of a relative change.
    near = 1e-9
    for cost in (expert * (1 - near), expert * (1 + near)):
        assert abs(reward(cost, expert, floor) - 0.5) <= 100 * near


@pytest.mark.parametrize(("cost", "worth"), [(200.0, 0.25), (400.0, 0.125), (100.0, 0.5), (60.0, 0.75), (20.0, 1.0)])
def test_the_formula_by_hand(cost: float, worth: float) -> None:
    assert reward(cost, 100.0, 20.0) == pytest.approx(worth)


@pytest.mark.parametrize(("expert", "floor"), [(1.0, 1.0), (1.0, 2.0), (1.0, 0.0), (1.0, -1.0), (float("nan"), 0.1)])
def test_a_floor_that_is_none_is_refused(expert: float, floor: float) -> None:
    with pytest.raises(ValueError, match="floor"):
        reward(1.0, expert, floor)


@pytest.mark.parametrize(
    ("cost", "found"),
    [
        (1.9, "below_floor"),
        (0.0, "below_floor"),
        (-5.0, "below_floor"),
        (float("nan"), "below_floor"),
        (9.9, "quarantined"),
    ],
)
def test_costs_that_no_honest_kernel_has(cost: float, found: str) -> None:
    hack = implausible(cost, 100.0, 2.0)
    assert hack is not None
    assert hack[0] == found


@pytest.mark.parametrize("cost", [10.0, 99.0, 100.0, 1e9])
def test_costs_that_are_believed(cost: float) -> None:
    assert implausible(cost, 100.0, 2.0) is None
