"""Steps that are launched before the last one's tokens are read, against an engine that waits for every token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.engine import Engine, PrefixCache
from k3rl.engine.cache import state_bytes
from k3rl.types import SamplingParams

TOLERANCE = 1e-9  # float64: only the order of summation differs
PROMPTS = [[1], [5, 9, 2], [7, 7, 7, 7, 3, 30, 11, 2, 18]]
PAGE, CONTEXT = 4, 32


def engine_of(model, deferred: bool = False, **options) -> Engine:
    """deferred: recurrent states are written once in 16 tokens, as on a GPU for many rows."""
    options = {"max_running": 4, "max_context": CONTEXT, "page_tokens": PAGE, "poison": True, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k3rl.engine.cache.defers", lambda *_: deferred)
        engine = Engine(model, static_decode=True, **options)
    assert (engine.batch.pool.paged.deferred is not None) == deferred
    return engine


def memory_of(model, rows: int, pages: int, deferred: bool) -> int:
    slot, token = state_bytes(model, deferred)
    return (rows + 1) * slot + pages * PAGE * token


def update(engine: Engine, other, version: int) -> None:
    tensors = dict(official_tensors(other))
    engine.start_weight_update(version, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(version)


def played(engine: Engine, schedule, others) -> tuple[list, list]:
    """What every action gave, and what `sampled` said of the live requests behind it."""
    outcomes, seen, asked = [], [], []
    for action, a, b in schedule:
        live = [number for number in asked if number in engine.batch.requests]
        if action == "submit":
            asked.append(engine.submit(PROMPTS[a], b))
        elif action == "step":
            outcomes += [engine.step() for _ in range(a)]
        elif action == "update":
            update(engine, others[engine.version % 2], engine.version + 1)
        elif live:
            engine.abort(live[a % len(live)])
        seen.append([engine.sampled(number)[0] for number in asked if number in engine.batch.requests])
    return [*outcomes, engine.drain()], seen


own_params = st.builds(
    lambda **given: SamplingParams(**given),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 0, 5]),
    max_tokens=st.sampled_from([1, 4, 9, 20]),
    seed=st.sampled_from([0, 1, 2]),
    stop_ids=st.sampled_from([(), tuple(range(0, 64, 5))]),
    return_routes=st.booleans(),
)
actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2), own_params),
    st.tuples(st.just("step"), st.integers(1, 6), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 5), st.none()),
    st.tuples(st.just("update"), st.none(), st.none()),
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(schedule=st.lists(actions, min_size=4, max_size=12), bounded=st.booleans(), deferred=st.booleans())
def test_an_engine_that_overlaps_steps_gives_what_one_that_waits_gives(build_model, schedule, bounded, deferred):
    """At the same steps: tokens, logprobs, routes, reasons and versions; with little memory, cancels and updates; and
    with states that are written now and then against states that are written at every token."""
    model, others = build_model(), [build_model(seed=8), build_model(seed=9)]
    engines = []
    for overlap, late in ((True, deferred), (False, False)):
        bound = {"memory_bytes": memory_of(model, 4, CONTEXT // PAGE + 2, late)} if bounded else {}
        engines.append(engine_of(model, late, overlap=overlap, **bound))
    overlapping, waiting = engines
    (got, got_seen), (expected, expected_seen) = (played(engine, schedule, others) for engine in (overlapping, waiting))
    assert got_seen == expected_seen
    for one, other in zip(got, expected, strict=True):
        assert [number for number, _ in one] == [number for number, _ in other]
        for (_, a), (_, b) in zip(one, other, strict=True):
            assert (a.token_ids, a.stop_reason) == (b.token_ids, b.stop_reason)
            assert (a.weight_version, a.first_version) == (b.weight_version, b.first_version)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE, rtol=0)
            assert (a.routes is None) == (b.routes is None)
            assert a.routes is None or np.array_equal(np.sort(a.routes, -1), np.sort(b.routes, -1))
    assert overlapping.counters.sampled_tokens == waiting.counters.sampled_tokens


def launches(engine: Engine) -> list[int]:
    """Rows of every step that the engine launches from now on."""
    launched, captured = [], engine.captured_decode
    launch = captured.launch

    def counted(model, rows, *given):
        launched.append(len(rows))
        return launch(model, rows, *given)

    captured.launch = counted
    return launched


def test_the_next_step_is_launched_before_this_one_is_read(model):
    engine = engine_of(model)
    launched = launches(engine)
    for seed in range(3):
        engine.submit(PROMPTS[1], SamplingParams(max_tokens=10, seed=seed))
    engine.step()  # the prompts
    for steps in range(1, 9):
        engine.step()
        assert len(launched) == min(steps + 1, 9)
    engine.drain()
    assert len(launched) == 9, "no step is launched for rows that all end by their limit"


def test_what_waits_beside_a_state_goes_where_the_state_goes(model):
    """Groups forked off a parked state, cached prefix states and their restoration, rows that close holes."""
    given = [PROMPTS[2]] * 5 + [PROMPTS[1], PROMPTS[2] + [3, 4]]
    own = [SamplingParams(max_tokens=3 + 4 * seed % 19, seed=seed) for seed in range(len(given))]
    results = []
    for deferred in (False, True):
        engine = engine_of(model, deferred, prefix_cache=PrefixCache.of_bytes(200_000, block=4))
        first = engine.generate(given, own)
        again = [[*prompt, *done.token_ids] for prompt, done in zip(given, first, strict=True)]
        again = [ids for ids in again if len(ids) < CONTEXT - 4]
        results.append((first, engine.generate(again, SamplingParams(max_tokens=4, seed=3))))
        assert any(done.cached_tokens for done in results[-1][1])
    for plain, late in zip(*results, strict=True):
        for a, b in zip(plain, late, strict=True):
            assert a.token_ids == b.token_ids
            assert a.cached_tokens == b.cached_tokens
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE, rtol=0)


def test_the_memory_of_a_row_is_what_its_tensors_take(model):
    for deferred in (False, True):
        engine = engine_of(model, deferred)
        cache = engine.batch.pool.paged
        tensors = [*cache.recurrent.values(), *cache.conv.values()]
        if deferred:
            for pending in cache.deferred.pending.values():
                tensors += [pending.keys, pending.updates, pending.decay, pending.span]
        assert sum(tensor.nbytes for tensor in tensors) == 5 * state_bytes(model, deferred)[0]


@pytest.mark.parametrize("asked", [{"top_p": 0.9}, {"logit_bias": ((3, 1.0),)}, {"top_k": 3}])
def test_rows_that_need_their_logits_wait_for_their_tokens(model, asked):
    engine = engine_of(model)
    launched = launches(engine)
    engine.generate(PROMPTS, SamplingParams(max_tokens=5, seed=0, **asked))
    assert not launched


@pytest.mark.parametrize(
    ("options", "early"),
    [({"in_flight": "carry"}, 1), ({"prefix_cache": True}, 1), ({"overlap": False}, 0)],
)
def test_steps_are_launched_early_with_cached_prefixes_and_carried_states_too(model, options, early):
    if "prefix_cache" in options:
        options = {"prefix_cache": PrefixCache.of_bytes(100_000)}
    engine = engine_of(model, **options)
    launched = launches(engine)
    engine.submit(PROMPTS[1], SamplingParams(max_tokens=6, seed=0))
    engine.step()
    for step in range(1, 4):
        engine.step()
        assert len(launched) == step + early


def test_a_token_drawn_ahead_of_a_carried_switch_is_of_the_version_that_drew_it(model, build_model, run_teacher_forced):
    engine, prompt = engine_of(model, in_flight="carry"), PROMPTS[1]
    number = engine.submit(prompt, SamplingParams(max_tokens=8, seed=0))
    for _ in range(3):
        engine.step()
    update(engine, build_model(seed=9), 1)
    engine.step()  # the step that the old weights had launched
    assert engine.batch.table.held(engine.batch.find(number).row).last_version == 0
    ids, logprobs = engine.sampled(number)
    logits, _ = run_teacher_forced(model, [*prompt, *ids])
    old = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1][range(len(ids)), list(ids)]
    np.testing.assert_allclose(logprobs, old, atol=TOLERANCE, rtol=0)
    engine.step()
    assert engine.batch.table.held(engine.batch.find(number).row).last_version == 1


def test_a_row_with_broken_logits_ends_alone_while_steps_overlap(build_model):
    model = build_model()
    engine = engine_of(model)
    numbers = [engine.submit(prompt, SamplingParams(max_tokens=12, seed=4)) for prompt in PROMPTS]
    for _ in range(4):
        engine.step()
    row = engine.batch.requests[numbers[1]].row
    with torch.inference_mode():
        for layer in model.config.kda_layers:
            engine.batch.pool.paged.recurrent[layer][row] = float("nan")
    outcomes = dict(engine.drain())
    assert type(outcomes[numbers[1]]).__name__ == "NonFiniteLogits"
    expected = engine_of(model, overlap=False).generate(PROMPTS, SamplingParams(max_tokens=12, seed=4))
    for place in (0, 2):
        assert outcomes[numbers[place]].token_ids == expected[place].token_ids
