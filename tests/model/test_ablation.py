"""Each part replaced by the common choice: what is computed, what is stored, and what stays bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3rl.checkpoint import inspect_model, load_checkpoint, official_tensors, save_checkpoint
from k3rl.kernels.kda.operator import kda
from k3rl.model import ABLATION_CHOICES, AblationConfig, K3Config, K3ForCausalLM, ModelConfigError, QuantizationConfig
from k3rl.model.gated import SwiGLU
from k3rl.model.mla import rotate
from k3rl.model.moe import LatentMoE
from k3rl.model.table import tensor_table
from k3rl.model.watch import watch_activations

DOUBLE = torch.float64
EVERY = [(part, choice) for part, choices in ABLATION_CHOICES.items() for choice in choices[1:]]
every_choice = pytest.mark.parametrize(("part", "choice"), EVERY)


PLAIN_ACTIVATIONS = QuantizationConfig()


def config(quantization: QuantizationConfig = PLAIN_ACTIVATIONS, **choices: str) -> K3Config:
    return K3Config.named("k3-nano").replace(
        num_experts=4, quantization=quantization, ablation=AblationConfig(**choices)
    )


def built(dtype: torch.dtype = DOUBLE, **choices: str) -> K3ForCausalLM:
    model = K3ForCausalLM(config(**choices), dtype=dtype)
    model.init_weights(3)
    return model


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 400, (1, n), generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------- one model each


@every_choice
def test_a_replaced_part_changes_the_model_and_takes_gradients(part, choice) -> None:
    model, tokens = built(**{part: choice}), ids(21)
    logits = model(tokens).logits
    # Fresh pseudo-queries are 0, so a mix is the mean of what a sum adds: only the epsilon of norms tells them apart.
    assert not torch.allclose(logits, built()(tokens).logits, atol=1e-6)
    logits.square().mean().backward()
    without = [n for n, p in model.official_parameters() if p.grad is None and p.requires_grad]
    assert all(".experts." in name or "layers.0.self_attention_res_" in name for name in without), without


@every_choice
def test_chunked_prefill_and_decode_equal_one_pass(part, choice) -> None:
    model, tokens = built(**{part: choice}), ids(23)
    whole = model(tokens).logits.detach()
    cache, got, start = model.new_cache(1), [], 0
    for size in (5, 1, 11, 1, 1, 4):
        got.append(model(tokens[:, start : start + size], cache=cache).logits)
        start += size
    assert torch.allclose(torch.cat(got, 1), whole, atol=1e-9)  # float64, another order of sums


@every_choice
def test_packed_documents_equal_separate_ones(part, choice) -> None:
    model, one, other = built(**{part: choice}), ids(9), ids(18, seed=1)
    packed = model(torch.cat([one, other], 1), cu_seqlens=torch.tensor([0, 9, 27])).logits
    separate = torch.cat([model(one).logits, model(other).logits], 1)
    assert torch.allclose(packed, separate, atol=1e-9)


@every_choice
def test_the_choice_is_saved_and_obeyed_on_load(part, choice, tmp_path) -> None:
    model, tokens = built(torch.float32, **{part: choice}), ids(12)
    save_checkpoint(model, tmp_path / "ck")
    loaded = load_checkpoint(tmp_path / "ck", dtype=torch.float32)
    assert getattr(loaded.config.ablation, part) == choice
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    found = inspect_model(tmp_path / "ck")
    assert found["parameters"] == sum(p.numel() for _, p in model.official_parameters())
    assert found["differences"][f"k3rl_ablation.{part}"] == [choice, None]
    assert f"| instead of K3's {ABLATION_CHOICES[part][0]} | {choice} |" in (tmp_path / "ck" / "README.md").read_text()


@every_choice
def test_the_table_lists_the_parameters_that_the_model_has(part, choice) -> None:
    changed = config(**{part: choice})
    listed = {
        entry.name.replace(".experts.0.", f".experts.{e}."): entry.shape
        for entry in tensor_table(changed)
        for e in range(entry.copies)
    }
    model = K3ForCausalLM(changed, device="meta")
    assert listed == {name: tuple(p.shape) for name, p in model.official_parameters()}


# ----------------------------------------------------------------------------------------------- the config


def test_k3_writes_no_key_of_ours_for_parts() -> None:
    assert "k3rl_ablation" not in K3Config.named("k3").to_dict()
    assert K3Config.named("k3").ablation == AblationConfig()


def test_official_keys_say_what_is_replaced_and_must_agree() -> None:
    written = config(activation="swiglu", experts="latent", attention="mla_rope").to_dict()
    text = written["text_config"]
    assert (text["hidden_act"], text["latent_moe_use_norm"], text["mla_use_nope"]) == ("silu", False, False)
    assert K3Config.from_dict(written) == config(activation="swiglu", experts="latent", attention="mla_rope")
    with pytest.raises(ModelConfigError, match="hidden_act is 'silu'"):
        K3Config.from_dict({key: value for key, value in written.items() if key != "k3rl_ablation"})


def test_unknown_parts_and_choices_are_refused() -> None:
    with pytest.raises(ModelConfigError, match=r"k3rl_ablation.residual is 'none'; it must be one of attn_res, sum"):
        AblationConfig(residual="none")
    with pytest.raises(ModelConfigError, match="unknown key 'colour'"):
        K3Config.from_dict({**config().to_dict(), "k3rl_ablation": {"colour": "red"}})


# ------------------------------------------------------------------------------------- each part by its formula


def test_swiglu_is_silu_times_up_and_its_backward_equals_finite_differences() -> None:
    x = torch.randn(3, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    assert torch.allclose(SwiGLU()(x), torch.nn.functional.silu(gate) * up, atol=1e-14)
    assert torch.autograd.gradcheck(SwiGLU(), (x,))


@pytest.mark.parametrize("experts", ["latent", "full_width"])
@pytest.mark.parametrize("activation", ["situ", "swiglu"])
def test_experts_compute_their_definition(experts, activation) -> None:
    layer = LatentMoE(config(QuantizationConfig(weights="none"), experts=experts, activation=activation), 1,
                      dtype=DOUBLE, device="cpu")  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=DOUBLE, generator=generator) * 0.2)
    x = torch.randn(7, 64, dtype=DOUBLE, generator=generator)
    out, chosen = layer(x, None, None)

    def unit(gate: Tensor, up: Tensor) -> Tensor:
        if activation == "swiglu":
            return gate * torch.sigmoid(gate) * up
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)

    shared = layer.shared_experts
    for row, own, got in zip(x, chosen, out, strict=True):
        scores = torch.sigmoid(layer.gate.weight @ row)[own]
        z = row if experts == "full_width" else layer.routed_expert_down_proj.weight @ row
        total = sum(
            p * (e.w2.weight @ unit(e.w1.weight @ z, e.w3.weight @ z))
            for p, e in zip(scores / scores.sum(), (layer.experts[int(i)] for i in own), strict=True)
        )
        routed = total if experts == "full_width" else layer.routed_expert_up_proj.weight @ total
        beside = shared.down_proj.weight @ unit(shared.gate_proj.weight @ row, shared.up_proj.weight @ row)
        assert torch.allclose(got, routed + beside, atol=1e-11)


def test_a_plain_sum_adds_every_sublayer_to_what_it_read() -> None:
    model, tokens = built(residual="sum"), ids(14)
    from k3rl.model.layout import Layout

    stack, layout = model.language_model.model, Layout([14])
    with torch.no_grad():
        x = stack.embed_tokens.weight[tokens[0]]
        for layer in stack.layers:
            seen = layer.input_layernorm(x)
            x = x + (layer.self_attn(seen, layout, None) if layer.is_kda else layer.self_attn(seen, layout, None, None))
            seen = layer.post_attention_layernorm(x)
            x = x + (layer.block_sparse_moe(seen, None, None)[0] if layer.is_moe else layer.mlp(seen))
        expected = stack.norm(x)
        assert torch.allclose(model.hidden(tokens).hidden[0], expected, atol=1e-12)


def test_rotation_turns_pairs_by_position_and_products_see_only_distances() -> None:
    x = torch.randn(2, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([3, 11])
    pairs = torch.view_as_complex(x.view(2, 3, 2))
    turn = torch.polar(torch.ones(3, dtype=DOUBLE), 10000.0 ** (-torch.arange(3, dtype=DOUBLE) / 3))
    expected = torch.view_as_real(pairs * torch.stack([turn**3, turn**11])).flatten(1)
    assert torch.allclose(rotate(x, position), expected, atol=1e-12)
    far = rotate(x, position + 1000)
    near = rotate(x, position)
    assert torch.allclose(far[0] @ far[1], near[0] @ near[1], atol=1e-9)


# ------------------------------------------------------------------------------------------- what stays bounded


@pytest.mark.parametrize(("activation", "bounded"), [("situ", True), ("swiglu", False)])
def test_situ_is_bounded_by_100_whatever_the_weights_and_swiglu_is_not(activation, bounded) -> None:
    model = built(torch.float32, activation=activation)
    with torch.no_grad():
        for name, parameter in model.official_parameters():
            if name.endswith(("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight")):
                parameter.mul_(50)
    with watch_activations(model) as largest:
        model(ids(32))
    assert (largest.value <= 100.001) == bounded  # float32 rounding of 4 * 25
    assert bounded or largest.value > 1000


class Logits:
    """A forward observer that keeps the largest attention logit."""

    def __init__(self) -> None:
        self.largest = float("-inf")

    def router(self, layer: int, scores: Tensor, cutoff: Tensor) -> None: ...

    def attention_logits(self, layer: int, maximum: Tensor) -> None:
        self.largest = max(self.largest, float(maximum.max()))


def test_logits_of_mla_grow_with_the_weights_and_kda_does_not_see_their_size() -> None:
    found = []
    for scale in (1.0, 100.0):
        model = built(torch.float32, attention="mla")
        with torch.no_grad():
            for name, parameter in model.official_parameters():
                if name.endswith("q_b_proj.weight"):
                    parameter.mul_(scale)
        model.observer = observer = Logits()
        model(ids(32))
        found.append(observer.largest)
    assert found[1] > 20 * found[0] > 0  # not quite 100 times: later layers read other values
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(1, 12, 2, 32, dtype=DOUBLE, generator=generator) for _ in range(4))
    beta = torch.randn(1, 12, 2, dtype=DOUBLE, generator=generator)
    decay = torch.zeros(2, dtype=DOUBLE), torch.zeros(64, dtype=DOUBLE)
    small, _ = kda(q, k, v, gate, beta, *decay)
    large, _ = kda(q * 1000, k * 1000, v, gate, beta, *decay)
    assert torch.allclose(small, large, atol=1e-5)  # the epsilon of the L2 norm is 1e-6


# ----------------------------------------------------------------------------------------- quantized afterwards


def test_post_hoc_quantization_computes_plainly_and_is_done_by_saving(tmp_path) -> None:
    plain = K3ForCausalLM(config(QuantizationConfig("none", activations="none")), dtype=torch.float32)
    later = K3ForCausalLM(config(QuantizationConfig("post_hoc", activations="mxfp8")), dtype=torch.float32)
    for model in (plain, later):
        model.init_weights(4)
    tokens = ids(20)
    assert torch.equal(plain(tokens).logits, later(tokens).logits)
    assert not any(name.endswith("_packed") for name, _ in official_tensors(later))
    save_checkpoint(later, tmp_path / "ck")
    loaded = load_checkpoint(tmp_path / "ck", dtype=torch.float32)
    assert loaded.config.quantization == QuantizationConfig("mxfp4", "ceil", "mxfp8")
    assert any(name.endswith("_packed") for name, _ in official_tensors(loaded))
    assert not torch.equal(loaded(tokens).logits, later(tokens).logits)
    assert inspect_model(tmp_path / "ck")["quantized"] == ["routed_experts"]
