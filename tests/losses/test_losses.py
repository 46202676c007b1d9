"""Losses against hand-written sums and gradients, and their independence of the batch's layout."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3rl.losses import GRPO, Correction, CrossEntropy, K3Policy, LossError, LossInputs, LossOutput, OnPolicyDistill

Loss = Callable[[LossInputs], LossOutput]
ALL: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "k3": K3Policy(0.5, 2.0, 0.02),
    "grpo": GRPO(0.2, 0.28),
    "distill": OnPolicyDistill(3.0, 0.5, 2.0, 0.02),
    "truncated": K3Policy(0.5, 2.0, 0.02, Correction("truncated")),
    "masked": GRPO(0.2, 0.28, Correction("masked", 0.5, 5.0)),
}
every_loss = pytest.mark.parametrize("name", ALL)


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def inputs(d: Tensor, advantages: Tensor | None = None, weights: Tensor | None = None, **more: Tensor) -> LossInputs:
    """Tokens whose learner logprob is -1 + d and whose sampler logprob is -1."""
    logprobs = (d - 1).requires_grad_()
    ones = torch.ones_like(d)
    return LossInputs(
        logprobs,
        -ones,
        ones if advantages is None else advantages,
        ones if weights is None else weights,
        **more,
    )


def random_inputs(seed: int, n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    logprobs = -draw().abs()
    return {
        "logprobs": logprobs,
        "sampler_logprobs": logprobs + 0.7 * draw(),
        "advantages": draw(),
        "weights": draw().abs() / n,
        "teacher_logprobs": logprobs + 2 * draw(),
        "entropy": draw().abs(),
    }


def gradient(loss: Loss, streams: LossInputs) -> Tensor:
    (grad,) = torch.autograd.grad(loss(streams).loss, streams.logprobs)
    return grad


def test_cross_entropy_is_the_weighted_sum_of_negative_logprobs() -> None:
    streams = LossInputs(column(-1.0, -2.0, -4.0).requires_grad_(), None, None, column(0.5, 0.25, 0.0))
    out = CrossEntropy()(streams)
    assert out.loss.item() == 0.5 * 1 + 0.25 * 2
    assert out.metrics["loss/mean"] == (3.0, 2.0)
    assert gradient(CrossEntropy(), streams).tolist() == [-0.5, -0.25, 0.0]


def test_k3_gradient_is_the_policy_gradient_inside_the_band_and_the_pull_everywhere() -> None:
    """d/dlogp of tau d^2 - ratio A is 2 tau d - ratio A inside, 2 tau d outside, for either sign of A."""
    ratios = column(0.4, 0.6, 1.0, 1.9, 2.1, 0.4, 2.1)
    advantages = column(1.0, 1.0, -1.0, 2.0, 1.0, -1.0, -1.0)
    d = ratios.log()
    grad = gradient(K3Policy(0.5, 2.0, 0.02), inputs(d, advantages))
    inside = (ratios >= 0.5) & (ratios <= 2.0)
    torch.testing.assert_close(grad, 0.04 * d - inside * ratios * advantages, rtol=1e-12, atol=1e-15)


def test_k3_value_is_the_clipped_objective() -> None:
    ratios, advantages = column(0.25, 1.0, 4.0), column(1.0, 2.0, -3.0)
    out = K3Policy(0.5, 2.0, 0.1)(inputs(ratios.log(), advantages, column(1.0, 1.0, 1.0)))
    square = [0.1 * math.log(r) ** 2 for r in (0.25, 1.0, 4.0)]
    assert out.loss.item() == pytest.approx(sum(square) - (0.5 * 1 + 1 * 2 + 2.0 * -3), rel=1e-12)


def test_ppo_keeps_the_gradient_that_k3_masks() -> None:
    """Ratio 3 with a negative advantage: PPO's minimum still pushes down, K3's mask leaves only the pull."""
    streams = inputs(column(math.log(3.0)), column(-1.0))
    assert gradient(GRPO(0.2, 0.28), streams).item() == pytest.approx(3.0)
    assert gradient(K3Policy(0.5, 2.0, 0.0), streams).item() == 0.0


def test_grpo_takes_the_smaller_surrogate() -> None:
    ratios = column(0.5, 0.9, 1.2, 1.5, 0.5, 1.5)
    advantages = column(1.0, 1.0, 1.0, 1.0, -1.0, -1.0)
    out = GRPO(0.2, 0.28)(inputs(ratios.log(), advantages))
    expected = -(0.5 + 0.9 + 1.2 + 1.28 - 0.8 - 1.5)
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)
    grad = gradient(GRPO(0.2, 0.28), inputs(ratios.log(), advantages))
    torch.testing.assert_close(grad, column(-0.5, -0.9, -1.2, 0.0, 0.0, 1.5), rtol=1e-12, atol=0)


def test_distillation_rewards_are_the_clipped_log_ratio_to_the_teacher() -> None:
    d, gap = column(0.0, 0.1, -0.2, 0.3), column(1.0, -1.0, 5.0, -7.0)
    streams = inputs(d, torch.full((4,), 9.0, dtype=torch.float64), teacher_logprobs=d - 1 + gap)
    reference = inputs(d, column(1.0, -1.0, 3.0, -3.0))
    distill, k3 = OnPolicyDistill(3.0, 0.5, 2.0, 0.02), K3Policy(0.5, 2.0, 0.02)
    assert distill(streams).loss.item() == pytest.approx(k3(reference).loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient(distill, streams), gradient(k3, reference), rtol=1e-12, atol=0)
    metrics = distill(streams).metrics
    assert metrics["distill/kl_reverse"] == (pytest.approx(2.0), 4.0)
    assert metrics["distill/clip_frac"] == (2.0, 4.0)


def test_on_policy_gradient_is_reinforce() -> None:
    """With learner = sampler the K3 gradient of a token is -weight * advantage."""
    advantages, weights = column(0.5, -1.0, 0.0), column(0.1, 0.2, 0.7)
    grad = gradient(K3Policy(), inputs(column(0.0, 0.0, 0.0), advantages, weights))
    torch.testing.assert_close(grad, -weights * advantages, rtol=1e-15, atol=0)


@every_loss
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), parts=st.integers(1, 7))
def test_loss_gradient_and_metrics_do_not_depend_on_the_micro_batch_split(name: str, seed: int, parts: int) -> None:
    """Sums of float64 in another order: relative 1e-12."""
    streams = random_inputs(seed, 41)
    whole = LossInputs(**streams | {"logprobs": streams["logprobs"].clone().requires_grad_()})
    out = ALL[name](whole)
    out.loss.backward()
    leaf = streams["logprobs"].clone().requires_grad_()
    order = torch.randperm(41, generator=torch.Generator().manual_seed(seed))
    total, sums, peaks = 0.0, {}, {}
    for rows in order.tensor_split(parts):
        part = LossInputs(**{key: value[rows] for key, value in (streams | {"logprobs": leaf}).items()})
        piece = ALL[name](part)
        piece.loss.backward()
        total += piece.loss.item()
        for key, (value, count) in piece.metrics.items():
            sums[key] = (sums.get(key, (0, 0))[0] + value, sums.get(key, (0, 0))[1] + count)
        for key, value in piece.maxima.items():
            peaks[key] = max(peaks.get(key, -math.inf), value)
    assert total == pytest.approx(out.loss.item(), rel=1e-12, abs=1e-12)
    assert leaf.grad is not None
    assert whole.logprobs.grad is not None
    torch.testing.assert_close(leaf.grad, whole.logprobs.grad, rtol=1e-12, atol=1e-15)
    assert peaks == out.maxima
    assert sums.keys() == out.metrics.keys()
    for key, (value, count) in out.metrics.items():
        assert sums[key] == (pytest.approx(value, rel=1e-12, abs=1e-12), count)


@every_loss
def test_tokens_of_weight_zero_take_no_part_even_when_they_are_broken(name: str) -> None:
    streams = random_inputs(3, 10)
    clean = ALL[name](LossInputs(**{key: value[:8] for key, value in streams.items()}))
    streams["weights"][8:] = 0
    streams["sampler_logprobs"][8] = -math.inf
    streams["advantages"][9] = math.nan
    streams["teacher_logprobs"][9] = math.nan
    logprobs = streams["logprobs"].clone()
    logprobs[9] = -math.inf
    broken = LossInputs(**streams | {"logprobs": logprobs.requires_grad_()})
    out = ALL[name](broken)
    assert out.loss.item() == pytest.approx(clean.loss.item(), rel=1e-14)
    assert out.metrics == {key: (pytest.approx(value), count) for key, (value, count) in clean.metrics.items()}
    assert out.maxima == pytest.approx(clean.maxima)
    grad = gradient(ALL[name], broken)
    assert bool(grad.isfinite().all())
    assert grad[8:].tolist() == [0.0, 0.0]


@every_loss
def test_a_batch_without_targets_gives_zero_and_counts_nothing(name: str) -> None:
    empty = {key: value[:0] for key, value in random_inputs(0, 4).items()}
    streams = LossInputs(**empty | {"logprobs": empty["logprobs"].requires_grad_()})
    out = ALL[name](streams)
    assert out.loss.item() == 0.0
    assert all(pair == (0.0, 0.0) for pair in out.metrics.values())
    assert out.maxima == {}
    assert gradient(ALL[name], streams).shape == (0,)


@every_loss
def test_huge_log_ratios_stay_finite(name: str) -> None:
    d = column(200.0, -200.0, 300.0, -300.0)
    streams = inputs(d, column(1.0, 1.0, -1.0, -1.0), teacher_logprobs=d)
    out = ALL[name](streams)
    assert bool(out.loss.isfinite())
    assert bool(gradient(ALL[name], streams).isfinite().all())


def test_policy_metrics_are_what_their_names_say() -> None:
    ratios = column(0.25, 1.0, 1.0, 4.0)
    out = K3Policy(0.5, 2.0, 0.02)(inputs(ratios.log(), entropy=column(1.0, 2.0, 3.0, 4.0)))
    metrics = out.metrics
    assert metrics["ratio/mean"] == (pytest.approx(6.25), 4.0)
    assert metrics["ratio/square_mean"] == (pytest.approx(0.0625 + 2 + 16), 4.0)
    assert out.maxima["ratio/max"] == pytest.approx(4.0)
    assert metrics["policy/clip_frac_low"] == (1.0, 4.0)
    assert metrics["policy/clip_frac_high"] == (1.0, 4.0)
    assert metrics["policy/entropy/mean"] == (10.0, 4.0)
    assert metrics["kl/old"] == (pytest.approx(0.0, abs=1e-12), 4.0)
    divergence = [r - 1 - math.log(r) for r in (0.25, 1, 1, 4)]
    assert metrics["mismatch/kl/mean"] == (pytest.approx(sum(divergence)), 4.0)
    assert out.maxima["mismatch/kl/max"] == pytest.approx(max(divergence))
    without = K3Policy()(inputs(ratios.log())).metrics
    assert "policy/entropy/mean" not in without


def test_mismatch_is_exactly_zero_when_learner_and_sampler_agree() -> None:
    out = K3Policy()(inputs(torch.zeros(5, dtype=torch.float64)))
    assert out.metrics["mismatch/kl/mean"] == (0.0, 5.0)
    assert out.maxima == {"ratio/max": 1.0, "mismatch/kl/max": 0.0}


def test_missing_and_broken_streams_are_named() -> None:
    streams = random_inputs(0, 4)
    for name, key in (("k3", "sampler_logprobs"), ("grpo", "advantages"), ("distill", "teacher_logprobs")):
        with pytest.raises(LossError, match=f"reads {key}"):
            ALL[name](LossInputs(**streams | {key: None}))
        broken = streams[key].clone()
        broken[2] = math.nan
        with pytest.raises(LossError, match=rf"1 of 4 values of {key} are not finite, the first at target 2"):
            ALL[name](LossInputs(**streams | {key: broken}))
    with pytest.raises(LossError, match=r"weights has shape \(3,\)"):
        LossInputs(**streams | {"weights": torch.ones(3)})


def test_impossible_settings_are_refused() -> None:
    for make in (
        lambda: K3Policy(1.5, 2.0),
        lambda: K3Policy(0.5, 0.9),
        lambda: K3Policy(tau=-1.0),
        lambda: GRPO(0.0, 0.2),
        lambda: OnPolicyDistill(0.0),
    ):
        with pytest.raises(LossError, match="wanted"):
            make()


@every_loss
def test_losses_travel_between_processes(name: str) -> None:
    assert pickle.loads(pickle.dumps(ALL[name])) == ALL[name]


@pytest.mark.parametrize("loss", [K3Policy, GRPO])
@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (Correction("truncated", high=2.0), (0.1, 0.6, 1.0, 1.9, 2.0, 2.0)),
        (Correction("masked", low=0.5, high=5.0), (0.0, 0.6, 1.0, 1.9, 4.0, 0.0)),
    ],
)
def test_a_correction_weighs_the_policy_gradient_of_each_token(loss, correction, weights):
    """Whatever the sign of the advantage, and without a gradient of the weight itself."""
    ratios, signs = column(0.1, 0.6, 1.0, 1.9, 4.0, 1e9), column(1, -1, 1, -1, -1, 1)
    made = loss(correction=correction)
    made = made if loss is GRPO else K3Policy(tau=0.0, correction=correction)
    given_inputs = inputs(ratios.log(), signs)
    found = made(given_inputs)
    found.loss.backward()
    torch.testing.assert_close(given_inputs.logprobs.grad, -column(*weights) * signs, rtol=1e-9, atol=1e-12)
    assert float(found.loss.detach()) == pytest.approx(-float((column(*weights) * signs).sum()))
    cut = sum(abs(w - float(r)) > 1e-6 for w, r in zip(weights, ratios, strict=True))
    assert found.metrics["correction/cut_frac"] == (cut, 6)
    assert found.metrics["correction/weight/mean"] == (pytest.approx(sum(weights)), 6)


def test_the_regularizer_acts_on_tokens_that_a_correction_masks():
    given_inputs = inputs(column(3.0))
    K3Policy(tau=0.02, correction=Correction("masked"))(given_inputs).loss.backward()
    assert float(given_inputs.logprobs.grad) == pytest.approx(2 * 0.02 * 3.0)


def test_masked_correction_with_the_bounds_of_the_band_has_the_gradient_of_k3():
    drawn = random_inputs(3, 40)
    gradients = []
    for loss in (K3Policy(0.5, 2.0, 0.02), K3Policy(correction=Correction("masked", 0.5, 2.0))):
        drawn["logprobs"] = drawn["logprobs"].detach().requires_grad_()
        loss(LossInputs(**drawn)).loss.backward()
        gradients.append(drawn["logprobs"].grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_bounds_of_a_correction_hold_the_ratio_of_equal_policies():
    with pytest.raises(LossError, match="0 <= low < 1 < high"):
        Correction("masked", low=1.5)
