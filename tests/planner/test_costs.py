"""The planner's counts against what real models and steps of them hold and do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from k3rl.model import K3Config, costs
from k3rl.model.costs import MicroBatch
from k3rl.model.recompute import PARTS
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.planner import GIB, Layout, Method, learner_memory, optimizer_costs
from k3rl.planner.memory import activation_memory, head_activations, optimizer_state_bytes
from k3rl.planner.optimizer import newton_schulz_flops
from tests.planner import measured

BYTES = {torch.float32: 4, torch.bfloat16: 2}


@pytest.mark.parametrize(
    ("name", "dtype", "tokens", "length", "targets"),
    [
        ("k3-nano", torch.float32, 1024, 128, 512),
        ("k3-nano", torch.bfloat16, 1000, 125, 300),  # lengths that are no whole number of chunks
        ("k3-mini", torch.bfloat16, 256, 256, 100),
        ("kimi-linear-nano", torch.bfloat16, 1000, 125, 300),
    ],
)
def test_saved_bytes_and_work_are_those_of_a_real_forward(name, dtype, tokens, length, targets) -> None:
    saved, flops = measured.saved_and_flops(measured.model_of(name, dtype), tokens, length, targets)
    config, batch = K3Config.named(name), MicroBatch(tokens, length, targets, BYTES[dtype])
    # What is left out, index vectors and scalars, is below one part in a hundred even at these sizes.
    counted = sum(costs.activations(config, batch).values()) + head_activations(config, batch)
    assert counted == pytest.approx(saved, rel=0.01)
    # Pairs of rows whose decays have no bound are made from halves of a chunk, by fewer products than are counted.
    assert sum(costs.flops(config, batch).values()) == pytest.approx(flops, rel=0.02 if config.flat else 0.01)


@pytest.mark.parametrize(
    ("name", "tokens", "length", "recompute"),
    [("k3-nano", 1024, 128, "none"), ("k3-mini", 256, 64, "none"), ("k3-nano", 1024, 64, "layer")],
)
def test_the_peak_of_a_forward_backward_is_within_15_percent(name, tokens, length, recompute) -> None:
    model = measured.model_of(name, torch.float32)
    model.recompute(PARTS if recompute == "layer" else ())
    method = Method(weight_bytes=4, gradient_bytes=4, recompute=recompute)
    gradients = 4 * sum(parameter.numel() for _, parameter in model.official_parameters())
    working = activation_memory(model.config, Layout(), method, MicroBatch(tokens, length, tokens, 4))
    planned = gradients + sum(working.values())
    assert planned == pytest.approx(measured.training_peak(model, tokens, length, tokens), rel=0.15)


def test_what_grouped_experts_keep_is_what_is_counted_for_kernels() -> None:
    model = measured.model_of("k3-nano", torch.bfloat16)
    part, config, n = next(iter(model.moe_parts())), model.config, 96
    k, generator = config.num_experts_per_token, torch.Generator().manual_seed(0)
    z = torch.randn(n, config.expert_hidden_size, generator=generator).to(torch.bfloat16).requires_grad_()
    scores = torch.rand(n, config.num_experts, generator=generator)
    weights, ids = scores.topk(k)
    kept: dict[int, int] = {}
    own = {matrix.untyped_storage().data_ptr() for matrix in part.bank.matrices()}
    own |= {weights.untyped_storage().data_ptr()}  # the router keeps them

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), 0 if storage.data_ptr() in own else storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        part.bank.static(z, weights, ids)
    every_layer = costs.activations(config, MicroBatch(n, n, n, 2, kernels=True))[costs.ROUTED]
    counted = every_layer / len(config.moe_layers)
    assert counted == pytest.approx(sum(kept.values()), rel=0.02)  # the ends of experts' rows are left out


# (model, tokens, length, more of the method, GiB): peaks of forward-backward on one H200, torch 2.11, one micro-batch
# a step.
PEAKS = [
    ("k3-small", 8192, 2048, {}, 12.695),
    ("k3-small", 8192, 2048, {"capture": True}, 13.093),
    ("wide", 2048, 1024, {"momentum_bytes": 2}, 113.281),
]


@pytest.mark.parametrize(("name", "tokens", "length", "more", "gib"), PEAKS)
def test_the_peak_on_a_gpu_is_within_15_percent(name, tokens, length, more, gib) -> None:
    config = K3Config.named("k3" if name == "wide" else name)
    if name == "wide":  # one group of the full model with 56 experts a layer, as `benchmarks/learner_gpu.py` trains it
        linear = dataclasses.replace(config.linear_attn_config, kda_layers=(1, 2, 3), full_attn_layers=(4,))
        config = config.replace(
            num_hidden_layers=4, num_experts=56, first_k_dense_replace=0, vocab_size=512, bos_token_id=0,
            eos_token_id=1, pad_token_id=2, media_placeholder_token_id=3, linear_attn_config=linear,
            vision_config=None, max_position_embeddings=4096,
        )  # fmt: skip
    batch = MicroBatch(tokens, length, tokens - tokens // length, kernels=True)
    memory = learner_memory(config, Layout(), Method(kernels=True, **more), batch, only_one=True)
    memory.pop("step", None)  # of forward-backward alone
    assert sum(memory.values()) / GIB == pytest.approx(gib, rel=0.15)


def test_graphs_keep_the_memory_of_forward_backward_and_of_the_step_and_other_layouts_have_none() -> None:
    config, batch = K3Config.named("k3-small"), MicroBatch(8192, 2048, 8192, kernels=True)
    plain, graphs = (Method(kernels=True, capture=capture) for capture in (False, True))
    free, kept = (learner_memory(config, Layout(), method, batch) for method in (plain, graphs))
    more = {name: kept[name] for name in ("step", "handed_over")}
    assert kept == free | more  # beside forward-backward, which hid the step
    split = Layout(expert=2)
    assert learner_memory(config, split, graphs, batch) == learner_memory(config, split, plain, batch)


def test_a_trainers_settings_are_a_method() -> None:
    config = K3Config.named("k3-small")
    settings = TrainerConfig(offload_optimizer=True, recompute=("attention", "mlp"), momentum_dtype="bfloat16")
    wanted = Method(momentum_bytes=2, offload=True, recompute="layer", kernels=True, capture=True)
    assert Method.of(settings, config, "h200") == wanted
    assert not Method.of(settings, config, "b200").kernels  # no kernel is compiled for it
    assert not Method.of(settings, K3Config.named("k3-nano"), "h200").kernels  # nor for heads of another width
    assert not Method.of(TrainerConfig(capture="off"), config, "h200").capture


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
    memory = learner_memory(model.config, Layout(), method, MicroBatch(16, 16, 1, 4))
    trainer = Trainer(model, config)
    held = sum(tensor.nbytes for tensor in trainer.native.optimizer.state_tensors().values())
    assert optimizer_state_bytes(model.config, Layout(), method) == pytest.approx(
        held, rel=2e-3
    )  # less biases, step counts
    found = trainer.memory()
    assert found["weights"] == memory["weights"]
    assert found["gradients"] == pytest.approx(memory["gradients"], rel=1e-3)  # biases have none
    assert found["optimizer"] == pytest.approx(memory["optimizer"], rel=2e-3)
    assert memory["optimizer"] == (0 if method.offload else pytest.approx(held, rel=2e-3))
    # A step that a micro-batch of 16 tokens cannot hide.
    assert memory["step"] == pytest.approx(measured.step_peak(trainer), rel=0.15)


@pytest.mark.parametrize("optimizer", ["per_head_muon", "adamw"])
def test_every_parameter_is_in_one_group(optimizer) -> None:
    model = measured.model_of("k3-nano", torch.float32)
    counted = optimizer_costs(model.config, optimizer)
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
    assert counter.get_total_flops() == 3 * newton_schulz_flops(40, 24)


def test_an_engine_holds_the_states_that_are_counted() -> None:
    model = measured.model_of("k3-nano", torch.float32)
    fixed, each = costs.sequence_state_bytes(model.config, page_bytes_each=4)
    cache = model.new_cache(1)
    kda = sum(cache.recurrent(layer).nbytes + cache.conv(layer).nbytes for layer in model.config.kda_layers)
    assert fixed == kda
    assert each == len(model.config.mla_layers) * 4 * (model.config.kv_lora_rank + model.config.qk_rope_head_dim)
