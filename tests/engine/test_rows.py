"""What is kept of running rows for each token: as much as there are tokens, and back again when a row ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.engine.rows import TokenColumn

WINDOW = 64


def test_one_long_row_among_many_takes_its_own_tokens_and_gives_them_back():
    """Rows times the longest would be 256 times as much."""
    rows, tokens, shape = 256, 16_384, (4, 2)
    column = TokenColumn(rows, shape, np.int16)
    row = np.array([7])
    value = np.ones((1, *shape), np.int16)
    column.append(row, np.array([0]), value)
    empty = column.nbytes
    for at in range(1, tokens):
        column.append(row, np.array([at]), value)
    assert column.nbytes - empty == tokens * value.nbytes
    column.clear(7)
    assert column.nbytes == empty == rows * WINDOW * value.nbytes


actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 100), st.sampled_from([(0,), (1, 3), (0, 1, 2, 3)])),
        st.tuples(st.just("set"), st.integers(0, 3), st.integers(0, 200)),
        st.tuples(st.just("move"), st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=8,
)


@pytest.mark.parametrize("shape", [(), (2,)])
@given(plan=actions, start=st.integers(0, 150))
def test_a_row_has_what_was_appended_to_it(shape, plan, start):
    column, expected, number = TokenColumn(4, shape, np.int64), {row: [] for row in range(4)}, 0

    def next_values(count: int) -> np.ndarray:
        nonlocal number
        number += count
        return np.broadcast_to(np.arange(number - count, number).reshape(-1, *(1 for _ in shape)), (count, *shape))

    for action, a, b in plan:
        if action == "append":
            for _ in range(a):
                values = next_values(len(b))
                column.append(np.array(b), np.array([len(expected[row]) for row in b]), values)
                for row, value in zip(b, values, strict=True):
                    expected[row].append(value)
        elif action == "set":
            values = next_values(b)
            column.set(a, values)
            expected[a] = list(values)
        elif a != b:
            column.move([a], [b])
            expected[b], expected[a] = expected[a], []
            column.clear(a)
    for row, values in expected.items():
        stop = len(values)
        first = min(start, stop)
        assert column.read(row, first, stop).tolist() == [value.tolist() for value in values[first:]]
