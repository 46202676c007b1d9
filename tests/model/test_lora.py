"""Adapters beside frozen matrices: nothing at the start, exact gradients, the same in every way of computing."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from k3rl.model import Adapter, AdapterError, K3Config, K3ForCausalLM, LoraConfig, QuantizationConfig
from k3rl.model.lora import Target, adapted, freeze, merge
from k3rl.numerics import mx

TINY = K3Config.named("k3-nano").replace(num_experts=4)
EVERY = LoraConfig(rank=3, alpha=6.0, targets=Target.__args__, seed=2)
PLAIN = QuantizationConfig("none", "ceil", "none")
TOLERANCE = 1e-9  # float64: only the order of sums differs


def build(config: K3Config = TINY, dtype: torch.dtype = torch.float64) -> K3ForCausalLM:
    model = K3ForCausalLM(config, dtype=dtype)
    model.init_weights(1)
    return model


def trained(model: K3ForCausalLM, config: LoraConfig = EVERY, seed: int = 0) -> Adapter:
    """An adapter whose B is not zero."""
    adapter = Adapter(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter.parameters():
            if name.endswith("lora_B.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return adapter


def tokens(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 400, (1, sum(lengths)), generator=torch.Generator().manual_seed(5))
    return ids, torch.tensor([0, *lengths]).cumsum(0)


def test_a_fresh_adapter_changes_no_bit_and_leaves_no_trace():
    model = build(dtype=torch.float32)
    ids, bounds = tokens(9, 4)
    before = {name: parameter.clone() for name, parameter in model.official_parameters()}
    alone = model(ids, cu_seqlens=bounds)
    adapter = Adapter(model, EVERY)
    with adapted(model, adapter):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                beside = model(ids, cu_seqlens=bounds)
            assert torch.equal(beside.logits, alone.logits)
            assert torch.equal(beside.routes, alone.routes)
    assert model.adapter is None
    assert torch.equal(model(ids, cu_seqlens=bounds).logits, alone.logits)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.official_parameters())


def test_gradients_are_those_of_the_low_rank_change_of_each_weight():
    """With W + s B A in the place of W: dA = s B' dW and dB = s dW A', rounding of expert inputs included."""
    ids, bounds = tokens(11, 1, 6)
    pull = torch.randn(1, 18, TINY.vocab_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    model = build()
    adapter = trained(model)
    freeze(model)
    adapter.attach(model)
    out = model(ids, cu_seqlens=bounds).logits
    (out * pull).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())

    dense = build()
    for module, pair in adapter.pairs.items():
        dense.get_submodule(module).weight.data += pair.product(torch.float64)
    wanted = dense(ids, cu_seqlens=bounds).logits
    (wanted * pull).sum().backward()
    assert (out - wanted).abs().max() < TOLERANCE
    for module, pair in adapter.pairs.items():
        grad = dense.get_submodule(module).weight.grad
        if grad is None:  # an expert that got no row
            assert pair.down.grad is None
            continue
        for found, value in (
            (pair.down.grad, pair.scale * pair.up.detach().T @ grad),
            (pair.up.grad, pair.scale * grad @ pair.down.detach().T),
        ):
            assert (found - value).abs().max() < TOLERANCE * max(1.0, float(value.abs().max())), module


def test_prompts_chunks_and_single_tokens_give_one_result():
    model = build()
    trained(model).attach(model)
    ids = torch.randint(0, 400, (2, 12), generator=torch.Generator().manual_seed(7))
    whole = model(ids).logits
    cache = model.new_cache(2)
    pieces = [ids[:, :5], ids[:, 5:9], ids[:, 9:10], ids[:, 10:11], ids[:, 11:]]
    steps = torch.cat([model(piece, cache=cache).logits for piece in pieces], dim=1)
    assert (whole - steps).abs().max() < TOLERANCE


def test_only_named_matrices_are_adapted_and_values_are_bf16():
    model = build()
    adapter = Adapter(model, LoraConfig(rank=2, targets=("q_proj", "w2")))
    leaves = {name.rsplit(".", 3)[1] for name, _ in adapter.parameters()}
    assert leaves == {"q_proj", "w2"}
    for _, parameter in adapter.parameters():
        assert torch.equal(parameter, parameter.to(torch.bfloat16).to(parameter.dtype))
    assert {name for name, _ in model.trained_parameters()} == {name for name, _ in model.official_parameters()}
    adapter.attach(model)
    assert {name for name, _ in model.trained_parameters()} == {name for name, _ in adapter.parameters()}


def test_what_an_expert_gets_does_not_depend_on_the_run_that_is_held():
    whole = dict(Adapter(build(), EVERY).parameters())
    part = dict(Adapter(K3ForCausalLM(TINY, dtype=torch.float64, experts=range(2, 4)), EVERY).parameters())
    assert part.keys() < whole.keys()
    assert all(torch.equal(parameter, whole[name]) for name, parameter in part.items())


def test_unrounded_sums_are_what_the_adapter_computes():
    model = build(TINY.replace(quantization=PLAIN))
    trained(model).attach(model)
    ids, bounds = tokens(8, 5)
    beside = model(ids, cu_seqlens=bounds).logits
    assert {form: about.lost for form, about in merge(model, stored=False).items()} == {"bf16": 0.0}
    assert model.adapter is None
    assert (model(ids, cu_seqlens=bounds).logits - beside).abs().max() < TOLERANCE


def test_a_merge_stores_mxfp4_experts_and_says_what_that_costs():
    model = build()
    before = {name: parameter.clone() for name, parameter in model.official_parameters()}
    adapter = trained(model, LoraConfig(rank=2, targets=("o_proj", "w1")))
    adapter.attach(model)
    about = merge(model)
    lost = {"mxfp4": 0.0, "bf16": 0.0}
    for name, parameter in model.official_parameters():
        pair = adapter.pairs.get(name.removesuffix(".weight"))
        if pair is None:
            assert torch.equal(parameter, before[name]), name
            continue
        exact = before[name] + pair.product(torch.float64)
        form = "mxfp4" if ".experts." in name else "bf16"
        stored = mx.fake_quantize_mxfp4(exact) if form == "mxfp4" else exact.to(torch.bfloat16).to(torch.float64)
        assert torch.equal(parameter, stored), name
        lost[form] += float((stored - exact).detach().square().sum())
    for form, found in about.items():
        assert found.lost == pytest.approx(lost[form] ** 0.5)
    assert about["bf16"].error < 0.05 < about["mxfp4"].error


def test_values_that_do_not_fit_are_refused_by_name_and_change_nothing():
    model = build()
    adapter = trained(model)
    values = dict(adapter.stored_tensors())
    name = next(iter(values))
    extra = name.replace("layers.0", "layers.99")
    for bad, words in (
        ({n: v for n, v in values.items() if n != name}, "missing"),
        (values | {extra: values[name]}, "layers.99"),
        (values | {name: values[name][:, :1]}, "shape"),
        (values | {name: values[name] * float("nan")}, "NaN"),
    ):
        with pytest.raises(AdapterError, match=words):
            adapter.assign({n: torch.ones_like(v) if n != name else v for n, v in bad.items()})
    assert all(torch.equal(values[n], v) for n, v in adapter.stored_tensors())


@pytest.mark.parametrize("targets", [(), ("w1", "w1"), ("embed_tokens",)])
def test_targets_are_matrices_that_can_be_adapted_each_once(targets):
    with pytest.raises(ValidationError):
        LoraConfig(targets=targets)
