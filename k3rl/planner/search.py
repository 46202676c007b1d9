"""Which layout to use: the fastest that fits, the fewest devices on which one does, and a plan as plain values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from k3rl.model import K3Config
from k3rl.planner.engine import engine_sizes, free_gib
from k3rl.planner.plan import (
    GIB,
    Cluster,
    Efficiency,
    Layout,
    Method,
    Plan,
    PlanError,
    Workload,
    forward_flops,
    held_bytes,
    model_counts,
    plan_layout,
)


def layouts(config: K3Config, devices: int, *, pipeline: bool = False) -> Iterator[Layout]:
    """Every layout of that many devices with no more expert ranks than experts, whose context (to 8) and pipeline (to
    16) degrees are powers of two."""
    powers = [2**n for n in range(devices.bit_length()) if devices % 2**n == 0]
    stages = [p for p in powers if 1 < p <= min(16, config.num_hidden_layers)] if pipeline else [1]
    experts = [n for n in range(1, min(devices, config.num_experts) + 1) if devices % n == 0]
    for stage, expert, context in itertools.product(stages[::-1], experts[::-1], (1, 2, 4, 8)):
        if devices % (stage * expert * context) == 0:
            yield Layout(devices // (stage * expert * context), expert, context, stage)


def search(
    config: K3Config,
    cluster: Cluster,
    workload: Workload,
    *methods: Method,
    efficiency: Efficiency | None = None,
) -> Plan:
    """The fastest layout that fits with any of the methods, or the one that misses by least.

    Pipeline stages are considered only where nothing that k3rl runs today fits. Raises PlanError when a number of
    rollout devices is asked for that leaves none to learn.
    """
    best = _search(config, cluster, workload, methods, efficiency)
    assert best is not None  # one device that learns is a layout
    return best


def _search(
    config: K3Config,
    cluster: Cluster,
    workload: Workload,
    methods: Sequence[Method],
    efficiency: Efficiency | None = None,
    *,
    misses: bool = True,
) -> Plan | None:
    """`search`; without misses None where nothing fits."""
    best: Plan | None = None
    for pipeline in (False, True):
        for rollout, devices in _divisions(config, cluster, workload):
            for layout, way in itertools.product(layouts(config, devices, pipeline=pipeline), methods):
                way = _dividing(way, layout)
                if (best or not misses) and _cannot_beat(best, config, cluster, layout, way):
                    continue
                for found in _judged(config, cluster, workload, way, layout, rollout, efficiency):
                    if best is None or _rank(found) < _rank(best):
                        best = found
        if best is not None and best.fits:
            return best
    return best if misses else None


def _cannot_beat(best: Plan | None, config: K3Config, cluster: Cluster, layout: Layout, method: Method) -> bool:
    """Whether what a layout holds before any pass is enough to know that `best` stays."""
    held = held_bytes(config, layout, method) / GIB
    return held > free_gib(cluster) and (best is None or best.fits or held > best.gpu_gib)


def best_way(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> Plan:
    """`search` with `method`, and with what takes less memory where that fits faster or alone: recomputed layers, and
    of LoRA frozen weights cut over the ranks of a node."""
    return search(config, cluster, workload, *_leaner(method, cluster))


def judge(
    config: K3Config,
    cluster: Cluster,
    workload: Workload,
    method: Method,
    layout: Layout,
    *,
    rollout_gpus: int,
    leaner: bool,
) -> Plan:
    """The layout that is given, in the passes that suit it, and with `leaner` in the best of `best_way`'s methods.

    Raises PlanError when the degrees do not fit the model or the cluster.
    """
    others = _leaner(method, cluster)[1:] if leaner else []
    methods = [method, *(_dividing(way, layout) for way in others)]
    tried = (_judged(config, cluster, workload, way, layout, rollout_gpus, None) for way in methods)
    return min(itertools.chain.from_iterable(tried), key=_rank)


def _dividing(method: Method, layout: Layout) -> Method:
    """Frozen weights over no more ranks than a stage's divide."""
    ranks = math.gcd(method.shard_frozen, layout.devices // layout.pipeline)
    return method if ranks == method.shard_frozen else dataclasses.replace(method, shard_frozen=ranks)


def _recomputed(method: Method) -> Method:
    return dataclasses.replace(method, recompute="layer")


def _leaner(method: Method, cluster: Cluster) -> list[Method]:
    """A method and what takes less memory, each once."""
    recomputed = _recomputed(method)
    return list(dict.fromkeys((method, recomputed, cut_over_node(recomputed, cluster))))


def cut_over_node(method: Method, cluster: Cluster) -> Method:
    """The same with frozen weights cut over the ranks of a node, where there are any."""
    if not method.lora_rank or method.shard_frozen > 1:
        return method
    return dataclasses.replace(method, shard_frozen=cluster.node)


def _rank(plan: Plan) -> tuple[bool, float]:
    return not plan.fits, plan.seconds if plan.fits else plan.gpu_gib


def _judged(
    config: K3Config,
    cluster: Cluster,
    workload: Workload,
    method: Method,
    layout: Layout,
    rollout: int,
    efficiency: Efficiency | None,
) -> Iterator[Plan]:
    """A layout in smaller and smaller passes, as long as a smaller one may be better."""
    for passes in _passes(workload, layout):
        found = plan_layout(config, cluster, passes, method, layout, rollout_gpus=rollout, efficiency=efficiency)
        yield found
        held = held_bytes(config, layout, method) / GIB
        if held > free_gib(cluster) or (found.fits and layout.pipeline == 1):
            return  # a smaller pass would not help, or would be slower; in stages it waits less


def _passes(workload: Workload, layout: Layout) -> list[Workload]:
    """The same work in smaller and smaller passes that still hold a sequence."""
    found = [workload]
    while workload.smaller_passes and len(found) < 4:
        tokens = found[-1].micro_batch_tokens // 2
        if tokens * layout.context < workload.length:
            break
        found.append(dataclasses.replace(workload, micro_batch_tokens=tokens))
    return found


def _divisions(config: K3Config, cluster: Cluster, workload: Workload) -> Iterator[tuple[int, int]]:
    """(devices that sample, devices that learn): all that are left, or a rounder number of them."""
    for rollout in _rollout_choices(config, cluster, workload):
        left = cluster.gpus - rollout
        for devices in sorted({left >> n << n for n in range(left.bit_length())}, reverse=True):
            yield rollout, devices


def _rollout_choices(config: K3Config, cluster: Cluster, workload: Workload) -> list[int]:
    if workload.kind == "sft":
        return [0]
    if (asked := workload.rollout_gpus) is not None:
        if asked >= cluster.gpus:
            raise PlanError(
                f"{asked} rollout devices of {cluster.gpus} leave none for the learner",
                key="--rollout-gpus", got=asked, wanted=f"less than {cluster.gpus}",
            )  # fmt: skip
        return [asked]
    sizes = engine_sizes(config, cluster)
    eighths = {cluster.gpus * part // 8 // size * size for part in range(1, 7) for size in sizes}
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
    plans = [search(config, cluster, workload, way) for way in ways(method, cluster)]
    rows = {plan.method.words: {"method": plan.method.words, "fits": plan.fits} | _about(plan) for plan in plans}
    return list(rows.values())


def suggestions(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> list[dict[str, Any]]:
    """For each of `ways` the fewest devices on which it fits, and on which it fits in a way that k3rl runs today."""
    found = []
    for way in ways(method, cluster):
        best, today = _fewest(config, cluster, workload, way)
        row = {"method": way.words, "gpus": _count(best), "gpus_today": _count(today)}
        found.append(row | (dict.fromkeys(_ABOUT) if best is None else _about(best)))
    return found


def _count(plan: Plan | None) -> int | None:
    """Devices of a cluster that just holds the plan."""
    return None if plan is None else plan.learner_gpus + plan.rollout_gpus


_ABOUT = (
    "layout",
    "micro_batch_tokens",
    "rollout_gpus",
    "runs_today",
    "not_run_today",
    "gpu_gib",
    "host_gib",
    "seconds",
)


def _about(plan: Plan) -> dict[str, Any]:
    values = (
        dataclasses.asdict(plan.layout),
        plan.micro_batch_tokens,
        plan.rollout_gpus,
        not plan.not_yet,
        plan.not_yet,
        round(plan.gpu_gib, 1),
        round(plan.host_gib, 1),
        round(plan.seconds, 1),
    )
    return dict(zip(_ABOUT, values, strict=True))


def _fewest(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> tuple[Plan | None, Plan | None]:
    """The plan on the fewest devices, and the one on the fewest as k3rl runs today.

    Powers of two and halfway between them, then what is below the first that fits: by devices, or by nodes above eight.
    """
    sizes = sorted({*(2**n for n in range(14)), *(3 * 2**n for n in range(12))})
    found: list[Plan | None] = [None, None]
    for before, size in itertools.pairwise([0, *sizes]):
        plan = _on(config, cluster, workload, method, size)
        for place in (0, 1):
            if found[place] is None and plan is not None and not (place and plan.not_yet):
                found[place] = _below(config, cluster, workload, method, before, plan, today=bool(place))
        if found[1] is not None:
            break
    return found[0], found[1]


def _below(
    config: K3Config, cluster: Cluster, workload: Workload, method: Method, before: int, plan: Plan, *, today: bool
) -> Plan:
    """The plan on the fewest devices between `before`, which are too few, and those of `plan`."""
    found = plan
    unit = cluster.node if before >= 8 * cluster.node else 1
    low, high = before // unit, -(-(plan.learner_gpus + plan.rollout_gpus) // unit)
    while high - low > 1:
        middle = (low + high) // 2
        tried = _on(config, cluster, workload, method, middle * unit)
        if tried is None or (today and tried.not_yet):
            low = middle
        else:
            found, high = tried, middle
    return found


def _on(config: K3Config, cluster: Cluster, workload: Workload, method: Method, count: int) -> Plan | None:
    """A plan that fits on `count` devices, or None."""
    if _least_gib(config, method, count) > free_gib(cluster):
        return None
    try:
        return _search(config, dataclasses.replace(cluster, gpus=count), workload, [method], misses=False)
    except PlanError:  # more devices sample than there are
        return None


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
        "flops": {name: round(value) for name, value in _pass_flops(config, workload, plan).items()},
        "step_flops": {name: round(value) for name, value in plan.flops.items()},
        "assumptions": assumptions(cluster, workload, plan.method, efficiency),
    }


def _pass_flops(config: K3Config, workload: Workload, plan: Plan) -> dict[str, float]:
    """Operations of one forward of `micro_batch_tokens`, by part."""
    passes = dataclasses.replace(workload, micro_batch_tokens=plan.micro_batch_tokens)
    return forward_flops(config, passes, plan.method)


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
