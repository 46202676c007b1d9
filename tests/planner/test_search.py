"""What the planner chooses: nothing worse for more memory or devices, the fewest devices, the longer side's phase."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from k3rl.cli import main
from k3rl.model import K3Config
from k3rl.planner import (
    GPUS,
    Cluster,
    Layout,
    Method,
    Plan,
    Workload,
    fastest_plan,
    memory_savers,
    plan_layout,
    smallest_clusters,
)
from k3rl.planner.engine import engine_size, engine_sizes
from k3rl.planner.work import train_flops

K3 = K3Config.named("k3")
SMALL = K3Config.named("k3-small")
FREE = Workload(smaller_micro_batches=True)


def _result(capsys, *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--no-suggest", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def best_plan(cluster: Cluster, method: Method, config: K3Config = K3) -> Plan:
    return fastest_plan(config, cluster, FREE, memory_savers(method, cluster))


def _order(found: Plan) -> tuple[bool, bool, float]:
    """Smaller is better: what fits, what runs today, what is faster."""
    return not found.fits, bool(found.unsupported), found.seconds if found.fits else 0.0


@pytest.mark.parametrize("devices", [3, 8])
def test_more_memory_never_makes_a_plan_worse(devices) -> None:
    gibs = (9, 11, 12, 13, 14, 16, 18, 24, 139)
    clusters = [Cluster(devices, dataclasses.replace(GPUS["h200"], gib=gib)) for gib in gibs]
    found = [_order(best_plan(c, Method(kernels=True, capture=True), SMALL)) for c in clusters]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_more_memory_leaves_an_engine_the_choice_of_more_devices() -> None:
    sizes = [engine_sizes(K3, Cluster(256, dataclasses.replace(GPUS["h200"], gib=g))) for g in (139, 1200)]
    assert set(sizes[0]) < set(sizes[1])
    assert sizes[1][-1] == sizes[0][-1] == engine_size(K3, Cluster(256, GPUS["h100"]))


def test_a_device_too_many_stays_idle() -> None:
    lora = Method(lora_rank=32)
    even, odd = (best_plan(Cluster(count), lora) for count in (48, 49))
    assert even.fits
    assert odd.fits
    assert odd.learner_gpus + odd.rollout_gpus <= 49


def test_what_runs_today_is_taken_before_stages_whatever_has_to_be_cut_for_it() -> None:
    found = best_plan(Cluster(256), Method(lora_rank=32))
    assert found.fits
    assert not found.unsupported
    assert found.method.shard_frozen == 8


def test_the_bottleneck_is_a_phase_of_the_longer_side(capsys) -> None:
    trained = _result(capsys, "k3-small", "--gpus", "3")
    sides = {True: 0.0, False: 0.0}
    for name, value in trained["step_s"].items():
        sides[name.startswith("rollout")] += value if name != "publish" else 0.0
    assert sides[False] > sides[True]
    assert trained["step_s"]["rollout tokens"] == max(trained["step_s"].values())
    assert trained["bottleneck"] == "backward"
    assert trained["seconds"] == pytest.approx(sides[False] + trained["step_s"]["publish"], abs=2e-3)


def test_one_device_fewer_than_the_fewest_does_not_do() -> None:
    cluster, method = Cluster(4, dataclasses.replace(GPUS["h200"], gib=8)), Method(recompute="layer")
    row = smallest_clusters(SMALL, cluster, FREE, method)[0]
    assert row["method"] == method.words
    for count, supported in ((row["gpus"], False), (row["gpus_today"], True)):
        below = fastest_plan(SMALL, dataclasses.replace(cluster, gpus=count - 1), FREE, [method])
        assert not below.fits or (supported and below.unsupported)


def test_rows_of_what_fits_nowhere_have_the_keys_of_the_others() -> None:
    clusters = [Cluster(2, dataclasses.replace(GPUS["h200"], gib=gib)) for gib in (6.0001, 139)]
    none, some = (smallest_clusters(SMALL, cluster, FREE, Method())[0] for cluster in clusters)
    assert (none["gpus"], some["gpus"]) == (None, 2)
    assert list(none) == list(some)


def test_work_does_not_depend_on_how_many_ranks_a_document_is_spread_over() -> None:
    work = dataclasses.replace(FREE, kind="sft", prompt_tokens=2**17, new_tokens=0, prompts=2, group=1)
    whole, spread = (
        sum(train_flops(K3, dataclasses.replace(work, micro_batch_tokens=tokens), Method(), layout).values())
        for tokens, layout in ((2**17, Layout()), (2**14, Layout(context=8)))
    )
    assert spread == pytest.approx(whole, rel=1e-3)
    step = plan_layout(K3, Cluster(1), work, Method(), Layout(), rollout_gpus=0)
    assert sum(step.flops.values()) > 6 * 100e9 * work.tokens  # K3 has 104 G active parameters


def test_links_and_devices_of_a_cluster_can_be_said(capsys) -> None:
    words = ["k3-small", "--gpus", "16", "--data", "8"]
    usual = _result(capsys, *words)
    slow = _result(capsys, *words, "--nvlink", "45", "--tflops", "98.9", "--network", "5", "--hbm", "480")
    assert set(slow) == set(usual)
    for phase in ("forward", "backward", "gradients (nvlink)", "publish"):
        assert slow["step_s"][phase] == pytest.approx(10 * usual["step_s"][phase], rel=1e-2, abs=2e-4)
    assert usual["step_flops"].keys() == {"forward", "backward", "optimizer"}


def test_a_given_layout_is_recomputed_where_it_fits_only_so_and_leaves_as_many_devices_as_said(capsys) -> None:
    words = ["k3-small", "--gpus", "4", "--gpu-gib", "14", "--data", "2"]
    assert _result(capsys, *words)["method"].endswith("recomputed layers")
    assert not _result(capsys, *words, "--recompute", "none")["fits"]
    assert _result(capsys, *words, "--rollout-gpus", "0")["rollout_gpus"] == 0


def test_a_model_of_a_short_context_is_planned_with_what_it_has_room_for(capsys) -> None:
    assert _result(capsys, "k3-nano", "--gpus", "2")["fits"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu-gib", "nan"], "'nan'; wanted a number above 0"),
        (["--gpu-gib", "5"], "a device has 5 GiB, of which 6 are"),
        (["--network", "0"], "'0'; wanted a number above 0"),
        (["--host-gib", "-1"], "'-1'; wanted a number above 0"),
        (["--rollout-gpus", "9"], "9 rollout devices of 8 leave none"),
        (["--lora-rank", "8", "--momentum-bytes", "2"], "leave it out"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(words, says, capsys) -> None:
    assert main(["plan", "k3-small", "--gpus", "8", *words]) == 2
    assert says in capsys.readouterr().err
