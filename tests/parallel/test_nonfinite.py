"""A NaN changes nothing, is named with its layer and its data, and ends the run or the step, as asked.

The contract of the eager path and of captured steps alike; test_deepspeed.py has what ZeRO can keep of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from k3rl.data.batch import BatchError, TrainBatch, TrainSequence
from k3rl.data.packing import SequenceTooLong
from k3rl.losses import CrossEntropy, LossInputs, LossOutput
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.parallel import NonFiniteGradients, NonFiniteLoss, Trainer, TrainerConfig

LAYER = 2


def batch(lengths: tuple[int, ...] = (6, 9)) -> TrainBatch:
    rng = np.random.default_rng(0)
    sequences = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= 3
        nothing, marks = np.zeros(length, np.float32), (mask & (number == 1)).astype(np.float32)
        sequences.append(TrainSequence(f"row-{number}", rng.integers(0, 400, length), mask, nothing, marks))
    return TrainBatch.pack(sequences)


@pytest.fixture(params=["off", "on"], ids=["eager", "captured"])
def trainer(request) -> Callable[..., Trainer]:
    """Makes trainers of one model."""

    def make(**config) -> Trainer:
        model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
        model.init_weights(1)
        return Trainer(model, TrainerConfig(capture=request.param, **config))

    return make


class _BadGradient(torch.autograd.Function):
    """x -> x, with a NaN as its gradient where `mask` is set."""

    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(mask)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.masked_fill(ctx.saved_tensors[0], float("nan")), None


def bad_gradient(inputs: LossInputs) -> LossOutput:
    """Cross entropy whose gradient is NaN at tokens that have an advantage, which are those of row-1."""
    mask = (inputs.advantages != 0) & (inputs.weights != 0)
    return CrossEntropy()(dataclasses.replace(inputs, logprobs=_BadGradient.apply(inputs.logprobs, mask)))


def state(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in made.state_tensors().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_first_layer_that_gives_a_nan_is_named_with_the_sequences_it_reaches(trainer):
    made = trainer()
    before = state(made)
    layer = made.model.language_model.model.layers[LAYER].self_attn
    handle = layer.register_forward_hook(
        lambda module, inputs, output: output.index_fill(0, torch.tensor([8]), torch.nan)
    )
    with pytest.raises(NonFiniteLoss) as caught:
        made.train(batch(), CrossEntropy())
    handle.remove()
    assert f"the output of language_model.model.layers.{LAYER}.self_attn;" in str(caught.value)
    assert "sequence row-1." in str(caught.value)  # row 8 of the packed batch is in the second sequence
    assert same(before, state(made))


def test_a_parameter_that_is_nan_already_is_named(trainer):
    made = trainer()
    name, parameter = next(
        item for item in made.model.official_parameters() if item[0].endswith("layers.1.self_attn.o_proj.weight")
    )
    with torch.no_grad():
        parameter[0, 0] = float("inf")
    with pytest.raises(NonFiniteLoss, match=f"The parameter {name} holds it already"):
        made.train(batch(), CrossEntropy())


def test_a_bad_number_in_the_data_is_named_with_its_sequence(trainer):
    made, data = trainer(), batch()
    data.weights[-1] = np.nan
    with pytest.raises(NonFiniteLoss, match="The batch's weights hold it; it reaches sequence row-1"):
        made.train(data, CrossEntropy())


def test_a_gradient_is_named_with_its_parameter_and_the_one_sequence_it_comes_from(trainer):
    made = trainer()
    before = state(made)
    with pytest.raises(
        NonFiniteGradients, match=r"gradient of language_model\.\S+ has \d+ non-finite.*from sequence row-1$"
    ):
        made.train(batch(), bad_gradient)
    assert same(before, state(made))


def test_a_loss_that_is_not_finite_itself_is_told_apart_and_changes_nothing(trainer):
    def broken(inputs: LossInputs) -> LossOutput:
        out = CrossEntropy()(inputs)
        return LossOutput(out.loss * float("nan"), tallied=out.tallied)

    made = trainer()
    before = state(made)
    with pytest.raises(NonFiniteLoss, match=r"arises in the loss itself.*weights are unchanged"):
        made.train(batch(), broken)
    assert same(before, state(made))


def test_skipped_steps_are_counted_told_and_limited(trainer):
    made = trainer(on_nonfinite="skip", nonfinite_limit=2)
    before, bad = state(made), bad_gradient
    for _ in range(2):
        assert made.train(batch(), bad).pairs() == {"optim/nonfinite_steps": (1.0, 1.0)}
    assert same(before, state(made))
    assert all("row-1" in note for note in made.notes)
    assert len(made.notes) == 2
    made.train(batch(), CrossEntropy())  # a good step begins the count anew
    good = state(made)
    assert not same(before, good)
    for _ in range(2):
        made.train(batch(), bad)
    with pytest.raises(NonFiniteGradients, match="3 steps in a row were not finite"):
        made.train(batch(), bad)
    assert same(good, state(made))


def test_a_sequence_longer_than_the_token_budget_is_refused_in_one_message(trainer):
    with pytest.raises(SequenceTooLong, match="sequence row-1 has 9 tokens, more than the budget of 8"):
        trainer(micro_batch_tokens=8).train(batch(), CrossEntropy())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_ids": 512}, "sequence row-1 has the token id 512; the model has 512"),
        ({"routes": 4}, "route goes to expert 4; the model has 4"),
        ({"routes": -1}, "route goes to expert -1"),
    ],
)
def test_what_no_table_of_the_model_holds_is_refused_before_a_step(trainer, change, says):
    made, given = trainer(), batch()
    shape = (given.tokens, len(made.model.config.moe_layers), made.model.config.num_experts_per_token)
    given = dataclasses.replace(given, routes=np.zeros(shape, np.int16))
    for name, value in change.items():
        held = getattr(given, name).copy()
        held[-1] = value
        given = dataclasses.replace(given, **{name: held})
    before = state(made)
    with pytest.raises(BatchError, match=says):
        made.train(given, CrossEntropy())
    assert same(before, state(made))
