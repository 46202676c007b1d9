"""Which layout to use: the fastest that fits, how other training methods compare, and the fewest devices for each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from k3rl.model import K3Config
from k3rl.planner.engine import engine_sizes
from k3rl.planner.inputs import GIB, Cluster, Layout, Method, PlanError, Workload
from k3rl.planner.memory import least_gib, standing_memory
from k3rl.planner.plan import Plan, plan_layout


def layouts(config: K3Config, devices: int, *, pipeline: bool = False) -> Iterator[Layout]:
    """Every layout of that many devices with no more expert ranks than experts, whose context (to 8) and pipeline (to
    16) degrees are powers of two."""
    powers = [2**n for n in range(devices.bit_length()) if devices % 2**n == 0]
    stages = [p for p in powers if 1 < p <= min(16, config.num_hidden_layers)] if pipeline else [1]
    experts = [n for n in range(1, min(devices, config.num_experts) + 1) if devices % n == 0]
    for stage, expert, context in itertools.product(stages[::-1], experts[::-1], (1, 2, 4, 8)):
        if devices % (stage * expert * context) == 0:
            yield Layout(devices // (stage * expert * context), expert, context, stage)


def fastest_plan(config: K3Config, cluster: Cluster, workload: Workload, methods: Sequence[Method]) -> Plan:
    """The fastest layout that fits with any of the methods, or the one that misses by least.

    Pipeline stages are considered only where nothing that k3rl runs fits. Raises PlanError when a number of rollout
    devices is asked for that leaves none to learn.
    """
    best = _search(config, cluster, workload, methods)
    assert best is not None  # one device that learns is a layout
    return best


def fastest_plan_of_layout(
    config: K3Config,
    cluster: Cluster,
    workload: Workload,
    methods: Sequence[Method],
    layout: Layout,
    *,
    rollout_gpus: int,
) -> Plan:
    """The layout with the method and the micro-batch that suit it best.

    The first method is planned as it is; of the others, frozen weights are cut over ranks that divide the layout's.
    Raises PlanError when the degrees, or what the first method asks for, do not fit the model or the cluster.
    """
    tried = [methods[0], *(_dividing(other, layout) for other in methods[1:])]
    plans = (_plans(config, cluster, workload, method, layout, rollout_gpus) for method in tried)
    return min(itertools.chain.from_iterable(plans), key=_rank)


def memory_savers(method: Method, cluster: Cluster) -> list[Method]:
    """A method and what takes less memory, each once: recomputed layers, and of LoRA frozen weights cut over the ranks
    of a node."""
    recomputed = dataclasses.replace(method, recompute="layer")
    return _each_once([method, recomputed, _cut_over_node(recomputed, cluster)])


def training_methods(method: Method, cluster: Cluster) -> list[Method]:
    """A method, the same with less memory each time, and LoRA."""
    recomputed = dataclasses.replace(method, recompute="layer")
    found = [method, recomputed]
    if not method.lora_rank:
        if method.optimizer != "adamw":
            found.append(dataclasses.replace(recomputed, momentum_bytes=2))
        found.append(dataclasses.replace(recomputed, offload=True))
    lora = dataclasses.replace(recomputed, lora_rank=method.lora_rank or 32, momentum_bytes=4, offload=method.offload)
    return _each_once([*found, lora, _cut_over_node(lora, cluster)])


def _each_once(methods: Iterable[Method]) -> list[Method]:
    return list(dict.fromkeys(methods))


def _cut_over_node(method: Method, cluster: Cluster) -> Method:
    """The same with frozen weights cut over the ranks of a node, where there are any."""
    if not method.lora_rank or method.shard_frozen > 1:
        return method
    return dataclasses.replace(method, shard_frozen=cluster.node)


def _dividing(method: Method, layout: Layout) -> Method:
    """The same with frozen weights over a number of ranks that divides those of a stage."""
    ranks = math.gcd(method.shard_frozen, layout.stage_devices)
    return method if ranks == method.shard_frozen else dataclasses.replace(method, shard_frozen=ranks)


def compare_methods(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> list[dict[str, Any]]:
    """A row for each of `training_methods` on this cluster, in the layout that suits it best."""
    plans = [fastest_plan(config, cluster, workload, [each]) for each in training_methods(method, cluster)]
    rows = {plan.method.words: {"method": plan.method.words, "fits": plan.fits} | _row(plan) for plan in plans}
    return list(rows.values())


def smallest_clusters(config: K3Config, cluster: Cluster, workload: Workload, method: Method) -> list[dict[str, Any]]:
    """A row for each of `training_methods`: the fewest devices on which it fits, and on which k3rl can run it."""
    rows = []
    for each in training_methods(method, cluster):
        smallest, supported = _smallest(config, cluster, workload, each)
        row = {"method": each.words, "gpus": _count(smallest), "gpus_today": _count(supported)}
        rows.append(row | (dict.fromkeys(_ROW_KEYS) if smallest is None else _row(smallest)))
    return rows


_ROW_KEYS = (
    "layout",
    "micro_batch_tokens",
    "rollout_gpus",
    "runs_today",
    "not_run_today",
    "gpu_gib",
    "host_gib",
    "seconds",
)


def _row(plan: Plan) -> dict[str, Any]:
    values = (
        dataclasses.asdict(plan.layout),
        plan.micro_batch_tokens,
        plan.rollout_gpus,
        not plan.unsupported,
        plan.unsupported,
        round(plan.gpu_gib, 1),
        round(plan.host_gib, 1),
        round(plan.seconds, 1),
    )
    return dict(zip(_ROW_KEYS, values, strict=True))


def _count(plan: Plan | None) -> int | None:
    """Devices of a cluster that just holds the plan."""
    return None if plan is None else plan.learner_gpus + plan.rollout_gpus


def _search(
    config: K3Config, cluster: Cluster, workload: Workload, methods: Sequence[Method], *, must_fit: bool = False
) -> Plan | None:
    """`fastest_plan`; with must_fit None where nothing fits."""
    best: Plan | None = None
    for pipeline in (False, True):
        for rollout_gpus, learner_gpus in _divisions(config, cluster, workload):
            for layout, method in itertools.product(layouts(config, learner_gpus, pipeline=pipeline), methods):
                method = _dividing(method, layout)
                if (best or must_fit) and _cannot_beat(best, config, cluster, layout, method):
                    continue
                for found in _plans(config, cluster, workload, method, layout, rollout_gpus):
                    if best is None or _rank(found) < _rank(best):
                        best = found
        if best is not None and best.fits:
            return best
    return None if must_fit else best


def _cannot_beat(best: Plan | None, config: K3Config, cluster: Cluster, layout: Layout, method: Method) -> bool:
    """Whether what a layout holds before any micro-batch is enough to know that `best` stays."""
    held = _standing_gib(config, layout, method)
    return held > cluster.free_gib and (best is None or best.fits or held > best.gpu_gib)


def _standing_gib(config: K3Config, layout: Layout, method: Method) -> float:
    return sum(standing_memory(config, layout, method, even=True).values()) / GIB


def _rank(plan: Plan) -> tuple[bool, float]:
    """Smaller is better: what fits, by its time; what does not, by its memory."""
    return not plan.fits, plan.seconds if plan.fits else plan.gpu_gib


def _plans(
    config: K3Config, cluster: Cluster, workload: Workload, method: Method, layout: Layout, rollout_gpus: int
) -> Iterator[Plan]:
    """Plans of a layout with smaller and smaller micro-batches, as long as a smaller one may be better."""
    for chosen in micro_batch_choices(workload, layout):
        found = plan_layout(config, cluster, chosen, method, layout, rollout_gpus=rollout_gpus)
        yield found
        too_large = _standing_gib(config, layout, method) > cluster.free_gib
        if too_large or (found.fits and layout.pipeline == 1):
            return  # a smaller one would not help, or would be slower; in stages it waits less


def micro_batch_choices(workload: Workload, layout: Layout) -> list[Workload]:
    """The same work in smaller and smaller micro-batches that still hold a sequence."""
    found = [workload]
    while workload.smaller_micro_batches and len(found) < 4:
        tokens = found[-1].micro_batch_tokens // 2
        if tokens * layout.context < workload.length:
            break
        found.append(dataclasses.replace(workload, micro_batch_tokens=tokens))
    return found


def _divisions(config: K3Config, cluster: Cluster, workload: Workload) -> Iterator[tuple[int, int]]:
    """(devices that sample, devices that learn): all that are left, or a rounder number of them."""
    for rollout_gpus in _rollout_choices(config, cluster, workload):
        left = cluster.gpus - rollout_gpus
        for devices in sorted({left >> n << n for n in range(left.bit_length())}, reverse=True):
            yield rollout_gpus, devices


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
    return fitting or [0]  # too few for an engine: the learner is planned alone, and the plan says so


def _smallest(
    config: K3Config, cluster: Cluster, workload: Workload, method: Method
) -> tuple[Plan | None, Plan | None]:
    """The plan on the fewest devices, and the one on the fewest that k3rl can run.

    Powers of two and halfway between them, then what is below the first that fits: by devices, or by nodes above eight.
    """
    sizes = sorted({*(2**n for n in range(14)), *(3 * 2**n for n in range(12))})
    found: dict[bool, Plan | None] = {False: None, True: None}  # by whether k3rl must be able to run it
    for before, size in itertools.pairwise([0, *sizes]):
        plan = _fitting(config, cluster, workload, method, size)
        for supported in found:
            if found[supported] is None and plan is not None and not (supported and plan.unsupported):
                found[supported] = _bisected(config, cluster, workload, method, before, plan, supported=supported)
        if found[True] is not None:
            break
    return found[False], found[True]


def _bisected(
    config: K3Config, cluster: Cluster, workload: Workload, method: Method, before: int, plan: Plan, *, supported: bool
) -> Plan:
    """The plan on the fewest devices between `before`, which are too few, and those of `plan`."""
    found = plan
    unit = cluster.node if before >= 8 * cluster.node else 1
    low, high = before // unit, -(-(plan.learner_gpus + plan.rollout_gpus) // unit)
    while high - low > 1:
        middle = (low + high) // 2
        tried = _fitting(config, cluster, workload, method, middle * unit)
        if tried is None or (supported and tried.unsupported):
            low = middle
        else:
            found, high = tried, middle
    return found


def _fitting(config: K3Config, cluster: Cluster, workload: Workload, method: Method, devices: int) -> Plan | None:
    """A plan that fits on so many devices, or None."""
    if least_gib(config, method, devices) > cluster.free_gib:
        return None
    try:
        smaller = dataclasses.replace(cluster, gpus=devices)
        return _search(config, smaller, workload, [method], must_fit=True)
    except PlanError:  # more devices sample than there are
        return None
