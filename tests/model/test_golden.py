"""The model against the official code's numbers, in float64 and float32.

Tolerances are those of golden/k3/README.md: expectations are float64 results, most of them stored as float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3rl.model import decoder
from k3rl.model.attn_res import ResidualStream
from k3rl.model.moe import LatentMoE

CASES = [(case, dtype) for case in "ad" for dtype in (torch.float64, torch.float32)]
LOGITS = {torch.float64: 1e-9, torch.float32: 1e-3}
HIDDEN = {torch.float64: 5e-6, torch.float32: 3e-3}
STATE = {torch.float64: 1e-6, torch.float32: 2e-4}
WEIGHTS = {torch.float64: 1e-6, torch.float32: 5e-5}
GRADIENT = {torch.float64: 1e-6, torch.float32: 1e-3}
LOSS = {torch.float64: 1e-9, torch.float32: 2e-5}

every_case = pytest.mark.parametrize(("case", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@every_case
def test_logits_are_the_official_ones(golden, case, dtype) -> None:
    gold = golden(case)
    model = gold.load(dtype)
    for number in ("1", "2"):
        logits = model(gold.inputs[f"ids{number}"]).logits
        assert logits.dtype == dtype
        assert largest(logits, gold.expected[f"logits{number}"]) < LOGITS[dtype]


class Recorder(ResidualStream):
    """The residual stream, keeping the running sum after every addition."""

    last: Recorder

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sums: list[Tensor] = []
        self.rows: list[Tensor] = []
        Recorder.last = self

    def push(self) -> None:
        self.rows.append(self.total())
        super().push()

    def add(self, output: Tensor) -> None:
        super().add(output)
        self.sums.append(self.total())


def recorded_forward(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Everything that golden `expected` names for a forward of `ids`."""
    seen: dict[str, Tensor] = {}

    def keep(key: str, module: nn.Module, output: bool = False) -> None:
        def hook(_: nn.Module, inputs: Any, result: Any) -> None:
            seen[key] = (result[0] if isinstance(result, tuple) else result) if output else inputs[0]

        module.register_forward_hook(hook)

    def route(self: LatentMoE, *args: Any) -> tuple[Tensor, Tensor]:
        weights, ids = original(self, *args)
        order = ids.argsort(-1)
        seen[f"layer.{self.layer}.router_ids"] = ids.gather(1, order)
        seen[f"layer.{self.layer}.router_weights"] = weights.gather(1, order)
        return weights, ids

    original = LatentMoE.route
    monkeypatch.setattr(LatentMoE, "route", route)
    monkeypatch.setattr(decoder, "ResidualStream", Recorder)
    stack = model.language_model.model
    for number, layer in enumerate(stack.layers):
        keep(f"layer.{number}.h_attn", layer.input_layernorm)
        keep(f"layer.{number}.h_mlp", layer.post_attention_layernorm)
        keep(f"layer.{number}.attn_out", layer.self_attn, output=True)
        keep(f"layer.{number}.mlp_out", layer.block_sparse_moe if layer.is_moe else layer.mlp, output=True)
        if layer.is_moe:
            keep(f"layer.{number}.latent_u", layer.block_sparse_moe.routed_expert_norm)
    keep("h_final", stack.norm)
    model(ids)
    for number in range(len(stack.layers)):
        seen[f"layer.{number}.P_mid"], seen[f"layer.{number}.P"] = Recorder.last.sums[2 * number : 2 * number + 2]
    seen["bank"] = torch.stack(Recorder.last.rows, dim=1)
    return seen


@every_case
def test_every_mix_sum_and_sublayer_output_is_the_official_one(golden, case, dtype, monkeypatch) -> None:
    gold = golden(case)
    seen = recorded_forward(gold.load(dtype), gold.inputs["ids1"], monkeypatch)
    names = [
        key
        for key in gold.expected
        if key in ("bank", "h_final") or key.split(".")[-1] in ("h_attn", "h_mlp", "attn_out", "mlp_out", "P", "P_mid")
    ]
    assert len(names) > 15
    for name in (*names, *(key for key in gold.expected if key.endswith("latent_u"))):
        assert largest(seen[name], gold.expected[name][0]) < HIDDEN[dtype], name


@every_case
def test_router_chooses_and_weighs_as_the_official_one(golden, case, dtype, monkeypatch) -> None:
    gold = golden(case)
    seen = recorded_forward(gold.load(dtype), gold.inputs["ids1"], monkeypatch)
    for key in gold.expected:
        if key.endswith("router_ids"):
            assert torch.equal(seen[key], gold.expected[key].long())
        if key.endswith("router_weights"):
            assert largest(seen[key], gold.expected[key]) < WEIGHTS[dtype]


class Scores:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.scores: dict[int, tuple[Tensor, Tensor]] = {}
        self.logits: dict[int, Tensor] = {}

    def router(self, layer: int, scores: Tensor, cutoff: Tensor) -> None:
        self.scores[layer] = scores, cutoff

    def attention_logits(self, layer: int, maximum: Tensor) -> None:
        self.logits[layer] = maximum


@every_case
def test_observer_sees_the_official_router_scores(golden, case, dtype) -> None:
    gold = golden(case)
    model = gold.load(dtype)
    model.observer = Scores()
    model(gold.inputs["ids1"])
    assert sorted(model.observer.scores) == list(model.config.moe_layers)
    assert sorted(model.observer.logits) == list(model.config.mla_layers)
    for layer, bias in model.router_biases():
        scores, cutoff = model.observer.scores[layer]
        expected = gold.expected[f"layer.{layer}.router_scores"].to(dtype)
        assert largest(scores, expected) < WEIGHTS[dtype]
        ranked = (expected + bias).sort(-1, descending=True).values
        assert largest(cutoff, ranked[:, model.config.num_experts_per_token]) < WEIGHTS[dtype]


@every_case
def test_states_after_any_prefix_are_the_official_ones(golden, case, dtype) -> None:
    gold = golden(case)
    model = gold.load(dtype)
    for n in gold.meta["state_prefix_lengths"]:
        cache = model.new_cache(1)
        model.hidden(gold.inputs["ids1"][:, :n], cache=cache)
        for layer in model.config.kda_layers:
            key = f"state.n{n}.layer.{layer}."
            if f"{key}S" not in gold.expected:
                continue
            assert largest(cache.recurrent(layer), gold.expected[f"{key}S"].mT) < STATE[dtype]
            last_four = torch.cat([gold.expected[f"{key}conv_{stream}"] for stream in "qkv"], dim=1)
            assert largest(cache.conv(layer), last_four.mT[:, 1:]) < STATE[dtype]


@every_case
def test_latents_expand_to_the_official_keys_and_values(golden, case, dtype) -> None:
    gold = golden(case)
    model = gold.load(dtype)
    n = gold.meta["decode_prefix_n"]
    cache = model.new_cache(1)
    model.hidden(gold.inputs["ids1"][:, :n], cache=cache)
    keys = [key for key in gold.expected if key.endswith("mla_k")]
    assert keys
    for key in keys:
        layer = int(key.split(".")[3])
        attention = model.language_model.model.layers[layer].self_attn
        latent = cache.latent(layer)
        k, v = attention.expand(latent[..., : attention.latent], latent[..., attention.latent :])
        assert largest(k.transpose(1, 2), gold.expected[key]) < HIDDEN[dtype]
        assert largest(v.transpose(1, 2), gold.expected[key[:-1] + "v"]) < HIDDEN[dtype]


@every_case
def test_decode_after_prefill_is_the_official_one(golden, case, dtype) -> None:
    gold = golden(case)
    model = gold.load(dtype)
    ids, n = gold.inputs["ids1"], gold.meta["decode_prefix_n"]
    cache = model.new_cache(1)
    model.hidden(ids[:, :n], cache=cache)
    steps = [model(ids[:, n + t : n + t + 1], cache=cache).logits for t in range(8)]
    assert largest(torch.cat(steps, dim=1), gold.expected["decode.logits"]) < LOGITS[dtype]
    for layer in model.config.kda_layers:
        key = f"decode.end.layer.{layer}.S"
        if key in gold.expected:
            assert largest(cache.recurrent(layer), gold.expected[key].mT) < STATE[dtype]


@every_case
def test_greedy_continuation_is_the_official_one(golden, case, dtype) -> None:
    gold = golden(case)
    model = gold.load(dtype)
    cache = model.new_cache(1)
    logits = model(gold.inputs["ids1"][:, : gold.meta["decode_prefix_n"]], cache=cache).logits[:, -1]
    sampled = []
    for _ in range(16):
        sampled.append(logits.argmax(-1))
        logits = model(sampled[-1][:, None], cache=cache).logits[:, -1]
    assert torch.cat(sampled).tolist() == gold.expected["greedy.ids"][0].tolist()


@every_case
def test_gradients_are_the_official_ones(golden, case, dtype) -> None:
    gold = golden(case)
    model = gold.load(dtype)
    ids = gold.inputs["ids1"]
    loss = nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    assert abs(loss.item() - gold.meta["loss_f64"]) < LOSS[dtype]
    loss.backward()
    parameters = dict(model.official_parameters())
    for name, expected in gold.gradients().items():
        difference = (parameters[name].grad - expected).norm() / expected.norm()
        assert difference < GRADIENT[dtype], name
    for name, norm in gold.meta["grad_norms"].items():
        gradient = parameters[name].grad
        assert (gradient is None) == (norm is None), name
        if norm is not None:
            assert gradient.norm().item() == pytest.approx(norm, rel=GRADIENT[dtype]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_vision_is_the_official_one(golden, dtype) -> None:
    gold = golden("v")
    model = gold.load(dtype)
    grids = [tuple(grid) for grid in gold.inputs["grid_thws"].tolist()]
    pixels = gold.inputs["pixel_values"].to(dtype)
    blocks: list[Tensor] = []
    for block in model.vision_tower.encoder.blocks:
        block.register_forward_hook(lambda module, inputs, output: blocks.append(output))
    merged = model.vision_tower(pixels, grids)
    projected = 2e-6 if dtype == torch.float64 else 1e-4
    assert largest(model.vision_tower.patch_embed(pixels, grids), gold.expected["patch_embed"]) < HIDDEN[dtype]
    for number, block in enumerate(blocks):
        assert largest(block, gold.expected[f"block.{number}"]) < HIDDEN[dtype]
    for number, rows in enumerate(model.image_rows(pixels, gold.inputs["grid_thws"])):
        assert largest(merged[number], gold.expected[f"image.{number}.merged"]) < HIDDEN[dtype]
        assert largest(rows, gold.expected[f"image.{number}.projected"]) < projected
    clip = model.image_rows(gold.inputs["clip_pixel_values"], gold.inputs["clip_grid_thws"])
    assert largest(clip[0], gold.expected["clip.0.projected"]) < projected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_images_are_merged_and_decoded_after_as_officially(golden, dtype) -> None:
    gold = golden("v")
    model = gold.load(dtype)
    cache = model.new_cache(1)
    images = {"pixel_values": gold.inputs["pixel_values"], "grid_thws": gold.inputs["grid_thws"]}
    out = model(gold.inputs["ids"], cache=cache, **images)
    assert largest(out.logits, gold.expected["logits"]) < LOGITS[dtype]
    steps = [model(gold.inputs["decode_ids"][:, t : t + 1], cache=cache).logits for t in range(2)]
    assert largest(torch.cat(steps, dim=1), gold.expected["decode.logits"]) < LOGITS[dtype]
