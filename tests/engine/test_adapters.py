"""Adapters beside the weights of an engine: each request gets its own, a version whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.checkpoint.manifest import manifest_digest
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.engine import Engine, PrefixCache
from k3rl.engine.adapters import AdapterHeader
from k3rl.engine.protocol import InvalidRequest, WeightUpdateError
from k3rl.losses import CrossEntropy
from k3rl.model import Adapter, LoraConfig
from k3rl.model.lora import adapted
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.types import SamplingParams

CONFIG = LoraConfig(rank=3, alpha=6.0)
SMALL = LoraConfig(rank=2, alpha=2.0, targets=("kv_b_proj", "w3"))
PROMPTS = [[5, 9, 2], [7, 7, 7, 7, 3, 30, 11, 2, 18], [1]]
TOLERANCE = 1e-9  # float64: only the order of summation differs between batches


def params(adapter: str = "", **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "seed": 1, "adapter": adapter, **changes})


def trained(model, config: LoraConfig, seed: int) -> Adapter:
    adapter = Adapter(model, config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(p.shape, generator=generator) * 0.3 for n, p in adapter.parameters()}
    adapter.assign(tensors)
    return adapter


def send(engine: Engine, name: str, version: int, adapter: Adapter, *, base=None) -> None:
    """Opens a version and sends its tensors."""
    stored = dict(adapter.stored_tensors())
    served = manifest_digest(engine.manifest)
    header = AdapterHeader(name, adapter.config, base or served).to_bytes()
    engine.adapters.open(version, header, manifest_of(stored.items()), served)
    engine.adapters.add(stored.items())


def publish(engine: Engine, name: str, version: int, adapter: Adapter) -> None:
    send(engine, name, version, adapter)
    engine.verify_weight_update()
    engine.finish_weight_update(version)


@pytest.fixture(scope="module")
def pair(model):
    return {"a": trained(model, CONFIG, 1), "b": trained(model, SMALL, 2), "": None}


def expected(model, run_alone, adapter, prompt, asked):
    with adapted(model, adapter):
        return run_alone(model, prompt, asked)


def test_a_batch_of_two_adapters_and_none_gives_each_row_what_it_gets_alone(model, pair, run_alone):
    engine = Engine(model, max_running=4, version=2, poison=True, prefill_tokens=5)
    publish(engine, "a", 4, pair["a"])
    publish(engine, "b", 9, pair["b"])
    asked = [(prompt, params(name)) for prompt in PROMPTS for name in pair]
    answers = engine.generate([prompt for prompt, _ in asked], [one for _, one in asked])
    assert engine.counters.steps < 6 * len(asked), "they ran together"
    for (prompt, one), got in zip(asked, answers, strict=True):
        ids, logprobs = expected(model, run_alone, pair[one.adapter], prompt, one)
        assert list(got.token_ids) == ids
        np.testing.assert_allclose(got.logprobs, logprobs, atol=TOLERANCE, rtol=0)
        assert got.weight_version == got.first_version == {"a": 4, "b": 9, "": 2}[one.adapter]
    assert model.adapter is None
    assert len({tuple(got.token_ids) for got in answers[:3]}) == 3, "the adapters matter"


def test_what_a_learner_trained_and_published_is_what_the_engine_samples_from(build_model):
    learner, engine = Trainer(build_model(), TrainerConfig(lora=CONFIG, adamw_lr=0.02)), Engine(build_model())
    prompt = PROMPTS[1]
    ids = np.array([*prompt, 5, 6, 7, 8])
    mask, nothing = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
    for _ in range(2):
        learner.train(TrainBatch.pack([TrainSequence("s", ids, mask, nothing, nothing)]), CrossEntropy())
    publish(engine, "policy", 1, learner.model.adapter)
    before, got = engine.generate([prompt] * 2, [params(), params("policy", return_routes=True)])
    assert before.token_ids != got.token_ids
    ids = np.array([*prompt, *got.token_ids])
    mask, nothing = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
    routes = np.concatenate([got.routes, got.routes[-1:]])
    scored = TrainBatch.pack([TrainSequence("s", ids, mask, nothing, nothing, routes=routes)])
    with torch.no_grad():
        learned = learner.target_inputs(scored).logprobs.numpy()
    np.testing.assert_allclose(got.logprobs, learned, atol=TOLERANCE, rtol=0)


def test_cached_prefixes_belong_to_one_version_of_one_adapter(model, pair, run_alone):
    engine = Engine(model, poison=True, prefix_cache=PrefixCache.of_bytes(1 << 30, block=4))
    publish(engine, "a", 1, pair["a"])
    publish(engine, "b", 1, pair["b"])
    prompt = PROMPTS[1]

    def ask(name: str, adapter: Adapter | None) -> int:
        (got,) = engine.generate([prompt], params(name))
        np.testing.assert_allclose(
            got.logprobs, expected(model, run_alone, adapter, prompt, params(name))[1], atol=TOLERANCE, rtol=0
        )
        return got.cached_tokens

    assert [ask(name, adapter) for name, adapter in pair.items()] == [0, 0, 0]
    assert [ask(name, adapter) for name, adapter in pair.items()] == [len(prompt)] * 3
    publish(engine, "a", 2, pair["b"])
    assert ask("a", pair["b"]) == 0, "of the version before"
    assert ask("b", pair["b"]) == len(prompt), "another adapter's version does not matter"


def test_no_salt_of_a_caller_is_that_of_an_adapter(model, pair):
    engine = Engine(model)
    publish(engine, "a", 1, pair["a"])
    of_adapter = engine.adapters.salt(params("a"))
    forged = [of_adapter, "\0a\x001", "'a' 1 "]
    assert of_adapter not in [engine.adapters.salt(params(cache_salt=salt)) for salt in forged]


@pytest.mark.parametrize("in_flight", ["recompute", "carry"])
def test_a_new_version_reaches_its_own_running_requests_and_leaves_others_alone(model, pair, run_alone, in_flight):
    engine = Engine(model, in_flight=in_flight)
    publish(engine, "a", 1, pair["a"])
    publish(engine, "b", 1, pair["b"])
    numbers = {name: engine.submit(PROMPTS[0], params(name)) for name in pair}
    for _ in range(3):
        engine.step()
    publish(engine, "a", 5, pair["b"])
    outcomes = dict(engine.drain())
    got = outcomes[numbers["a"]]
    assert (got.first_version, got.weight_version) == (1, 5)
    for name in ("b", ""):
        ids, logprobs = expected(model, run_alone, pair[name], PROMPTS[0], params(name))
        assert list(outcomes[numbers[name]].token_ids) == ids
        np.testing.assert_allclose(outcomes[numbers[name]].logprobs, logprobs, atol=TOLERANCE, rtol=0)
        assert outcomes[numbers[name]].weight_version == (1 if name else 0)
    assert engine.counters.recomputed_tokens == (len(PROMPTS[0]) + 3 if in_flight == "recompute" else 0)
    if in_flight == "recompute":  # the rest is what the new adapter makes of prompt and sampled tokens
        with adapted(model, pair["b"]), torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS[0], *got.token_ids]])).logits[0].log_softmax(-1)
        rows = np.arange(len(PROMPTS[0]) + 3, len(PROMPTS[0]) + 6)
        wanted = logits[rows - 1, list(got.token_ids[3:])]
        np.testing.assert_allclose(got.logprobs[3:], wanted, atol=TOLERANCE, rtol=0)


def test_a_version_that_is_not_for_these_weights_is_refused_and_the_old_one_serves_on(model, pair):
    engine = Engine(model)
    publish(engine, "a", 3, pair["a"])
    before = engine.generate([PROMPTS[0]], params("a"))
    with pytest.raises(WeightUpdateError, match="not later"):
        send(engine, "a", 3, pair["b"])
    with pytest.raises(WeightUpdateError, match="other weights"):
        send(engine, "a", 4, pair["b"], base="0" * 64)
    for header in (b"{}", b"x", AdapterHeader("", CONFIG, "").to_bytes()):
        with pytest.raises(WeightUpdateError):
            engine.adapters.open(4, header, {}, "")
    send(engine, "a", 4, pair["b"])
    with pytest.raises(WeightUpdateError, match="open"):
        send(engine, "b", 4, pair["b"])
    engine.abort_weight_update()
    with pytest.raises(WeightUpdateError, match="trained beside its weights"):
        engine.start_weight_update(7, manifest_of(official_tensors(model)))
    assert engine.generate([PROMPTS[0]], params("a")) == before


def test_weights_that_were_prepared_before_an_adapter_came_are_refused(model, build_model, pair):
    engine = Engine(model)
    tensors = dict(official_tensors(build_model(seed=3)))
    engine.start_weight_update(1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.verify_weight_update()
    publish(engine, "a", 1, pair["a"])
    with pytest.raises(WeightUpdateError, match="serves a, trained beside its weights"):
        engine.finish_weight_update(1)
    assert (engine.version, engine.model, engine.adapters.names) == (0, model, ["a"])


def test_a_request_names_an_adapter_that_is_there(model):
    with pytest.raises(InvalidRequest, match="'a' is not served; there are none"):
        Engine(model).submit(PROMPTS[0], params("a"))
