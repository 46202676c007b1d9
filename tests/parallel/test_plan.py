"""`k3rl plan`: arithmetic that can be done by hand, and what a person gets."""

from __future__ import annotations

import dataclasses
import json

import pytest

from k3rl.cli import main
from k3rl.model import K3Config
from k3rl.parallel import plan, plan_search
from k3rl.parallel.plan import GIB, Cluster, Layout, Method, PlanError, Workload

K3 = K3Config.named("k3")
SMALL = K3Config.named("k3-small")


def test_state_of_the_full_model_is_14_bytes_a_parameter_over_all_devices() -> None:
    # 2.78 T parameters at 2 + 4 + 4 + 4 bytes on 256 devices are 142 GiB each, whatever the layout.
    parameters = 2_779_931_834_976
    memory = plan.learner_memory(K3, Layout(expert=16, pipeline=16), Method(), plan._mix(Workload(), Method()))
    state = sum(memory[name] for name in ("weights", "gradients", "optimizer"))
    assert 256 * plan_search._least_gib(K3, Method(), 256) * GIB == pytest.approx(14 * parameters)
    assert plan_search._least_gib(K3, Method(), 256) == pytest.approx(141.6, abs=0.05)
    # The fullest of 16 stages has 6 of 93 layers, and what is no expert is repeated on 16 ranks.
    assert 14 * parameters / 256 < state < 1.3 * 14 * parameters / 256


def test_what_does_not_fit_names_the_part_and_what_would() -> None:
    found = plan_search.search(K3, Cluster(256), Workload(), Method())
    assert not found.fits
    assert "GiB on a learner's device" in found.why_not[0]
    rows = plan_search.suggestions(K3, Cluster(256), Workload(), Method())
    fewest = {row["method"]: row["gpus"] for row in rows}
    assert fewest["full weights"] is None  # what 8,192 tokens leave for their backward fills a device
    lora = next(count for name, count in fewest.items() if name.startswith("LoRA"))
    others = [count for name, count in fewest.items() if count is not None and not name.startswith("LoRA")]
    assert lora is not None
    assert lora < min(others) / 4


def test_a_small_model_fits_one_device_without_stages_and_says_what_it_assumed() -> None:
    found = plan_search.report(
        SMALL, Cluster(2), Workload(), plan_search.search(SMALL, Cluster(2), Workload(), Method())
    )
    assert found["fits"]
    assert found["runs_today"]
    assert sum(found["memory_gib"].values()) == pytest.approx(found["gpu_gib"], abs=0.01)
    assert any("8192 tokens" in line for line in found["assumptions"])


def test_sharding_divides_and_offload_moves_to_the_host() -> None:
    layout, mix = Layout(data=4, expert=2), plan._mix(Workload(), Method())
    whole = plan.learner_memory(SMALL, layout, Method(shard_optimizer=False), mix)
    shared = plan.learner_memory(SMALL, layout, Method(), mix)
    facts = plan.model_counts(SMALL)
    rest = facts.rest + facts.first + facts.last
    assert whole["optimizer"] == pytest.approx(8 * (facts.routed / 2 + rest))
    assert shared["optimizer"] == pytest.approx(8 * (facts.routed / 2 / 4 + rest / 8))
    method = Method(offload=True)
    assert plan.learner_memory(SMALL, layout, method, mix)["optimizer"] == 0
    assert plan._host_gib(SMALL, Cluster(8), layout, method) * GIB == pytest.approx(8 * shared["optimizer"])


def test_expert_traffic_is_every_row_sent_four_times_to_others() -> None:
    workload = Workload("sft", prompts=16, group=1, prompt_tokens=1024, new_tokens=0)
    moved = plan._traffic(SMALL, Cluster(4), workload, Method(), Layout(expert=4), 0)
    rows = 16 * 1024 / 4 * SMALL.num_experts_per_token * len(SMALL.moe_layers)
    assert moved["nvlink"]["experts"] == pytest.approx(4 * rows * SMALL.expert_hidden_size * 2 * 3 / 4)
    assert "experts" not in moved["network"]
    apart = plan._traffic(SMALL, Cluster(4, node=1), workload, Method(), Layout(expert=4), 0)
    assert apart["network"]["experts"] == pytest.approx(moved["nvlink"]["experts"])


def test_more_devices_are_never_slower_in_arithmetic_and_lora_publishes_less() -> None:
    one, two = (
        plan._train_times(SMALL, Cluster(count), Workload(), Method(), Layout(data=count), plan.Efficiency())
        for count in (1, 2)
    )
    assert two["forward"] == pytest.approx(one["forward"] / 2)
    assert two["optimizer"] < one["optimizer"]
    full = plan._traffic(K3, Cluster(64), Workload(), Method(), Layout(expert=64), 1)["network"]
    lora = plan._traffic(K3, Cluster(64), Workload(), Method(lora_rank=32), Layout(expert=64), 1)["network"]
    assert lora["weights to engines"] < full["weights to engines"] / 10


@pytest.mark.parametrize(
    ("layout", "rollout", "words"),
    [
        (Layout(expert=3), 1, "do not divide"),
        (Layout(data=8), 8, "more than the cluster's"),
        (Layout(pipeline=64), 1, "more than 13 layers"),
    ],
)
def test_degrees_that_cannot_be_are_refused(layout, rollout, words) -> None:
    with pytest.raises(PlanError, match=words):
        plan.plan_layout(SMALL, Cluster(8 if words != "more than 13 layers" else 128), Workload(), Method(), layout,
                         rollout_gpus=rollout)  # fmt: skip


def test_the_search_prefers_what_runs_today() -> None:
    found = plan_search.search(SMALL, Cluster(16), Workload(), Method())
    assert found.fits
    assert not found.layout.not_yet
    for layout in plan_search.layouts(SMALL, 24):
        assert layout.devices == 24
        assert SMALL.num_experts % layout.expert == 0


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


def test_a_given_layout_is_judged_as_it_is(capsys) -> None:
    words = ["plan", "k3", "--gpus", "256", "--kind", "sft", "--expert", "16", "--pipeline", "16", "--no-suggest"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["layout"] == dataclasses.asdict(Layout(1, 16, 1, 16))
    assert result["not_run_today"] == ["pipeline"]


@pytest.mark.parametrize("words", [["plan", "k3-huge", "--gpus", "8"], ["plan", "k3", "--gpus", "0"], ["plan", "k3"]])
def test_bad_words_are_refused_with_the_fix(words, capsys) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("k3rl: configuration error")
