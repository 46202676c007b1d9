"""Experts and rows that do not divide evenly: the plan counts what the rank that has most of them really has."""

from __future__ import annotations

import json

import numpy as np
import pytest

from k3rl.cli import main
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.model import K3Config, K3ForCausalLM, costs
from k3rl.model.costs import MicroBatch
from k3rl.parallel import Axis, ContextParallel, World, pair_cost
from k3rl.parallel.mesh import expert_run
from k3rl.planner import Cluster, Layout, Method, Workload, expert_bytes, learner_memory
from k3rl.planner.memory import activation_memory
from k3rl.planner.shares import context_shares, expert_load
from k3rl.planner.work import train_times

NANO = K3Config.named("k3-nano")
SMALL = K3Config.named("k3-small")


@pytest.mark.parametrize("ranks", [3, 5, 16])
def test_weights_are_those_of_the_rank_with_most_experts(ranks) -> None:
    parts = [
        K3ForCausalLM(NANO, device="meta", experts=expert_run(NANO.num_experts, rank, ranks)) for rank in range(ranks)
    ]
    largest = max(sum(parameter.numel() for parameter in part.parameters()) for part in parts)
    memory = learner_memory(NANO, Layout(expert=ranks), Method(), MicroBatch(64, 64, 64))
    assert memory["weights"] == 2 * largest
    assert memory["gradients"] == 4 * largest


def test_a_rank_sends_what_drawn_routes_to_uneven_experts_send() -> None:
    rng, ranks, tokens, k = np.random.default_rng(0), 3, 6000, SMALL.num_experts_per_token
    routes = rng.permuted(np.tile(np.arange(SMALL.num_experts), (tokens, 1)), axis=1)[:, :k]
    runs = [expert_run(SMALL.num_experts, rank, ranks) for rank in range(ranks)]
    owner = np.array([next(r for r, run in enumerate(runs) if e in run) for e in range(SMALL.num_experts)])[routes]
    latent, sent = SMALL.expert_hidden_size, []
    for rank in range(ranks):
        rows = np.mean([len(set(row) - {rank}) for row in owner.tolist()])
        choices = int((owner != rank).sum()) / tokens
        sent.append(
            (rows * latent * 33 / 32 + choices * (12 + 2 * latent), rows * 2 * latent + choices * 2 * (latent + 1))
        )
    assert expert_bytes(SMALL, ranks, 2) == pytest.approx(max(sent), rel=0.01)  # 6,000 drawn rows


def test_a_step_takes_as_long_as_the_rank_with_most_experts() -> None:
    work = Workload("sft", 18, 1, 1024, 0)
    assert expert_load(SMALL, 3) == 22 * 3 / 64
    even, uneven = (train_times(SMALL, Cluster(n), work, Method(), Layout(expert=n))["forward"] * n for n in (2, 3))
    parts = costs.flops(SMALL, MicroBatch(8192, 1024, 8192))
    more = parts[costs.ROUTED] * (66 / 64 - 1) / sum(parts.values())
    assert uneven == pytest.approx(even * (1 + more))


def test_a_sequence_is_whole_on_a_rank_so_more_ranks_than_sequences_do_not_help() -> None:
    work = Workload("sft", 4, 1, 8192, 0)
    seconds = [
        train_times(SMALL, Cluster(16), work, Method(), layout)["backward"]
        for layout in (Layout(), Layout(data=3), Layout(data=4), Layout(data=8), Layout(data=4, context=2))
    ]
    assert [one / seconds[0] for one in seconds] == pytest.approx([1, 1 / 2, 1 / 4, 1 / 4, 1 / 8])


def test_expert_degrees_that_the_learner_runs_are_planned(capsys) -> None:
    words = ["plan", "k3-small", "--gpus", "5", "--kind", "sft", "--no-suggest", "--json"]
    assert main([*words, "--expert", "5"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["fits"], found["runs_today"], found["layout"]["expert"]) == (True, True, 5)
    assert main(["plan", "k3-nano", "--gpus", "17", "--kind", "sft", "--no-suggest", "--expert", "17"]) == 2
    assert "17 expert ranks are more than 16 experts" in capsys.readouterr().err


@pytest.mark.parametrize(("tokens", "length", "ranks"), [(64, 256, 4), (64, 128, 4), (100, 30, 3), (512, 1024, 2)])
def test_rows_of_context_ranks_are_those_that_they_are_given(tokens, length, ranks) -> None:
    """The longer a document, the fewer rows a rank late in it has, and the more of them lie before its own."""
    nothing = np.zeros(length, np.float32)
    mask = np.arange(length) > 0
    lengths = [length] * (tokens * ranks // length)
    batch = TrainBatch.pack(
        [TrainSequence(f"s{n}", np.ones(each, np.int64), mask, nothing, nothing) for n, each in enumerate(lengths)]
    )
    found = []
    for rank in range(ranks):
        axis = Axis(rank, ranks, tuple(range(ranks)))
        share = ContextParallel(axis, World.alone(), pair=pair_cost(NANO)).split(batch, -1)
        assert share.communicator is not None
        found.append((share.rows.stop - share.rows.start, share.communicator.before))
    assert list(context_shares(NANO, tokens, length, ranks)) == found


def test_a_context_rank_needs_what_its_rows_and_the_keys_and_values_before_them_need() -> None:
    """By hand for a document of four ranks' rows; short ones leave a rank with what it would have alone."""
    tokens, ranks, w = 1024, 4, 4
    key = NANO.qk_nope_head_dim + NANO.qk_rope_head_dim
    each = w * NANO.num_attention_heads * (key + NANO.v_head_dim) * len(NANO.mla_layers)
    one, last = (
        costs.activations(NANO, MicroBatch(tokens, 4096, tokens, w, ranks=ranks)),
        MicroBatch(tokens, 4096, tokens, w, ranks=ranks, before=3 * tokens),
    )
    kept = 3 * tokens * tokens * w * NANO.num_attention_heads * len(NANO.mla_layers)  # their probabilities
    assert costs.activations(NANO, last)["mla"] - one["mla"] == 3 * tokens * each + kept
    alone, split = (
        activation_memory(NANO, Layout(context=n), Method(weight_bytes=4), MicroBatch(tokens, 128, tokens, w))
        for n in (1, ranks)
    )
    assert split == pytest.approx(alone)


# (model, context ranks, length, bytes): what `benchmarks/learner.py --parts layouts` found at most on a rank of 1,024
# tokens in float32, torch 2.11.
PEAKS = [
    ("k3-mini", 2, 32, 623_109_552),
    ("k3-mini", 2, 512, 630_875_472),
    ("k3-mini", 2, 2048, 715_570_724),
    ("k3-nano", 2, 2048, 123_967_416),
    ("k3-nano", 4, 4096, 173_440_838),
]


@pytest.mark.parametrize(("name", "ranks", "length", "peak"), PEAKS)
def test_peaks_of_context_ranks_are_within_10_percent(name, ranks, length, peak) -> None:
    batch, method = MicroBatch(1024, length, 1024, 4), Method(weight_bytes=4)
    memory = learner_memory(K3Config.named(name), Layout(context=ranks), method, batch, only_one=True)
    assert sum(memory.values()) == pytest.approx(peak, rel=0.10)
