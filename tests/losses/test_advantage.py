"""Advantages within a group: who counts, and that equal rewards teach nothing."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.losses import group_advantages

rewards = st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=12)


def test_the_baseline_is_the_mean_of_the_rewards_present() -> None:
    assert group_advantages([1.0, None, 0.0, 0.0, 1.0]) == [0.5, None, -0.5, -0.5, 0.5]


def test_a_missing_reward_is_not_a_zero() -> None:
    assert group_advantages([1.0, None, 1.0]) == [0.0, None, 0.0]
    assert group_advantages([None, None]) == [None, None]
    assert group_advantages([]) == []


def test_std_normalization_divides_by_the_population_deviation() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], normalise="std") == pytest.approx(
        [0.75 / math.sqrt(0.1875)] + [-0.25 / math.sqrt(0.1875)] * 3
    )


@pytest.mark.parametrize("normalise", ["none", "std"])
@pytest.mark.parametrize("group", [[0.1] * 3, [1 / 3] * 7, [0.1 + 0.2, 0.3], [1e9 + 0.1, 1e9 + 0.1], [5.0], [-0.7] * 8])
def test_equal_rewards_give_exactly_zero(group: list[float], normalise: str) -> None:
    assert group_advantages(group, normalise=normalise) == [0.0] * len(group)


@given(group=rewards, normalise=st.sampled_from(["none", "std"]))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(group: list[float | None], normalise: str) -> None:
    result = group_advantages(group, normalise=normalise)
    assert [a is None for a in result] == [r is None for r in group]
    pairs = [(r, a) for r, a in zip(group, result, strict=True) if r is not None and a is not None]
    assert abs(math.fsum(a for _, a in pairs)) < 1e-6
    assert all(math.isfinite(a) for _, a in pairs)
    if normalise == "std":
        assert all(abs(a) <= math.sqrt(len(pairs)) + 1e-9 for _, a in pairs)  # the bound of a z-score
    ordered = sorted(pairs)
    assert all(one[1] <= two[1] for one, two in itertools.pairwise(ordered))


def test_a_number_that_is_no_reward_is_refused() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="is None, never a number"):
            group_advantages([1.0, bad])
    with pytest.raises(ValueError, match="normalise"):
        group_advantages([1.0], normalise="batch")
