"""Whose optimizer state is where: the planner's count of the learner's own assignment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3rl.model import K3Config, K3ForCausalLM, LoraConfig, prepare_adapter
from k3rl.optim import trained
from k3rl.parallel import assign_owners, candidates_of
from k3rl.planner import GIB, Layout, Method, learner_memory
from k3rl.planner.inputs import Workload
from k3rl.planner.memory import optimizer_state_bytes, publication_bytes
from k3rl.planner.owners import owners
from k3rl.planner.shares import micro_batch, model_counts

K3, NANO = K3Config.named("k3"), K3Config.named("k3-nano")
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 16, 1), (2, 3, 1), (1, 1, 4), (3, 2, 2), (64, 1, 1)]


def state_by_rank(config: K3Config, shape: tuple[int, int, int], lora: LoraConfig | None) -> list[int]:
    """Bytes of masters and momenta of each rank, summed over the names that `assign_owners` gives it."""
    model = K3ForCausalLM(config, device=torch.device("meta"))
    prepare_adapter(model, lora)
    infos = {name: info for name, (info, _) in trained(model.trained_parameters(), config).items()}
    sizes = {name: parameter.numel() for name, parameter in model.trained_parameters()}
    ranks = shape[0] * shape[1] * shape[2]
    mesh: Any = SimpleNamespace(shape=shape, world=SimpleNamespace(size=ranks))
    found = [0] * ranks
    for name, owner in assign_owners(candidates_of(model, infos, mesh), ranks).items():
        found[owner] += sizes[name] * (8 if infos[name].group == "muon" else 12)
    return found


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 4])
def test_the_fullest_rank_is_that_of_the_learners_own_assignment(shape, rank) -> None:
    lora = LoraConfig(rank=rank, alpha=8.0) if rank else None
    layout, method = Layout(*shape), Method(lora_rank=rank)
    expected = state_by_rank(NANO, shape, lora)
    assert optimizer_state_bytes(NANO, layout, method) == max(expected)
    assert {own.state_bytes(4) for own in owners(NANO, layout, method)} == {float(value) for value in expected}


def test_a_matrix_has_one_owner_however_many_ranks_there_are() -> None:
    """K3's embedding and head are 1.17 G numbers each; with master and two moments 13.1 GiB."""
    one, numbers = 12 * K3.vocab_size * K3.hidden_size, sum(model_counts(K3).counts.values())
    for layout in (Layout(data=1024), Layout(data=16, expert=64)):
        even = 8 * numbers / 1024
        assert even + 0.9 * one <= optimizer_state_bytes(K3, layout, Method()) < 1.02 * (even + one)
    assert optimizer_state_bytes(K3, Layout(expert=64), Method(shard_optimizer=False)) > 400 * GIB


def test_a_publication_gathers_the_experts_of_one_layer_on_one_device() -> None:
    """896 experts of three matrices, half a byte a number and a byte for 32, and the own share of 1/8 beside them."""
    layer = 896 * 3 * K3.expert_hidden_size * K3.moe_intermediate_size * 17 / 32
    assert publication_bytes(K3, Layout(expert=8), Method()) == pytest.approx(layer * 9 / 8)
    assert publication_bytes(K3, Layout(data=8), Method()) == 0
    small = Workload("sft", 8, 1, 256, 0, micro_batch_tokens=256)
    memory = learner_memory(K3, Layout(expert=8), Method(recompute="layer"), micro_batch(small, Method()))
    assert memory["publication"] == pytest.approx(layer * 9 / 8)
    assert "activations" not in memory
