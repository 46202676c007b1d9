"""A batch by reference is, once it is packed, the batch of the episodes themselves, to the bit."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.data import BatchError, BatchPlan, TrainBatch, from_episodes, header_of, payload_of, played
from k3rl.packed import Packed, SamplingMasks
from k3rl.types import Branch, Episode, Failed, Group, Scored, StopReason, Turn

EXPERTS = (2, 3)  # layers, experts per token


def turn(rng: np.random.Generator, before: Packed, known: int, *, masks: bool) -> tuple[Turn, Packed]:
    """A turn that goes on after `before`, of which `known` rows have routes, and all ids so far."""
    prompt = before.extended(rng.integers(0, 99, int(rng.integers(1, 6))))
    sampled = int(rng.integers(1, 7))
    ids = prompt.extended(rng.integers(0, 99, sampled))
    kept = [np.unique(rng.integers(0, 99, 4)).astype(np.int32) for _ in range(sampled)]
    first = int(rng.integers(1, 4))
    return Turn(
        prompt_ids=prompt,
        sampled_ids=ids[len(prompt) :],
        logprobs=-rng.random(sampled).astype(np.float32),
        stop_reason=StopReason.LENGTH if rng.random() < 0.3 else StopReason.STOP,
        first_version=first,
        last_version=max(first, int(rng.integers(1, 4))),
        routes=rng.integers(0, 9, (len(ids) - 1 - known, *EXPERTS)).astype(np.int16),
        sampling_mask=SamplingMasks.of(kept) if masks and rng.random() < 0.7 else None,
    ), ids


def branch(rng: np.random.Generator, name: str, parent: Branch | None, *, masks: bool) -> Branch:
    """One to three turns, after some of those of its parent."""
    turns = [] if parent is None else list(parent.turns[: int(rng.integers(1, len(parent.turns) + 1))])
    ids = turns[-1].ids if turns else Packed.of((), np.int32)
    for _ in range(int(rng.integers(parent is None, 3))):
        made, ids = turn(rng, ids, max(0, len(ids) - 1), masks=masks)
        turns.append(made)
    return Branch(name, tuple(turns), None if parent is None else parent.id)


def episode(seed: int, name: str, *, forks: bool, masks: bool) -> Episode:
    rng = np.random.default_rng(seed)
    branches = [branch(rng, f"{name}/0", None, masks=masks)]
    for number in range(1, int(rng.integers(1, 4)) if forks else 1):
        branches.append(branch(rng, f"{name}/{number}", branches[int(rng.integers(number))], masks=masks))
    return Episode(name, "t", "env", "list", 1, tuple(branches), StopReason.COMPLETED, Scored(1.0), answer=name)


def assert_equal(ours: TrainBatch, theirs: TrainBatch) -> None:
    """In every bit, dtypes included: both copy the same numbers and round none."""
    for item in dataclasses.fields(TrainBatch):
        a, b = getattr(ours, item.name), getattr(theirs, item.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype, item.name
            np.testing.assert_array_equal(a, b, err_msg=item.name)
        else:
            assert a == b, item.name


@settings(max_examples=40, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**30), min_size=1, max_size=6),
    cut=st.integers(0, 6),
    mode=st.sampled_from(["token", "sequence"]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_a_packed_plan_is_the_batch_of_its_episodes(seeds, cut, mode, flags):
    forks, masks, routes = flags
    episodes = [episode(seed, f"e{n}", forks=forks, masks=masks) for n, seed in enumerate(seeds)]
    headers = []
    for part in (episodes[:cut], episodes[cut:]):
        payload = pickle.loads(pickle.dumps(payload_of(part), protocol=5))
        headers += [header_of(one, payload, place) for place, one in enumerate(part)]
        whole = [payload.tokens.episode(place, words) for place, words in enumerate(payload.words)]
        assert repr(whole) == repr(part)  # arrays have no truth value
    order = np.random.default_rng(seeds[0]).permutation(len(episodes)).tolist()
    earned = [float(number) / 3 - 0.5 for number in order]
    named = {f"e{number}": value for number, value in zip(order, earned, strict=True)}
    theirs = from_episodes([episodes[n] for n in order], named, mode=mode, routes=routes)
    plan = BatchPlan.of([headers[n] for n in order], earned, mode=mode, routes=routes)
    assert_equal(plan.pack(), theirs)
    assert (plan.tokens, plan.target_tokens) == (theirs.tokens, theirs.target_tokens)
    np.testing.assert_array_equal(plan.row_lengths, theirs.row_lengths)
    chosen = list(range(plan.sequences))[::-2]
    assert_equal(plan.select(chosen).pack(), theirs.select(chosen))
    scores = np.where(theirs.loss_mask, np.float32(-0.5), np.float32(0))
    scored = dataclasses.replace(plan, teacher_logprobs=scores).select(chosen).pack()
    assert_equal(scored, dataclasses.replace(theirs, teacher_logprobs=scores).select(chosen))


def test_a_prompt_that_was_rendered_anew_is_refused_by_name():
    one = episode(1, "e", forks=False, masks=False)
    first = one.branches[0].turns[0]
    other = dataclasses.replace(first, prompt_ids=Packed.of((98, 97), np.int32), routes=None)
    broken = dataclasses.replace(one, branches=(Branch("e/0", (first, other)),))
    [group] = played([Group("g", "t", (broken,))])
    with pytest.raises(BatchError, match="the prompt of turn 1 does not extend the tokens before it"):
        BatchPlan.of(group.episodes, [1.0]).pack()


@pytest.mark.parametrize("what", ["logprobs", "sampling_mask"])
def test_a_turn_with_numbers_for_other_tokens_never_becomes_columns(what):
    one = episode(2, "e", forks=False, masks=True)
    first = one.branches[0].turns[0]
    more = {"logprobs": [-1.0] * 9, "sampling_mask": SamplingMasks.of([np.arange(3, dtype=np.int32)] * 9)}[what]
    broken = dataclasses.replace(one, branches=(Branch("e/0", (dataclasses.replace(first, **{what: more}),)),))
    with pytest.raises(ValueError, match=f"sampled ids and 9 {what.replace('_mask', ' masks')}; wanted one each"):
        payload_of([broken])


def test_routes_that_lack_rows_are_refused_where_they_are_replayed_and_no_matter_elsewhere():
    one = episode(3, "e", forks=False, masks=False)
    turns = one.branches[0].turns
    short = dataclasses.replace(turns[0], routes=turns[0].routes[:-1])
    [group] = played([Group("g", "t", (dataclasses.replace(one, branches=(Branch("e/0", (short,)),)),))])
    assert BatchPlan.of(group.episodes, [1.0]).pack().routes is None
    with pytest.raises(BatchError, match="turn 0: routes are"):
        BatchPlan.of(group.episodes, [1.0], routes=True).pack()


def test_a_header_of_other_contents_is_found_out():
    one, two = (episode(seed, "e", forks=False, masks=False) for seed in (4, 5))
    headers = [header_of(one, payload_of([two]))]
    assert headers[0].sequences != header_of(two).sequences
    with pytest.raises(BatchError, match="its header says"):
        BatchPlan.of(headers, [1.0]).pack()


def test_a_failed_episode_and_a_batch_without_a_target_are_no_plan():
    one = episode(6, "e", forks=False, masks=False)
    with pytest.raises(BatchError, match=r"e failed .x.; remove it before the baseline"):
        BatchPlan.of([header_of(dataclasses.replace(one, score=Failed("x")))], [1.0])
    with pytest.raises(BatchError, match="no sequences to pack"):
        BatchPlan.of([header_of(dataclasses.replace(one, branches=(Branch("e/0", ()),)))], [1.0])
