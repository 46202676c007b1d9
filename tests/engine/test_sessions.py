"""Sessions: a conversation's state stays in the engine between its turns, and nothing but what is computed changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.engine import Engine, InvalidRequest, PrefixCache
from k3rl.types import SamplingParams

TOLERANCE = 1e-9  # float64: only the order of summation differs between a kept and a computed state
LARGE = 1 << 30
FIRST = [3, 1, 4, 1, 5, 9, 2, 6]


def params(session: str = "a", **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 5, "seed": 1, "session": session, **changes})


def engine_of(model, budget: int = LARGE, **options) -> Engine:
    options = {"max_context": 250, "poison": True, "prefix_cache": PrefixCache.of_bytes(budget, block=8), **options}
    return Engine(model, **options)


def update(engine: Engine, other) -> None:
    tensors = dict(official_tensors(other))
    version = engine.version + 1
    engine.start_weight_update(version, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(version)


def assert_cold(model, run_teacher_forced, prompt, got, routes_from=None) -> None:
    """What was sampled has the logprobs, and the routes, of one pass over all tokens."""
    logits, routes = run_teacher_forced(model, [*prompt, *got.token_ids])
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(
        got.logprobs, rows[range(len(got.token_ids)), list(got.token_ids)], atol=TOLERANCE, rtol=0
    )
    if routes_from is not None:
        assert np.array_equal(np.sort(got.routes, -1), np.sort(routes[routes_from:-1], -1))


@pytest.fixture(scope="module")
def other_model(build_model):
    return build_model(seed=9)


def said(turn: int) -> list[int]:
    return [(7 * turn + i) % 37 for i in range(4 + turn % 3)]


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("routes", [True, False])
@pytest.mark.parametrize("stops", [(), tuple(range(0, 40, 3))])
def test_each_turn_computes_its_new_tokens_and_gives_what_a_cold_engine_gives(
    model, run_teacher_forced, static, routes, stops
):
    """Whether it ended by a limit, which is known when the next step is launched, or by a stop id, which is not: then
    its state has taken in the last token, too."""
    engine = engine_of(model, static_decode=static)
    prompt, known, computed = list(FIRST), 0, []
    for turn in range(8):
        before = engine.counters.prefilled_tokens
        own = params(seed=turn, max_tokens=4, stop_ids=stops, return_routes=routes, routes_from=known if routes else 0)
        (got,) = engine.generate([prompt], own)
        assert_cold(model, run_teacher_forced, prompt, got, known if routes else None)
        computed.append(engine.counters.prefilled_tokens - before)
        known = len(prompt) + len(got.token_ids) - 1
        prompt += [*got.token_ids, *said(turn)]
    for turn, count in enumerate(computed[1:]):
        assert count in (len(said(turn)), len(said(turn)) + 1)
    ahead = [count == len(said(turn)) for turn, count in enumerate(computed[1:])]
    assert any(ahead) == bool(static and stops), "a state that has taken in all of an answer computes none of it again"


def test_steps_are_launched_ahead_while_sessions_are_kept(model):
    engine = engine_of(model, static_decode=True)
    launched, launch = [], engine.captured_decode.launch
    engine.captured_decode.launch = lambda *given: launched.append(1) or launch(*given)
    engine.submit(FIRST, params(max_tokens=8))
    for _ in range(3):
        engine.step()
    assert len(launched) == 3, "two that were read, and one ahead"


turns = st.lists(
    st.tuples(
        st.integers(0, 3),  # whose turn it is
        st.lists(st.integers(1, 37), min_size=1, max_size=6),  # what is said to it
        st.integers(0, 3),  # steps before the next one begins
        st.sampled_from(["", "", "abort", "end", "update"]),  # what happens then
    ),
    min_size=4,
    max_size=14,
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=turns,
    budget=st.sampled_from([4000, 12_000, LARGE]),
    static=st.booleans(),
    routes=st.booleans(),
    bounded=st.booleans(),
)
def test_any_conversations_give_what_they_give_cold(
    model, other_model, run_teacher_forced, plan, budget, static, routes, bounded
):
    """With little room for states, little memory for rows, aborts, ends and new weights."""
    models = [model, other_model]
    memory = {"memory_bytes": 120_000, "page_tokens": 4, "max_context": 120} if bounded else {}
    engine = engine_of(models[0], budget, static_decode=static, max_running=3, **memory)
    histories, asked, busy = [[*FIRST, n] for n in range(4)], {}, {}

    def step() -> None:
        for number, got in engine.step():
            who, prompt = asked[number]
            if busy.get(who) == number:
                del busy[who]
            if got.first_version == got.weight_version == engine.version:
                assert_cold(engine.model, run_teacher_forced, prompt, got, 0 if routes and got.token_ids else None)
            histories[who] = [*prompt, *got.token_ids]
        for tier in engine.prefix_cache.tiers:
            assert tier.bytes <= tier.budget_bytes

    for who, new, steps, then in plan:
        if who not in busy:
            prompt = [*histories[who], *new][:100]
            number = engine.submit(prompt, params(str(who), seed=who, return_routes=routes))
            asked[number], busy[who] = (who, prompt), number
        for _ in range(steps):
            step()
        if then == "abort" and busy:
            engine.abort(busy[aborted := min(busy)])
            del busy[aborted]
        elif then == "end":
            engine.end_sessions(str(who))
        elif then == "update":
            update(engine, models[(engine.version + 1) % 2])
    for _ in range(500):
        if not busy:
            break
        step()
    assert not busy
    engine.drain()
    engine.end_sessions(*map(str, range(4)))
    engine.prefix_cache.clear(keep_owned=True)
    assert [(len(tier), tier.bytes) for tier in engine.prefix_cache.tiers] == [(0, 0)], "nothing is left behind"


def test_a_conversation_that_had_to_leave_is_computed_again_whole(model, run_teacher_forced):
    engine = engine_of(model)
    (first,) = engine.generate([FIRST], params())
    tier = engine.prefix_cache.tiers[0]
    tier.budget_bytes = tier.bytes
    for n in range(3):  # each of more tokens for its bytes than the first one
        engine.generate([[n, 8, *range(1, 30)]], params(f"other {n}"))
    before, prompt = engine.counters.prefilled_tokens, [*FIRST, *first.token_ids, 7]
    (got,) = engine.generate([prompt], params())
    assert_cold(model, run_teacher_forced, prompt, got)
    assert (got.cached_tokens, engine.counters.prefilled_tokens - before) == (0, len(prompt))
    assert tier.evicted > 0


@pytest.mark.parametrize("static", [True, False])
def test_recompute_drops_conversations_at_a_new_version(model, other_model, run_teacher_forced, static):
    engine = engine_of(model, static_decode=static)
    (first,) = engine.generate([FIRST], params())
    update(engine, other_model)
    assert len(engine.prefix_cache.tiers[0]) == 0
    prompt = [*FIRST, *first.token_ids, 7]
    (got,) = engine.generate([prompt], params())
    assert got.cached_tokens == 0
    assert_cold(engine.model, run_teacher_forced, prompt, got)


@pytest.mark.parametrize("static", [True, False])
def test_carry_keeps_conversations_and_nothing_else_over_a_new_version(model, other_model, static):
    """The reference: the first model's cache over the first turn, continued by hand with the second model."""
    engine = engine_of(model, static_decode=static, in_flight="carry")
    (first,) = engine.generate([FIRST], params(max_tokens=3, temperature=0))
    update(engine, other_model)
    prompt = [*FIRST, *first.token_ids, 7, 8]
    before = engine.counters.prefilled_tokens
    (got,) = engine.generate([prompt], params(max_tokens=4, temperature=0))
    assert engine.counters.prefilled_tokens - before == 3
    cache = model.new_cache(1)
    with torch.no_grad():
        model.hidden(torch.tensor([prompt[: got.cached_tokens]]), cache=cache)
        read = prompt[got.cached_tokens :]
        for token, logprob in zip(got.token_ids, got.logprobs, strict=True):
            logits = engine.model.logits(engine.model.hidden(torch.tensor([read]), cache=cache).hidden[0, -1])
            assert logprob == pytest.approx(float(torch.log_softmax(logits, -1)[token]), abs=TOLERANCE)
            read = [token]
    (other,) = engine.generate([prompt], params("b"))
    assert other.cached_tokens == 0, "who begins does so with the new weights"


def test_a_turn_that_was_being_read_at_a_switch_goes_on_from_its_carried_state(model, other_model):
    engine = engine_of(model, in_flight="carry", prefill_tokens=4)
    (first,) = engine.generate([FIRST], params(max_tokens=3))
    number = engine.submit([*FIRST, *first.token_ids, *range(1, 11)], params())
    engine.step()
    before = engine.counters.prefilled_tokens
    update(engine, other_model)
    outcome = dict(engine.drain())[number]
    assert outcome.cached_tokens == len(FIRST) + 2
    assert engine.counters.prefilled_tokens - before == 11


def test_branches_of_a_conversation_compute_their_own_tokens(model, run_teacher_forced):
    engine = engine_of(model)
    (first,) = engine.generate([FIRST], params())
    prompt = [*FIRST, *first.token_ids]
    for name, new in (("b", [7, 8, 9]), ("c", [7, 8, 10, 11]), ("a", [12])):
        before = engine.counters.prefilled_tokens
        (got,) = engine.generate([[*prompt, *new]], params(name))
        assert_cold(model, run_teacher_forced, [*prompt, *new], got)
        assert engine.counters.prefilled_tokens - before == len(new) + 1


def test_members_of_a_group_become_conversations_of_their_own(model, run_teacher_forced):
    engine = engine_of(model)
    firsts = engine.generate([FIRST] * 3, [params(str(n), seed=n) for n in range(3)])
    before = engine.counters.prefilled_tokens
    assert before == len(FIRST), "their prompt was computed once"
    prompts = [[*FIRST, *first.token_ids, 7] for first in firsts]
    for prompt, got in zip(prompts, engine.generate(prompts, [params(str(n)) for n in range(3)]), strict=True):
        assert_cold(model, run_teacher_forced, prompt, got)
    assert engine.counters.prefilled_tokens - before == 2 * 3


@pytest.mark.parametrize("when", ["waiting", "running", "ended"])
def test_an_ended_session_leaves_nothing_behind(model, when):
    engine = engine_of(model)
    number = engine.submit(FIRST, params())
    for _ in range({"waiting": 0, "running": 3, "ended": 9}[when]):
        engine.step()
    engine.end_sessions("a")
    if when != "ended":
        engine.abort(number)
    engine.drain()
    tier = engine.prefix_cache.tiers[0]
    assert {len(held.chain.ids) for held in tier.states.values()} <= {len(FIRST), len(FIRST) + 2}
    assert engine.batch.prefix.num_sessions == 0


def test_behind_a_last_turn_nothing_is_kept(model):
    engine = engine_of(model, in_flight="carry")
    (first,) = engine.generate([FIRST], params())
    engine.generate([[*FIRST, *first.token_ids, 7]], params(ends_session=True))
    engine.generate([[9, *FIRST]], params("b", ends_session=True))
    lengths = sorted(len(held.chain.ids) for held in engine.prefix_cache.tiers[0].states.values())
    assert lengths == [len(FIRST), len(FIRST) + 1, len(FIRST) + 4], "two prompts, and the turn before the last one"


def test_an_aborted_turn_leaves_the_state_of_the_turn_before(model):
    engine = engine_of(model)
    (first,) = engine.generate([FIRST], params())
    prompt = [*FIRST, *first.token_ids, 7, 8]
    number = engine.submit(prompt, params())
    for _ in range(3):
        engine.step()
    engine.abort(number)
    before = engine.counters.prefilled_tokens
    (got,) = engine.generate([[*prompt[:-1], 9]], params())
    assert (got.cached_tokens, engine.counters.prefilled_tokens - before) == (len(prompt) - 3, 3)


def test_a_session_under_pressure_is_what_costs_least_for_its_bytes(model):
    engine = engine_of(model)
    for name, length in (("short", 4), ("long", 100), ("middle", 40)):
        engine.generate([[name.__len__(), *([5, 6, 7, 8] * 30)[:length]]], params(name))
    tier = engine.prefix_cache.tiers[0]
    tier.budget_bytes = tier.bytes
    engine.generate([[9, *([2, 3] * 60)[:110]]], params("longest"))
    kept = {name for name, chain in engine.batch.prefix._sessions.items() if chain.key(len(chain.ids)) in tier.states}
    assert {"long", "longest"} <= kept
    assert "short" not in kept


def test_the_last_token_of_a_prompt_cannot_have_a_known_route(model):
    with pytest.raises(InvalidRequest, match="the prompt has 8 tokens"):
        engine_of(model).submit(FIRST, params(return_routes=True, routes_from=8))


SYSTEM = [(5 * n) % 37 for n in range(24)]  # three blocks


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_a_system_prompt_that_prompts_share_is_computed_once(model, run_teacher_forced, together, exact):
    """By the first of those that wait together; of those that come one after the other, by the first that shows where
    it ends, which is the second one."""
    options = {"exact": True, "prefix_cache": PrefixCache.of_bytes(LARGE, block=16)} if exact else {}
    engine = engine_of(model, **options)
    prompts = [[*SYSTEM, n, *range(3 + n)] for n in range(5)]
    own = [params(str(n), return_routes=True) for n in range(5)]
    if together:
        found = engine.generate(prompts, own)
    else:
        found = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, own, strict=True)]
    for prompt, got in zip(prompts, found, strict=True):
        assert_cold(model, run_teacher_forced, prompt, got, 0)
    shared = 16 if exact else 24
    whole = 1 if together or exact else 2  # in the exact mode a prompt's state is that of its last whole block
    assert engine.counters.prefilled_tokens == sum(map(len, prompts)) - (5 - whole) * shared
    assert [got.cached_tokens for got in found] == [0] * whole + [shared] * (5 - whole)


def test_whoever_waits_for_a_shared_beginning_goes_on_when_it_is_not_computed(model, run_teacher_forced):
    engine = engine_of(model, prefill_tokens=8)
    prompts = [[*SYSTEM, n, 7] for n in range(3)]
    numbers = [engine.submit(prompt, params(str(n))) for n, prompt in enumerate(prompts)]
    engine.step()
    assert engine.num_running == 1
    engine.abort(numbers[0])
    outcomes = dict(engine.drain())
    for number, prompt in zip(numbers[1:], prompts[1:], strict=True):
        assert_cold(model, run_teacher_forced, prompt, outcomes[number])
