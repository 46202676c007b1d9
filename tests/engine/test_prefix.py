"""The prefix cache: hits change what is computed and nothing else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.engine import Engine, PrefixCache
from k3rl.engine.prefix import FixedState, MemoryTier
from k3rl.engine.prefix.chain import Chain
from k3rl.engine.prefix.parts import RoutePieces, SourceSize, TokenStates
from k3rl.types import SamplingParams, StopReason

TOLERANCE = 1e-9  # float64: only the order of summation differs between a cached and a computed prefix
LARGE = 1 << 30


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "seed": 1, **changes})


def cached_engine(model, budget=LARGE, host=0, block=4, **options) -> Engine:
    return Engine(model, poison=True, prefix_cache=PrefixCache.of_bytes(budget, host, block), **options)


def expect(got, ids, logprobs) -> None:
    assert list(got.token_ids) == ids[: len(got.token_ids)]
    np.testing.assert_allclose(got.logprobs, logprobs[: len(got.token_ids)], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("routes", [False, True])
def test_twenty_turns_compute_little_more_than_their_new_tokens(model, run_teacher_forced, routes):
    engine = cached_engine(model, block=16)
    prompt, fresh = list(range(1, 12)), 11
    for turn in range(20):
        (got,) = engine.generate([prompt], params(max_tokens=2, seed=turn, return_routes=routes))
        logits, expected_routes = run_teacher_forced(model, [*prompt, *got.token_ids])
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(got.logprobs, rows[range(2), list(got.token_ids)], atol=TOLERANCE, rtol=0)
        if routes:
            assert np.array_equal(np.sort(got.routes, -1), np.sort(expected_routes[:-1], -1))
        assert got.cached_tokens == (len(prompt) - 11 if turn else 0), "all but the new tokens and the last sampled one"
        new = [(7 * turn + i) % 38 for i in range(10)]
        prompt += [*got.token_ids, *new]
        fresh += len(new)
    fresh -= len(new)  # those of the turn after the last one
    assert engine.counters.prefilled_tokens <= 1.1 * fresh
    assert engine.counters.prefilled_tokens == fresh + 19, "the last sampled token of each turn is read by the next"


steps = st.lists(
    st.tuples(
        st.integers(0, 30),  # which sequence so far goes on
        st.lists(st.integers(1, 37), max_size=6),  # what is appended
        st.integers(1, 3),  # how many equal requests
        st.sampled_from([{}, {"return_routes": True}, {"cache_salt": "b"}]),
        st.integers(0, 4),  # engine steps before the next one
        st.booleans(),  # then one is aborted
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows=st.integers(1, 4), prefill=st.integers(3, 40), budget=st.sampled_from([9000, 20000, LARGE]), plan=steps)
def test_any_conversation_gives_what_it_gives_without_the_cache(model, rows, prefill, budget, plan):
    engine = cached_engine(model, budget, host=20000, max_running=rows, prefill_tokens=prefill)
    histories, asked, outcomes, aborted = [[3, 1, 4, 1, 5]], {}, {}, set()
    for parent, extra, copies, changes, count, abort in plan:
        prompt = (histories[parent % len(histories)] + extra)[:60]
        for copy in range(copies):
            own = params(seed=copy, **changes)
            asked[engine.submit(prompt, own)] = (prompt, own)
        for _ in range(count):
            for number, got in engine.step():
                outcomes[number] = got
                histories.append([*asked[number][0], *got.token_ids])
        live = sorted(asked.keys() - outcomes.keys() - aborted)
        if abort and live:
            engine.abort(live[0])
            aborted.add(live[0])
    outcomes |= dict(engine.drain())
    assert outcomes.keys() == asked.keys()
    alone = Engine(model).generate(*zip(*asked.values(), strict=True))
    for (number, (prompt, own)), uncached in zip(asked.items(), alone, strict=True):
        got = outcomes[number]
        expect(got, list(uncached.token_ids), list(uncached.logprobs))
        assert got.stop_reason is StopReason.ABORTED or len(got.token_ids) == 4
        if own.return_routes and got.token_ids:
            assert got.routes.shape[0] == len(prompt) + len(got.token_ids) - 1
    for tier in engine.prefix_cache.tiers:
        assert held_bytes(tier) == tier.bytes <= tier.budget_bytes


def held_bytes(tier: MemoryTier) -> int:
    blocks = sum(block.tokens.latent.nbytes + _routes(block.tokens) for block in tier.blocks.values())
    states = 0
    for held in tier.states.values():
        tensors = [held.fixed.recurrent, held.fixed.conv, held.rest.latent]
        tensors += [held.fixed.hidden] if held.fixed.hidden is not None else []
        states += sum(tensor.nbytes for tensor in tensors) + _routes(held.rest) + held.chain.ids.nbytes
    return blocks + states


def _routes(tokens: TokenStates) -> int:
    return 0 if tokens.routes is None else tokens.routes.nbytes


def test_the_same_prompt_again_computes_nothing(model):
    engine = cached_engine(model)
    prompt = list(range(1, 14))
    (first,) = engine.generate([prompt], params())
    before = engine.counters.prefilled_tokens
    again = engine.generate([prompt] * 3, params())
    assert engine.counters.prefilled_tokens == before
    for got in again:
        assert got.cached_tokens == 13
        expect(got, list(first.token_ids), list(first.logprobs))


def test_a_shared_state_is_never_written_to(model):
    engine = cached_engine(model)
    prompt = list(range(1, 14))
    (first,) = engine.generate([prompt], params())
    tier = engine.prefix_cache.tiers[0]
    tensors = [
        tensor for held in tier.states.values() for tensor in (held.fixed.recurrent, held.fixed.conv, held.rest.latent)
    ] + [block.tokens.latent for block in tier.blocks.values()]
    copies = [tensor.clone() for tensor in tensors]
    engine.generate([[*prompt, *first.token_ids, extra] for extra in range(5)] + [prompt] * 2, params(max_tokens=9))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("in_flight", ["carry", "recompute"])
def test_a_weight_switch_leaves_nothing_of_the_old_weights(model, build_model, in_flight):
    engine, other = cached_engine(model, in_flight=in_flight), build_model(seed=9)
    prompt = list(range(1, 14))
    engine.generate([prompt], params())
    tensors = dict(official_tensors(other))
    running = engine.submit([*prompt, 2], params(max_tokens=12))
    engine.step()
    engine.start_weight_update(1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(1)
    assert len(engine.prefix_cache.tiers[0]) == 0
    (mixed,) = (got for number, got in engine.drain() if number == running)
    assert (mixed.first_version, mixed.weight_version) == (0, 1)
    kept = len(engine.prefix_cache.tiers[0])
    assert (kept == 0) == (in_flight == "carry"), "carried states are of two versions, computed ones of the new one"
    longer = [*prompt, 2, *mixed.token_ids, 7]
    (got,) = engine.generate([longer], params())
    assert (got.cached_tokens > 0) == (in_flight == "recompute")
    (expected,) = Engine(engine.model).generate([longer], params())
    expect(got, list(expected.token_ids), list(expected.logprobs))


def test_salts_do_not_share(model):
    engine = cached_engine(model, budget=9000, host=LARGE)
    prompt = list(range(1, 14))
    cached = [
        engine.generate([prompt], params(cache_salt=salt))[0].cached_tokens for salt in ("", "a", "b", "a", "", "c")
    ]
    assert cached == [0, 0, 0, 13, 13, 0]


def test_a_cached_state_without_routes_is_no_hit_for_who_needs_them_and_gains_them(model):
    engine = cached_engine(model)
    prompt = list(range(1, 14))
    (first,) = engine.generate([prompt], params())
    longer = [*prompt, *first.token_ids, 2]
    (asking,) = engine.generate([longer], params(return_routes=True))
    assert asking.cached_tokens == 13, "the prompt's own routes are known, those of the sampled tokens are not"
    assert asking.routes.shape[0] == len(longer) + 3
    assert engine.generate([longer], params(return_routes=True))[0].cached_tokens == len(longer)


def test_what_leaves_the_first_tier_comes_back_from_the_host(model):
    engine = cached_engine(model, budget=8000, host=LARGE)
    prompts = [[start, *range(1, 14)] for start in range(1, 8)]
    first = engine.generate(prompts, params())
    device, host = engine.prefix_cache.tiers
    assert len(device) < 7 <= len(host)
    before = engine.counters.prefilled_tokens
    again = engine.generate(prompts, params())
    assert engine.counters.prefilled_tokens == before
    for got, expected in zip(again, first, strict=True):
        expect(got, list(expected.token_ids), list(expected.logprobs))


def test_a_tier_that_lost_half_of_a_state_gives_no_hit(model):
    class Forgetful(MemoryTier):
        def read(self, chain, length):
            return None

    engine = Engine(model, poison=True, prefix_cache=PrefixCache([Forgetful(LARGE)], 4))
    expected = engine.generate([[1, 2, 3, 4, 5]], params())
    assert engine.generate([[1, 2, 3, 4, 5]], params())[0].cached_tokens == 0
    assert engine.generate([[1, 2, 3, 4, 5]], params())[0].token_ids == expected[0].token_ids


class Plain:
    """A source of `length` tokens whose values tell where they came from."""

    has_routes, has_hidden = False, True

    def __init__(self, mark: int) -> None:
        self.mark = mark

    def fixed(self):
        return FixedState(torch.full((1, 8), self.mark), torch.zeros(1), torch.zeros(1, 2))

    @property
    def size(self):
        return SourceSize(8 * 8 + 4 + 2 * 4, 8)

    def tokens(self, start, stop):
        return TokenStates(torch.arange(start, stop).view(1, -1, 1) + 1000 * self.mark, None)


def longest(tier, chain: Chain) -> int:
    return tier.longest(chain, None, LARGE)


def test_what_is_worth_least_leaves_first_and_shared_blocks_stay_while_used():
    tier = MemoryTier(LARGE)
    shared, root = np.arange(8), b"root"
    chains = [Chain.of(np.append(shared, 50 + i), root, 4) for i in range(3)]
    for i, chain in enumerate(chains):
        tier.put(chain, Plain(i))
    assert len(tier.blocks) == 2
    assert tier.read(chains[0], 9).latent[0, :, 0].tolist() == list(range(9))
    tier.budget_bytes = tier.bytes
    tier.put(Chain.of(np.append(shared, 60), root, 4), Plain(3))
    assert sorted(longest(tier, chain) for chain in chains) == [0, 9, 9]
    assert tier.read(chains[2], 9).latent[0, :, 0].tolist() == [*range(8), 2008], "its blocks are the first one's"
    tier.put(Chain.of(np.arange(100, 1000), root, 4), Plain(4))
    assert len(tier) == 3, "one that can never fit drives nobody out"
    tier.clear()
    assert (len(tier), len(tier.blocks), tier.bytes) == (0, 0, 0)
    with pytest.raises(ValueError, match="budget"):
        MemoryTier(0)


def test_a_state_that_is_not_used_becomes_worth_less_than_shorter_ones_that_are():
    tier = MemoryTier(2000)
    long = Chain.of(np.arange(5000, 5030), b"root", 4)
    tier.put(long, Plain(0))
    for start in range(12):
        tier.put(Chain.of(np.arange(100 * start, 100 * start + 25), b"root", 4), Plain(start))
    assert longest(tier, long) == 0


@settings(max_examples=50)
@given(
    budget=st.integers(1, 3000),
    plan=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.sampled_from(["", "a", "b"])), max_size=12),
    below=st.booleans(),
)
def test_a_tier_never_holds_more_than_its_budget(budget, plan, below):
    """Not for a moment: every copy that is made is counted when it is made."""
    host = MemoryTier(500) if below else None
    tier = MemoryTier(budget, below=host)

    class Watched(Plain):
        def watch(self, size):
            for one in (tier, host):
                if one is not None:
                    assert one.bytes <= one.budget_bytes
            return size

        def fixed(self):
            return self.watch(super().fixed())

        def tokens(self, start, stop):
            return self.watch(super().tokens(start, stop))

    for length, first, owner in plan:
        ids = np.arange(1000 * first, 1000 * first + length)
        tier.put(Chain.of(ids, b"root", 4), Watched(0), frozenset([owner] if owner else []))
        for one in (tier, host):
            if one is not None:
                assert one.bytes == sum(h.bytes for h in one.states.values()) + sum(
                    block.tokens.bytes for block in one.blocks.values()
                )
                assert one.bytes <= one.budget_bytes


def test_a_damaged_state_does_not_hide_a_shorter_one(model):
    class Damaged(MemoryTier):
        def read(self, chain, length):
            return None if length > 10 else super().read(chain, length)

    engine = Engine(model, prefix_cache=PrefixCache([Damaged(LARGE)], 4))
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, *range(6, 20)]]
    for prompt in prompts:
        engine.generate([prompt], params(max_tokens=1))
    assert engine.generate([[*prompts[1], 7]], params())[0].cached_tokens == 5


def test_another_beginning_or_root_is_another_chain():
    ids = np.arange(12)
    digests = {
        Chain.of(np.array(ids), root, block).digests[-1]
        for root, ids, block in [(b"a", ids, 4), (b"b", ids, 4), (b"a", np.append(ids[:11], 5), 4), (b"a", ids + 1, 4)]
    }
    assert len(digests) == 4
    assert Chain.of(ids, b"a", 4).digests[2] == Chain.of(ids[:8], b"a", 4).digests[-1]


def test_a_known_chain_saves_hashing_and_changes_no_name():
    ids, block = np.arange(30), 4
    fresh = {length: Chain.of(ids[:length], b"a", block) for length in (0, 3, 8, 17, 30)}
    for known in fresh.values():
        for length, wanted in fresh.items():
            got = Chain.of(ids[:length], b"a", block, known)
            assert (got.digests, got.key(length)) == (wanted.digests, wanted.key(length))
            assert Chain.of(ids[:length], b"b", block, known).digests == Chain.of(ids[:length], b"b", block).digests
    wrong = Chain((b"a", b"x"), ids[:4], block)  # its one block is not hashed again
    assert Chain.of(ids[:8], b"a", block, wrong).digests[1] == b"x"


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), ends=st.tuples(st.integers(0, 30), st.integers(0, 30))
)
def test_routes_in_pieces_are_those_of_one(sizes, ends):
    bounds = np.cumsum([0, *sizes])
    whole = np.arange(bounds[-1], dtype=np.int16)
    pieces = RoutePieces([whole[start:stop] for start, stop in pairwise(bounds)])
    start, stop = sorted(end % (len(whole) + 1) for end in ends)
    got = pieces.between(start, stop)
    assert got.tolist() == whole[start:stop].tolist()
    assert not np.shares_memory(got, whole)
