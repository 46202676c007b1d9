"""Planned optimizer state is that of the owners whom a run assigns, to the number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.model import K3Config, tensor_table
from k3rl.optim import ParamInfo, classify
from k3rl.parallel.zero import assign_owners, candidates
from k3rl.planner import GIB, Cluster, Layout, Method, Workload, plan_layout
from k3rl.planner.memory import optimizer_state_bytes
from k3rl.planner.owners import least_loaded, owned_numbers

K3 = K3Config.named("k3")


def assigned(config: K3Config, layout: Layout, adamw_only: bool = False) -> np.ndarray:
    """[ranks, 2]: numbers that Muon and AdamW train on each rank, by the owners of every name."""
    shapes = {entry.name: entry.shape for entry in tensor_table(config) if entry.copies in (1, config.num_experts)}
    infos = {name: classify(name, shape, config) for name, shape in shapes.items()}
    infos = {name: info for name, info in infos.items() if info.group != "balanced"}
    if adamw_only:
        infos = {name: ParamInfo("adamw", info.decay) for name, info in infos.items()}
    named = [(name, shape) for name, shape in shapes.items() if name in infos]
    found = candidates(named, infos, config.num_experts, (layout.data, layout.expert, layout.context))
    owned = np.zeros((layout.devices, 2))
    for name, owner in assign_owners(found, layout.devices).items():
        head, _, tail = name.partition(".experts.")
        first = f"{head}.experts.0.{tail.partition('.')[2]}" if tail else name
        owned[owner, 0 if infos[first].group == "muon" else 1] += math.prod(shapes[first])
    return owned


@pytest.mark.parametrize("layout", [Layout(expert=64), Layout(data=16, expert=64)])
def test_the_plan_of_k3_has_the_state_of_its_owners(layout):
    owned = assigned(K3, layout)
    assert np.array_equal(owned_numbers(K3, layout, Method()), owned)
    bytes_each = 8 * owned[:, 0] + 12 * owned[:, 1]
    assert optimizer_state_bytes(K3, layout, Method()) == bytes_each.max()
    assert bytes_each.max() > 1.02 * bytes_each.mean()


def test_a_vocabulary_on_one_of_many_ranks_is_more_than_the_mean_by_thirteen_gib():
    planned = optimizer_state_bytes(K3, Layout(data=16, expert=64), Method()) / GIB
    mean = 8 * 2_779_931_834_976 / 1024 / GIB
    assert planned > mean
    table = 12 * K3.vocab_size * K3.hidden_size / GIB
    assert table == pytest.approx(13.1, abs=0.05)
    assert planned >= table


@given(
    data=st.integers(1, 4), expert=st.integers(1, 4), context=st.integers(1, 3), experts=st.integers(4, 9),
    adamw=st.booleans(),
)  # fmt: skip
@settings(max_examples=25)
def test_whatever_the_mesh_planned_owners_are_assigned_ones(data, expert, context, experts, adamw):
    config = K3Config.named("k3-nano").replace(num_experts=experts)
    layout = Layout(data, expert, context)
    planned = owned_numbers(config, layout, Method(optimizer="adamw" if adamw else "per_head_muon"))
    found = assigned(config, layout, adamw_only=adamw)
    assert np.array_equal(planned, found)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(1, 30), st.integers(1, 60))
def test_handing_out_at_once_is_handing_out_one_by_one(load, cost, count):
    loads, counts = list(load), [0] * len(load)
    for _ in range(count):
        rank = min(range(len(loads)), key=lambda r: (loads[r], r))
        loads[rank] += cost
        counts[rank] += 1
    assert least_loaded(np.array(load, float), float(cost), count).tolist() == counts


def test_a_learner_that_publishes_needs_room_for_it_and_for_a_layer_of_experts():
    layout, cluster = Layout(data=16, expert=64), Cluster(2048)
    rl = plan_layout(K3, cluster, Workload(micro_batch_tokens=8192), Method(), layout, rollout_gpus=512)
    sft = plan_layout(K3, cluster, Workload(kind="sft"), Method(), layout, rollout_gpus=0)
    assert "published" not in sft.memory
    layer = 896 * 3 * 3072 * 3584 * (0.5 + 1 / 32)
    assert layer / GIB == pytest.approx(14.6, abs=0.05)
    offload = Method(recompute="layer", offload=True)
    small = plan_layout(K3, cluster, Workload(micro_batch_tokens=8192), offload, layout, rollout_gpus=512)
    for plan in (rl, small):
        assert plan.memory["published"] > 92 * layer / 64
        working = sum(plan.memory.get(name, 0) for name in ("activations", "logits", "working", "all_to_all", "step"))
        assert max(working, plan.memory.get("gathered", 0)) >= layer * (1 - 1e-9)


@given(data=st.integers(1, 4), expert=st.integers(1, 4), context=st.integers(1, 2))
@settings(max_examples=15)
def test_the_even_share_that_a_search_rules_layouts_out_by_is_no_more_than_what_the_fullest_owns(data, expert, context):
    config, layout = K3Config.named("k3-mini"), Layout(data, expert, context)
    found = [optimizer_state_bytes(config, layout, Method(), even=even) for even in (True, False)]
    assert found[0] <= found[1] * (1 + 1e-3)  # the even share counts the router's biases too, which nobody owns
