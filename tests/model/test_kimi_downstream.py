"""What is built on a model, on a Kimi Linear: engine, adapters, experts and documents over ranks, the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3rl.data import TrainBatch, TrainSequence
from k3rl.engine import Engine, SamplingParams
from k3rl.losses import CrossEntropy
from k3rl.model import (
    Adapter,
    K3Config,
    K3ForCausalLM,
    LoraConfig,
    QuantizationConfig,
    adapted,
    exact_logprobs,
    pack_experts,
    tensor_table,
)
from k3rl.model.costs import MicroBatch, activations, flops
from k3rl.optim import classify
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.pipelines.configs import ModelConfig
from k3rl.pipelines.presets import distill, rl, sft
from k3rl.pipelines.start import trainer_of

NANO = K3Config.named("kimi-linear-nano")


def model(dtype: torch.dtype = torch.float32, **changes: object) -> K3ForCausalLM:
    made = K3ForCausalLM(NANO.replace(**changes), dtype=dtype)
    made.init_weights(5)
    return made


def batch() -> TrainBatch:
    rng, sequences = np.random.default_rng(0), []
    for number, length in enumerate((7, 19, 12)):
        nothing = np.zeros(length, np.float32)
        sequences.append(
            TrainSequence(f"s{number}", rng.integers(0, 400, length), np.arange(length) > 0, nothing, nothing)
        )
    return TrainBatch.pack(sequences)


def logprobs_of(made: K3ForCausalLM, prompt: list[int], sampled: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([*prompt, *sampled])
    with torch.no_grad():
        table = made(ids[None]).logits[0].log_softmax(-1)
    return table[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("static", [False, True])
def test_an_engine_samples_what_the_learner_scores(static) -> None:
    made = model()
    prompts = [list(range(3, 3 + n)) for n in (5, 21, 33)]
    engine = Engine(made, max_running=3, static_decode=static)
    done = engine.generate(prompts, SamplingParams(max_tokens=6, seed=1, return_routes=True))
    for prompt, completion in zip(prompts, done, strict=True):
        wanted = logprobs_of(made, prompt, completion.token_ids)
        assert torch.allclose(torch.tensor(completion.logprobs), wanted, atol=1e-4)  # float32, other sums
        assert completion.routes.shape == (len(prompt) + 5, 4, 2)


def test_exact_mode_gives_the_learners_bits() -> None:
    made = model()
    (done,) = Engine(made, max_running=1, exact=True).generate([[3, 4, 5]], SamplingParams(max_tokens=5, seed=1))
    ids = torch.tensor([3, 4, 5, *done.token_ids])
    wanted = exact_logprobs(made, ids, torch.arange(2, 7), done.token_ids)
    assert torch.equal(torch.tensor(done.logprobs, dtype=torch.float64), wanted)


def test_packed_experts_compute_as_their_values() -> None:
    made, ids = model(quantization=QuantizationConfig("mxfp4")), torch.arange(4, 40)[None]
    with torch.no_grad():
        before = made(ids).logits
        pack_experts(made)
        assert torch.equal(made(ids).logits, before)


def test_every_parameter_has_an_optimizer_and_steps_lower_the_loss() -> None:
    made = model()
    groups = {name: classify(name, parameter.shape, NANO) for name, parameter in made.official_parameters()}
    at = "model.layers.{}.self_attn.{}.weight"
    assert groups[at.format(3, "q_proj")].segments == (48,)
    assert groups[at.format(0, "q_proj")].segments == (32,)
    assert groups[at.format(0, "g_a_proj")].heads == 1
    assert not groups["model.layers.0.self_attn.A_log"].decay
    biases = [bias.clone() for _, bias in made.router_biases()]
    trainer = Trainer(made, TrainerConfig(qk_clip=1e-3))
    metrics = [trainer.train(batch(), CrossEntropy()).values() for _ in range(4)]
    assert metrics[-1]["loss/mean"] < metrics[0]["loss/mean"]
    assert metrics[0]["optim/qk_clipped_heads"] == 2
    moved = [(bias - before).abs().max() for before, (_, bias) in zip(biases, made.router_biases(), strict=True)]
    assert all(0 < float(change) <= 4 * 0.001 + 1e-6 for change in moved)  # by the fixed step


def test_a_captured_step_is_the_eager_one() -> None:
    found = {}
    for capture in ("off", "on"):
        made = model()
        trainer = Trainer(made, TrainerConfig(capture=capture))
        trainer.gradients(batch(), CrossEntropy())
        found[capture] = {n: p.grad.clone() for n, p in trainer.native.shards.params.items() if p.grad is not None}
    for name, grad in found["off"].items():
        assert torch.allclose(grad, found["on"][name], atol=1e-5), name


def test_adapters_stand_beside_every_kind_of_matrix_experts_too() -> None:
    made, ids = model(), torch.arange(4, 40)[None]
    with torch.no_grad():
        before = made(ids).logits
    trainer = Trainer(made, TrainerConfig(lora=LoraConfig(rank=4), adamw_lr=0.01))
    names = {name.split(".")[-3] for name, _ in made.trained_parameters()}
    assert {"q_proj", "g_a_proj", "g_b_proj", "kv_b_proj", "w1", "w2", "w3", "o_proj"} <= names
    losses = [trainer.train(batch(), CrossEntropy()).values()["loss/mean"] for _ in range(3)]
    assert losses[-1] < losses[0]
    with torch.no_grad(), adapted(made, None):
        assert torch.equal(made(ids).logits, before)
    assert isinstance(made.adapter, Adapter)


def test_replayed_routes_are_those_used() -> None:
    made, ids = model(), torch.arange(4, 40)[None]
    with torch.no_grad():
        out = made(ids)
        other = out.routes.roll(1, 1)
        assert torch.equal(made(ids, routes=out.routes).logits, out.logits)
        assert torch.equal(made(ids, routes=other).routes, other)


def test_the_table_and_the_costs_are_of_this_model() -> None:
    made = K3ForCausalLM(NANO, device="meta")
    listed = {
        entry.name.replace(".experts.0.", f".experts.{expert}."): entry.shape
        for entry in tensor_table(NANO)
        for expert in range(entry.copies)
    }
    assert listed == {name: tuple(parameter.shape) for name, parameter in made.official_parameters()}
    found = activations(NANO, MicroBatch(64, 32, 64, 4)) | flops(NANO, MicroBatch(64, 32, 64, 4))
    assert not {"attention_residuals", "latent_projections"} & found.keys()


@pytest.mark.parametrize(("stage", "when"), [(sft, "step"), (rl, "freeze"), (distill, "freeze")])
def test_the_balancing_bias_is_frozen_where_a_policy_samples_and_moves_by_fixed_steps_in_sft(stage, when) -> None:
    config = stage()
    linear = trainer_of(config.replace(model=ModelConfig(start="kimi-linear-nano")))
    assert (linear.balance, linear.balance_by) == (when, "fixed_step")
    k3 = trainer_of(config.replace(model=ModelConfig(start="k3-nano")))
    assert (k3.balance, k3.balance_by) == ("step" if when == "step" else "batch", "quantile")
    chosen = config.replace(model=ModelConfig(start="kimi-linear-nano"), trainer=TrainerConfig(balance="fresh"))
    assert trainer_of(chosen).balance == "fresh"
