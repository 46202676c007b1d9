"""The engine against engine-free generation: schedules, logprobs, routes, pauses, errors."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.engine import Engine, RolloutEngine, diagnose
from k3rl.engine.protocol import EngineError, InvalidRequest, NonFiniteLogits, UnknownRequest
from k3rl.model import QuantizationConfig
from k3rl.types import Completion, SamplingParams, StopReason

TOLERANCE = 1e-9  # float64: only the order of summation differs between batch, chunk and single token
PROMPTS = [[1], [5, 9, 2], [7, 7, 7, 7, 3, 30, 11, 2, 18], list(range(1, 24))]


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "seed": 1, **changes})


def by_number(outcomes):
    numbers = [number for number, _ in outcomes]
    assert len(numbers) == len(set(numbers)), "a request comes out once"
    return dict(outcomes)


request_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    max_tokens=st.sampled_from([1, 2, 5, 8]),
    stop_ids=st.sampled_from([(), (3, 4, 5, 6, 7, 8), tuple(range(20))]),
    seed=st.sampled_from([0, 1, 2]),
    return_routes=st.booleans(),
)
asked = st.tuples(st.sampled_from(PROMPTS), st.just(()), request_params)


def test_any_schedule_gives_each_request_what_it_gets_alone(model, run_alone, run_teacher_forced, any_schedule):
    known = {}

    def alone(prompt, own) -> Completion:
        """By whole passes over all tokens, without an engine."""
        key = (*prompt, own)
        if key not in known:
            ids, logprobs = run_alone(model, prompt, own)
            routes = run_teacher_forced(model, [*prompt, *ids[:-1]])[1]
            reason = StopReason.STOP if ids[-1] in own.stop_ids else StopReason.LENGTH
            known[key] = Completion(tuple(ids), tuple(logprobs), reason, 0, 0, routes)
        return known[key]

    any_schedule(
        lambda **options: Engine(model, poison=True, **options),
        asked,
        lambda given: [alone(prompt, own) for prompt, _, own in given],
        examples=50,
        drawn={"max_running": st.integers(1, 4), "prefill_tokens": st.integers(2, 30)},
    )


def test_logprobs_equal_a_teacher_forced_pass_of_the_learner(model, run_teacher_forced):
    completions = Engine(model, max_running=3, prefill_tokens=7).generate(PROMPTS, params(max_tokens=20))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        logits, _ = run_teacher_forced(model, [*prompt, *completion.token_ids])
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        expected = rows[torch.arange(20), list(completion.token_ids)]
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("activations", ["none", "mxfp8"])
def test_float32_logprobs_equal_the_learners(build_model, run_teacher_forced, activations):
    """Within design.md's 1e-5 mean and 5e-4 maximum. With MXFP8 on, a value on a rounding boundary may round the
    other way (float32 sums in another order), which moves the tokens after it by more: there the median is bounded.
    """
    quantization = QuantizationConfig(weights="mxfp4", activations=activations)
    model = build_model(dtype=torch.float32, quantization=quantization)
    completions = Engine(model, max_running=8).generate(PROMPTS * 4, params(max_tokens=40, seed=None))
    gaps = []
    for prompt, completion in zip(PROMPTS * 4, completions, strict=True):
        logits, _ = run_teacher_forced(model, [*prompt, *completion.token_ids])
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        gaps.append(np.abs(rows[torch.arange(40), list(completion.token_ids)].numpy() - completion.logprobs))
    if activations == "none":
        assert np.mean(gaps) < 1e-5
        assert np.max(gaps) < 5e-4
    else:
        assert np.median(gaps) < 1e-5


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 4), (0.9, 8)])
def test_the_recorded_kept_set_lets_the_learner_recompute_the_logprob(
    model, run_teacher_forced, temperature, top_p, top_k
):
    own = params(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=12)
    (completion,) = Engine(model).generate([PROMPTS[1]], own)
    logits, _ = run_teacher_forced(model, [*PROMPTS[1], *completion.token_ids])
    assert (completion.sampling_mask is None) == (top_p == 1 and top_k == 0)
    for step, token in enumerate(completion.token_ids):
        scaled = logits[len(PROMPTS[1]) - 1 + step] / temperature
        sampling_mask = (
            completion.sampling_mask[step] if completion.sampling_mask is not None else np.arange(len(scaled))
        )
        assert token in sampling_mask
        assert not top_k or len(sampling_mask) <= top_k
        expected = scaled[token] - torch.logsumexp(scaled[torch.from_numpy(sampling_mask).long()], 0)
        assert completion.logprobs[step] == pytest.approx(float(expected), abs=TOLERANCE)


def test_temperature_zero_takes_the_most_likely_token_at_temperature_one(model, run_teacher_forced):
    (completion,) = Engine(model).generate([PROMPTS[2]], params(temperature=0, max_tokens=8))
    logits, _ = run_teacher_forced(model, [*PROMPTS[2], *completion.token_ids])
    rows = torch.log_softmax(logits, -1)[len(PROMPTS[2]) - 1 : -1]
    assert rows.argmax(-1).tolist() == list(completion.token_ids)
    np.testing.assert_allclose(completion.logprobs, rows.amax(-1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("rows", "budget"), [(16, 8192), (3, 8192), (3, 4)])
def test_a_group_shares_one_prefill_and_each_member_gets_what_it_gets_alone(model, run_alone, rows, budget):
    engine = Engine(model, max_running=rows, prefill_tokens=budget, poison=True)
    own = [params(seed=seed, max_tokens=2 + seed) for seed in range(8)]
    completions = engine.generate([PROMPTS[2]] * 8, own)
    assert engine.counters.prefilled_tokens == len(PROMPTS[2])
    assert len({completion.token_ids[:2] for completion in completions}) > 1
    for mine, completion in zip(own, completions, strict=True):
        ids, logprobs = run_alone(model, PROMPTS[2], mine)
        assert list(completion.token_ids) == ids
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("rows", "budget"), [(16, 8192), (2, 5)])
def test_routes_are_the_models_for_every_token_but_the_last_one(model, run_teacher_forced, rows, budget):
    prompts = [PROMPTS[3], PROMPTS[2], PROMPTS[2], PROMPTS[2]]
    own = [params(return_routes=True, seed=seed, max_tokens=70 + seed) for seed in range(4)]
    engine = Engine(model, max_running=rows, prefill_tokens=budget)
    for prompt, completion in zip(prompts, engine.generate(prompts, own), strict=True):
        _, routes = run_teacher_forced(model, [*prompt, *completion.token_ids[:-1]])
        assert completion.routes.dtype == np.int16
        assert np.array_equal(np.sort(completion.routes, -1), np.sort(routes, -1))  # order within k is free


def routes_of(engine, number, start=0):
    return engine.batch.routes(engine.batch.find(number), start)


def test_routes_come_piece_by_piece_and_over_a_preemption(model):
    engine = Engine(model, prefill_tokens=4)
    other = engine.submit(PROMPTS[1], params())
    number = engine.submit(PROMPTS[2], params(return_routes=True, max_tokens=9))
    weights = dict(official_tensors(model))
    pieces, ended = [], {}
    while number not in ended:
        if len(pieces) == 3 and engine.version == 0:  # the same weights: what runs is computed again
            engine.start_weight_update(1, manifest_of(weights.items()))
            engine.update_weights(weights.items())
            engine.finish_weight_update(1)
            assert (engine.num_running, routes_of(engine, number, sum(map(len, pieces))).size) == (0, 0)
        ended.update(engine.step())
        routes = None if number in ended else routes_of(engine, number, sum(map(len, pieces)))
        pieces += [] if routes is None or not len(routes) else [routes]
        assert other in ended or routes_of(engine, other) is None
    whole = ended[number].routes
    assert [len(piece) for piece in pieces] == [len(PROMPTS[2]), *[1] * 7]
    assert np.array_equal(np.concatenate(pieces), whole[:-1])


def test_routes_are_none_unless_asked_for(model):
    asked, not_asked = Engine(model).generate([PROMPTS[1]] * 2, [params(return_routes=True), params()])
    assert asked.routes is not None
    assert not_asked.routes is None


def test_a_seed_fixes_the_draws_and_without_one_siblings_differ(model):
    first = Engine(model, seed=5).generate([PROMPTS[1]] * 4, params(seed=None, max_tokens=8))
    again = Engine(model, seed=5).generate([PROMPTS[1]] * 4, params(seed=None, max_tokens=8))
    other = Engine(model, seed=6).generate([PROMPTS[1]] * 4, params(seed=None, max_tokens=8))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.token_ids for c in (*first, *other)}) == 8


def test_a_stop_id_ends_the_completion_and_is_part_of_it(model, run_alone):
    ids, _ = run_alone(model, PROMPTS[1], params(max_tokens=10))
    never = next(i for i in range(40) if i not in ids)
    (completion,) = Engine(model).generate([PROMPTS[1]], params(max_tokens=10, stop_ids=(never, ids[4])))
    assert list(completion.token_ids) == ids[: ids.index(ids[4]) + 1]
    assert completion.stop_reason is StopReason.STOP


def test_aborting_frees_the_slot_at_once_and_returns_the_tokens_so_far(model, run_alone):
    engine = Engine(model, max_running=1)
    first, second = engine.submit(PROMPTS[1], params(max_tokens=50)), engine.submit(PROMPTS[2], params(max_tokens=1))
    for _ in range(3):
        assert engine.step() == []
    engine.abort(first)
    outcomes = by_number(engine.step())
    assert outcomes[first].stop_reason is StopReason.ABORTED
    assert list(outcomes[first].token_ids) == run_alone(model, PROMPTS[1], params(max_tokens=3))[0]
    assert outcomes[second].stop_reason is StopReason.LENGTH, "it took the slot in the very next step"
    with pytest.raises(UnknownRequest, match=str(first)):
        engine.abort(first)


def test_pause_keep_freezes_and_resume_goes_on_as_if_nothing_was(model):
    expected = Engine(model).generate([PROMPTS[1]], params())
    engine = Engine(model)
    number = engine.submit(PROMPTS[1], params())
    engine.step()
    engine.pause("keep")
    assert [engine.step() for _ in range(5)] == [[]] * 5
    with pytest.raises(EngineError, match="resume"):
        engine.drain()
    engine.resume()
    assert engine.drain() == [(number, expected[0])]


def test_pause_abort_ends_everything_and_takes_new_requests_for_later(model):
    engine = Engine(model, max_running=2)
    numbers = [engine.submit(PROMPTS[i % 2], params()) for i in range(5)]
    engine.step()
    engine.pause("abort")
    assert engine.num_running == engine.num_waiting == 0
    later = engine.submit(PROMPTS[0], params())
    outcomes = by_number(engine.step())
    assert outcomes.keys() == set(numbers)
    assert {outcome.stop_reason for outcome in outcomes.values()} == {StopReason.ABORTED}
    assert sorted(len(outcome.token_ids) for outcome in outcomes.values()) == [0, 0, 0, 1, 1]
    engine.resume()
    assert [number for number, _ in engine.drain()] == [later]


def test_pause_wait_finishes_what_runs_and_admits_nothing(model):
    engine = Engine(model, max_running=2)
    numbers = [engine.submit(PROMPTS[1], params()) for _ in range(5)]
    engine.step()
    engine.pause("wait")
    outcomes = []
    while engine.num_running:
        outcomes += engine.step()
    assert [number for number, _ in outcomes] == numbers[:2]
    assert engine.num_waiting == 3
    with pytest.raises(EngineError, match="resume"):
        engine.drain()
    engine.resume()
    assert sorted(number for number, _ in engine.drain()) == numbers[2:]


def test_an_unknown_pause_mode_is_refused(model):
    with pytest.raises(ValueError, match="'keep', 'abort' or 'wait'"):
        Engine(model).pause("stop")


@pytest.mark.parametrize(
    ("prompt", "changes", "says"),
    [
        ([], {}, "empty"),
        ([[1, 2]], {}, "one row"),
        ([1, 40], {}, "token id 40"),
        ([-1], {}, "token id -1"),
        ([0.5], {}, "float64"),
        ([1] * 32, {}, "32 tokens"),
        ([1] * 30, {"max_tokens": 3}, "at most 2"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_and_others_go_on(model, prompt, changes, says):
    engine = Engine(model, max_context=32)
    good = engine.submit([1] * 30, params(max_tokens=2))
    with pytest.raises(InvalidRequest, match=says):
        engine.submit(prompt, params(**changes))
    assert [number for number, _ in engine.drain()] == [good]


def test_generate_refuses_before_any_work_and_keeps_requests_of_others(model):
    engine = Engine(model)
    other = engine.submit(PROMPTS[0], params(max_tokens=1))
    with pytest.raises(InvalidRequest):
        engine.generate([PROMPTS[0], []], params())
    assert engine.num_waiting == 1
    assert len(engine.generate([PROMPTS[1]], params())) == 1
    assert [number for number, _ in engine.step()] == [other]
    assert engine.generate([], params()) == []


def test_a_context_beyond_the_models_is_refused(model):
    with pytest.raises(ValueError, match="256"):
        Engine(model, max_context=257)


def test_broken_weights_name_the_request_and_the_first_bad_layer_and_spare_the_others(build_model):
    model = build_model()
    with torch.no_grad():
        for name, parameter in model.official_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter[33] = float("nan")  # only requests that read token 33 break
    engine = Engine(model, max_running=4)
    without = params(logit_bias=((33, -math.inf),))
    bad, good = engine.submit([1, 33, 2], without), engine.submit([1, 2], without)
    outcomes = by_number(engine.drain())
    assert isinstance(outcomes[good], Completion)
    assert isinstance(outcomes[bad], NonFiniteLogits)
    assert (outcomes[bad].request, outcomes[bad].position) == (bad, 2)
    assert "layers.0" in outcomes[bad].layer
    assert "embed_tokens.weight" in str(outcomes[bad])
    assert str(pickle.loads(pickle.dumps(outcomes[bad]))) == str(outcomes[bad])
    with pytest.raises(NonFiniteLogits, match="embed"):
        engine.generate([[33]], params())


def test_a_long_request_with_broken_logits_fails_without_being_run_again(model, monkeypatch):
    monkeypatch.setattr(diagnose, "EXAMINED", 4)
    monkeypatch.setattr(diagnose, "first_bad_module", lambda *given: pytest.fail("others wait for it"))
    engine = Engine(model, max_running=4)
    bad, good = engine.submit([1, 4, 2, 5, 3], params()), engine.submit([1, 2], params())
    engine.step()
    with torch.inference_mode():
        engine.batch.pool.cache.recurrent(1)[engine.batch.requests[bad].row] = float("nan")
    outcomes = by_number(engine.drain())
    assert isinstance(outcomes[good], Completion)
    assert isinstance(outcomes[bad], NonFiniteLogits)
    assert "is not finite in layer 1; it has more than the 4 tokens" in str(outcomes[bad])


def test_a_corrupted_state_is_told_from_broken_weights(model):
    engine = Engine(model, max_running=4)
    bad, good = engine.submit([1, 4, 2], params()), engine.submit([1, 2], params())
    engine.step()
    with torch.inference_mode():
        engine.batch.pool.cache.recurrent(1)[engine.batch.requests[bad].row] = float("nan")
    outcomes = by_number(engine.drain())
    assert isinstance(outcomes[good], Completion)
    assert isinstance(outcomes[bad], NonFiniteLogits)
    assert outcomes[bad].layer is None
    assert "state of layer 1" in str(outcomes[bad])


def test_poisoned_slots_are_seen_when_a_row_is_not_reset(model, monkeypatch):
    engine = Engine(model, max_running=1, poison=True)
    engine.generate([PROMPTS[1]], params())
    monkeypatch.setattr(type(engine.batch.pool), "reset", lambda self, rows: None)
    with pytest.raises(NonFiniteLogits):
        engine.generate([PROMPTS[1]], params())


def test_the_latent_cache_grows_with_the_longest_request_and_not_with_their_number(model):
    engine = Engine(model, max_running=2)
    sizes = []
    for _ in range(3):
        engine.generate([PROMPTS[1]] * 4, params(max_tokens=34))
        cache = engine.batch.pool.cache
        sizes.append([cache.latent(layer, 1 << 20).shape for layer in model.config.mla_layers])  # as long as there is
        assert int(cache.lengths.max()) == 0, "a row is reset when its request leaves"
    assert sizes[0] == sizes[1] == sizes[2]


def test_more_requests_than_a_small_pool_can_hold_all_end(model):
    engine = Engine(model, max_running=8)
    completions = engine.generate([[1 + i % 30, 2] for i in range(300)], params(max_tokens=2, seed=None))
    assert len(completions) == 300
    assert engine.num_running == engine.num_waiting == 0


def test_the_engine_is_a_rollout_engine(model):
    assert isinstance(Engine(model), RolloutEngine)
