"""The planner's counts against what real models and steps of them hold and do."""

from __future__ import annotations

import pytest
import torch

from k3rl.engine import Engine
from k3rl.model import K3Config
from k3rl.model.recompute import PARTS
from k3rl.parallel import Trainer, TrainerConfig, costs
from k3rl.parallel.costs import Mix
from k3rl.parallel.plan import Layout, Method, _state_bytes, activation_memory, learner_memory
from tests.parallel import measured

BYTES = {torch.float32: 4, torch.bfloat16: 2}


@pytest.mark.parametrize(
    ("name", "dtype", "tokens", "length", "targets"),
    [
        ("k3-nano", torch.float32, 1024, 128, 512),
        ("k3-nano", torch.bfloat16, 1000, 125, 300),  # lengths that are no whole number of chunks
        ("k3-mini", torch.bfloat16, 256, 256, 100),
    ],
)
def test_saved_bytes_and_work_are_those_of_a_real_forward(name, dtype, tokens, length, targets) -> None:
    saved, flops = measured.saved_and_flops(measured.model_of(name, dtype), tokens, length, targets)
    mix = Mix(tokens, length, targets, BYTES[dtype])
    # What is left out, index vectors and scalars, is below one part in a hundred even at these sizes.
    assert sum(costs.activations(K3Config.named(name), mix).values()) == pytest.approx(saved, rel=0.01)
    assert sum(costs.flops(K3Config.named(name), mix).values()) == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tokens", "length", "recompute"),
    [("k3-nano", 1024, 128, "none"), ("k3-mini", 256, 64, "none"), ("k3-nano", 1024, 64, "layer")],
)
def test_the_peak_of_a_pass_is_within_15_percent(name, tokens, length, recompute) -> None:
    model = measured.model_of(name, torch.float32)
    model.recompute(PARTS if recompute == "layer" else ())
    method = Method(weight_bytes=4, gradient_bytes=4, recompute=recompute)
    gradients = 4 * sum(parameter.numel() for _, parameter in model.official_parameters())
    working = activation_memory(model.config, Layout(), method, Mix(tokens, length, tokens, 4))
    planned = gradients + sum(working.values())
    assert planned == pytest.approx(measured.training_peak(model, tokens, length, tokens), rel=0.15)


STEPS = [
    (Method(weight_bytes=4), TrainerConfig()),
    (Method(weight_bytes=4, optimizer="adamw"), TrainerConfig(optimizer="adamw")),
    (Method(weight_bytes=4, momentum_bytes=2), TrainerConfig(momentum_dtype="bfloat16")),
    (Method(weight_bytes=4, offload=True), TrainerConfig(offload_optimizer=True)),
    (
        Method(weight_bytes=4, offload=True, optimizer="adamw"),
        TrainerConfig(offload_optimizer=True, optimizer="adamw"),
    ),
]


@pytest.mark.parametrize(("method", "config"), STEPS)
def test_state_and_the_peak_of_a_step_are_within_15_percent(method, config) -> None:
    model = measured.model_of("k3-nano", torch.float32)
    memory = learner_memory(model.config, Layout(), method, Mix(16, 16, 1, 4))
    trainer = Trainer(model, config)
    held = sum(tensor.nbytes for tensor in trainer.optimizer.state_tensors().values())
    assert _state_bytes(model.config, Layout(), method) == pytest.approx(held, rel=2e-3)  # less biases, step counts
    found = trainer.memory()
    assert found["weights"] == memory["weights"]
    assert found["gradients"] == pytest.approx(memory["gradients"], rel=1e-3)  # biases have none
    assert found["optimizer"] == pytest.approx(memory["optimizer"], rel=2e-3)
    assert memory["optimizer"] == (0 if method.offload else pytest.approx(held, rel=2e-3))
    # A step that a pass of 16 tokens cannot hide.
    assert memory["step"] == pytest.approx(measured.step_peak(trainer), rel=0.15)


@pytest.mark.parametrize("optimizer", ["per_head_muon", "adamw"])
def test_every_parameter_is_in_one_group(optimizer) -> None:
    model = measured.model_of("k3-nano", torch.float32)
    counted = costs.optimizer_costs(model.config, optimizer)
    muon, adamw = sum(counted.muon.values()), sum(counted.adamw.values())
    assert muon + adamw + sum(bias.numel() for _, bias in model.router_biases()) == sum(
        parameter.numel() for _, parameter in model.official_parameters()
    )


def test_the_work_of_newton_schulz_is_that_of_its_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from k3rl.optim.newton_schulz import newton_schulz

    counter = FlopCounterMode(display=False)
    with counter:
        newton_schulz(torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0)))
    assert counter.get_total_flops() == 3 * costs._newton_schulz(40, 24)


def test_an_engine_holds_the_states_that_are_counted() -> None:
    model = measured.model_of("k3-nano", torch.float32)
    fixed, each = costs.state_bytes(model.config, page_bytes_each=4)
    cache = model.new_cache(1)
    kda = sum(cache.recurrent(layer).nbytes + cache.conv(layer).nbytes for layer in model.config.kda_layers)
    assert fixed == kda
    assert each == len(model.config.mla_layers) * 4 * (model.config.kv_lora_rank + model.config.qk_rope_head_dim)
    assert Engine(model).num_running == 0
