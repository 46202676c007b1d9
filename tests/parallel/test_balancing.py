"""Who counts when the router bias moves, and what moves it."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from k3rl.data.batch import TrainBatch, TrainSequence, from_episodes
from k3rl.losses import CrossEntropy, LossInputs, LossOutput
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.types import Branch, Episode, Scored, StopReason, Turn

TINY = K3Config.named("k3-nano").replace(num_experts=4)


def trainer(**config: object) -> Trainer:
    model = K3ForCausalLM(TINY)
    model.init_weights(5)
    return Trainer(model, TrainerConfig(**config))


def sequence(name: str, length: int, seed: int, fresh: np.ndarray | None = None) -> TrainSequence:
    mask = np.arange(length) >= length // 2
    zeros = np.zeros(length, np.float32)
    ids = np.random.default_rng(seed).integers(0, 400, length)
    return TrainSequence(name, ids, mask, zeros, mask.astype(np.float32), fresh=fresh)


def batch(stale: tuple[str, ...] = ()) -> TrainBatch:
    lengths = {"a": 40, "b": 60, "c": 25}
    made = [sequence(name, n, n, np.full(n, name not in stale)) for name, n in lengths.items()]
    return TrainBatch.pack(made)


def biases(of: Trainer) -> torch.Tensor:
    return torch.stack([bias.clone() for _, bias in of.model.router_biases()])


# ------------------------------------------------------------------------------------------------------- fresh


def turn(prompt: int, sampled: int, first: int, last: int, start: int = 0) -> Turn:
    ids = tuple(range(start, start + prompt + sampled))
    return Turn(ids[:prompt], ids[prompt:], (-1.0,) * sampled, StopReason.STOP, first, last)


def test_tokens_are_fresh_when_the_newest_version_alone_sampled_their_turn() -> None:
    first = turn(3, 2, 6, 6)
    second = Turn((0, 1, 2, 3, 4, 5, 6), (7, 8), (-1.0, -1.0), StopReason.STOP, 7, 7)
    carried = Branch("carried", (first, second))
    crossing = Branch("crossing", (turn(2, 3, 6, 7),))
    new = Branch("new", (turn(4, 2, 7, 7),))
    episodes = [
        Episode(branch.id, "t", "e", "f", 1, (branch,), StopReason.COMPLETED, Scored(1.0))
        for branch in (carried, crossing, new)
    ]
    advantages = dict.fromkeys(("carried", "crossing", "new"), 1.0)
    made = from_episodes(episodes, advantages)
    assert made.fresh is not None
    assert made.fresh.tolist() == [False] * 5 + [True] * 4 + [False] * 5 + [True] * 6
    older = from_episodes(episodes, advantages, version=6)
    assert older.fresh is not None
    assert older.fresh.sum() == 5
    assert made.select([2, 0]).fresh.tolist() == [True] * 6 + [False] * 5 + [True] * 4  # type: ignore[union-attr]


def test_the_newest_version_is_that_of_all_episodes_together() -> None:
    episodes = [
        Episode(
            name, "t", "e", "f", 1, (Branch("0", (turn(3, 2, version, version),)),), StopReason.COMPLETED, Scored(1.0)
        )
        for name, version in (("old", 3), ("new", 4))
    ]
    made = from_episodes(episodes, {"old": 1.0, "new": -1.0})
    assert made.fresh is not None
    assert made.fresh.tolist() == [False] * 5 + [True] * 5


def test_only_fresh_tokens_move_the_bias_and_are_in_the_load() -> None:
    mixed, alone = trainer(balance="fresh"), trainer(balance="fresh")
    metrics = mixed.train(batch(stale=("b",)), CrossEntropy()).values()
    fresh_only = batch().select([0, 2])
    weights = fresh_only.weights / fresh_only.weights.sum()
    loads = alone.train(dataclasses.replace(fresh_only, weights=weights), CrossEntropy()).values()
    assert torch.equal(biases(mixed), biases(alone))
    assert float(biases(mixed).abs().max()) > 0
    assert metrics["moe/max_vio/mean"] == loads["moe/max_vio/mean"]
    assert metrics["moe/fresh_tokens"] == pytest.approx(65 / 125)
    every = trainer(balance="batch")
    every.train(batch(), CrossEntropy())
    assert not torch.equal(biases(every), biases(mixed))


def test_supervised_batches_have_no_sampler_and_count_whole() -> None:
    plain = dataclasses.replace(batch(), fresh=None)
    one, other = trainer(balance="fresh"), trainer(balance="batch")
    for each in (one, other):
        each.train(plain, CrossEntropy())
    assert torch.equal(biases(one), biases(other))


def test_a_batch_without_fresh_tokens_keeps_the_bias() -> None:
    stale = trainer(balance="fresh")
    metrics = stale.train(batch(stale=("a", "b", "c")), CrossEntropy()).values()
    assert float(biases(stale).abs().max()) == 0
    assert metrics["moe/fresh_tokens"] == 0
    assert "moe/max_vio/mean" not in metrics


def test_fresh_balancing_moves_once_a_rollout_batch() -> None:
    made = trainer(balance="fresh")
    made.train(batch(), CrossEntropy(), last_of_batch=False)
    assert float(biases(made).abs().max()) == 0
    made.train(batch(), CrossEntropy(), last_of_batch=True)
    assert float(biases(made).abs().max()) > 0


def broken(inputs: LossInputs) -> LossOutput:
    return LossOutput(inputs.logprobs.sum() * float("nan"), {})


@functools.cache
def without_a_skipped_step(balance: str, by: str) -> tuple[tuple[float, float], list[torch.Tensor]]:
    """(largest violation that the second step tells, biases after a batch of two steps and after one of one)."""
    made, moved = trainer(balance=balance, balance_by=by, on_nonfinite="skip"), []
    for number in range(2):
        told = made.train(batch(), CrossEntropy(), last_of_batch=number == 1).pairs()
    moved.append(biases(made))
    made.train(batch(), CrossEntropy(), last_of_batch=True)
    return told["moe/max_vio/mean"], [*moved, biases(made)]


@pytest.mark.parametrize("balance", ["batch", "fresh"])
@pytest.mark.parametrize("by", ["quantile", "fixed_step"])
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_skipped_step_takes_nothing_from_what_the_others_of_its_batch_counted(balance, by, skipped) -> None:
    """Also where it is the last one: biases and loads are those of the two steps alone that were taken."""
    made = trainer(balance=balance, balance_by=by, on_nonfinite="skip")
    violation, wanted = without_a_skipped_step(balance, by)
    losses = [CrossEntropy(), CrossEntropy()]
    losses.insert(skipped, broken)
    for number, loss in enumerate(losses):
        found = made.train(batch(), loss, last_of_batch=number == 2).pairs()
    assert torch.equal(biases(made), wanted[0])
    assert float(biases(made).abs().max()) > 0
    assert found["moe/max_vio/mean"] == violation
    assert int(made.balancer.loads.sum()) == 0
    made.train(batch(), CrossEntropy(), last_of_batch=True)
    assert torch.equal(biases(made), wanted[1])


# ---------------------------------------------------------------------------------------------- other methods


def test_fixed_steps_move_each_bias_by_the_rate_or_not_at_all() -> None:
    made = trainer(balance_by="fixed_step", balance_rate=0.25)
    made.train(batch(), CrossEntropy())
    assert set(biases(made).unique().tolist()) <= {-0.25, 0.0, 0.25}
    assert float(biases(made).abs().max()) == 0.25
    assert int(made.balancer.loads.sum()) == 0


def test_the_auxiliary_loss_and_none_leave_the_bias_alone_and_only_the_loss_changes_gradients() -> None:
    norms = {}
    for by in ("none", "auxiliary_loss"):
        made = trainer(balance_by=by, auxiliary_weight=1.0)
        metrics = made.train(batch(), CrossEntropy()).values()
        assert float(biases(made).abs().max()) == 0
        norms[by] = metrics["optim/grad_norm"]
        assert ("moe/auxiliary_loss" in metrics) == (by == "auxiliary_loss")
    assert norms["none"] != norms["auxiliary_loss"]


def test_the_auxiliary_loss_evens_the_load_over_steps() -> None:
    found = {}
    for by in ("none", "auxiliary_loss"):
        made = trainer(balance_by=by, auxiliary_weight=1.0, muon_lr=0.02)
        for _ in range(6):
            metrics = made.train(batch(), CrossEntropy()).values()
        found[by] = metrics["moe/max_vio/mean"]
    assert found["auxiliary_loss"] < found["none"]


def test_after_a_failed_step_no_router_is_watched() -> None:
    def broken(inputs: LossInputs) -> LossOutput:
        return LossOutput(inputs.logprobs.sum() * float("nan"), {})

    made = trainer(balance_by="auxiliary_loss")
    with pytest.raises(Exception, match="wanted a finite number"):
        made.train(batch(), broken)
    assert all(part.router_loss is None for part in made.model.moe_parts())
    made.train(batch(), CrossEntropy())


def test_the_largest_attention_logit_is_a_metric() -> None:
    made = trainer()
    values = made.train(batch(), CrossEntropy()).values()
    assert 0 < values["attention/logit/max"] < 100
