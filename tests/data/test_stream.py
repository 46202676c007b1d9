from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.data import BatchError
from k3rl.data.stream import IndexStream


@given(st.integers(1, 30), st.data())
def test_no_example_comes_twice_in_an_epoch_and_orders_differ(count, data):
    size = data.draw(st.integers(1, count))
    stream = IndexStream(count, size, seed=3, fingerprint="f")
    for _ in range(3):
        epoch = np.concatenate([next(stream) for _ in range(count // size)])
        assert len(set(epoch.tolist())) == len(epoch)
        assert set(epoch.tolist()) <= set(range(count))
    assert stream.epoch == 3


@given(st.integers(0, 20))
def test_a_resumed_stream_gives_the_batches_that_were_still_to_come(steps):
    whole, part = (IndexStream(7, 2, seed=1, fingerprint="f") for _ in range(2))
    for _ in range(steps):
        next(whole), next(part)
    resumed = IndexStream(7, 2, seed=1, fingerprint="f")
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    for _ in range(5):
        np.testing.assert_array_equal(next(resumed), next(whole))


def test_the_seed_decides_the_order():
    first, same, other = (next(IndexStream(50, 50, seed=seed, fingerprint="f")).tolist() for seed in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize("change", [{"fingerprint": "g"}, {"seed": 2}, {"count": 8}, {"batch_size": 3}])
def test_a_state_of_other_data_or_settings_is_refused(change):
    settings = {"count": 7, "batch_size": 2, "seed": 1, "fingerprint": "f"}
    state = IndexStream(**settings).state_dict()
    with pytest.raises(BatchError, match=next(iter(change))):
        IndexStream(**{**settings, **change}).load_state_dict(state)


@pytest.mark.parametrize("size", [0, 8])
def test_a_batch_must_fit_the_data(size):
    with pytest.raises(BatchError, match=r"in 1 \.\. 7"):
        IndexStream(7, size, seed=0, fingerprint="f")
