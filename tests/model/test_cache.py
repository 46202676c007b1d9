"""Rows of a cache: views, forks, resets, growth. Comparisons are exact: nothing is computed in between."""

from __future__ import annotations

import pytest
import torch

from k3rl.model import CacheError


def ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 500, (batch, tokens), generator=torch.Generator().manual_seed(batch * 100 + tokens))


@pytest.mark.parametrize("rows", [[0, 1, 2], [3, 1, 4]], ids=["neighbours", "scattered"])
def test_a_view_writes_through_and_touches_no_other_row(nano, rows) -> None:
    model = nano()
    pool = model.new_cache(5)
    model.hidden(ids(5, 9), cache=pool)
    before = [pool.recurrent(0).clone(), pool.conv(1).clone(), pool.latent(3).clone()]
    view = pool.select(torch.tensor(rows))
    model.hidden(ids(3, 1), cache=view)
    model.hidden(ids(3, 4), cache=view)
    others = [row for row in range(5) if row not in rows]
    after = [pool.recurrent(0), pool.conv(1), pool.latent(3, 9)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[others], new[others])
    assert not torch.equal(before[0][rows], after[0][rows])
    assert pool.lengths.tolist() == [14 if row in rows else 9 for row in range(5)]
    assert view.lengths.tolist() == [14, 14, 14]


def test_a_fork_continues_like_its_source(nano) -> None:
    model = nano()
    cache = model.new_cache(4)
    cache.poison(torch.tensor([2, 3]))
    model.hidden(ids(1, 11), cache=cache.select(torch.tensor([1])))
    cache.copy_rows(torch.tensor([1, 1]), torch.tensor([2, 3]))
    step = ids(1, 1).expand(3, 1)
    out = model(step, cache=cache.select(torch.tensor([1, 2, 3]))).logits
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])


def test_a_poisoned_row_shows_when_read_and_is_clean_after_reset(nano) -> None:
    model = nano()
    cache = model.new_cache(2)
    model.hidden(ids(2, 5), cache=cache)
    row = torch.tensor([1])
    cache.poison(row)
    assert cache.lengths.tolist() == [5, 0]
    assert bool(model(ids(1, 1), cache=cache.select(row)).logits.isnan().all())
    cache.reset(row)
    fresh = model(ids(1, 6)).logits
    assert (model(ids(1, 6), cache=cache.select(row)).logits - fresh).abs().max() < 1e-12  # chunked against itself


def test_a_shorter_neighbour_decodes_as_if_alone(nano) -> None:
    """Rows of different lengths share a padded latent read; what lies beyond a row's length must not count."""
    model = nano()
    together, alone = model.new_cache(2), model.new_cache(1)
    model.hidden(ids(1, 40), cache=together.select(torch.tensor([0])))
    model.hidden(ids(1, 3), cache=together.select(torch.tensor([1])))
    model.hidden(ids(1, 3), cache=alone)
    both = model(ids(2, 1), cache=together).logits[1]
    single = model(ids(2, 1)[1:], cache=alone).logits[0]
    assert (both - single).abs().max() < 1e-12


def test_latents_grow_and_keep_what_they_hold(nano) -> None:
    model = nano()
    cache = model.new_cache(1)
    model.hidden(ids(1, 20), cache=cache)
    before = cache.latent(3).clone()
    model.hidden(ids(1, 50), cache=cache)
    assert cache.latent(3).shape[1] == 70
    assert torch.equal(cache.latent(3)[:, :20], before)


def test_conv_history_of_a_short_row_is_zero_on_the_left(nano) -> None:
    model = nano()
    cache = model.new_cache(1)
    model.hidden(ids(1, 2), cache=cache)
    assert not cache.conv(0)[:, 0].any()
    assert bool(cache.conv(0)[:, 1:].any())


def test_no_gradient_is_recorded_with_a_cache(nano) -> None:
    model = nano()
    out = model(ids(1, 4), cache=model.new_cache(1))
    assert not out.logits.requires_grad


@pytest.mark.parametrize("rows", [[], [0, 0], [2], [-1]])
def test_rows_the_cache_does_not_have_are_refused(nano, rows) -> None:
    with pytest.raises(CacheError, match="rows must be distinct"):
        nano(dtype=torch.float32).new_cache(2).select(torch.tensor(rows, dtype=torch.int64))


def test_asking_an_mla_layer_for_a_recurrent_state_is_refused(nano) -> None:
    with pytest.raises(CacheError, match="layer 3 keeps no such state"):
        nano(dtype=torch.float32).new_cache(1).recurrent(3)
