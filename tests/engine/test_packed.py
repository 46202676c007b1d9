"""An engine that holds experts as stored bytes is the engine that holds their values, weight updates included.

Kernels need a GPU. Here the functions that define them stand in their place, and the model is told that they serve.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
import torch

from k3rl.checkpoint import load_checkpoint, manifest_of, official_tensors, save_checkpoint
from k3rl.checkpoint.delta import encode
from k3rl.engine import Engine, WeightUpdateError
from k3rl.kernels import limits
from k3rl.kernels.gemm import w4_grouped_skinny
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
        monkeypatch.setattr(w4_grouped_skinny, name, counting(getattr(w4_grouped_skinny, f"{name}_reference")))
    monkeypatch.setattr(limits.W4GroupedSkinnyLimits, "takes", lambda self, rows, count, codes: 0 < count <= 40)
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


def test_whole_updates_and_deltas_arrive_packed(wide, stored, later, served):
    expected = Engine(wide, packed=False)
    expected.start_weight_update(1, manifest_of(later.items()))
    expected.update_weights(later.items())
    expected.finish_weight_update(1)
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
    for receive in (whole, delta):
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
    bank.fill(1, "w2", (packed, torch.full_like(scale, limits.W4_GROUPED_SKINNY.scale + 1)))
    assert not bank.in_range
    assert not bank.takes(torch.zeros(1, 256), 1)
    assert torch.equal(bank.down()[1], bank.value(1, "w2", torch.float64))


def test_a_run_of_experts_is_read_and_written_as_one_by_one(wide, later, served):
    model, other = Engine(wide).model, Engine(wide).model
    layer, bank = next(iter(model.packed_banks.items()))
    other = other.packed_banks[layer]
    numbers = [3, 0, 2]
    found = bank.stored_many(numbers)
    assert found.keys() == {(number, leaf) for number in numbers for leaf in ("w1", "w2", "w3")}
    for (number, leaf), parts in found.items():
        for got, wanted in zip(parts, bank.stored(number, leaf), strict=True):
            assert torch.equal(got, wanted)
    prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts."
    given = {
        (number, leaf): tuple(later[f"{prefix}{number}.{leaf}.weight_{part}"] for part in ("packed", "scale"))
        for number, leaf in [(2, "w1"), (0, "w3"), (3, "w2"), (0, "w2"), (0, "w1")]
    }
    bank.fill_many(given)
    for (number, leaf), parts in given.items():
        other.fill(number, leaf, parts)
    for expert, leaf in [(number, leaf) for number in range(wide.config.num_experts) for leaf in ("w1", "w2", "w3")]:
        for left, right in zip(bank.stored(expert, leaf), other.stored(expert, leaf), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("run_bytes", [1, 8 << 20])
def test_a_delta_of_every_expert_turns_tiles_a_run_at_a_time(wide, stored, later, served, monkeypatch, run_bytes):
    for place in ("k3rl.model.packed", "k3rl.checkpoint.official"):
        monkeypatch.setattr(f"{place}.PACKED_RUN_BYTES", run_bytes)
    only_codes = {name: later[name] if name.endswith("_packed") else stored[name] for name in stored}
    manifests = manifest_of(stored.items()), manifest_of(only_codes.items())
    header, buckets = encode(stored, only_codes, manifests, (0, 1))
    engine, calls = Engine(wide), {"tiled": 0, "stored": 0}
    assert engine.manifest == manifests[0]
    for name in calls:
        own = getattr(w4_grouped_skinny, name)

        def counted(*parts, name=name, own=own):
            calls[name] += 1
            return own(*parts)

        monkeypatch.setattr(w4_grouped_skinny, name, counted)
    engine.start_weight_delta(header.to_bytes(manifests[0]))
    for bucket in buckets:
        engine.update_weights_by_delta(bucket)
    engine.verify_weight_update()
    layers, runs = len(engine.model.packed_banks), wide.config.num_experts if run_bytes == 1 else 1
    assert calls["tiled"] == 3 * runs * layers, "once for each of w1, w2 and w3"
    if run_bytes == 1:  # runs so small that more are read ahead than a view holds
        assert calls["stored"] <= 2 * 2 * runs * layers
    else:
        assert calls["stored"] == 2 * layers, "once for gate and up, once for down, for scales that stay too"
    engine.finish_weight_update(1)
    assert manifest_of(official_tensors(engine.model)) == manifests[1]


def test_bytes_of_an_expert_that_were_written_to_are_refused_by_name(wide, stored, served):
    name = next(name for name in stored if name.endswith("experts.1.w2.weight_packed"))
    changed = {**stored, name: stored[name].clone()}
    changed[name][:, ::7] ^= 3
    manifests = manifest_of(stored.items()), manifest_of(changed.items())
    header, buckets = encode(stored, changed, manifests, (0, 1))
    sent = list(buckets)
    for part, says in ((0, name), (1, name.replace("_packed", "_scale"))):
        engine = Engine(wide)
        assert engine.manifest == manifests[0]
        bank = next(iter(engine.model.packed_banks.values()))
        mine = [part.clone() for part in bank.stored(1, "w2")]
        mine[part][0, 0] ^= 1
        bank.fill(1, "w2", tuple(mine))
        engine.start_weight_delta(header.to_bytes(manifests[0]))
        for bucket in sent:
            engine.update_weights_by_delta(bucket)
        with pytest.raises(WeightUpdateError, match=says):
            engine.verify_weight_update()
        assert engine.version == 0
