"""What the engines of a planned run hold, how many devices one has, and how long they sample."""

from __future__ import annotations

import math
from functools import cache, lru_cache

from k3rl.model import K3Config, costs
from k3rl.model.costs import ROUTED, MicroBatch
from k3rl.planner.inputs import GIB, GPUS, Cluster, Workload
from k3rl.planner.work import part_flops


@cache
def _stored_bytes(config: K3Config) -> dict[str, int]:
    return costs.stored_bytes(config)


def checkpoint_bytes(config: K3Config) -> int:
    """Bytes of a checkpoint."""
    return sum(_stored_bytes(config).values())


def engine_size(config: K3Config, cluster: Cluster) -> int:
    """The fewest devices, a power of two, whose memory holds the stored weights in 7 parts of 10."""
    return _size(config, cluster.free_gib)


def _size(config: K3Config, free: float) -> int:
    return int(2 ** max(0, math.ceil(math.log2(checkpoint_bytes(config) / (free * GIB * 0.7)))))


def engine_sizes(config: K3Config, cluster: Cluster) -> list[int]:
    """Devices that an engine may have: the fewest, and more up to the fewest of the smallest known devices.

    More devices read the weights less often for a token. The end does not depend on the device's memory, so a device
    with more of it can do all that one with less does.
    """
    smallest = min(gpu.gib for gpu in GPUS.values())
    least, most = engine_size(config, cluster), _size(config, smallest - cluster.reserve_gib)
    return [least * 2**n for n in range(max(1, (most // least).bit_length()))]


def fastest_engine(
    config: K3Config, cluster: Cluster, workload: Workload, rollout_gpus: int
) -> tuple[int, int, dict[str, float], dict[str, float]]:
    """(devices of an engine, engines, bytes of one of its devices, seconds of sampling) on these devices.

    No engines and nothing else where the devices are too few for one.
    """
    size, engines, memory, times = _fastest_engine(config, cluster, workload, rollout_gpus)
    return size, engines, dict(memory), dict(times)


@lru_cache(maxsize=1 << 14)
def _fastest_engine(
    config: K3Config, cluster: Cluster, workload: Workload, rollout_gpus: int
) -> tuple[int, int, dict[str, float], dict[str, float]]:
    """`fastest_engine`, which a search of layouts asks for few numbers of devices."""
    least = engine_size(config, cluster)
    best: tuple[int, int, dict[str, float], dict[str, float]] = (least if rollout_gpus else 0, 0, {}, {})
    for size in engine_sizes(config, cluster):
        if not (engines := rollout_gpus // size):
            break
        memory, waves = _engine_memory(config, cluster, workload, size, engines)
        times = _rollout_times(config, cluster, workload, size, engines, waves)
        if not best[1] or sum(times.values()) < sum(best[3].values()):
            best = size, engines, memory, times
    return best


def _engine_memory(
    config: K3Config, cluster: Cluster, workload: Workload, engine_gpus: int, engines: int
) -> tuple[dict[str, float], int]:
    """Bytes of one device of an engine, and in how many waves the sequences run where their states do not all fit."""
    fixed, each = costs.sequence_state_bytes(config)
    one = fixed + each * workload.length
    weights = checkpoint_bytes(config) / engine_gpus
    free = cluster.free_gib * GIB - weights
    together = max(1, math.floor(free * 0.9 * engine_gpus / one))
    wanted = math.ceil(workload.prompts * workload.group / engines)
    waves = math.ceil(wanted / together)
    return {"weights": weights, "states": min(wanted, together) * one / engine_gpus}, waves


def _rollout_times(
    config: K3Config,
    cluster: Cluster,
    workload: Workload,
    engine_gpus: int,
    engines: int,
    waves: int,
) -> dict[str, float]:
    """Seconds of one engine for its share of the sequences: prompts once a group, then a token a step."""
    sequences = workload.prompts * workload.group / engines / waves
    batch = MicroBatch(workload.prompt_tokens, workload.prompt_tokens, 1)
    prompt = sum(part_flops(config, batch).values()) * workload.prompts / engines / engine_gpus
    stored = _stored_bytes(config)
    touched = 1.0 - (1.0 - config.num_experts_per_token / config.num_experts) ** sequences
    read = stored.get(ROUTED, 0) * touched + sum(stored.values()) - stored.get(ROUTED, 0) - stored["embedding"]
    fixed, each = costs.sequence_state_bytes(config)
    states = sequences * (2 * fixed + each * (workload.prompt_tokens + workload.new_tokens / 2))
    one = MicroBatch(1, 1, 1)
    work = sum(part_flops(config, one).values()) * sequences
    step = max((read + states) / engine_gpus / cluster.memory_rate, work / engine_gpus / cluster.train_rate)
    return {"rollout prompts": prompt / cluster.train_rate, "rollout tokens": workload.new_tokens * waves * step}
