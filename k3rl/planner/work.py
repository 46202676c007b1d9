"""Arithmetic of a step: operations of the learner, and the seconds that they take."""

from __future__ import annotations

from functools import cache

from k3rl.model import K3Config, costs
from k3rl.model.costs import ROUTED, MicroBatch
from k3rl.planner.inputs import Cluster, Layout, Method, Workload
from k3rl.planner.memory import optimizer_state_bytes, owned_state
from k3rl.planner.optimizer import optimizer_costs
from k3rl.planner.shares import device_tokens, expert_load, micro_batch


@cache
def part_flops(config: K3Config, batch: MicroBatch) -> dict[str, float]:
    """`k3rl.model.costs.flops`, counted once."""
    return costs.flops(config, batch)


def train_flops(
    config: K3Config, workload: Workload, method: Method, layout: Layout, load: float = 1.0
) -> dict[str, float]:
    """Operations of a step by phase, of all devices of the learner together.

    load: over the mean, of routed experts; with it all devices are counted as busy as the one that has most.
    """
    batch = micro_batch(workload, method)
    parts = part_flops(config, batch)
    forward = (sum(parts.values()) + (load - 1) * parts.get(ROUTED, 0.0)) / batch.tokens * workload.tokens
    # Frozen weights need no gradient of their own.
    found = {"forward": forward, "backward": (1.0 if method.lora_rank else 2.0) * forward}
    if method.recompute == "layer":
        found["recompute"] = forward
    if not method.lora_rank:
        orthogonal = optimizer_costs(config, method.optimizer).flops
        repeated = (1, 1) if method.shard_optimizer else (layout.replicas, layout.stage_devices)
        found["optimizer"] = load * orthogonal[True] * repeated[0] + orthogonal[False] * repeated[1]
    return found


def train_times(
    config: K3Config, cluster: Cluster, workload: Workload, method: Method, layout: Layout
) -> dict[str, float]:
    """Seconds of arithmetic by phase, on the device that has most."""
    most = train_flops(config, workload, method, layout, expert_load(config, layout.expert))
    flops = {name: each / layout.devices for name, each in most.items()}
    optimizer = flops.pop("optimizer", 0.0) / (cluster.gpu.tflops * 1e12 * cluster.efficiency.optimizer)
    tokens = device_tokens(workload, layout)
    most_tokens = tokens * layout.stage_devices / workload.tokens
    times = {name: each * most_tokens / cluster.train_rate for name, each in flops.items()}
    if layout.pipeline > 1:
        micro_batches = max(1.0, tokens / workload.micro_batch_tokens)
        times["bubble"] = sum(times.values()) * (layout.pipeline - 1) / micro_batches
    owned = sum(owned_state(config, layout, method))
    moved = owned * (method.gradient_bytes + method.weight_bytes)
    moved += 2 * optimizer_state_bytes(config, layout, method)
    times["optimizer"] = optimizer + moved / cluster.memory_rate
    return times
