"""The forms that a GPU runs of what a CPU computes piece by piece, and how they are compiled."""

from __future__ import annotations

import warnings

import pytest
import torch

from k3rl.kernels.moe.decode_routing import choose
from k3rl.model import attn_res, fuse, norm, situ
from k3rl.model.moe import LatentMoE
from k3rl.model.moe_grouped import compiled_mxfp8, rounded, rounding_trial, weighted_sum
from k3rl.numerics import mx

ROWS, WIDTH = 7, 64


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(got, expected) -> bool:
    return torch.allclose(got, expected, atol=1e-12, rtol=1e-11)


def test_the_norm_and_its_gradients_are_those_of_the_cpu():
    x, weight, up = rows(0).requires_grad_(), rows(1, WIDTH).requires_grad_(), rows(2)
    expected = norm.rms_norm(x, weight, 1e-5)
    out, r = norm.normed(x, weight, 1e-5)
    assert near(out, expected)
    for got, wanted in zip(norm.normed_backward(up, x, weight, r), torch.autograd.grad(expected, [x, weight], up),
                           strict=True):  # fmt: skip
        assert near(got, wanted)


@pytest.mark.parametrize("count", [2, 4])
def test_the_residual_mix_and_its_gradients_are_those_of_the_cpu(count):
    sources = [rows(n).requires_grad_() for n in range(count)]
    weight, proj, up = rows(10, WIDTH).requires_grad_(), rows(11, 1, WIDTH).requires_grad_(), rows(12)
    inverses = [norm.inverse_rms(source.detach(), 1e-5) for source in sources]
    expected = attn_res.MixFunction.apply(weight, proj, inverses, *sources)
    wanted = torch.autograd.grad(expected, [weight, proj, *sources], up)
    query = (weight * proj[0]).detach()
    out, p = attn_res.mixed(sources, inverses, query)
    grad_query, grads = attn_res.mixed_backward(up, sources, inverses, p, query)
    assert near(out, expected)
    assert near(attn_res.inverse_rms_of(sources[0], 1e-5), inverses[0])
    for got, gradient in zip([grad_query * proj[0], (grad_query * weight)[None], *grads], wanted, strict=True):
        assert near(got, gradient)


def test_a_read_of_the_stream_in_one_piece_is_the_read_of_the_cpu():
    stream = attn_res.ResidualStream(rows(0), 1e-5)
    norm_weight, proj = rows(10, WIDTH), rows(11, 1, WIDTH)
    for n in (1, 2):
        stream.push()
        stream.add(rows(n))
        with torch.no_grad():
            expected = stream.read(norm_weight, proj)
        _, (total, *bank) = stream.apart()
        inverses = [norm.inverse_rms(row, 1e-5) for row in bank]
        got = attn_res.mixed_read(total, bank, inverses, norm_weight, proj, 1e-5)
        assert near(got, expected)


@pytest.mark.parametrize(("renormalize", "scaling"), [(True, 1.0), (True, 2.5), (False, 1.0)])
def test_routing_without_gradients_is_the_routing_of_the_cpu(nano, renormalize, scaling):
    moe = next(module for module in nano().modules() if isinstance(module, LatentMoE))
    moe.renormalize, moe.scaling = renormalize, scaling
    x = rows(0)
    with torch.no_grad():
        moe.gate.e_score_correction_bias.copy_(0.1 * rows(1, 16))
        weights, ids = moe.route(x, None, None)
        logits, bias = torch.nn.functional.linear(x, moe.gate.weight), moe.gate.e_score_correction_bias
        made = choose(logits, bias, 2, renormalize, scaling)
        kept = choose(logits, bias, 2, renormalize, scaling, ids.to(torch.int16))
    assert torch.equal(torch.topk(torch.sigmoid(logits) + bias, 2, dim=-1).indices, ids)
    assert torch.equal(made[1], ids)
    assert torch.equal(kept[1], ids)
    assert near(made[0], weights)
    assert torch.equal(kept[0], made[0])


def test_the_unit_and_its_gradient_are_those_of_the_cpu():
    gate_up, up = rows(0).requires_grad_(), rows(1, ROWS, WIDTH // 2)
    expected = situ.situ(gate_up, 4.0, 25.0)
    assert near(situ.situ_value(gate_up, 4.0, 25.0), expected)
    assert near(situ.situ_gradient(up, gate_up, 4.0, 25.0), torch.autograd.grad(expected, gate_up, up)[0])


def test_a_compiled_function_gives_what_it_gives_as_it_is_written():
    for count in (3, 5):
        choices, weights = rows(0, count, 2, 16).float(), rows(1, count, 2).float()
        assert torch.allclose(weighted_sum.run(choices, weights), weighted_sum(choices, weights), rtol=1e-6)
    assert weighted_sum.compiled is not None
    assert weighted_sum.refused is None


def test_what_does_not_compile_is_said_once_and_runs_as_it_is_written():
    @fuse.fused
    def awkward(x):
        return x + float(x.sum().item()) if bool(x.sum() > 0) else x

    x = torch.ones(3)
    with pytest.warns(UserWarning, match="without fusing"):
        assert torch.equal(awkward.run(x), x + 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(awkward(x), x + 3)
    assert awkward.refused is not None


def test_a_cpu_never_compiles():
    before = norm.normed.compiled
    norm.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
    norm.normed(torch.ones(2, 4), torch.ones(4), 1e-5)
    assert norm.normed.compiled is before is None


def test_rounding_is_that_of_the_quantizer_and_is_tried_on_every_bit_pattern():
    trial = rounding_trial(torch.device("cpu"))
    assert len(trial.view(torch.int16).unique()) == 1 << 16
    got, expected = rounded(trial, "ceil"), mx.fake_quantize_mxfp8(trial, "ceil")
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert compiled_mxfp8.compiled is None
