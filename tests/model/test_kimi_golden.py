"""Kimi Linear against the oracle's numbers, in float64 and float32, from checkpoints in the hub's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3rl.model import exact_hidden, exact_logits
from k3rl.model.moe import LatentMoE
from tests.model.kimi_golden import CASES, Case

DTYPES = (torch.float64, torch.float32)
KEPT = 4e-6  # what is stored as float32
every_case = pytest.mark.parametrize("case", CASES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])


@pytest.fixture(scope="module")
def golden() -> Any:
    made: dict[str, Case] = {}
    return lambda name: made.setdefault(name, Case(name))


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@every_case
@every_dtype
@torch.no_grad()
def test_logits_are_the_oracles(golden, case, dtype) -> None:
    gold = golden(case)
    model = gold.load(dtype)
    for length in gold.meta["lengths"]:
        logits = model(gold.tensors[f"ids.{length}"]).logits
        assert largest(logits, gold.tensors[f"logits.{length}"]) < gold.limit("logits", dtype, 1e-9)


@every_case
@every_dtype
@torch.no_grad()
def test_packed_sequences_are_the_oracles_apart(golden, case, dtype) -> None:
    gold, lengths = golden(case), (17, 1, 65)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    together = torch.cat([gold.tensors[f"ids.{n}"] for n in lengths], 1)
    wanted = torch.cat([gold.tensors[f"logits.{n}"] for n in lengths], 1)
    assert largest(gold.load(dtype)(together, cu_seqlens=ends).logits, wanted) < gold.limit("logits", dtype, 1e-9)


def recorded(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Sublayer outputs, streams and routes of a forward, under the golden names."""
    seen: dict[str, Tensor] = {}

    def keep(key: str, module: nn.Module, first: bool = False) -> None:
        def hook(_: nn.Module, inputs: Any, result: Any) -> None:
            seen[key] = inputs[0] if first else result[0] if isinstance(result, tuple) else result

        module.register_forward_hook(hook)

    def route(self: LatentMoE, *args: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = original(self, *args)
        order = chosen.argsort(-1)
        seen[f"router.{self.layer}.ids"], seen[f"router.{self.layer}.weights"] = (
            chosen.gather(1, order), weights.gather(1, order)
        )  # fmt: skip
        return weights, chosen

    original = LatentMoE.route
    monkeypatch.setattr(LatentMoE, "route", route)
    layers = model.language_model.model.layers
    for number, layer in enumerate(layers):
        keep(f"layer.{number}.attn_out", layer.self_attn)
        keep(f"layer.{number}.mlp_out", layer.block_sparse_moe if layer.is_moe else layer.mlp)
        if number:
            keep(f"layer.{number - 1}.out", layer.input_layernorm, first=True)
    norm = model.language_model.model.norm
    keep(f"layer.{len(layers) - 1}.out", norm, first=True)
    keep("final", norm)
    model(ids)
    return seen


@every_case
@every_dtype
@torch.no_grad()
def test_every_sublayer_and_choice_is_the_oracles(golden, case, dtype, monkeypatch) -> None:
    gold = golden(case)
    seen = recorded(gold.load(dtype), gold.input(gold.meta["hidden_input"]), monkeypatch)
    hidden = [key for key in gold.tensors if key == "final" or key.endswith((".attn_out", ".mlp_out", ".out"))]
    assert len(hidden) >= 7
    for key in hidden:
        assert largest(seen[key], gold.tensors[key][0]) < gold.limit("hidden", dtype, KEPT), key
    routed = [key for key in gold.tensors if key.startswith("router.") and key.endswith(".ids")]
    assert routed
    for key in routed:
        assert torch.equal(seen[key], gold.tensors[key].long()), key
        weights = key.replace(".ids", ".weights")
        assert largest(seen[weights], gold.tensors[weights]) < (1e-9 if dtype == torch.float64 else 5e-5), key


@every_case
@every_dtype
def test_states_after_any_prefix_are_the_oracles(golden, case, dtype) -> None:
    gold, limit = golden(case), KEPT if dtype == torch.float64 else 5e-4
    model = gold.load(dtype)
    for n, key in gold.meta["state_input"].items():
        cache = model.new_cache(1)
        model.hidden(gold.input(key), cache=cache)
        for layer in range(model.config.num_hidden_layers):
            at = f"state.{n}.layer.{layer}."
            if f"{at}S" in gold.tensors:
                assert largest(cache.recurrent(layer), gold.tensors[f"{at}S"]) < limit
                four = torch.cat([gold.tensors[f"{at}conv_{stream}"] for stream in "qkv"], dim=1)
                assert largest(cache.conv(layer), four.mT[:, 1:]) < limit
            if f"{at}latent" in gold.tensors:
                wanted = torch.cat([gold.tensors[f"{at}latent"], gold.tensors[f"{at}shared_key"]], -1)
                assert largest(cache.latent(layer), wanted) < limit


@every_case
@every_dtype
def test_decode_and_prefill_in_pieces_are_the_oracles(golden, case, dtype) -> None:
    gold = golden(case)
    model, about = gold.load(dtype), gold.meta["decode"]
    ids, n = gold.input(about["input"]), about["prefill"]
    cache = model.new_cache(1)
    model.hidden(ids[:, : n - 7], cache=cache)
    model.hidden(ids[:, n - 7 : n], cache=cache)
    steps = [model(ids[:, n + t : n + t + 1], cache=cache).logits for t in range(about["steps"])]
    assert largest(torch.cat(steps, 1), gold.tensors["decode.logits"]) < gold.limit("decode.logits", dtype, 1e-9)
    for key in gold.tensors:
        if key.startswith("decode.end."):
            assert largest(cache.recurrent(int(key.split(".")[3])), gold.tensors[key]) < 5e-4


@every_case
def test_the_exact_forward_is_the_oracles(golden, case) -> None:
    gold = golden(case)
    model = gold.load(torch.float64)
    hidden, _ = exact_hidden(model, gold.tensors["ids.65"][0], model.new_cache(1))
    assert largest(exact_logits(model, hidden, 0), gold.tensors["logits.65"][0]) < 1e-9


@every_case
def test_greedy_continuation_is_the_oracles(golden, case) -> None:
    gold = golden(case)
    model, about = gold.load(torch.float64), gold.meta["decode"]
    cache = model.new_cache(1)
    logits = model(gold.input(about["input"])[:, : about["prefill"]], cache=cache).logits[:, -1]
    sampled = []
    for _ in range(16):
        sampled.append(logits.argmax(-1))
        logits = model(sampled[-1][:, None], cache=cache).logits[:, -1]
    assert torch.cat(sampled).tolist() == gold.tensors["decode.greedy"][0].tolist()


@every_case
@every_dtype
def test_gradients_are_the_oracles(golden, case, dtype) -> None:
    gold = golden(case)
    model, ids = gold.load(dtype), gold.input(gold.meta["loss"]["input"])
    loss = nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    exact = dtype == torch.float64
    assert abs(float(loss.detach()) - gold.meta["loss"]["value"]) < (1e-10 if exact else 1e-5)
    loss.backward()
    limit = 1e-8 if exact else 2e-3
    parameters = dict(model.official_parameters())
    for name, norm in gold.meta["grad_norms"].items():
        gradient = parameters[name].grad
        if not norm:
            assert gradient is None or not gradient.any(), name
            continue
        probe = (gradient.double().flatten() * torch.arange(gradient.numel(), dtype=torch.float64).cos()).sum()
        assert abs(float(gradient.norm()) - norm) < limit * norm, name
        assert abs(float(probe) - gold.meta["grad_probes"][name]) < limit * norm * gradient.numel() ** 0.5, name
    for key, wanted in gold.tensors.items():
        if key.startswith("grad."):
            error = (parameters[key[5:]].grad - wanted).norm() / wanted.norm().clamp(min=1e-30)
            assert float(error) < (1e-6 if exact else 2e-3), key  # stored as float32
    assert not parameters["model.embed_tokens.weight"].grad[model.config.pad_token_id].any()
