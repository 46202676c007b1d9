"""Which layout to use: the fastest that fits, the fewest devices on which one does, and a plan as plain values."""

from __future__ import annotations

import dataclasses
import itertools
import math
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
    """The fastest layout that fits, or the one that misses by least.

    Pipeline stages are considered only where nothing that k3rl runs today fits. Raises PlanError when a number of
    rollout devices is asked for that leaves none to learn.
    """
    best: Plan | None = None
    for pipeline in (False, True):
        for rollout in _rollout_choices(config, cluster, workload):
            for layout in layouts(config, cluster.gpus - rollout, pipeline=pipeline):
                for passes in _passes(workload, layout):
                    stage = layout.devices // layout.pipeline
                    way = dataclasses.replace(method, shard_frozen=math.gcd(method.shard_frozen, stage))
                    found = plan_layout(
                        config, cluster, passes, way, layout, rollout_gpus=rollout, efficiency=efficiency
                    )
                    if best is None or _rank(found) < _rank(best):
                        best = found
                    held = sum(
                        found.memory.get(part, 0.0) for part in ("weights", "gradients", "optimizer", "adapters")
                    )
                    if found.fits or held > (cluster.gpu.gib - cluster.reserve_gib) * GIB:
                        break  # a smaller pass would be slower, or would not help
        if best is not None and best.fits:
            return best
    if best is None:
        raise PlanError(
            f"{workload.rollout_gpus} rollout devices of {cluster.gpus} leave none for the learner",
            key="--rollout-gpus", got=workload.rollout_gpus, wanted=f"less than {cluster.gpus}",
        )  # fmt: skip
    return best


def best_way(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> Plan:
    """`search` with `method`; where that does not fit, layers are recomputed if that fits or misses by less.

    Of LoRA, frozen weights are then cut over the ranks of a node too.
    """
    best = search(config, cluster, workload, method)
    leaner = dataclasses.replace(method, recompute="layer")
    for way in (leaner, cut_over_node(leaner, cluster)):
        if not best.fits and way != method:
            best = min(best, search(config, cluster, workload, way), key=_rank)
    return best


def cut_over_node(method: Method, cluster: Cluster) -> Method:
    """The same with frozen weights cut over the ranks of a node, where there are any."""
    if not method.lora_rank or method.shard_frozen > 1:
        return method
    return dataclasses.replace(method, shard_frozen=cluster.node)


def _rank(plan: Plan) -> tuple[bool, float]:
    return not plan.fits, plan.seconds if plan.fits else plan.gpu_gib


def _passes(workload: Workload, layout: Layout) -> list[Workload]:
    """The same work in smaller and smaller passes that still hold a sequence."""
    found = [workload]
    while workload.smaller_passes and len(found) < 4:
        tokens = found[-1].micro_batch_tokens // 2
        if tokens * layout.context < workload.length:
            break
        found.append(dataclasses.replace(workload, micro_batch_tokens=tokens))
    return found


def _rollout_choices(config: K3Config, cluster: Cluster, workload: Workload) -> list[int]:
    if workload.kind == "sft":
        return [0]
    if workload.rollout_gpus is not None:
        return [workload.rollout_gpus]
    one = engine_size(config, cluster)
    eighths = {cluster.gpus * part // 8 // one * one for part in (1, 2, 3, 4, 5, 6)}
    fitting = sorted(count for count in eighths if 0 < count < cluster.gpus)
    return fitting or [0]  # too few for an engine: the learner is judged alone, and the plan says so


def ways(method: Method, cluster: Cluster) -> list[Method]:
    """Plain training, with less memory each time, and LoRA."""
    leaner = dataclasses.replace(method, recompute="layer")
    found = [method, leaner]
    if not method.lora_rank:
        if method.optimizer != "adamw":
            found.append(dataclasses.replace(leaner, momentum_bytes=2))
        found.append(dataclasses.replace(leaner, offload=True))
    lora = dataclasses.replace(leaner, lora_rank=method.lora_rank or 32, momentum_bytes=4, offload=method.offload)
    found += [lora, cut_over_node(lora, cluster)]
    return list(dict.fromkeys(found))


def here(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> list[dict[str, Any]]:
    """Each of `ways` on this very cluster, in the layout that suits it best."""
    return [
        {"method": way.words, "fits": plan.fits} | _about(plan)
        for way in ways(method, cluster)
        for plan in (search(config, cluster, workload, way),)
    ]


def suggestions(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> list[dict[str, Any]]:
    """For each of `ways` the fewest devices on which it fits, and on which it fits in a way that k3rl runs today."""
    found = []
    for way in ways(method, cluster):
        row: dict[str, Any] = {"method": way.words, "gpus": None, "gpus_today": None}
        for plan in _fitting(config, cluster, workload, way):
            count = plan.learner_gpus + plan.rollout_gpus
            if row["gpus"] is None:
                row |= {"gpus": count} | _about(plan)
            if not plan.not_yet:
                row["gpus_today"] = count
                break
        found.append(row)
    return found


def _about(plan: Plan) -> dict[str, Any]:
    return {
        "layout": dataclasses.asdict(plan.layout),
        "micro_batch_tokens": plan.micro_batch_tokens,
        "rollout_gpus": plan.rollout_gpus,
        "runs_today": not plan.not_yet,
        "not_run_today": plan.not_yet,
        "gpu_gib": round(plan.gpu_gib, 1),
        "host_gib": round(plan.host_gib, 1),
        "seconds": round(plan.seconds, 1),
    }


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
        "micro_batch_tokens": plan.micro_batch_tokens,
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


def _momentum(method: Method) -> str:
    return "moments 8" if method.optimizer == "adamw" else f"momentum {method.momentum_bytes} (AdamW's moments 8)"


def _activations(method: Method) -> str:
    if not method.kernels:
        return "activations are those of the torch code, KDA states at every 16 tokens included"
    said = "activations are those of the kernels, KDA states at every 32 tokens included"
    if method.capture and not method.lora_rank:
        said += "; where one rank holds all experts and whole documents, passes and steps are CUDA graphs, which keep "
        said += "the memory of both"
    return said


def _frozen(method: Method) -> str:
    if method.shard_frozen == 1:
        return "what is no expert is whole on every rank of a stage"
    return (
        f"what is no expert is cut over {method.shard_frozen} neighbouring ranks, gathered a part of a layer at a time "
        "in each forward and backward, and whole in host memory while a model is loaded"
    )


def assumptions(cluster: Cluster, workload: Workload, method: Method, efficiency: Efficiency) -> list[str]:
    """What the figures take for granted, in sentences."""
    gpu = cluster.gpu
    said = [
        f"devices of {gpu.gib:g} GiB ({cluster.reserve_gib:g} of them for the driver and fragments), {gpu.tflops:g} "
        f"TFLOP/s bf16, {gpu.hbm:g} GB/s memory, {gpu.nvlink:g} NVLink, {gpu.network:g} network, {gpu.pcie:g} PCIe",
        f"matrix products reach {efficiency.train:.0%} of the peak in training and {efficiency.optimizer:.0%} in the "
        f"optimizer, memory {efficiency.hbm:.0%}, links {efficiency.link:.0%}",
        f"weights take {method.weight_bytes} bytes a number, gradients {method.gradient_bytes}, masters 4, "
        + ("moments of adapters 8; frozen experts stay packed" if method.lora_rank else _momentum(method))
        + f"; masters and momentum are {'sharded over' if method.shard_optimizer else 'repeated on'} the ranks that "
        "share a weight; " + _frozen(method),
        _activations(method) + "; experts get equal loads",
        "links and arithmetic do not overlap; sampling overlaps training, one step ahead",
    ]
    if workload.kind != "sft":
        said.append(
            f"all {workload.prompts * workload.group} sequences have {workload.length} tokens; environments take no "
            f"time; an engine's own traffic is not counted; a version moves {workload.publish_share:.0%} of its bytes"
        )
    return said
