from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.data import SequenceTooLong, best_fit

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
