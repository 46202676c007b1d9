"""The common ways to balance, on the routing that Quantile Balancing settles in one update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3rl.optim import AuxiliaryLoss, QuantileBalancer, fixed_step


def uneven() -> Tensor:
    """Scores [8, 4] whose best experts are loaded 4, 3, 1, 0."""
    routed = [(0, 1, 0.5), (0, 1, 0.51), (0, 3, 0.8), (0, 3, 0.81), (1, 0, 0.5), (1, 0, 0.51), (1, 2, 0.8), (2, 0, 0.5)]
    scores = torch.full((8, 4), 0.05, dtype=torch.float64)
    for token, (best, second, second_score) in enumerate(routed):
        scores[token, best], scores[token, second] = 0.9, second_score
    return scores


def loads(scores: Tensor, bias: Tensor) -> Tensor:
    return torch.bincount((scores + bias).argmax(-1), minlength=4)


def test_one_quantile_update_evens_4_3_1_0_where_fixed_steps_take_fifty() -> None:
    scores, bias = uneven(), torch.zeros(4, dtype=torch.float64)
    assert loads(scores, bias).tolist() == [4, 3, 1, 0]
    balancer = QuantileBalancer(4, 1, 1)
    balancer.observe(0, scores, scores.topk(2).values[:, -1], bias)
    assert loads(scores, balancer.update([bias])[0]).tolist() == [2, 2, 2, 2]
    steps = 0
    while loads(scores, bias).tolist() != [2, 2, 2, 2]:
        (bias,) = fixed_step([bias], loads(scores, bias)[None], 0.001)
        steps += 1
    assert 40 < steps < 60  # the margin of 0.09 to 0.1 closes by 0.002 a step


def test_a_fixed_step_moves_towards_the_mean_load_and_rests_there() -> None:
    biases = [torch.zeros(3), torch.tensor([0.5, 0.0, -0.5])]
    new = fixed_step(biases, torch.tensor([[6, 3, 0], [2, 2, 2]]), 0.01)
    torch.testing.assert_close(new[0], torch.tensor([-0.01, 0.0, 0.01]))
    assert torch.equal(new[1], biases[1])
    assert new[0].dtype == torch.float32


def test_the_auxiliary_loss_is_its_weight_when_even_and_pulls_scores_of_busy_experts_down() -> None:
    even = AuxiliaryLoss(0.01, 2)
    scores = torch.full((6, 3), 0.4, dtype=torch.float64)
    even(1, scores, torch.tensor([[0, 1], [1, 2], [2, 0]] * 2))
    assert float(even.take()) == pytest.approx(0.01)
    busy = AuxiliaryLoss(1.0, 1)
    scores = uneven().requires_grad_()
    ids = scores.argmax(-1, keepdim=True)
    busy(1, scores, ids)
    total = busy.take()
    shares = scores / scores.sum(-1, keepdim=True)
    expected = sum(4 * (ids == j).sum() / 8 * shares[:, j].mean() for j in range(4))
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    total.backward()
    assert scores.grad is not None
    assert float(scores.grad[:, 0].sum()) > 0 > float(scores.grad[:, 3].sum())
