"""Quantile Balancing against golden updates, and the properties that make it safe to sum over ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from k3rl.optim import BalanceError, QuantileBalancer

FOLDER = Path(__file__).parents[1] / "golden" / "qb"
GOLDEN = load_file(FOLDER / "qb.safetensors")
CASES = {case["name"]: case for case in json.loads((FOLDER / "meta.json").read_text())["cases"]}
every_case = pytest.mark.parametrize("name", CASES)


def balancer(name: str, layers: int = 1) -> QuantileBalancer:
    return QuantileBalancer(CASES[name]["n"], CASES[name]["k"], layers)


def cutoff(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    return torch.topk(scores + bias, k + 1, dim=-1).values[:, -1]


def loads(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    return torch.bincount(torch.topk(scores + bias, k).indices.flatten(), minlength=scores.shape[1])


def bin_width(bias: Tensor) -> float:
    return float(bias.max() - bias.min() + 2) / 1000


@every_case
def test_counts_loads_and_next_bias_equal_the_golden_update(name: str) -> None:
    k, scores, bias = CASES[name]["k"], GOLDEN[f"{name}.scores"], GOLDEN[f"{name}.bias0"]
    assert torch.equal(cutoff(scores, bias, k), GOLDEN[f"{name}.alpha"])
    qb = balancer(name)
    qb.observe(0, scores, GOLDEN[f"{name}.alpha"], bias)
    assert torch.equal(qb.loads[0], GOLDEN[f"{name}.loads0"])
    if name != "toy":  # there a required bias of exactly 0 sits on a bin edge
        assert torch.equal(qb.counts[0], GOLDEN[f"{name}.hist_counts"])
    (new,) = qb.update([bias])
    tolerance = bin_width(bias) if name == "toy" else 1e-9
    torch.testing.assert_close(new, GOLDEN[f"{name}.hist_bias1"], rtol=0, atol=tolerance)
    assert torch.equal(loads(scores, new, k), GOLDEN[f"{name}.hist_loads1"])


@every_case
def test_the_update_is_within_one_bin_of_the_exact_quantile(name: str) -> None:
    """Exact: between the q-th and (q+1)-th smallest required bias, found by sorting instead of by histogram."""
    k, scores, bias = CASES[name]["k"], GOLDEN[f"{name}.scores"], GOLDEN[f"{name}.bias0"]
    required = (cutoff(scores, bias, k)[:, None] - scores).sort(0).values
    q = CASES[name]["q"]
    low, high = required[math.ceil(q) - 1], required[math.ceil(q)]
    qb = balancer(name)
    qb.observe(0, scores, GOLDEN[f"{name}.alpha"], bias)
    new = qb.update([bias])[0]
    shift = (new - low).mean()  # centring moves all experts alike
    gap = float((high - low).max())
    assert float((new - low - shift).abs().max()) <= 2 * bin_width(bias) + gap


@every_case
def test_float32_bias_is_within_one_bin_of_the_golden_update(name: str) -> None:
    """Float32 scores may fall into the neighbouring bin, so a bias may be off by one bin width."""
    k, scores, bias = CASES[name]["k"], GOLDEN[f"{name}.scores"].float(), GOLDEN[f"{name}.bias0"].float()
    qb = balancer(name)
    qb.observe(0, scores, cutoff(scores, bias, k), bias)
    (new,) = qb.update([bias])
    assert new.dtype == torch.float32
    torch.testing.assert_close(new.double(), GOLDEN[f"{name}.hist_bias1"], rtol=0, atol=1.01 * bin_width(bias))


@every_case
def test_ten_updates_in_a_row_follow_the_golden_path(name: str) -> None:
    k, scores, bias = CASES[name]["k"], GOLDEN[f"{name}.scores"], GOLDEN[f"{name}.bias0"]
    qb = balancer(name)
    for step in range(10):
        qb.observe(0, scores, cutoff(scores, bias, k), bias)
        (bias,) = qb.update([bias])
        tolerance = bin_width(bias) if name == "toy" else 1e-9
        torch.testing.assert_close(bias, GOLDEN[f"{name}.hist_bias_10steps"][step], rtol=0, atol=tolerance)


def test_toy_loads_become_even_in_one_update() -> None:
    tokens, experts = torch.arange(8, dtype=torch.float64)[:, None], torch.arange(4, dtype=torch.float64)
    scores = torch.sigmoid(1.5 * torch.sin(1.7 * tokens + 2.3 * experts) + 1 - 0.6 * experts)
    bias = torch.zeros(4, dtype=torch.float64)
    assert loads(scores, bias, 1).tolist() == [3, 3, 2, 0]
    qb = QuantileBalancer(4, 1, 1)
    qb.observe(0, scores, cutoff(scores, bias, 1), bias)
    assert qb.loads.tolist() == [[3, 3, 2, 0]]
    assert qb.max_violation() == [0.5]
    (new,) = qb.update([bias])
    assert loads(scores, new, 1).tolist() == [2, 2, 2, 2]
    torch.testing.assert_close(  # the midpoint rule of the exact method, so within a bin width of 0.002
        new, torch.tensor([-0.11647079, -0.13318997, 0.02029092, 0.22936984], dtype=torch.float64), rtol=0, atol=0.05
    )


def test_loads_4_3_1_0_become_2_2_2_2_in_one_update() -> None:
    """The overloaded experts 0 and 1 hold some tokens by a hair, with experts 3 and 2 as the next best."""
    routed = [(0, 1, 0.5), (0, 1, 0.51), (0, 3, 0.8), (0, 3, 0.81), (1, 0, 0.5), (1, 0, 0.51), (1, 2, 0.8), (2, 0, 0.5)]
    scores = torch.full((8, 4), 0.05, dtype=torch.float64)
    for token, (best, second, second_score) in enumerate(routed):
        scores[token, best], scores[token, second] = 0.9, second_score
    bias = torch.zeros(4, dtype=torch.float64)
    qb = QuantileBalancer(4, 1, 1)
    qb.observe(0, scores, cutoff(scores, bias, 1), bias)
    assert qb.loads.tolist() == [[4, 3, 1, 0]]
    assert qb.max_violation() == [1.0]
    (new,) = qb.update([bias])
    assert loads(scores, new, 1).tolist() == [2, 2, 2, 2]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), parts=st.integers(2, 5), k=st.integers(1, 3))
def test_counts_do_not_depend_on_how_the_batch_was_split(seed: int, parts: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.sigmoid(torch.randn(53, 6, generator=generator))
    bias = torch.randn(6, generator=generator) * 0.1
    alpha = cutoff(scores, bias, k)
    whole, ranks = QuantileBalancer(6, k, 1), [QuantileBalancer(6, k, 1) for _ in range(2)]
    whole.observe(0, scores, alpha, bias)
    for number, (s, a) in enumerate(zip(scores.tensor_split(parts), alpha.tensor_split(parts), strict=True)):
        ranks[number % 2].observe(0, s, a, bias)
    for mine, other in zip(ranks[0].tensors(), ranks[1].tensors(), strict=True):
        mine += other
    assert torch.equal(whole.counts, ranks[0].counts)
    assert torch.equal(whole.loads, ranks[0].loads)
    assert int(whole.counts.sum()) == 53 * 6
    assert int(whole.loads.sum()) == 53 * k
    assert torch.equal(whole.update([bias])[0], ranks[0].update([bias])[0])


def test_padding_is_not_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.sigmoid(torch.randn(40, 8, generator=generator))
    bias = torch.zeros(8)
    alpha = cutoff(scores, bias, 2)
    padded_scores, padded_alpha = torch.cat([scores, torch.full((9, 8), 0.99)]), torch.cat([alpha, torch.zeros(9)])
    valid = torch.arange(49) < 40
    plain, masked = QuantileBalancer(8, 2, 1), QuantileBalancer(8, 2, 1)
    plain.observe(0, scores, alpha, bias)
    masked.observe(0, padded_scores, padded_alpha, bias, valid)
    assert torch.equal(plain.counts, masked.counts)
    assert torch.equal(plain.loads, masked.loads)


def test_layers_are_balanced_apart_and_unseen_layers_keep_their_bias() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.sigmoid(torch.randn(64, 8, generator=generator))
    biases = [torch.zeros(8), torch.full((8,), 0.25), torch.zeros(8)]
    qb = QuantileBalancer(8, 2, 3)
    qb.observe(2, scores, cutoff(scores, biases[2], 2), biases[2])
    assert len(qb.max_violation()) == 1
    new = qb.update(biases)
    assert torch.equal(new[0], biases[0])
    assert torch.equal(new[1], biases[1])
    assert not torch.equal(new[2], biases[2])
    assert abs(float(new[2].mean())) < 1e-6  # float32 mean of centred values
    assert int(qb.counts.sum()) == int(qb.loads.sum()) == 0
    assert qb.max_violation() == []


def test_repeated_updates_even_out_a_skewed_router() -> None:
    """On one fixed batch the busiest expert ends within a few tokens of its share (the histogram's resolution)."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.sigmoid(torch.randn(2048, 16, generator=generator) + torch.linspace(-2, 2, 16))
    bias = torch.zeros(16)
    qb = QuantileBalancer(16, 2, 1)
    violations = []
    for _ in range(12):
        qb.observe(0, scores, cutoff(scores, bias, 2), bias)
        violations += qb.max_violation()
        (bias,) = qb.update([bias])
    assert violations[0] > 1
    assert violations[-1] < 0.1


def test_a_bias_that_moves_within_a_step_is_refused() -> None:
    scores = torch.sigmoid(torch.randn(16, 4, generator=torch.Generator().manual_seed(3)))
    old, moved = torch.zeros(4), torch.tensor([0.1, 0.0, 0.0, 0.0])
    qb = QuantileBalancer(4, 1, 1)
    qb.observe(0, scores, cutoff(scores, old, 1), old)
    with pytest.raises(BalanceError, match="layer 0 changed"):
        qb.update([moved])
    qb.observe(0, scores, cutoff(scores, moved, 1), moved)
    with pytest.raises(BalanceError, match="layer 0 changed"):
        qb.update([old])
    qb.clear()
    qb.observe(0, scores, cutoff(scores, moved, 1), moved)
    assert len(qb.update([moved])) == 1


def test_the_observed_bias_may_be_the_models_own_tensor() -> None:
    """The model's buffer is overwritten after the update; the next step must see it as a new bias."""
    scores = torch.sigmoid(torch.randn(64, 4, generator=torch.Generator().manual_seed(4)))
    bias = torch.zeros(4)
    qb = QuantileBalancer(4, 1, 1)
    for _ in range(3):
        qb.observe(0, scores, cutoff(scores, bias, 1), bias)
        before = bias.clone()
        bias.copy_(qb.update([bias])[0])
        assert qb.loads.sum() == 0  # what was counted under the old bias is gone
    assert not torch.equal(before, torch.zeros(4))


def test_nan_scores_and_misfit_shapes_are_refused() -> None:
    qb = QuantileBalancer(4, 1, 1)
    scores = torch.full((3, 4), math.nan)
    qb.observe(0, scores, torch.zeros(3), torch.zeros(4))
    with pytest.raises(BalanceError, match="NaN"):
        qb.update([torch.zeros(4)])
    with pytest.raises(BalanceError, match="do not fit"):
        qb.observe(0, torch.zeros(3, 5), torch.zeros(3), torch.zeros(4))
    with pytest.raises(BalanceError, match="2 biases"):
        qb.update([torch.zeros(4)] * 2)
    with pytest.raises(BalanceError, match="top_k < n_experts"):
        QuantileBalancer(4, 4, 1)


def test_a_batch_without_tokens_counts_nothing() -> None:
    qb = QuantileBalancer(4, 1, 1)
    qb.observe(0, torch.zeros(0, 4), torch.zeros(0), torch.zeros(4))
    assert torch.equal(qb.update([torch.zeros(4)])[0], torch.zeros(4))


def test_ranks_are_summed_with_one_message() -> None:
    name = next(iter(CASES))
    scores, bias = GOLDEN[f"{name}.scores"], GOLDEN[f"{name}.bias0"]
    alpha, half = GOLDEN[f"{name}.alpha"], len(scores) // 2
    whole, one, other = balancer(name), balancer(name), balancer(name)
    whole.observe(0, scores, alpha, bias)
    one.observe(0, scores[:half], alpha[:half], bias)
    other.observe(0, scores[half:], alpha[half:], bias)
    sent: list[Tensor] = []
    other.all_reduce(sent.append)
    one.all_reduce(lambda mine: (sent.append(mine), mine.add_(sent[0]))[0])
    assert len(sent) == 2
    assert sent[0].dtype == torch.int32
    assert torch.equal(one.counts, whole.counts)
    assert torch.equal(one.loads, whole.loads)
    assert torch.equal(one.update([bias])[0], whole.update([bias])[0])
