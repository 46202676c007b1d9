"""A frozen policy that scores: its values are a trainer's, and nothing of a trainer is there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from k3rl.actors.teachers import Teachers
from k3rl.checkpoint import save_adapter, save_checkpoint
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import LossInputs, OnPolicyDistill
from k3rl.model import K3Config, K3ForCausalLM, LoraConfig, prepare_adapter
from k3rl.parallel import NonFiniteLogprobs, Scorer, ScorerConfig, Trainer, TrainerConfig
from k3rl.types import SamplingMasks

TINY = K3Config.named("k3-nano").replace(num_experts=4)


def model(seed: int = 5) -> K3ForCausalLM:
    made = K3ForCausalLM(TINY)
    made.init_weights(seed)
    return made


def batch(sets: bool = True) -> TrainBatch:
    """Three sequences with routes; the second one's targets were drawn from sets of one and of three tokens."""
    rng, sequences = np.random.default_rng(0), []
    for number, length in enumerate((7, 19, 12)):
        mask = np.arange(length) >= length // 2
        ids, nothing = rng.integers(0, 400, length), np.zeros(length, np.float32)
        routes = rng.permuted(np.tile(np.arange(4), (length, 4, 1)), axis=2)[:, :, :2].astype(np.int16)
        cut = None
        if number == 1 and sets:
            kept = [[t] if i % 2 else sorted({t, 3, 450}) for i, t in enumerate(ids[mask].tolist())]
            drawn = SamplingMasks.of([np.array(own, np.int32) for own in kept])
            cut = SamplingMasks.join([int((~mask).sum()), drawn])
        sequences.append(
            TrainSequence(f"s{number}", ids, mask, nothing, mask.astype("f4"), routes=routes, sampling_mask=cut)
        )
    return TrainBatch.pack(sequences)


def trainers(of: K3ForCausalLM, given: TrainBatch, temperature: float) -> np.ndarray:
    return Trainer(of, TrainerConfig()).logprobs(dataclasses.replace(given, routes=None), temperature)


@pytest.mark.parametrize("budget", [6144, 8])
def test_its_logprobs_are_a_trainers_over_everything_that_it_may_say(budget) -> None:
    """Also where a sequence is longer than the budget of a pass, and whatever set the student drew from."""
    scored = Scorer(model(), ScorerConfig(micro_batch_tokens=budget)).logprobs(batch(), 0.7)
    expected = trainers(model(), batch(sets=False), 0.7)
    assert np.abs(scored - expected).max() < 1e-5  # float32 in other shapes of products
    assert (scored[batch().loss_mask] < 0).all()
    assert not scored[~batch().loss_mask].any()


def test_it_is_asked_for_a_share_of_the_sampled_set_alone() -> None:
    scored = Scorer(model(), ScorerConfig(support="sampled")).logprobs(batch())
    assert np.abs(scored - trainers(model(), batch(), 1.0)).max() < 1e-5
    mask = batch().sampling_mask
    assert mask is not None
    alone = [place for place in np.flatnonzero(mask.which >= 0) if len(mask.set(int(mask.which[place]))) == 1]
    assert alone
    assert not scored[alone].any(), "of the only token that is left it says 1"
    assert (Scorer(model(), ScorerConfig()).logprobs(batch())[alone] < -1).all()


def test_a_token_that_the_teacher_would_never_say_is_worth_the_least_reward() -> None:
    one = torch.tensor([-0.5], requires_grad=True)

    def gradient(of_teacher: float) -> float:
        own = one.detach().clone().requires_grad_()
        inputs = LossInputs(
            own, torch.tensor([-0.5]), torch.zeros(1), torch.ones(1), torch.tensor([of_teacher]), torch.zeros(1)
        )
        OnPolicyDistill(tau=0.0)(inputs).loss.backward()
        assert own.grad is not None
        return float(own.grad)

    assert gradient(-40.0) == gradient(-0.5 - 3.0) == pytest.approx(3.0)


def test_it_holds_weights_and_nothing_else() -> None:
    made = Scorer(model(), ScorerConfig())
    made.logprobs(batch())
    assert not any(parameter.requires_grad for parameter in made.model.parameters())
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert all(part.bank.sums is None for part in made.model.moe_parts())


def test_values_that_are_no_numbers_are_an_error_with_the_sequences() -> None:
    broken = model()
    broken.language_model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(NonFiniteLogprobs, match="not finite in sequences s0, s1, s2"):
        Scorer(broken, ScorerConfig()).logprobs(batch())


def test_an_adapter_teaches_beside_a_checkpoint(tmp_path) -> None:
    base, lora = model(), LoraConfig(rank=2, alpha=4.0)
    save_checkpoint(base, tmp_path / "base")
    prepare_adapter(base, lora)
    assert base.adapter is not None
    for _, parameter in base.adapter.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    save_adapter(dict(base.adapter.stored_tensors()), base.adapter.config, tmp_path / "adapter", base=tmp_path / "base")
    teachers, given = Teachers(torch.float32, torch.device("cpu")), batch(sets=False)
    teachers.load({"adapted": str(tmp_path / "adapter"), "*": str(tmp_path / "base")}, ScorerConfig())
    scored = teachers.logprobs(given, ["adapted", "other", "adapted"])
    ends = given.cu_seqlens
    wanted = trainers(model(), given, 1.0)
    own = Trainer(base, TrainerConfig(lora=lora)).logprobs(dataclasses.replace(given, routes=None))
    for number, expected in enumerate((own, wanted, own)):
        rows = slice(ends[number], ends[number + 1])
        assert np.abs(scored[rows] - expected[rows]).max() < 1e-4  # adapters are stored in bf16
    assert np.abs(own - wanted).max() > 1e-2
