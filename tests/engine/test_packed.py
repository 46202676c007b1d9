"""An engine that holds experts as stored bytes is the engine that holds their values, weight updates included.

Kernels need a GPU. Here the functions that define them stand in their place, and the model is told that they serve.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
import torch

from k3rl.checkpoint import load_checkpoint, official_tensors, save_checkpoint
from k3rl.checkpoint.delta import encode
from k3rl.engine import Engine
from k3rl.engine.weights import manifest_of
from k3rl.kernels import few_rows_packed
from k3rl.model import LoraConfig
from k3rl.model.lora import Adapter
from k3rl.types import SamplingParams

# Two chunks of 128 inputs for the first product, one for the second.
WIDTHS = MappingProxyType({"routed_expert_hidden_size": 256, "moe_intermediate_size": 128, "hidden_size": 32})
PROMPTS, PARAMS = [[5, 9, 2], [7], [3, 3, 8, 1]], SamplingParams(max_tokens=6, seed=1)


@pytest.fixture
def served(monkeypatch):
    """Packed experts wherever they fit; the number of products that met bytes is counted."""
    counted = []

    def counting(reference):
        def call(rows, *others):
            counted.append(len(rows))
            return reference(rows, *others)

        return call

    for place in ("k3rl.model.packed", "k3rl.engine.weights", "k3rl.checkpoint.hf"):
        monkeypatch.setattr(f"{place}.serves_packed", lambda *_: True)
    for name in ("product", "activated"):
        monkeypatch.setattr(few_rows_packed, name, counting(getattr(few_rows_packed, f"{name}_reference")))
    monkeypatch.setattr(few_rows_packed, "takes", lambda rows, count, codes: 0 < count <= 40)
    return counted


@pytest.fixture(scope="module")
def wide(build_model):
    """A model whose experts fit the tiles of the kernels; nobody writes to it."""
    return build_model(**WIDTHS)


@pytest.fixture(scope="module")
def stored(wide):
    return dict(official_tensors(wide))


@pytest.fixture(scope="module")
def later(build_model):
    return dict(official_tensors(build_model(seed=1, **WIDTHS)))


def assert_same(left: list, right: list) -> None:
    """The same tokens; logprobs to the order of float64 sums."""
    assert [c.token_ids for c in left] == [c.token_ids for c in right]
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-9, rtol=0)


@pytest.mark.parametrize("static", [True, False])
def test_tokens_and_logprobs_are_those_of_an_engine_that_holds_values(wide, served, static):
    plain = Engine(wide, packed=False, static_decode=static)
    engine = Engine(wide, static_decode=static)
    assert (engine.model.packed, wide.packed, plain.model is wide) == (True, False, True)
    values = {p.is_meta for n, p in engine.model.named_parameters() if ".experts." in n}
    assert values == {True}, "no values of experts are held"
    assert_same(engine.generate(PROMPTS, PARAMS), plain.generate(PROMPTS, PARAMS))
    assert bool(served) == static, "a decode step of fixed shapes multiplies with the bytes"
    assert engine.manifest == plain.manifest


def test_more_rows_than_the_kernel_takes_are_multiplied_with_decoded_experts(wide, served):
    long = [list(range(1, 31)), [4] * 20]  # 100 assignments
    engine, plain = (Engine(wide, packed=packed, static_decode=True) for packed in (True, False))
    assert_same(engine.generate(long, PARAMS), plain.generate(long, PARAMS))
    assert max(served) <= 40


def test_every_form_of_an_update_arrives_packed(wide, stored, later, served, tmp_path):
    expected = Engine(wide, packed=False)
    expected.start_weight_update(1, manifest_of(later.items()))
    expected.update_weights(later.items())
    expected.finish_weight_update(1)
    save_checkpoint(expected.model, tmp_path / "v1")
    wanted = expected.generate(PROMPTS, PARAMS)
    manifests = manifest_of(stored.items()), manifest_of(later.items())
    header, buckets = encode(stored, later, manifests, (0, 1), 1 << 16)

    def whole(engine: Engine) -> None:
        engine.start_weight_update(1, manifests[1])
        engine.update_weights(later.items())

    def delta(engine: Engine) -> None:
        engine.start_weight_delta(header.to_bytes(manifests[0]))
        for bucket in sent:
            engine.update_weights_by_delta(bucket)

    sent = list(buckets)
    for receive in (whole, delta, lambda engine: engine.load_weight_update(1, tmp_path / "v1", manifests[1])):
        engine = Engine(wide, static_decode=True)
        before = engine.generate(PROMPTS, PARAMS)
        receive(engine)
        engine.finish_weight_update(1)
        assert engine.model.packed
        assert engine.manifest == manifests[1] == manifest_of(official_tensors(engine.model))
        found = engine.generate(PROMPTS, PARAMS)
        assert_same(found, wanted)
        assert [c.token_ids for c in found] != [c.token_ids for c in before]
    assert manifest_of(official_tensors(wide)) == manifests[0], "the caller's model is never written"


def test_a_checkpoint_loaded_to_be_served_holds_no_values_and_writes_the_same_bytes(wide, stored, served, tmp_path):
    save_checkpoint(wide, tmp_path / "one")
    model = load_checkpoint(tmp_path / "one", dtype=torch.float64, packed="served")
    assert model.packed
    assert not model.stored_blocks, "the bytes are held once"
    assert Engine(model).model is model
    assert manifest_of(official_tensors(model)) == manifest_of(stored.items())


def test_adapters_of_experts_are_beside_packed_ones_what_they_are_beside_values(build_model, served):
    plain, packed = build_model(**WIDTHS), Engine(build_model(**WIDTHS)).model
    generator = torch.Generator().manual_seed(2)
    found = []
    for model in (plain, packed):
        adapter = Adapter(model, LoraConfig(rank=2, alpha=4.0, targets=("w1", "w2", "w3", "q_proj")))
        generator.manual_seed(2)
        adapter.assign({n: 0.3 * torch.randn(p.shape, generator=generator) for n, p in adapter.parameters()})
        adapter.attach(model)
        with torch.no_grad():
            found.append(model(torch.tensor([[5, 9, 2, 7]])).logits)
    torch.testing.assert_close(*found, atol=1e-9, rtol=0)


def test_scales_beyond_the_kernels_are_decoded(wide, served):
    model = Engine(wide).model
    bank = next(iter(model.packed_banks.values()))
    assert bank.in_range
    packed, scale = bank.stored(1, "w2")
    bank.fill(1, "w2", (packed, torch.full_like(scale, few_rows_packed.MOST_SCALE + 1)))
    assert not bank.in_range
    assert not bank.multiplies(torch.zeros(1, 256), 1)
    assert torch.equal(bank.down()[1], bank.value(1, "w2", torch.float64))
