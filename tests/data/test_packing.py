from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.data import SequenceTooLong, best_fit
from k3rl.data.packing import balanced_fit, sequence_costs

lengths = st.lists(st.integers(1, 50), max_size=40)


@given(lengths, st.integers(50, 120))
def test_every_sequence_is_in_exactly_one_bin_and_no_bin_passes_the_budget(lengths, budget):
    bins = best_fit(lengths, budget)
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in chosen) <= budget for chosen in bins)
    assert all(chosen == sorted(chosen) for chosen in bins)


@given(lengths, st.integers(50, 120))
def test_no_two_bins_could_be_one(lengths, budget):
    """Holds for best fit: a bin is opened only when nothing that is open has room."""
    sums = sorted(sum(lengths[index] for index in chosen) for chosen in best_fit(lengths, budget))
    assert len(sums) < 2 or sums[0] + sums[1] > budget


@given(lengths, st.integers(50, 120))
def test_packing_depends_on_the_arguments_alone(lengths, budget):
    assert best_fit(lengths, budget) == best_fit(tuple(lengths), budget)


def test_a_sequence_goes_into_the_fullest_bin_with_room():
    # 7 and 6 open two bins of 10; 3 fits both and goes beside 7; 4 then fits beside 6 only.
    assert best_fit([3, 7, 6, 4], 10) == [[0, 1], [2, 3]]


def test_a_sequence_longer_than_the_budget_is_refused_by_number():
    with pytest.raises(SequenceTooLong, match="sequence 1 has 11 tokens") as caught:
        best_fit([3, 11], 10)
    assert (caught.value.index, caught.value.length, caught.value.budget) == (1, 11, 10)


def test_balanced_bins_refuse_what_best_fit_refuses():
    with pytest.raises(SequenceTooLong, match="sequence 1 has 11 tokens"):
        balanced_fit([3, 11], 10, 0.0)
    assert balanced_fit([], 10, 0.0) == []


def costs_of(bins, lengths, pair):
    """Rows and pairs of each bin, counted one by one."""
    return [sum(1 + pair * (row + 1) for i in chosen for row in range(lengths[i])) for chosen in bins]


@given(lengths, st.integers(50, 120), st.sampled_from([0.0, 0.001, 0.5]))
def test_balanced_bins_are_as_many_hold_every_sequence_once_and_none_costs_more_than_the_worst(lengths, budget, pair):
    fitted, balanced = best_fit(lengths, budget), balanced_fit(lengths, budget, pair)
    assert len(balanced) == len(fitted)
    assert sorted(index for chosen in balanced for index in chosen) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in chosen) <= budget for chosen in balanced)
    if lengths:
        most = max(costs_of(balanced, lengths, pair))
        assert most <= max(costs_of(fitted, lengths, pair)) * (1 + 1e-12)  # sums of floats in another order
    assert costs_of([[n] for n in range(len(lengths))], lengths, pair) == pytest.approx(sequence_costs(lengths, pair))


def test_equal_sequences_are_spread_and_a_long_one_counts_for_its_pairs():
    assert best_fit([10] * 6, 40) == [[0, 1, 2, 3], [4, 5]]
    assert balanced_fit([10] * 6, 40, 0.0) == [[0, 2, 4], [1, 3, 5]]
    # By rows 40 and 40. With pairs 30 costs 30 + 465, 20 costs 20 + 210 and 10 costs 10 + 55: the first stays alone.
    assert balanced_fit([30, 10, 10, 10, 20], 50, 0.0) == [[0, 2], [1, 3, 4]]
    assert balanced_fit([30, 10, 10, 10, 20], 50, 1.0) == [[0], [1, 2, 3, 4]]


def test_a_sequence_that_finds_no_room_leaves_the_bins_of_best_fit():
    # Spread by cost, each 6 has a 4 beside it, and the last 4 has no room in a bin of 12.
    assert balanced_fit([6, 6, 4, 4, 4], 12, 0.0) == best_fit([6, 6, 4, 4, 4], 12) == [[0, 1], [2, 3, 4]]
