from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.data import (
    BatchError,
    SequenceTooLong,
    TrainBatch,
    TrainSequence,
    from_episodes,
    token_weights,
)
from k3rl.data.batch import branch_routes
from k3rl.packed import SamplingMasks
from k3rl.types import Branch, Episode, Failed, Scored, StopReason, Turn


def turn(prompt, sampled, *, routes=None, version=0):
    logprobs = tuple(-0.5 - 0.001 * value for value in sampled)
    return Turn(tuple(prompt), tuple(sampled), logprobs, StopReason.STOP, version, version, routes)


def episode(name, *branches):
    return Episode(name, "task", "env", "family", 1, tuple(branches), StopReason.ENV_DONE, Scored(1.0))


def batch_of(branches, advantages, **options):
    """The batch of episodes of one branch each, of the branch's id."""
    return from_episodes([episode(branch.id, branch) for branch in branches], advantages, **options)


def sequence(name, length, targets, seed=0):
    rng = np.random.default_rng(seed)
    mask = np.zeros(length, bool)
    mask[1 + rng.permutation(length - 1)[:targets]] = True
    return TrainSequence(
        id=name,
        ids=rng.integers(0, 512, length),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        advantages=np.where(mask, rng.standard_normal(length), 0).astype(np.float32),
        routes=rng.integers(0, 8, (length, 2, 2)).astype(np.int16),
        teacher_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
    )


TWO = Branch("a", (turn([1, 2, 3], [4, 5]), turn([1, 2, 3, 4, 5, 6, 7], [8])))
ONE = Branch("b", (turn([1, 2], [3, 4, 5, 6]),))


@st.composite
def batches(draw):
    shapes = draw(st.lists(st.tuples(st.integers(2, 20), st.integers(0, 19)), min_size=1, max_size=12))
    parts = [sequence(f"s{i}", n, min(t, n - 1), seed=i) for i, (n, t) in enumerate(shapes)]
    if not any(part.loss_mask.any() for part in parts):
        parts.append(sequence("more", 3, 1))
    return TrainBatch.pack(parts, draw(st.sampled_from(["token", "sequence"])))


def listed(sampling_mask: SamplingMasks) -> list[list[int] | None]:
    """What each token was drawn from, read without the methods of the class."""
    starts = [0, *sampling_mask.ends[:-1].tolist()]
    return [
        None if n < 0 else sampling_mask.ids[starts[n] : sampling_mask.ends[n]].tolist()
        for n in sampling_mask.which.tolist()
    ]


@given(st.data())
def test_sampling_masks_follow_their_tokens_through_packing_and_splitting(data):
    one_set = st.sets(st.integers(0, 9), min_size=1).map(lambda ids: np.array(sorted(ids), np.int32))
    sets = data.draw(st.lists(one_set, min_size=1, max_size=4))
    parts, wanted = [], {}
    for number in range(data.draw(st.integers(1, 5))):
        part = dataclasses.replace(sequence(f"s{number}", 6, 3, seed=number), routes=None, teacher_logprobs=None)
        own = [sets[data.draw(st.integers(0, len(sets) - 1))] if target else None for target in part.loss_mask]
        if data.draw(st.booleans()):
            own = [None] * 6
        pieces = [1 if ids is None else SamplingMasks.of([ids]) for ids in own]
        sampling_mask = None if all(ids is None for ids in own) else SamplingMasks.join(pieces)
        parts.append(dataclasses.replace(part, sampling_mask=sampling_mask))
        wanted[part.id] = [None if ids is None else ids.tolist() for ids in own]
    batch = TrainBatch.pack(parts)
    assert (batch.sampling_mask is None) == all(part.sampling_mask is None for part in parts)
    for micro in batch.split(data.draw(st.integers(6, 20))):
        micro.validate()
        got = [None] * micro.tokens if micro.sampling_mask is None else listed(micro.sampling_mask)
        assert got == [ids for name in micro.sequence_ids for ids in wanted[name]]
        if micro.sampling_mask is not None:
            assert len(micro.sampling_mask.ids) <= sum(len(ids) for ids in got if ids), (
                "sets that nobody uses stay behind"
            )


def test_sets_that_fit_no_token_are_refused():
    good = dataclasses.replace(sequence("a", 6, 3), routes=None, teacher_logprobs=None)
    ids = np.array([1, 2], np.int32)
    for sampling_mask, says in (
        (SamplingMasks.of([ids] * 6), "no targets"),
        (SamplingMasks.of([ids] * 5), "5 sampling_mask"),
        (SamplingMasks(np.where(good.loss_mask, 1, -1).astype(np.int32), np.array([2]), ids), "does not hold"),
    ):
        with pytest.raises(BatchError, match=says):
            TrainBatch.pack([dataclasses.replace(good, sampling_mask=sampling_mask)])


def test_a_branch_gives_the_sets_of_its_own_turns_alone():
    sets = [np.array([4, 9], np.int32), np.array([5], np.int32), np.array([8], np.int32)]
    first = dataclasses.replace(turn([1, 2, 3], [4, 5]), sampling_mask=SamplingMasks.of(sets[:2]))
    second = dataclasses.replace(turn([1, 2, 3, 4, 5, 6], [8]), sampling_mask=SamplingMasks.of(sets[2:]))
    whole, child = Branch("a", (first,)), Branch("b", (first, second), "a")
    batch = from_episodes([episode("e", whole, child)], {"e": 1.0})
    assert batch.sequence_ids == ("e/a", "e/b")
    assert listed(batch.sampling_mask) == [None] * 3 + [[4, 9], [5]] + [None] * 6 + [[8]]


def test_exactly_the_sampled_tokens_of_every_turn_are_targets():
    batch = batch_of([TWO, ONE], {"b": 2.0, "a": -1.0})
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6]
    assert batch.cu_seqlens.tolist() == [0, 8, 14]
    assert batch.loss_mask.nonzero()[0].tolist() == [3, 4, 7, 10, 11, 12, 13]
    assert batch.advantages.tolist() == [0, 0, 0, -1, -1, 0, 0, -1, 0, 0, 2, 2, 2, 2]
    np.testing.assert_allclose(batch.sampler_logprobs[[3, 4, 7]], [-0.504, -0.505, -0.508], rtol=1e-6)
    assert batch.sequence_ids == ("a/a", "b/b")


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ({"a": 1.0}, r"missing for \['b'\]"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, r"unknown \['c'\]"),
        ({"a": float("nan"), "b": 1.0}, "advantages holds NaN or infinity in sequence a"),
    ],
)
def test_advantages_that_do_not_fit_are_refused(advantages, message):
    with pytest.raises(BatchError, match=message):
        batch_of([TWO, ONE], advantages)


def test_two_episodes_of_one_id_are_refused():
    with pytest.raises(BatchError, match="the id a occurs twice"):
        batch_of([TWO, TWO], {"a": 1.0})


def test_a_branch_that_was_rendered_again_is_refused():
    with pytest.raises(BatchError, match="does not extend"):
        batch_of([Branch("x", (turn([1], [2]), turn([1, 9], [3])))], {"x": 1.0})


def test_a_completion_without_a_logprob_for_each_token_is_refused():
    short = dataclasses.replace(turn([1], [2, 3]), logprobs=(-0.5,))
    with pytest.raises(BatchError, match="3 tokens and 2 logprobs"):
        batch_of([Branch("x", (short,))], {"x": 1.0})


def test_turns_shared_with_the_parent_branch_are_trained_once():
    root = Branch("root", (turn([1, 2], [3]), turn([1, 2, 3, 4], [5])))
    fork = Branch("fork", (turn([1, 2], [3]), turn([1, 2, 3, 9], [6, 7])), parent="root")
    same = Branch("same", root.turns, parent="root")
    batch = from_episodes([episode("e", root, fork, same)], {"e": 1.0})
    assert batch.sequence_ids == ("e/root", "e/fork")
    trained = batch.input_ids[batch.loss_mask].tolist()
    assert trained == [3, 5, 6, 7]


def test_an_unknown_parent_is_refused():
    with pytest.raises(BatchError, match="has the parent gone"):
        from_episodes([episode("e", dataclasses.replace(ONE, parent="gone"))], {"e": 1.0})


def test_a_failed_episode_is_refused():
    failed = dataclasses.replace(episode("e", ONE), score=Failed("sandbox is gone"))
    with pytest.raises(BatchError, match="episode e failed"):
        from_episodes([failed], {"e": 0.0})


def test_token_weights_are_one_over_all_targets():
    weights = token_weights(np.array([0, 1, 1, 0, 1], bool), np.array([0, 3, 5], np.int32))
    np.testing.assert_allclose(weights, [0, 1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-15)


def test_sequence_weights_share_equally_among_sequences_that_have_targets():
    mask = np.array([0, 1, 1, 0, 0, 0, 1], bool)
    weights = token_weights(mask, np.array([0, 3, 5, 7], np.int32), "sequence")
    np.testing.assert_allclose(weights, [0, 1 / 4, 1 / 4, 0, 0, 0, 1 / 2], rtol=1e-15)


def test_a_batch_without_targets_is_refused():
    with pytest.raises(BatchError, match="nothing to train on"):
        token_weights(np.zeros(3, bool), np.array([0, 3], np.int32))
    with pytest.raises(BatchError, match="at least one"):
        TrainBatch.pack([])


@given(batches(), st.integers(20, 80))
def test_a_split_holds_every_sequence_once_with_all_its_values(batch, budget):
    parts = batch.split(budget)
    seen = {}
    for part in parts:
        part.validate()
        assert part.tokens <= budget
        for number, name in enumerate(part.sequence_ids):
            rows = slice(part.cu_seqlens[number], part.cu_seqlens[number + 1])
            assert name not in seen
            seen[name] = (part, rows)
    assert set(seen) == set(batch.sequence_ids)
    for number, name in enumerate(batch.sequence_ids):
        rows = slice(batch.cu_seqlens[number], batch.cu_seqlens[number + 1])
        part, theirs = seen[name]
        for field in (
            "input_ids",
            "loss_mask",
            "sampler_logprobs",
            "advantages",
            "weights",
            "routes",
            "teacher_logprobs",
        ):
            np.testing.assert_array_equal(getattr(part, field)[theirs], getattr(batch, field)[rows])


@given(batches(), st.integers(20, 40), st.integers(41, 200))
def test_the_weighted_sum_over_micro_batches_does_not_depend_on_the_split(batch, small, large):
    """1e-12 relative to the sum of magnitudes: float64 sums in another order."""
    expected = float(batch.weights @ batch.advantages)
    scale = float(batch.weights @ np.abs(batch.advantages)) + 1e-30
    assert abs(batch.weights.sum() - 1) < 1e-12
    for budget in (small, large):
        total = sum(float(part.weights @ part.advantages) for part in batch.split(budget))
        assert abs(total - expected) < 1e-12 * scale


def test_a_sequence_longer_than_the_budget_is_refused():
    with pytest.raises(SequenceTooLong):
        batch_of([TWO], {"a": 1.0}).split(7)


def test_routes_of_a_token_are_those_it_was_first_computed_with():
    """Turn 2 has the experts of what it computed first: the last token of turn 1, and its own."""
    first = np.full((4, 2, 3), 5, np.int16)  # 3 prompt + 2 sampled - 1 rows
    second = np.full((3, 2, 3), 9, np.int16)  # 7 prompt + 1 sampled - 1 rows, without the 4 of turn 1
    branch = Branch("a", (turn([1, 2, 3], [4, 5], routes=first), turn([1, 2, 3, 4, 5, 6, 7], [8], routes=second)))
    routes = branch_routes(branch)
    assert routes.dtype == np.int16
    assert routes[:, 0, 0].tolist() == [5, 5, 5, 5, 9, 9, 9, 0]
    assert routes[-1].tolist() == [[0, 1, 2], [0, 1, 2]]
    batch = batch_of([branch], {"a": 1.0}, routes=True)
    np.testing.assert_array_equal(batch.routes, routes)


def test_missing_or_short_routes_are_refused():
    with pytest.raises(BatchError, match="turn 0: routes are none, wanted 5 rows"):
        batch_of([ONE], {"b": 1.0}, routes=True)
    short = Branch("b", (turn([1, 2], [3, 4, 5, 6], routes=np.zeros((4, 1, 1), np.int16)),))
    with pytest.raises(BatchError, match="routes are 4 rows, wanted 5 rows"):
        batch_of([short], {"b": 1.0}, routes=True)
    some = [sequence("a", 4, 2), dataclasses.replace(sequence("b", 4, 2), routes=None)]
    with pytest.raises(BatchError, match="sequence b has no routes"):
        TrainBatch.pack(some)


GOOD = TrainBatch.pack([sequence("a", 5, 2), sequence("b", 4, 3)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": GOOD.input_ids.astype(np.int32)}, r"input_ids is int32 \[9\]; wanted int64 \[9\]"),
        ({"loss_mask": GOOD.advantages}, "loss_mask is float32"),
        ({"advantages": GOOD.advantages[:-1]}, r"advantages is float32 \[8\]"),
        ({"weights": GOOD.weights.astype(np.float32)}, "weights is float32"),
        ({"sequence_ids": ("a", "a")}, "one id"),
        ({"cu_seqlens": np.array([0, 5, 8], np.int32)}, "must rise from 0 to 9"),
        ({"cu_seqlens": np.array([0, 0, 9], np.int32)}, "must rise from 0 to 9"),
        ({"loss_mask": np.ones(9, bool)}, "first token of a sequence"),
        ({"input_ids": GOOD.input_ids - 600}, "token id is negative"),
        ({"sampler_logprobs": GOOD.loss_mask * np.float32(0.5)}, "sampler_logprobs is above 0 in sequence a"),
        ({"advantages": np.ones(9, np.float32)}, "not 0 at tokens that are no targets"),
        (
            {"teacher_logprobs": np.where(GOOD.loss_mask, np.float32(-np.inf), np.float32(0))},
            "teacher_logprobs holds NaN",
        ),
        ({"routes": GOOD.routes[:, 0]}, "routes have the shape"),
        ({"routes": GOOD.routes.astype(np.int64)}, "routes is int64"),
    ],
)
def test_validate_names_what_is_wrong(change, message):
    GOOD.validate()
    with pytest.raises(BatchError, match=message):
        dataclasses.replace(GOOD, **change).validate()


def test_lengths_that_are_wrong_twice_do_not_cancel():
    long, short = sequence("a", 5, 2), sequence("b", 4, 2)
    with pytest.raises(BatchError, match="sequence a has 5 tokens and 4 advantages"):
        TrainBatch.pack(
            [
                dataclasses.replace(long, advantages=short.advantages),
                dataclasses.replace(short, advantages=long.advantages),
            ]
        )
