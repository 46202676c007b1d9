"""Who sends what to whom, and who owns what: the plans that every rank must make alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3rl.config import ConfigError
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.optim import ParamInfo, classify, trained
from k3rl.parallel import Mesh, Trainer, TrainerConfig, data_degree
from k3rl.parallel.expert import plan_exchange
from k3rl.parallel.mesh import expert_run
from k3rl.parallel.zero import Candidate, assign_owners, candidates_of, step_cost


@st.composite
def routed(draw):
    """(ids [N, k] of distinct experts a row, first expert of each rank, number of experts)."""
    experts = draw(st.integers(2, 9))
    ranks = draw(st.integers(1, experts))
    k = draw(st.integers(1, experts))
    rows = draw(st.lists(st.permutations(range(experts)).map(lambda order: order[:k]), max_size=12))
    starts = [expert_run(experts, rank, ranks).start for rank in range(ranks)]
    return torch.tensor(rows, dtype=torch.int64).view(-1, k), starts, experts


@given(routed())
def test_a_plan_sends_every_row_once_to_each_rank_that_it_chose_and_every_choice_once(case):
    ids, starts, experts = case
    plan = plan_exchange(ids, starts)
    ends = [*starts[1:], experts]
    k = ids.shape[1]
    rows = plan.rows.split(plan.row_counts.tolist())
    orders = plan.order.split(plan.counts.tolist())
    places = plan.place.split(plan.counts.tolist())
    chosen = plan.expert.split(plan.counts.tolist())
    assert sorted(plan.order.tolist()) == list(range(ids.numel()))
    for first, end, sent, order, place, expert in zip(starts, ends, rows, orders, places, chosen, strict=True):
        wanted = [n for n, row in enumerate(ids.tolist()) if any(first <= e < end for e in row)]
        assert sent.tolist() == wanted
        for assignment, at, number in zip(order.tolist(), place.tolist(), expert.tolist(), strict=True):
            assert first <= number < end
            assert ids[assignment // k, assignment % k] == number
            assert sent[at] == assignment // k


@given(st.integers(1, 40), st.integers(1, 40))
def test_expert_runs_cover_all_experts_once_and_differ_by_one(count, size):
    if size > count:
        with pytest.raises(ConfigError, match="use at most"):
            expert_run(count, 0, size)
        return
    runs = [expert_run(count, rank, size) for rank in range(size)]
    assert [e for run in runs for e in run] == list(range(count))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(
    st.lists(st.floats(0.1, 100), max_size=40),
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 2)), max_size=20),
)
def test_owners_are_allowed_ones_and_loads_differ_by_one_parameter_at_most(free, bound):
    pairs = [(0, 3), (1, 4), (2, 5)]
    shares = [Candidate(f"free{i}", cost, tuple(range(6))) for i, cost in enumerate(free)]
    shares += [Candidate(f"bound{i}", cost, pairs[side]) for i, (cost, side) in enumerate(bound)]
    owners = assign_owners(shares, 6)
    assert owners == assign_owners(shares[::-1], 6)  # whatever the order in which a rank lists them
    assert owners.keys() == {share.name for share in shares}
    assert all(owners[share.name] in share.ranks for share in shares)
    load, largest = [0.0] * 6, [0.0] * 6
    for share in shares:
        load[owners[share.name]] += share.cost
        largest[owners[share.name]] = max(largest[owners[share.name]], share.cost)
    for rank in range(6):
        if any(owners[share.name] == rank and len(share.ranks) == 6 for share in shares):
            smallest = min(s.cost for s in shares if owners[s.name] == rank and len(s.ranks) == 6)
            assert load[rank] - smallest <= min(load) + 1e-9  # else its last one had gone to a lighter rank


def test_costs_are_those_of_the_blocks_that_are_orthogonalised():
    whole = ParamInfo("muon", decay=True, heads=1, segments=(64,))
    heads = ParamInfo("muon", decay=True, heads=4, segments=(16,))
    flops = 5 * (4 * 64 * 64 * 128 + 2 * 64**3)
    assert step_cost(whole, (64, 128)) == 20 * 64 * 128 + flops / 100
    by_head = 4 * 5 * (4 * 16 * 16 * 128 + 2 * 16**3)
    assert step_cost(heads, (64, 128)) == 20 * 64 * 128 + by_head / 100
    assert step_cost(ParamInfo("adamw", decay=False), (128,)) == 28 * 128


def test_every_trained_parameter_has_one_share_whatever_run_of_experts_is_here():
    config = K3Config.named("k3-nano").replace(num_experts=4)
    whole = K3ForCausalLM(config, device="meta")
    part = K3ForCausalLM(config, device="meta", experts=range(2, 4))
    mesh = Mesh.alone()
    infos = {name: classify(name, p.shape, config) for name, p in whole.official_parameters()}
    names = [share.name for share in candidates_of(whole, infos, mesh)]
    assert set(names) == set(trained(whole.official_parameters(), config)) | {
        name for name, _ in whole.official_parameters() if name.endswith("e_score_correction_bias")
    }
    assert names == [share.name for share in candidates_of(part, infos, mesh)] or set(names) == {
        share.name for share in candidates_of(part, infos, mesh)
    }
    assert whole.parameter_count() == part.parameter_count() == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize(("world", "expert", "context"), [(4, 3, 1), (6, 2, 2), (1, 1, 2), (2, 4, 1)])
def test_degrees_must_divide_the_ranks(world, expert, context):
    with pytest.raises(ConfigError, match=f"multiple of {expert * context}"):
        data_degree(world, expert, context)


def test_a_trainer_refuses_a_mesh_or_a_model_of_other_degrees():
    config = K3Config.named("k3-nano").replace(num_experts=4)
    with pytest.raises(ConfigError, match="expert_parallel 2"):
        Trainer(K3ForCausalLM(config), TrainerConfig(expert_parallel=2))
    with pytest.raises(ConfigError, match="holds experts"):
        Trainer(K3ForCausalLM(config, experts=range(2)), TrainerConfig())


def test_a_part_of_a_model_has_the_weights_of_the_whole_and_refuses_to_run_alone():
    config = K3Config.named("k3-nano").replace(num_experts=4)
    whole, part = K3ForCausalLM(config), K3ForCausalLM(config, experts=range(1, 3))
    whole.init_weights(7)
    part.init_weights(7)
    expected = dict(whole.official_parameters())
    for name, parameter in part.official_parameters():
        assert torch.equal(parameter, expected[name]), name
    with pytest.raises(Exception, match="holds experts 1 to 2 of 4"):
        part(torch.zeros(1, 3, dtype=torch.int64))
