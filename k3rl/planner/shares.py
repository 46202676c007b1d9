"""What falls to one device: the weights that it holds, and its rows, of the rank that has most of them.

Neither experts nor rows need divide evenly (`k3rl.parallel.mesh.expert_run`, `k3rl.parallel.context.balanced_cuts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from k3rl.model import K3Config, costs, tensor_table
from k3rl.model.costs import ROUTED, MicroBatch
from k3rl.parallel import balanced_cuts, pair_cost
from k3rl.planner.inputs import Layout, Method, Workload

UNITS = 1 << 14  # that a micro-batch is cut in here: a share is known to one part in a thousand


@dataclass(frozen=True)
class ModelCounts:
    """Numbers of a model by where they go in a layout, and its layers of each kind."""

    counts: dict[str, int]
    routed: int
    rest: int  # all but experts, embedding, head and vision
    first: int  # embedding and vision, on the first stage
    last: int  # the head, on the last stage
    layers: int
    moe: int
    kda: int
    mla: int


@cache
def model_counts(config: K3Config) -> ModelCounts:
    """Counts of a configuration."""
    counts = costs.parameters(config)
    routed, last = counts.get(ROUTED, 0), counts["lm_head"]
    first = counts["embedding"] + counts.get("vision_tower", 0) + counts.get("mm_projector", 0)
    return ModelCounts(
        counts, routed, sum(counts.values()) - routed - first - last, first, last, config.num_hidden_layers,
        len(config.moe_layers), len(config.kda_layers), len(config.mla_layers),
    )  # fmt: skip


@cache
def lora_parameters(config: K3Config, rank: int) -> dict[bool, int]:
    """Numbers of the adapters {True: of routed experts, each its own; False: of attention and shared experts}."""
    found = {True: 0, False: 0}
    for entry in tensor_table(config):
        if entry.part in ("kda", "mla", "shared_experts", ROUTED) and len(entry.shape) == 2:
            found[entry.part == ROUTED] += entry.copies * rank * sum(entry.shape)
    return found


def expert_load(config: K3Config, ranks: int) -> float:
    """Experts of the rank that has most of them, over the mean."""
    return math.ceil(config.num_experts / ranks) * ranks / config.num_experts


@dataclass(frozen=True)
class DeviceParameters:
    """Numbers that the device which has most holds: of routed experts and of the rest; trained ones of each."""

    routed: float
    rest: float
    trained_routed: float
    trained_rest: float

    @property
    def trained(self) -> float:
        return self.trained_routed + self.trained_rest

    def owned(self, layout: Layout, method: Method) -> tuple[float, float]:
        """Trained numbers (of routed experts, of the rest) whose optimizer state this device keeps."""
        experts, rest = (layout.replicas, layout.stage_devices) if method.shard_optimizer else (1, 1)
        return self.trained_routed / experts, self.trained_rest / rest


@lru_cache(maxsize=1 << 14)
def device_parameters(config: K3Config, layout: Layout, method: Method) -> DeviceParameters:
    """What the device that has most holds in a layout."""
    facts = model_counts(config)
    share = math.ceil(facts.layers / layout.pipeline) / facts.layers
    ends = max(facts.first, facts.last) if layout.pipeline > 1 else facts.first + facts.last
    experts = share * expert_load(config, layout.expert) / layout.expert
    rest, routed = facts.rest * share + ends, facts.routed * experts
    if not method.lora_rank:
        return DeviceParameters(routed, rest, routed, rest)
    adapters = lora_parameters(config, method.lora_rank)
    return DeviceParameters(routed, rest, adapters[True] * experts, adapters[False] * share)


def micro_batch(workload: Workload, method: Method) -> MicroBatch:
    """The micro-batch that a device runs, in the mean over the ranks of a context axis."""
    tokens = workload.micro_batch_tokens
    share = workload.new_tokens / workload.length if workload.new_tokens else 1.0
    return MicroBatch(tokens, workload.length, math.ceil(tokens * share), method.weight_bytes, method.kernels)


def device_tokens(workload: Workload, layout: Layout) -> float:
    """Tokens in a step of a device that has most of them: a sequence is whole on the ranks of one context axis."""
    sequences = math.ceil(workload.prompts * workload.group / (layout.data * layout.expert))
    return sequences * workload.length / layout.context


@cache
def _cost_of_pairs(config: K3Config) -> float:
    return pair_cost(config)


@cache
def context_shares(config: K3Config, tokens: int, length: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """(rows, rows of their first document on the ranks before) of each of `ranks`, which share `ranks` * tokens rows.

    Documents have `length` rows. Cuts balance cost, so ranks early in a long document have more rows than later ones.
    """
    total = tokens * ranks
    unit = math.ceil(total / UNITS)
    each = min(max(1, length // unit), max(1, total // unit))
    whole, rest = divmod(max(ranks, total // unit), each)
    ends = np.cumsum([0, *[each] * whole, *[rest] * (rest > 0)])
    cuts = balanced_cuts(np.full(ends[-1], unit), ends, ranks, _cost_of_pairs(config))
    begins = ends[np.searchsorted(ends, cuts[:-1], side="right") - 1]
    return tuple(zip((np.diff(cuts) * unit).tolist(), ((cuts[:-1] - begins) * unit).tolist(), strict=True))


def fullest_micro_batches(
    config: K3Config, mean: MicroBatch, *, experts: int, context: int, lora: bool
) -> list[MicroBatch]:
    """The micro-batches of the ranks that may need most memory: of most rows, and of most rows before their own.

    mean: what a rank has in the mean; experts and context: ranks of those axes.
    """
    mean = replace(mean, grouped=experts == 1 and not lora, load=expert_load(config, experts))
    if context == 1:
        return [mean]
    shares = context_shares(config, mean.tokens, mean.length, context)
    fullest = {max(shares), max(shares, key=lambda share: share[::-1])}
    return [
        replace(mean, tokens=rows, targets=math.ceil(mean.targets * rows / mean.tokens), before=before, ranks=context)
        for rows, before in sorted(fullest)
    ]
