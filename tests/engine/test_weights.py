"""Weight versions: whole or absent, and what in-flight requests see of a switch."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from k3rl.checkpoint import (
    digest,
    empty_buffer,
    manifest_of,
    official_tensors,
    shard_layout,
    shard_of,
    write_flat,
)
from k3rl.engine import Engine
from k3rl.engine.flat_update import ValuesCopy
from k3rl.engine.protocol import WeightUpdateError
from k3rl.types import SamplingParams

PROMPT = [5, 9, 2]
PARAMS = SamplingParams(max_tokens=8, seed=1)


@pytest.fixture
def stored(build_model):
    """The stored tensors of other weights of the same config."""
    return dict(official_tensors(build_model(seed=1)))


def publish_flat(engine: Engine, version: int, model) -> None:
    layout = shard_layout(model, rest=True)
    buffer = empty_buffer(layout, torch.device("cpu"))
    write_flat(model, layout, buffer)
    engine.start_flat_update(version, [shard_of(0, layout, buffer)])
    engine.update_weights_by_shard(0, buffer)
    engine.finish_weight_update(version)


def publish(engine: Engine, version: int, stored: dict, manifest: dict | None = None) -> None:
    engine.start_weight_update(version, manifest or manifest_of(stored.items()))
    engine.update_weights(stored.items())
    engine.finish_weight_update(version)


def assert_same(left: list, right: list) -> None:
    """Equal in all but the last digits of the logprobs (float64, other batch composition)."""
    for a, b in zip(left, right, strict=True):
        assert dataclasses.replace(a, logprobs=()) == dataclasses.replace(b, logprobs=())
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-9, rtol=0)


def test_after_an_update_the_engine_is_the_published_model(model, build_model, stored):
    engine = Engine(model, version=3)
    before = engine.generate([PROMPT], PARAMS)
    publish(engine, 4, stored)
    after = engine.generate([PROMPT], PARAMS)
    assert engine.version == 4
    fresh = Engine(build_model(seed=7))
    publish(fresh, 4, stored)
    assert after == fresh.generate([PROMPT], PARAMS)
    assert before[0].token_ids != after[0].token_ids
    assert (before[0].weight_version, after[0].first_version, after[0].weight_version) == (3, 4, 4)
    assert manifest_of(official_tensors(engine.model)) == manifest_of(stored.items())


def test_a_verified_version_is_served_only_after_finish_and_can_still_be_dropped(model, stored):
    engine = Engine(model)
    expected = engine.generate([PROMPT], PARAMS)
    manifest = manifest_of(stored.items())
    for last in (engine.abort_weight_update, lambda: engine.finish_weight_update(1)):
        engine.start_weight_update(1, manifest)
        engine.update_weights(stored.items())
        engine.verify_weight_update()
        assert engine.generate([PROMPT], PARAMS) == expected
        with pytest.raises(WeightUpdateError, match="no weight update is open"):
            engine.update_weights([])
        with pytest.raises(WeightUpdateError, match="another weight update is open"):
            engine.start_weight_update(2, manifest)
        last()
    assert engine.version == 1
    assert engine.generate([PROMPT], PARAMS) != expected


def test_tensors_may_come_in_any_order_and_in_parts(model, stored):
    engine = Engine(model)
    engine.start_weight_update(1, manifest_of(stored.items()))
    for name in sorted(stored, reverse=True):
        engine.update_weights([(name, stored[name])])
    engine.finish_weight_update(1)
    assert manifest_of(official_tensors(engine.model)) == manifest_of(stored.items())


def test_the_callers_model_is_never_written(model, build_model, stored):
    before = manifest_of(official_tensors(model))
    engine = Engine(model)
    for version in (1, 2):
        publish(engine, version, stored)
    for version in (3, 4, 5):
        publish_flat(engine, version, build_model(seed=version))
    assert manifest_of(official_tensors(model)) == before


def test_versions_in_flat_buffers_are_served_one_after_the_other_by_two_models(model, build_model, stored):
    engine, served = Engine(model), []
    for version in (1, 2, 3, 5, 6):
        new = build_model(seed=version)
        if version == 3:  # another way in between
            publish(engine, 3, stored)
        else:
            publish_flat(engine, version, new)
        wanted = dict(official_tensors(new)) if version != 3 else stored
        assert engine.manifest == manifest_of(wanted.items())
        fresh = Engine(new if version != 3 else build_model(seed=1), version=version)
        assert engine.generate([PROMPT], PARAMS) == fresh.generate([PROMPT], PARAMS)
        served.append(engine.model)
    assert len({id(each) for each in served[:2]}) == 2


def test_where_steps_are_captured_values_are_copied_to_where_they_were(model, build_model):
    engine = Engine(model)
    publish_flat(engine, 1, build_model(seed=1))
    served = engine.model
    other = build_model(seed=2)
    ValuesCopy(served, other).run()
    addresses = [parameter.data_ptr() for parameter in served.parameters()]
    assert manifest_of(official_tensors(served)) == manifest_of(official_tensors(other))
    assert engine.generate([PROMPT], PARAMS)[0].logprobs == Engine(other).generate([PROMPT], PARAMS)[0].logprobs
    assert addresses == [parameter.data_ptr() for parameter in served.parameters()]


def test_versions_only_go_up_and_one_update_is_open_at_a_time(model, stored):
    engine, manifest = Engine(model, version=5), manifest_of(stored.items())
    for version in (5, 4):
        with pytest.raises(WeightUpdateError, match="not later than 5"):
            engine.start_weight_update(version, manifest)
    with pytest.raises(WeightUpdateError, match="no weight update is open"):
        engine.update_weights(stored.items())
    engine.start_weight_update(6, manifest)
    with pytest.raises(WeightUpdateError, match="another weight update is open"):
        engine.start_weight_update(7, manifest)
    engine.update_weights(stored.items())
    with pytest.raises(WeightUpdateError, match="version 7 is not the one"):
        engine.finish_weight_update(7)
    engine.start_weight_update(6, manifest)
    engine.abort_weight_update()
    engine.abort_weight_update()
    publish(engine, 6, stored)
    assert engine.version == 6


def test_the_handshake_names_what_differs(model, build_model, stored):
    engine = Engine(model)
    engine.init_weight_transfer(stored)
    with pytest.raises(WeightUpdateError, match=r"unknown here: .*experts\.4"):
        engine.init_weight_transfer(dict(official_tensors(build_model(num_experts=6))))


def test_running_requests_carry_their_state_and_record_the_span(model, build_model, stored):
    """The reference: the first model's cache after 3 sampled tokens, continued by hand with the second model."""
    engine = Engine(model, in_flight="carry")
    number = engine.submit(PROMPT, SamplingParams(max_tokens=8, temperature=0))
    for _ in range(3):
        assert engine.step() == []
    publish(engine, 1, stored)
    ((got, completion),) = engine.drain()
    assert (got, completion.first_version, completion.weight_version) == (number, 0, 1)

    cache, read, ids = model.new_cache(1), PROMPT, []
    with torch.no_grad():
        for step in range(8):
            current = model if step < 3 else engine.model
            out = current.hidden(torch.tensor([read]), cache=cache)
            logprobs = torch.log_softmax(current.logits(out.hidden[0, -1]), -1)
            ids.append(int(logprobs.argmax()))
            np.testing.assert_allclose(completion.logprobs[step], float(logprobs.max()), atol=1e-9, rtol=0)
            read = ids[-1:]
    assert list(completion.token_ids) == ids


def test_running_requests_are_recomputed_by_the_new_weights(model, stored, run_teacher_forced):
    """The reference: one pass of each model over the tokens; after the switch the second one's logprobs hold alone."""
    engine = Engine(model, poison=True, max_running=3, prefill_tokens=5)
    group = [engine.submit(PROMPT, SamplingParams(max_tokens=8, seed=seed)) for seed in range(4)]
    for _ in range(3):
        engine.step()
    before = [len(engine.sampled(number)[0]) for number in group]
    assert before == [3, 3, 3, 0]
    publish(engine, 1, stored)
    outcomes = dict(engine.drain())
    assert engine.counters.recomputed_tokens == 3 * (len(PROMPT) + 3)
    assert engine.counters.preempted == 0
    for number, count in zip(group, before, strict=True):
        got = outcomes[number]
        assert (got.first_version, got.weight_version, len(got.token_ids)) == (0 if count else 1, 1, 8)
        for first, last, weights in ((0, count, model), (count, 8, engine.model)):
            logits, _ = run_teacher_forced(weights, [*PROMPT, *got.token_ids])
            rows = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
            expected = rows[range(8), list(got.token_ids)][first:last]
            np.testing.assert_allclose(got.logprobs[first:last], expected, atol=1e-9, rtol=0)


def test_prompts_not_sampled_from_yet_start_over_under_the_new_weights(model, stored):
    engine = Engine(model, max_running=2, prefill_tokens=4, poison=True)
    long = engine.submit(list(range(1, 11)), PARAMS)  # half prefilled when the weights change
    group = [engine.submit(PROMPT, PARAMS) for _ in range(4)]
    engine.step()
    publish(engine, 1, stored)
    outcomes = dict(engine.drain())
    fresh = Engine(engine.model, version=1)
    assert_same([outcomes[long]], fresh.generate([list(range(1, 11))], PARAMS))
    assert_same([outcomes[number] for number in group], fresh.generate([PROMPT], PARAMS) * 4)


def test_a_prompt_state_kept_for_siblings_does_not_outlive_its_version(model, stored):
    engine = Engine(model, max_running=1, poison=True)
    group = [engine.submit(PROMPT, PARAMS) for _ in range(3)]
    engine.step()  # the first runs, the prompt's state waits for the other two
    publish(engine, 1, stored)
    outcomes = dict(engine.drain())
    assert outcomes[group[0]].first_version == 0
    fresh = Engine(engine.model, version=1).generate([PROMPT], PARAMS)
    assert_same([outcomes[group[1]], outcomes[group[2]]], fresh * 2)


def test_a_digest_depends_on_dtype_shape_and_every_byte():
    base = torch.arange(8, dtype=torch.uint8)
    changed = base.clone()
    changed[7] = 9
    variants = [base, changed, base.reshape(2, 4), base.view(torch.int8), base.view(torch.bfloat16)]
    assert len({digest(tensor) for tensor in variants}) == len(variants)
    assert digest(base) == digest(copy.deepcopy(base))
    assert digest(torch.arange(16, dtype=torch.uint8)[::2]) == digest(torch.arange(0, 16, 2, dtype=torch.uint8))
    assert len(digest(torch.tensor(1.5))) == 64
