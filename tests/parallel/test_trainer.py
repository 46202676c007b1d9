"""A step does not depend on layout, a state continues to the bit, and nothing is updated from a bad number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.data.packing import sequence_costs
from k3rl.losses import CrossEntropy, K3Policy
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.numerics import project, stored_dtype
from k3rl.parallel import Trainer, TrainerConfig, balanced_shares

TINY = K3Config.named("k3-nano").replace(num_experts=4)


def model(dtype: torch.dtype = torch.float64) -> K3ForCausalLM:
    made = K3ForCausalLM(TINY, dtype=dtype)
    made.init_weights(5)
    return made


def batch(seed: int = 0, lengths: tuple[int, ...] = (7, 19, 33, 12, 26)) -> TrainBatch:
    rng = np.random.default_rng(seed)
    sequences = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= length // 2
        draws = rng.normal(size=(2, length)).astype(np.float32)
        sequences.append(
            TrainSequence(
                f"s{number}",
                rng.integers(0, 400, length),
                mask,
                np.where(mask, -np.abs(draws[0]) - 4, 0).astype(np.float32),
                np.where(mask, draws[1], 0).astype(np.float32),
            )
        )
    return TrainBatch.pack(sequences)


def masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.native.optimizer.masters(trainer.native.optimizer.params)


def worst_relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[n] - other[n]).norm() / one[n].norm().clamp_min(1e-30)) for n in one)


@pytest.mark.parametrize("loss", [CrossEntropy(), K3Policy(0.5, 2.0, 0.02)])
def test_gradients_do_not_depend_on_the_micro_batches(loss):
    found = []
    for budget in (40, 1000):
        trainer = Trainer(model(), TrainerConfig(micro_batch_tokens=budget))
        whole = batch()
        for micro in whole.split(budget):
            loss(trainer.target_inputs(micro)).loss.backward()
        found.append({n: p.grad.clone() for n, p in trainer.native.optimizer.params.items() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    # float64 sums in another order; quantized activations are on and equal, so only rounding is left
    assert worst_relative_difference(*found) < 1e-8


def test_after_a_step_every_parameter_is_what_a_checkpoint_stores_of_its_master():
    trainer = Trainer(model(torch.float32), TrainerConfig())
    trainer.train(batch(), CrossEntropy())
    for name, master in masters(trainer).items():
        stored = project(master, stored_dtype(name, "mxfp4"), "ceil")
        assert torch.equal(trainer.native.optimizer.params[name], stored), name


def test_a_step_keeps_what_it_computed_of_each_token_and_the_load_of_experts():
    trainer, whole = Trainer(model(), TrainerConfig(micro_batch_tokens=40)), batch()
    before = np.split(trainer.logprobs(whole), whole.cu_seqlens[1:-1])
    masks = np.split(whole.loss_mask, whole.cu_seqlens[1:-1])
    trainer.train(whole, K3Policy(0.5, 2.0, 0.02))
    scores = trainer.statistics.scores.take()
    assert sorted(scores) == sorted(whole.sequence_ids)
    for name, wanted, mask in zip(whole.sequence_ids, before, masks, strict=True):
        np.testing.assert_allclose(scores[name].logprobs[mask], wanted[mask], rtol=1e-6)  # stored as float32
        assert np.isnan(scores[name].logprobs[~mask]).all()
        assert (scores[name].entropies[mask] > 0).all()
    assert trainer.statistics.scores.take() == {}, "they are given once"
    layers, experts = len(TINY.moe_layers), TINY.num_experts
    assert trainer.statistics.expert_load.shape == (layers, experts)
    # Each token goes to top-k experts of each layer, and what was counted outlives the clearing of the counts.
    assert (trainer.statistics.expert_load.sum(axis=1) > 0).all()


def test_a_state_continues_to_the_bit():
    torch.manual_seed(0)
    straight = Trainer(model(torch.float32), TrainerConfig())
    for step in range(4):
        straight.train(batch(step), CrossEntropy())
    first = Trainer(model(torch.float32), TrainerConfig())
    for step in range(2):
        first.train(batch(step), CrossEntropy())
    second = Trainer(model(torch.float32), TrainerConfig())
    second.load_state_tensors(first.state_tensors())
    for step in range(2, 4):
        second.train(batch(step), CrossEntropy())
    one, two = straight.state_tensors(), second.state_tensors()
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    for (_, left), (_, right) in zip(
        straight.model.official_parameters(), second.model.official_parameters(), strict=True
    ):
        assert torch.equal(left, right)


def test_a_frozen_balance_keeps_the_bias_and_batch_balance_moves_it_once():
    def biases(trainer: Trainer) -> list[torch.Tensor]:
        return [bias.clone() for _, bias in trainer.model.router_biases()]

    frozen = Trainer(model(torch.float32), TrainerConfig(balance="freeze"))
    frozen.train(batch(), CrossEntropy())
    assert all(bool((bias == 0).all()) for bias in biases(frozen))
    once = Trainer(model(torch.float32), TrainerConfig(balance="batch"))
    once.train(batch(), CrossEntropy(), last_of_batch=False)
    assert all(bool((bias == 0).all()) for bias in biases(once))
    once.train(batch(1), CrossEntropy(), last_of_batch=True)
    assert all(bool((bias != 0).any()) for bias in biases(once))


def test_evaluation_and_scoring_move_nothing():
    trainer = Trainer(model(torch.float32), TrainerConfig())
    before = {n: t.clone() for n, t in trainer.state_tensors().items()}
    whole = batch()
    scored = trainer.logprobs(whole)
    loss = trainer.evaluate(whole, CrossEntropy()).values()["loss/mean"]
    assert loss == pytest.approx(-scored[whole.loss_mask].mean(), rel=1e-5)  # float32 means of the same logprobs
    assert (scored[~whole.loss_mask] == 0).all()
    after = trainer.state_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_sequences_are_balanced_once_each_and_evenly():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 200, 50).tolist()
    balanced = balanced_shares(lengths, 4)
    assert sorted(i for share in balanced for i in share) == list(range(50))
    loads = [sum(lengths[i] for i in share) for share in balanced]
    assert max(loads) - min(loads) <= max(lengths)
    assert balanced_shares([5], 3) == [[0], [], []]
    # 40 tokens have 820 pairs, sixteen times 9 have 720: where pairs count, the one is as much as all the others.
    assert balanced_shares(sequence_costs([40, *[9] * 16], 1.0), 2) == [[0], list(range(1, 17))]
    assert [len(share) for share in balanced_shares(sequence_costs([40, *[9] * 16], 0.0), 2)] == [7, 10]


def test_gradients_of_bf16_weights_add_up_in_float32():
    """Micro-batches of one sequence each: their sum is that of their own gradients, not rounded to bf16 on the way."""
    trainer, alone = (Trainer(model(torch.bfloat16), TrainerConfig(micro_batch_tokens=33)) for _ in range(2))
    trainer.gradients(batch(), CrossEntropy())
    name = "language_model.model.layers.0.mlp.gate_proj.weight"
    total = torch.zeros_like(trainer.native.shards.params[name], dtype=torch.float64)
    for micro in batch().split(33):
        alone.native.reduction.zero_grad()
        CrossEntropy()(alone.target_inputs(micro)).loss.backward()
        total += alone.native.shards.params[name].grad
    found = trainer.native.shards.params[name].grad
    assert found.dtype == torch.float32
    assert float((found - total).norm() / total.norm()) < 1e-6  # float32 sums; bf16 ones are a thousand times worse
    trainer.train(batch(), CrossEntropy())
    assert {p.dtype for p in trainer.native.shards.params.values()} == {torch.bfloat16, torch.float32}


def test_recomputed_routers_and_a_loss_on_them_are_refused_together():
    with pytest.raises(ValueError, match="would count twice"):
        TrainerConfig(recompute=("mlp",), balance_by="auxiliary_loss")
