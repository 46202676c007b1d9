"""Which layout to use: the fastest that fits, the fewest devices on which one does, and a plan as plain values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from k3rl.model import K3Config
from k3rl.parallel.plan import (
    GIB,
    Cluster,
    Efficiency,
    Layout,
    Method,
    Plan,
    PlanError,
    Workload,
    engine_size,
    forward_flops,
    model_counts,
    plan_layout,
)


def layouts(config: K3Config, devices: int, *, pipeline: bool = False) -> Iterator[Layout]:
    """Every layout of that many devices whose expert, context (to 8) and pipeline (to 16) degrees are powers of two."""
    powers = [2**n for n in range(devices.bit_length()) if devices % 2**n == 0]
    stages = [p for p in powers if 1 < p <= min(16, config.num_hidden_layers)] if pipeline else [1]
    for stage, expert, context in itertools.product(stages, powers, (1, 2, 4, 8)):
        if devices % (stage * expert * context) == 0 and config.num_experts % expert == 0:
            yield Layout(devices // (stage * expert * context), expert, context, stage)


def search(
    config: K3Config,
    cluster: Cluster,
    workload: Workload,
    method: Method,
    *,
    efficiency: Efficiency | None = None,
) -> Plan:
    """The fastest layout that fits, or the one that misses by least. Raises PlanError when there is none to judge.

    Pipeline stages are considered only where nothing that k3rl runs today fits.
    """
    best: Plan | None = None
    for pipeline in (False, True):
        for rollout in _rollout_choices(config, cluster, workload):
            for layout in layouts(config, cluster.gpus - rollout, pipeline=pipeline):
                found = plan_layout(
                    config, cluster, workload, method, layout, rollout_gpus=rollout, efficiency=efficiency
                )
                if best is None or _rank(found) < _rank(best):
                    best = found
        if best is not None and best.fits:
            return best
    if best is None:
        raise PlanError(
            f"{cluster.gpus} devices are too few: one engine of this model takes {engine_size(config, cluster)}",
            key="--gpus", got=cluster.gpus, wanted="devices for an engine and for the learner",
        )  # fmt: skip
    return best


def _rank(plan: Plan) -> tuple[bool, float]:
    return not plan.fits, plan.seconds if plan.fits else plan.gpu_gib


def _rollout_choices(config: K3Config, cluster: Cluster, workload: Workload) -> list[int]:
    if workload.kind == "sft":
        return [0]
    if workload.rollout_gpus is not None:
        return [workload.rollout_gpus]
    one = engine_size(config, cluster)
    eighths = {cluster.gpus * part // 8 // one * one for part in (1, 2, 3, 4, 5, 6)}
    return sorted(count for count in eighths if 0 < count < cluster.gpus)


def suggestions(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> list[dict[str, Any]]:
    """For plain training, with less memory each time, and for LoRA: the fewest devices on which it fits."""
    leaner = dataclasses.replace(method, recompute="layer")
    ways = [
        method,
        leaner,
        dataclasses.replace(leaner, momentum_bytes=2),
        dataclasses.replace(leaner, offload=True),
        dataclasses.replace(leaner, lora_rank=method.lora_rank or 32),
    ]
    found = []
    for way in dict.fromkeys(ways):
        smallest = next(iter(_fitting(config, cluster, workload, way)), None)
        row: dict[str, Any] = {"method": way.words, "gpus": None}
        if smallest is not None:
            row |= {
                "gpus": smallest.learner_gpus + smallest.rollout_gpus,
                "layout": dataclasses.asdict(smallest.layout),
                "rollout_gpus": smallest.rollout_gpus,
                "runs_today": not smallest.not_yet,
                "gpu_gib": round(smallest.gpu_gib, 1),
                "host_gib": round(smallest.host_gib, 1),
                "seconds": round(smallest.seconds, 1),
            }
        found.append(row)
    return found


def _fitting(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> Iterator[Plan]:
    """Plans that fit, on more and more devices: powers of two and halfway between them."""
    sizes = sorted({*(2**n for n in range(13)), *(3 * 2**n for n in range(3, 11))})
    for count in sizes:
        if _least_gib(config, method, count) > cluster.gpu.gib:
            continue
        try:
            plan = search(config, dataclasses.replace(cluster, gpus=count), workload, method)
        except PlanError:
            continue
        if plan.fits:
            yield plan


def _least_gib(config: K3Config, method: Method, devices: int) -> float:
    """GiB a device that no layout can go below: everything that is trained or held, divided by all devices."""
    facts = model_counts(config)
    total = sum(facts.counts.values())
    if method.lora_rank:
        return (facts.routed * 0.53 + (total - facts.routed) * method.weight_bytes) / devices / GIB
    state = 0 if method.offload else 4 + (8 if method.optimizer == "adamw" else method.momentum_bytes)
    return total * (method.weight_bytes + method.gradient_bytes + state) / devices / GIB


def report(
    config: K3Config, cluster: Cluster, workload: Workload, plan: Plan, efficiency: Efficiency | None = None
) -> dict[str, Any]:
    """A plan as one JSON-ready object with the keys that `k3rl plan` promises."""
    efficiency = efficiency or Efficiency()
    return {
        "fits": plan.fits,
        "why_not": plan.why_not,
        "method": plan.method.words,
        "layout": dataclasses.asdict(plan.layout),
        "runs_today": not plan.not_yet,
        "not_run_today": plan.not_yet,
        "learner_gpus": plan.learner_gpus,
        "rollout_gpus": plan.rollout_gpus,
        "engine_gpus": plan.engine_gpus,
        "gpu_gib": round(plan.gpu_gib, 2),
        "memory_gib": {name: round(value / GIB, 3) for name, value in plan.memory.items()},
        "engine_memory_gib": {name: round(value / GIB, 3) for name, value in plan.engine_memory.items()},
        "host_gib": round(plan.host_gib, 2),
        "seconds": round(plan.seconds, 3),
        "step_s": {name: round(value, 4) for name, value in plan.step_s.items()},
        "bytes": {link: round(sum(each.values())) for link, each in plan.traffic.items()},
        "bytes_by_purpose": {
            link: {name: round(value) for name, value in each.items()} for link, each in plan.traffic.items()
        },
        "bottleneck": plan.bottleneck,
        "flops": {name: round(value) for name, value in forward_flops(config, workload, plan.method).items()},
        "assumptions": assumptions(cluster, workload, plan.method, efficiency),
    }


def assumptions(cluster: Cluster, workload: Workload, method: Method, efficiency: Efficiency) -> list[str]:
    """What the figures take for granted, in sentences."""
    gpu = cluster.gpu
    said = [
        f"devices of {gpu.gib:g} GiB ({cluster.reserve_gib:g} of them for the driver and fragments), {gpu.tflops:g} "
        f"TFLOP/s bf16, {gpu.hbm:g} GB/s memory, {gpu.nvlink:g} NVLink, {gpu.network:g} network, {gpu.pcie:g} PCIe",
        f"matrix products reach {efficiency.train:.0%} of the peak in training and {efficiency.optimizer:.0%} in the "
        f"optimizer, memory {efficiency.hbm:.0%}, links {efficiency.link:.0%}",
        f"weights take {method.weight_bytes} bytes a number, gradients {method.gradient_bytes}, masters 4, momentum "
        f"{8 if method.optimizer == 'adamw' else method.momentum_bytes}; masters and momentum are "
        f"{'sharded over' if method.shard_optimizer else 'repeated on'} the ranks that share a weight",
        "activations are those of the torch code, KDA states at every 16 tokens included; experts get equal loads",
        "links and arithmetic do not overlap; sampling overlaps training, one step ahead",
    ]
    if workload.kind != "sft":
        said.append(
            f"all {workload.prompts * workload.group} sequences have {workload.length} tokens; environments take no "
            f"time; an engine's own traffic is not counted; a version moves {workload.publish_share:.0%} of its bytes"
        )
    return said
