"""A trainer of adapters: the weights stay to the bit, memory holds nothing for them, a state continues to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3rl.config import ConfigError, load, split_words
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import Adapter, K3Config, K3ForCausalLM, LoraConfig
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.pipelines.configs import RLConfig

TINY = K3Config.named("k3-nano").replace(num_experts=4)
LORA = LoraConfig(rank=4, alpha=8.0)


def model(dtype: torch.dtype = torch.float32) -> K3ForCausalLM:
    made = K3ForCausalLM(TINY, dtype=dtype)
    made.init_weights(5)
    return made


def batch(seed: int = 0, lengths: tuple[int, ...] = (7, 19, 12)) -> TrainBatch:
    rng = np.random.default_rng(seed)
    sequences = []
    for number, length in enumerate(lengths):
        mask, nothing = np.arange(length) >= length // 2, np.zeros(length, np.float32)
        sequences.append(TrainSequence(f"s{number}", rng.integers(0, 400, length), mask, nothing, nothing))
    return TrainBatch.pack(sequences)


def test_steps_move_the_adapter_alone_and_lower_the_loss():
    made = model()
    before = {name: parameter.clone() for name, parameter in made.official_parameters()}
    trainer = Trainer(made, TrainerConfig(lora=LORA, adamw_lr=0.01, qk_clip=1e-3))
    losses = [trainer.train(batch(), CrossEntropy()).values() for _ in range(4)]
    assert losses[-1]["loss/mean"] < losses[0]["loss/mean"] - 0.1
    assert losses[0]["optim/qk_clipped_heads"] == 0
    assert losses[0]["optim/lr"] == pytest.approx(0.01)
    for name, parameter in made.official_parameters():
        assert torch.equal(parameter, before[name]), name
    for name, tensor in trainer.adapter_tensors().items():
        assert torch.equal(tensor.float(), dict(made.trained_parameters())[name]), name
        assert bool(tensor.any()), name


def test_gradients_and_optimizer_state_are_as_large_as_the_adapter():
    trainer = Trainer(model(), TrainerConfig(lora=LORA))
    trainer.gradients(batch(), CrossEntropy())
    trained = sum(parameter.numel() for _, parameter in trainer.model.trained_parameters())
    state = trainer.native.optimizer.state_tensors()
    assert sum(tensor.nbytes for key, tensor in state.items() if not key.endswith("/steps")) == 3 * 4 * trained
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    held = sum(p.grad.nbytes for _, p in trainer.model.trained_parameters() if p.grad is not None)
    assert 0 < held <= 4 * trained < sum(parameter.nbytes for parameter in trainer.model.parameters()) / 2


def test_gradients_do_not_depend_on_micro_batches_or_on_what_is_recomputed():
    found = []
    for budget, again in ((20, ()), (1000, ("attention", "mlp"))):
        config = TrainerConfig(lora=LORA, micro_batch_tokens=budget, recompute=again)
        trainer = Trainer(model(torch.float64), config)
        trainer.train(batch(1), CrossEntropy())  # so that B is not zero
        trainer.gradients(batch(), CrossEntropy())
        found.append({n: p.grad for n, p in trainer.model.trained_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, one in found[0].items():
        assert float((one - found[1][name]).norm() / one.norm()) < 1e-7, name  # float64 sums in another order


def test_a_state_continues_to_the_bit():
    config = TrainerConfig(lora=LORA)
    straight, first, second = (Trainer(model(), config) for _ in range(3))
    for step in range(3):
        straight.train(batch(step), CrossEntropy())
    first.train(batch(0), CrossEntropy())
    second.load_state_tensors(first.state_tensors())
    for step in (1, 2):
        second.train(batch(step), CrossEntropy())
    wanted, found = straight.state_tensors(), second.state_tensors()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in wanted.items())


def test_a_trainer_goes_on_with_the_adapter_that_is_attached_if_it_is_the_one_it_wants():
    made = model()
    adapter = Adapter(made, LORA.replace(seed=9))
    adapter.attach(made)
    assert Trainer(made, TrainerConfig(lora=LORA)).model.adapter is adapter
    with pytest.raises(ConfigError, match="merge"):
        Trainer(made, TrainerConfig())
    with pytest.raises(ConfigError, match="rank"):
        Trainer(made, TrainerConfig(lora=LORA.replace(rank=8)))


def test_flags_switch_it_on_and_off():
    def of(*words: str) -> LoraConfig | None:
        return load(RLConfig(), flags=split_words(words)[1]).trainer.lora

    assert of() is None
    assert of("--trainer.lora.rank", "8") == LoraConfig(rank=8)
    assert of("--trainer.lora.targets", '["w1", "w3"]', "--trainer.lora.alpha", "16").targets == ("w1", "w3")
    with pytest.raises(ConfigError, match="rank"):
        of("--trainer.lora.rnak", "8")
