"""How a micro-batch is cut over context ranks: balanced, every target predicted once, every message expected."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.data.images import ImagePatches
from k3rl.model import InputError, K3Config, K3ForCausalLM
from k3rl.parallel import Axis, ContextParallel, ContextShare, World, balanced_cuts, pair_cost
from k3rl.parallel.context import SNAP, ContextError

PLACEHOLDER = K3Config.named("k3-nano").media_placeholder_token_id


def parallel(rank: int, ranks: int) -> ContextParallel:
    """One rank's side, which splits without any other."""
    return ContextParallel(Axis(rank, ranks, tuple(range(ranks))), World.alone())


def batch(lengths: list[int], images: dict[tuple[int, int], int] | None = None, seed: int = 0) -> TrainBatch:
    """Sequences of these lengths. images: (sequence, token) -> rows of the image there."""
    rng = np.random.default_rng(seed)
    sequences = []
    for number, length in enumerate(lengths):
        ids, mask = rng.integers(0, 400, length), rng.random(length) < 0.7
        mask[0] = False
        own = []
        for (sequence, token), rows in sorted((images or {}).items()):
            if sequence == number:
                ids[token], mask[token] = PLACEHOLDER, False
                pixels = np.zeros((4 * rows, 3, 14, 14), np.float32)
                own.append(ImagePatches(pixels, (1, 2, 2 * rows), 28 * rows, 28, rows))
        ids[mask & (rng.random(length) < 0.2)] = PLACEHOLDER  # sampled, and so no image
        nothing = np.zeros(length, np.float32)
        sequences.append(TrainSequence(f"s{number}", ids, mask, nothing, nothing, images=tuple(own)))
    if not any(sequence.loss_mask.any() for sequence in sequences):
        sequences.append(
            TrainSequence("target", np.ones(2, np.int64), np.array([False, True]), *np.zeros((2, 2), "f4"))
        )
    return TrainBatch.pack(sequences)


def shares(given_: TrainBatch, ranks: int, cuts: list[int] | None = None) -> list[ContextShare]:
    chosen = None if cuts is None else np.array(cuts)
    return [parallel(rank, ranks).split(given_, PLACEHOLDER, chosen) for rank in range(ranks)]


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(lengths=LENGTHS, ranks=st.integers(1, 9), pair=st.sampled_from([0.0, 0.01, 1.0]), seed=st.integers(0, 9))
def test_cuts_divide_all_tokens_and_balance_the_cost(lengths: list[int], ranks: int, pair: float, seed: int) -> None:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.random.default_rng(seed).choice([1, 1, 1, 5], ends[-1])
    cuts = balanced_cuts(rows, ends, ranks, pair)
    tokens = np.diff(cuts)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, ends[-1], ranks + 1)
    assert sorted((tokens > 0).tolist(), reverse=True) == (tokens > 0).tolist()
    assert (tokens > 0).sum() == min(ranks, ends[-1])
    cost = []  # by the definition, row by row
    for first, last in pairwise(ends):
        position = 0
        for token in range(first, last):
            cost.append(sum(1 + pair * (position + row + 1) for row in range(rows[token])))
            position += rows[token]
    if ends[-1] >= 2 * ranks * max(cost) / min(cost):  # else a single token is a large part of a share
        share, most = sum(cost) / ranks, max(cost)
        for first, last in pairwise(cuts):
            assert abs(sum(cost[first:last]) - share) <= most + 2 * SNAP * share


def test_a_cut_goes_between_sequences_when_that_costs_little() -> None:
    rows = np.ones(200, np.int64)
    assert balanced_cuts(rows, np.array([0, 99, 200]), 2).tolist() == [0, 99, 200]
    assert balanced_cuts(rows, np.array([0, 90, 200]), 2).tolist() == [0, 100, 200]


def test_attention_moves_cuts_to_the_right_and_its_weight_is_that_of_the_model() -> None:
    rows, ends = np.ones(1000, np.int64), np.array([0, 1000])
    assert balanced_cuts(rows, ends, 2, 0.0)[1] == 500
    assert balanced_cuts(rows, ends, 2, 100.0)[1] == pytest.approx(1000 / 2**0.5, abs=2)
    # 24 layers * 96 heads * (192 + 128) a pair, against the 104 B parameters that a row meets (k3.md 0), head included
    assert pair_cost(K3Config.named("k3")) == pytest.approx(24 * 96 * 320 / 104e9, rel=0.03)


@settings(max_examples=60)
@given(data=st.data(), lengths=LENGTHS, ranks=st.integers(2, 6), seed=st.integers(0, 99))
def test_every_row_and_target_has_one_rank_and_every_message_a_reader(
    data: st.DataObject, lengths: list[int], ranks: int, seed: int
) -> None:
    images = {(0, lengths[0] - 1): 3, (len(lengths) - 1, 0): 2} if data.draw(st.booleans()) else {}
    whole = batch(lengths, images, seed)
    n = whole.tokens
    cuts = None
    if data.draw(st.booleans()):
        inner = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=ranks - 1))) if n > 1 else []
        cuts = [0, *inner, *[n] * (ranks - len(inner))]
    parts = shares(whole, ranks, cuts)
    own = [part for part in parts if part.counted]
    assert np.array_equal(np.concatenate([np.arange(n)[part.tokens] for part in own]), np.arange(n))
    assert np.array_equal(np.concatenate([part.targets for part in parts]), np.flatnonzero(whole.loss_mask))
    rows = whole.rows_per_token(PLACEHOLDER)
    of_row = np.repeat(np.arange(n), rows)  # token of each row of the model
    sequence = np.repeat(np.arange(len(whole.lengths)), whole.lengths)
    first = 0
    for rank, part in enumerate(parts):
        communicator = part.communicator
        assert communicator is not None
        if not part.counted:
            assert (part.tokens, communicator.before, communicator.continues) == (slice(0, 1), 0, False)
            continue
        last = first + int(rows[part.tokens].sum())
        assert part.rows == slice(first, last)
        assert np.array_equal(part.rows_per_token, rows[part.tokens])
        # the row before each target is the last one of the token before it
        assert np.array_equal(of_row[part.before + first], part.targets - 1)
        assert np.array_equal(of_row[np.minimum(part.before + first + 1, len(of_row) - 1)], part.targets)
        # rows of the same sequence on other ranks
        belongs = sequence[of_row]
        assert communicator.before == (belongs[:first] == belongs[first]).sum()
        assert communicator.continues == bool((belongs[last:] == belongs[last - 1]).any())
        inside = belongs[part.rows]
        assert np.array_equal(part.cu_seqlens, [0, *(np.flatnonzero(np.diff(inside)) + 1), len(inside)])
        shown = np.flatnonzero((whole.input_ids == PLACEHOLDER) & ~whole.loss_mask)
        assert np.array_equal(part.places, np.flatnonzero(np.isin(of_row[part.rows], shown)))
        assert sum(image.rows for image in part.images) == len(part.places)
        for reach in (None, 3):
            check_messages(parts, rank, reach, first, communicator.before)
        first = last


def check_messages(parts: list[ContextShare], rank: int, reach: int | None, first: int, before: int) -> None:
    """Rank gets the rows just before its own, in order, each from the rank that has it, which sends just those."""
    wanted = list(range(first - (before if reach is None else min(before, reach)), first))
    starts = np.cumsum([0, *(rows_of(part) for part in parts)])
    found = []
    for place, peer in parts[rank].communicator.gets(reach):  # type: ignore[union-attr]
        sent = [own for own, reader in parts[peer].communicator.gives(reach) if reader == rank]  # type: ignore[union-attr]
        assert len(sent) == 1
        assert place == slice(len(found), len(found) + sent[0].stop - sent[0].start)
        found += range(starts[peer] + sent[0].start, starts[peer] + sent[0].stop)
    assert found == wanted
    for peer, other in enumerate(parts):
        reads = any(source == rank for _, source in other.communicator.gets(reach))  # type: ignore[union-attr]
        assert reads == any(reader == peer for _, reader in parts[rank].communicator.gives(reach))  # type: ignore[union-attr]


def rows_of(part: ContextShare) -> int:
    """Rows of the model on a rank, 0 where it runs a copy."""
    tokens = part.tokens.stop - part.tokens.start
    return (tokens + sum(image.rows - 1 for image in part.images)) if part.counted else 0


def test_a_document_over_all_ranks_sends_what_the_plan_counts() -> None:
    ranks, each = 4, 10
    for reach, rows in ((None, ranks * (ranks - 1) // 2 * each), (3, 3 * (ranks - 1))):  # MLA, short convolution
        parts = [part.communicator for part in shares(batch([ranks * each]), ranks)]
        sent = [sum(own.stop - own.start for own, _ in part.gives(reach)) for part in parts]  # type: ignore[union-attr]
        back = [sum(own.stop - own.start for own, _ in part.gets(reach)) for part in parts]  # type: ignore[union-attr]
        assert sum(sent) == sum(back) == rows
        if reach is None:  # forward and backward together, every rank sends the same
            assert [a + b for a, b in zip(sent, back, strict=True)] == [(ranks - 1) * each] * ranks
    assert [part.continues for part in parts] == [True] * (ranks - 1) + [False]  # type: ignore[union-attr]


def test_one_rank_has_the_whole_batch_and_no_communicator() -> None:
    whole = batch([5, 9])
    part = parallel(0, 1).split(whole, PLACEHOLDER)
    assert part.communicator is None
    assert (part.tokens, part.cu_seqlens.tolist()) == (slice(0, 14), [0, 5, 14])


@pytest.mark.parametrize("cuts", [[0, 14], [0, 7, 13], [0, 9, 7], [0, 0, 14], [1, 7, 14]])
def test_cuts_that_do_not_divide_the_batch_are_refused(cuts: list[int]) -> None:
    with pytest.raises(ContextError, match="cuts"):
        shares(batch([5, 9]), 2, cuts)


def test_a_cache_and_other_ranks_do_not_go_together() -> None:
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
    model.init_weights(0)
    communicator = shares(batch([5, 9]), 2)[0].communicator
    with pytest.raises(InputError, match="a cache or a context"):
        model.hidden(torch.ones(1, 3, dtype=torch.int64), cache=model.new_cache(1), context=communicator)
