"""`k3rl plan`: arithmetic that can be done by hand, and what a person gets."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest

from k3rl.cli import main
from k3rl.model import K3Config, QuantizationConfig
from k3rl.planner import (
    GIB,
    Cluster,
    Layout,
    Method,
    PlanError,
    Workload,
    expert_bytes,
    fastest_plan,
    frozen_parts,
    learner_memory,
    memory_savers,
    optimizer_costs,
    plan_layout,
    plan_report,
    smallest_clusters,
)
from k3rl.planner.memory import host_gib, least_gib, optimizer_state_bytes
from k3rl.planner.search import layouts, micro_batch_choices
from k3rl.planner.shares import lora_parameters, micro_batch, model_counts
from k3rl.planner.traffic import traffic
from k3rl.planner.work import train_times

K3 = K3Config.named("k3")
SMALL = K3Config.named("k3-small")


def test_state_of_the_full_model_is_14_bytes_a_parameter_over_all_devices() -> None:
    # 2.78 T parameters at 2 + 4 + 4 + 4 bytes on 256 devices are 142 GiB each, whatever the layout.
    parameters = 2_779_931_834_976
    memory = learner_memory(K3, Layout(expert=16, pipeline=16), Method(), micro_batch(Workload(), Method()))
    state = sum(memory[name] for name in ("weights", "gradients", "optimizer"))
    assert 256 * least_gib(K3, Method(), 256) * GIB == pytest.approx(14 * parameters)
    assert least_gib(K3, Method(), 256) == pytest.approx(141.6, abs=0.05)
    # The fullest of 16 stages has 6 of 93 layers, and what is no expert is repeated on 16 ranks.
    assert 14 * parameters / 256 < state < 1.3 * 14 * parameters / 256


def test_what_does_not_fit_names_the_part_and_what_would() -> None:
    found = fastest_plan(K3, Cluster(256), Workload(), [Method()])
    assert not found.fits
    assert "GiB on a learner's device" in found.why_not[0]
    rows = smallest_clusters(K3, Cluster(256), Workload(), Method())
    fewest = {row["method"]: row["gpus"] for row in rows}
    assert fewest["full weights"] is None  # what 8,192 tokens leave for their backward fills a device
    lora = next(count for name, count in fewest.items() if name.startswith("LoRA"))
    others = [count for name, count in fewest.items() if count is not None and not name.startswith("LoRA")]
    assert lora is not None
    assert lora < min(others) / 4


def test_a_small_model_fits_one_device_without_stages_and_says_what_it_assumed() -> None:
    found = plan_report(SMALL, Cluster(2), Workload(), fastest_plan(SMALL, Cluster(2), Workload(), [Method()]))
    assert found["fits"]
    assert found["runs_today"]
    assert sum(found["memory_gib"].values()) == pytest.approx(found["gpu_gib"], abs=0.01)
    assert any("8192 tokens" in line for line in found["assumptions"])


def test_sharding_divides_and_offload_moves_to_the_host() -> None:
    layout, batch = Layout(data=4, expert=2), micro_batch(Workload(), Method())
    whole = learner_memory(SMALL, layout, Method(shard_optimizer=False), batch)
    shared = learner_memory(SMALL, layout, Method(), batch)
    facts, counts = model_counts(SMALL), optimizer_costs(SMALL)
    rest = 8 * counts.muon[False] + 12 * counts.adamw[False]
    assert whole["optimizer"] == pytest.approx(8 * facts.routed / 2 + rest, rel=1e-4)  # balancing biases
    even = 8 * facts.routed / 2 / 4 + rest / 8  # owners hold whole matrices, balanced by the time of a step
    assert even < shared["optimizer"] < 1.1 * even
    method = Method(offload=True)
    assert learner_memory(SMALL, layout, method, batch)["optimizer"] == 0
    assert host_gib(SMALL, Cluster(8), layout, method) * GIB == pytest.approx(8 * even, rel=1e-4)


def test_expert_traffic_is_what_an_exchange_of_drawn_routes_sends() -> None:
    """Rows and choices that leave a rank, counted from routes; a second forward with recomputation."""
    rng, ranks, tokens = np.random.default_rng(0), 4, 4000
    routes = rng.permuted(np.tile(np.arange(SMALL.num_experts), (tokens, 1)), axis=1)[:, : SMALL.num_experts_per_token]
    owner = routes // (SMALL.num_experts // ranks)
    choices = int((owner != 0).sum()) / tokens
    rows = np.mean([len(set(row) - {0}) for row in owner.tolist()])
    latent = SMALL.expert_hidden_size
    forward = rows * (latent + latent / 32) + choices * (8 + 4 + 2 * latent)
    backward = rows * 2 * latent + choices * 2 * (latent + 1)
    assert expert_bytes(SMALL, ranks, 2) == pytest.approx((forward, backward), rel=0.01)  # 4,000 drawn rows

    workload = Workload("sft", prompts=16, group=1, prompt_tokens=1024, new_tokens=0)
    for method, again in ((Method(), 1), (Method(recompute="layer"), 2)):
        moved = traffic(SMALL, Cluster(4), workload, method, Layout(expert=4), 0)
        layers = 16 * 1024 / 4 * len(SMALL.moe_layers)
        assert moved["nvlink"]["experts"] == pytest.approx(layers * (again * forward + backward), rel=0.01)
        assert "experts" not in moved["network"]
        apart = traffic(SMALL, Cluster(4, node=1), workload, method, Layout(expert=4), 0)
        assert apart["network"]["experts"] == pytest.approx(moved["nvlink"]["experts"])


def test_experts_that_read_unrounded_rows_are_sent_those() -> None:
    plain = SMALL.replace(quantization=QuantizationConfig("mxfp4", "ceil", "none"))
    for width in (2, 4):
        rounded, whole = expert_bytes(SMALL, 8, width), expert_bytes(plain, 8, width)
        assert whole[1] == rounded[1]
        rows = rounded[1] / width - SMALL.num_experts_per_token * 7 / 8 * (SMALL.expert_hidden_size + 1)
        assert whole[0] - rounded[0] == pytest.approx(rows * (width - 33 / 32))


def test_state_is_counted_by_the_optimizer_that_owns_it() -> None:
    layout = Layout()
    counts = optimizer_costs(SMALL)
    muon, adamw = sum(counts.muon.values()), sum(counts.adamw.values())
    assert optimizer_state_bytes(SMALL, layout, Method()) == pytest.approx(8 * muon + 12 * adamw, rel=1e-3)  # biases
    assert optimizer_state_bytes(SMALL, layout, Method(momentum_bytes=2)) == pytest.approx(
        6 * muon + 12 * adamw, rel=1e-3
    )
    adapters = sum(lora_parameters(SMALL, 8).values())
    assert optimizer_state_bytes(SMALL, layout, Method(lora_rank=8)) == 12 * adapters


def test_micro_batches_are_made_smaller_only_where_asked_and_where_a_sequence_still_fits() -> None:
    workload = Workload("sft", prompts=8, group=1, prompt_tokens=8192, new_tokens=0, smaller_micro_batches=True)
    tokens = [work.micro_batch_tokens for work in micro_batch_choices(workload, Layout(context=4))]
    assert tokens == [8192, 4096, 2048]
    assert len(micro_batch_choices(workload, Layout())) == 1
    assert len(micro_batch_choices(dataclasses.replace(workload, smaller_micro_batches=False), Layout(context=4))) == 1
    short = dataclasses.replace(workload, micro_batch_tokens=4096)
    found = plan_layout(SMALL, Cluster(1), short, Method(), Layout(), rollout_gpus=0)
    assert found.why_not[-1].startswith("sequences of 8,192 tokens, where 1 context ranks take 4,096")


def test_too_few_devices_for_an_engine_are_a_plan_that_says_so(capsys) -> None:
    assert main(["plan", "k3", "--gpus", "8", "--no-suggest", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not result["fits"]
    assert result["rollout_gpus"] == 0
    assert "one engine of this model takes 16" in result["why_not"][-1]


def test_layers_are_recomputed_where_nothing_else_fits(capsys) -> None:
    assert main(["plan", "k3-small", "--gpus", "2", "--gpu-gib", "18", "--no-suggest", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["fits"]
    assert result["method"].endswith("recomputed layers")
    assert result["micro_batch_tokens"] == 8192


def test_more_devices_are_never_slower_in_arithmetic_and_lora_publishes_less() -> None:
    one, two = (train_times(SMALL, Cluster(count), Workload(), Method(), Layout(data=count)) for count in (1, 2))
    assert two["forward"] == pytest.approx(one["forward"] / 2)
    assert two["optimizer"] < one["optimizer"]
    full = traffic(K3, Cluster(64), Workload(), Method(), Layout(expert=64), 1)["network"]
    lora = traffic(K3, Cluster(64), Workload(), Method(lora_rank=32), Layout(expert=64), 1)["network"]
    assert lora["weights to engines"] < full["weights to engines"] / 10


def test_frozen_weights_over_ranks_divide_what_is_cut_and_move_every_part_twice() -> None:
    lora, layout, workload = Method(lora_rank=8), Layout(data=2, expert=4), Workload("sft", 16, 1, 1024, 0)
    cut, batch = dataclasses.replace(lora, shard_frozen=4), micro_batch(workload, lora)
    parts, ends = frozen_parts(SMALL), SMALL.vocab_size * SMALL.hidden_size
    assert parts[0] == parts[-1] == ends
    whole, sliced = (learner_memory(SMALL, layout, method, batch) for method in (lora, cut))
    assert whole["weights"] - sliced["weights"] == pytest.approx(2 * sum(parts) * 3 / 4)
    assert sliced["gathered"] == 2 * max(one + other for one, other in itertools.pairwise(parts))
    moved = traffic(SMALL, Cluster(8, node=2), workload, cut, layout, 0)
    once = 2 * (2 * sum(parts) - 2 * ends) * 3 / 4  # 2,048 tokens a rank are one micro-batch
    assert moved["nvlink"]["frozen weights"] == pytest.approx(once / 3)  # 1 of 3 others is on the node
    assert moved["network"]["frozen weights"] == pytest.approx(once * 2 / 3)
    with pytest.raises(PlanError, match="3 ranks do not divide the 8"):
        plan_layout(SMALL, Cluster(8), workload, dataclasses.replace(lora, shard_frozen=3), layout, rollout_gpus=0)
    with pytest.raises(PlanError, match="--lora-rank"):
        plan_layout(SMALL, Cluster(8), workload, Method(shard_frozen=2), layout, rollout_gpus=0)


def test_the_full_model_is_post_trained_on_few_nodes_with_frozen_weights_cut() -> None:
    cluster = Cluster(48)
    methods = memory_savers(Method(lora_rank=32), cluster)
    found = fastest_plan(K3, cluster, Workload(smaller_micro_batches=True), methods)
    assert found.fits
    assert not found.unsupported
    assert found.method.shard_frozen == 8
    assert found.learner_gpus <= 32


@pytest.mark.parametrize(
    ("layout", "rollout", "words"),
    [
        (Layout(expert=65), 1, "more than 64 experts"),
        (Layout(data=8), 8, "more than the cluster's"),
        (Layout(pipeline=64), 1, "more than 13 layers"),
    ],
)
def test_degrees_that_cannot_be_are_refused(layout, rollout, words) -> None:
    with pytest.raises(PlanError, match=words):
        plan_layout(SMALL, Cluster(8 if rollout == 8 else 128), Workload(), Method(), layout, rollout_gpus=rollout)


def test_the_search_prefers_what_k3rl_runs() -> None:
    found = fastest_plan(SMALL, Cluster(16), Workload(), [Method()])
    assert found.fits
    assert not found.layout.unsupported
    for layout in layouts(SMALL, 24):
        assert layout.devices == 24
        assert layout.expert <= SMALL.num_experts


def test_the_command_prints_its_keys_and_a_table(capsys) -> None:
    words = ["plan", "k3-small", "--gpus", "4", "--micro-batch-tokens", "2048", "--no-suggest"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    keys = {"fits", "gpu_gib", "memory_gib", "host_gib", "step_s", "bytes", "bottleneck", "assumptions"}
    assert keys <= result.keys()
    assert result["bottleneck"] in result["step_s"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "learner device" in shown
    assert "assumed:" in shown


def test_a_given_layout_is_planned_as_it_is(capsys) -> None:
    words = ["plan", "k3", "--gpus", "256", "--kind", "sft", "--expert", "16", "--pipeline", "16", "--no-suggest"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["layout"] == dataclasses.asdict(Layout(1, 16, 1, 16))
    assert result["not_run_today"] == ["pipeline"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "many"], "argument --gpus: 'many'; wanted a whole number from 1 to 1,000,000"),
        (["--gpus", "99999999999"], "'99999999999'; wanted a whole number from 1 to 1,000,000"),
        (["--gpus", "8", "--lora-rank", "-4"], "'-4'; wanted a whole number, 0 or more"),
        (["--gpus", "8", "--publish-share", "2"], "'2'; wanted a share above 0 and at most 1"),
        (["--gpus", "8", "--rollout-gpus", "8"], "8 rollout devices of 8 leave none for the learner"),
    ],
)
def test_numbers_that_cannot_be_are_named_with_what_is_wanted(words, says, capsys) -> None:
    assert main(["plan", "k3-nano", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan", "k3-huge", "--gpus", "8"], ["plan", "k3", "--gpus", "0"], ["plan", "k3"]])
def test_bad_words_are_refused_with_the_fix(words, capsys) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("k3rl: configuration error")
