"""The parts by themselves, against plain formulas, published numbers and finite differences (float64, 1e-12)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from k3rl.model import K3Config, K3ForCausalLM, QuantizationConfig
from k3rl.model.attn_res import ResidualStream
from k3rl.model.moe import LatentMoE
from k3rl.model.norm import rms_norm
from k3rl.model.situ import situ

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    values = torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_(grad)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1, 1, 0.71581783),
        (-2, 3, -0.65787382),
        (10, -40, -90.92900922),
        (100, 100, 99.93292997),
        (0.5, 0.25, 0.07740211),
    ],
)
def test_situ_has_the_published_values(gate, up, expected) -> None:
    assert situ(torch.tensor([[gate, up]], dtype=DOUBLE)).item() == pytest.approx(expected, abs=5e-9)  # 8 digits given


@pytest.mark.parametrize("kind", [torch.float32, DOUBLE, torch.bfloat16])
def test_situ_has_the_same_bits_with_and_without_a_backward(kind) -> None:
    for shape in ((1, 2), (5, 7, 64), (3000, 768)):  # the last one goes in pieces
        gate_up = (8 * normal(*shape, grad=False)).to(kind)
        with torch.no_grad():
            alone = situ(gate_up)
        assert torch.equal(alone, situ(gate_up.requires_grad_()).detach())


def test_situ_backward_equals_finite_differences() -> None:
    assert torch.autograd.gradcheck(lambda x: situ(3 * x), (normal(4, 6),))


def test_rms_norm_backward_equals_finite_differences_and_forward_the_formula() -> None:
    x, weight = normal(3, 5), normal(5, seed=1)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(rms_norm(x, weight, 1e-5), expected, atol=1e-14)


def stream_of(rows: list[Tensor]) -> ResidualStream:
    """A residual stream whose bank holds all rows but the last, which is the running sum."""
    stream = ResidualStream(rows[0], 1e-5)
    for row in rows[1:]:
        stream.push()
        stream.add(row)
    return stream


def test_attention_residual_mix_has_the_published_value() -> None:
    rows = [[1, 2, -1, 0.5], [0.2, -0.3, 0.8, 1.5], [0.7, 0.1, -1.2, 2]]
    stream = stream_of([torch.tensor([row], dtype=DOUBLE) for row in rows])
    norm = torch.tensor([1, 0.9, 1.1, 1], dtype=DOUBLE)
    proj = torch.tensor([[0.5, -0.4, 0.3, 0.2]], dtype=DOUBLE)
    expected = torch.tensor([[0.47268109, 0.17973982, -0.07010213, 1.48902392]], dtype=DOUBLE)
    assert torch.allclose(stream.read(norm, proj), expected, atol=5e-9)  # 8 digits given


def test_attention_residual_backward_equals_finite_differences() -> None:
    rows = [normal(2, 4, seed=s) for s in range(3)]
    norm, proj = normal(4, seed=5), normal(1, 4, seed=6)
    assert torch.autograd.gradcheck(lambda n, p, *r: stream_of(list(r)).read(n, p), (norm, proj, *rows))


def moe(**changes: object) -> LatentMoE:
    """A small MoE layer with random weights, biases too."""
    config = K3Config.named("k3-nano").replace(
        hidden_size=8, num_experts=5, routed_expert_hidden_size=32, moe_intermediate_size=32,
        quantization=QuantizationConfig(activations="none"), **changes,
    )  # fmt: skip
    layer = LatentMoE(config, 1, dtype=DOUBLE, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=DOUBLE, generator=generator) * 0.5)
    return layer


def plain_moe(layer: LatentMoE, x: Tensor, ids: Tensor) -> Tensor:
    """The layer from its definition, one token and one expert at a time."""
    out = []
    for row, chosen in zip(x, ids, strict=True):
        scores = torch.sigmoid(layer.gate.weight @ row)[chosen]
        weights = scores / (scores.sum() + 1e-20) if layer.renormalize else scores
        z = layer.routed_expert_down_proj.weight @ row
        total = torch.zeros_like(z)
        for p, e in zip(weights, chosen.tolist(), strict=True):
            expert = layer.experts[e]
            total = total + p * (expert.w2.weight @ situ(torch.cat([expert.w1.weight @ z, expert.w3.weight @ z])))
        hat = total / (total.square().mean() + 1e-5).sqrt() * layer.routed_expert_norm.weight
        shared = layer.shared_experts
        inner = situ(torch.cat([shared.gate_proj.weight @ row, shared.up_proj.weight @ row]))
        out.append(layer.routed_expert_up_proj.weight @ hat + shared.down_proj.weight @ inner)
    return torch.stack(out)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts_per_token": 2},
        {"num_experts_per_token": 1},
        {"num_experts_per_token": 4, "moe_renormalize": False},
    ],
    ids=["top2", "top1-keeps-the-raw-score", "no-renormalisation"],
)
def test_moe_equals_its_definition_in_value_and_gradient(changes) -> None:
    layer, x = moe(**changes), normal(7, 8)
    out, ids = layer(x, None, None)
    scores = torch.sigmoid(x @ layer.gate.weight.t()) + layer.gate.e_score_correction_bias
    best = scores.topk(layer.k, dim=-1).indices
    assert torch.equal(ids.sort(-1).values, best.sort(-1).values)
    expected = plain_moe(layer, x, ids)
    assert torch.allclose(out, expected, atol=1e-12)
    leaves = [p for p in layer.parameters() if p.requires_grad]
    weight = normal(*out.shape, seed=9, grad=False)
    ours = torch.autograd.grad((out * weight).sum(), [x, *leaves], allow_unused=True)
    theirs = torch.autograd.grad((expected * weight).sum(), [x, *leaves], allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-11)


def test_the_balancing_bias_changes_who_is_chosen_and_nothing_else() -> None:
    layer, x = moe(num_experts_per_token=2), normal(6, 8, grad=False)
    _, ids = layer.route(x, None, None)
    weights, _ = layer.route(x, ids, None)
    with torch.no_grad():
        layer.gate.e_score_correction_bias[3] += 10.0
    _, moved = layer.route(x, None, None)
    assert bool((moved == 3).any(-1).all())
    same, _ = layer.route(x, ids, None)
    assert torch.equal(weights, same)


def test_scaling_factor_comes_after_the_division() -> None:
    x = normal(4, 8, grad=False)
    weights, _ = moe(routed_scaling_factor=2.5).route(x, None, None)
    assert torch.allclose(weights.sum(-1), torch.full((4,), 2.5, dtype=DOUBLE), atol=1e-12)


def test_quantized_activations_reach_both_expert_products() -> None:
    """With MXFP8 on, the layer equals the plain one whose expert inputs were rounded beforehand."""
    from k3rl.numerics import mx

    layer, x = moe(num_experts_per_token=1), normal(5, 8, grad=False)
    _, ids = layer.route(x, None, None)
    z = nn.functional.linear(x, layer.routed_expert_down_proj.weight)
    weights, _ = layer.route(x, ids, None)
    expected = []
    for row, p, e in zip(mx.fake_quantize_mxfp8(z), weights, ids[:, 0].tolist(), strict=True):
        expert = layer.experts[e]
        inner = situ(torch.cat([expert.w1.weight @ row, expert.w3.weight @ row]))
        expected.append(p * (expert.w2.weight @ mx.fake_quantize_mxfp8(inner[None])[0]))
    layer.bank.quantization = QuantizationConfig(activations="mxfp8")
    assert torch.allclose(layer.bank(z, weights, ids), torch.stack(expected), atol=1e-12)


def test_the_straight_through_gradient_treats_rounding_as_identity() -> None:
    layer, x = moe(num_experts_per_token=2), normal(40, 32)
    layer.bank.quantization = QuantizationConfig(activations="mxfp8")
    weights, ids = torch.ones(40, 1, dtype=DOUBLE), torch.zeros(40, 1, dtype=torch.int64)
    (ours,) = torch.autograd.grad(layer.bank(x, weights, ids).sum(), x)
    expert = layer.experts[0]
    from k3rl.numerics import mx

    rounded = mx.fake_quantize_mxfp8(x)
    hidden = rounded @ torch.cat([expert.w1.weight, expert.w3.weight]).t()
    expected = mx.fake_quantize_mxfp8(situ(hidden)) @ expert.w2.weight.t()
    (theirs,) = torch.autograd.grad(expected.sum(), x)
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_joined_parameters_stay_joined_through_writes_copies_and_moves(nano) -> None:
    import copy

    model = nano(dtype=torch.float32)
    ids = torch.arange(9)[None]
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids).logits, model(ids).logits)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(twin(ids).logits, model(ids).logits)
    assert torch.equal(model.double()(ids).logits.float(), copy.deepcopy(model)(ids).logits.float())
    expert = twin.language_model.model.layers[1].block_sparse_moe.experts[0]
    before = twin(ids).logits
    with torch.no_grad():
        expert.w1.weight.zero_()
    routed = twin(ids, routes=torch.stack([torch.zeros(1, 9, 4), torch.ones(1, 9, 4)], dim=-1).to(torch.int16))
    assert not torch.equal(routed.logits, before)


def test_weights_that_are_on_no_device_are_joined_without_data(monkeypatch):
    """torch's `cat` on `meta` would import its whole compiler: two seconds in every rank that shares experts."""
    nano = K3Config.named("k3-nano")
    real = {name: value.shape for name, value in K3ForCausalLM(nano).named_parameters()}
    monkeypatch.setattr(torch, "cat", None)
    made = K3ForCausalLM(nano, device="meta")
    assert all(value.is_meta for value in made.parameters())
    assert {name: value.shape for name, value in made.named_parameters()} == real
