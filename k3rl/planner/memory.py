"""Bytes of one device of the learner, by part, and of the host memory of a node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np

from k3rl.losses import TABLE_ELEMENTS, tile_elements
from k3rl.model import K3Config, costs
from k3rl.model.costs import ROUTED, WIDE, MicroBatch, block_sums
from k3rl.optim import BUCKET_ELEMENTS, SLOTS
from k3rl.planner.frozen import cut_bytes, gathered_numbers
from k3rl.planner.inputs import GIB, Cluster, Layout, Method
from k3rl.planner.optimizer import optimizer_costs
from k3rl.planner.owners import owned_numbers
from k3rl.planner.shares import (
    device_parameters,
    expert_load,
    fullest_micro_batches,
    lora_parameters,
    model_counts,
)

MASTER_BYTES, ADAMW_BYTES = 4, 12
"""Of a master; of a master and two moments of AdamW."""
WORKING = ("activations", "logits", "working", "all_to_all", "step", "handed_over")
"""Parts that are there during forward-backward or the optimizer's step alone."""
PACKED_BYTES = 0.5 + 1 / 32
"""Of one number of a packed expert: half a byte, and a scale for 32."""


def learner_memory(
    config: K3Config, layout: Layout, method: Method, batch: MicroBatch, *, only_one: bool = False
) -> dict[str, float]:
    """Bytes of one device by part, when forward-backward is at its peak and gradients of earlier ones are there.

    With LoRA the frozen experts stay packed. `step` replaces `activations` during the optimizer's step; only the larger
    of the two counts, but for CUDA graphs, which keep the memory of both. only_one: a step has one micro-batch;
    gradients of all but experts then come as activations go.
    """
    held = device_parameters(config, layout, method)
    memory = standing_memory(config, layout, method)
    if method.shard_frozen > 1:
        memory["gathered"] = gathered_numbers(config) * method.weight_bytes
    replacing = held.trained_rest * method.gradient_bytes if only_one and not method.lora_rank else 0.0
    captured = method.captures(layout)
    working = activation_memory(config, layout, method, batch, replacing=0.0 if captured else replacing)
    step = _step_workspace(config, method, sum(owned_state(config, layout, method)))
    if captured:
        # A graph's backward gives the gradients of all but experts together, as they come, to be added.
        return memory | working | {"handed_over": held.trained_rest * method.weight_bytes, "step": step}
    return memory | (working if sum(working.values()) >= step else {"step": step})


def standing_memory(config: K3Config, layout: Layout, method: Method, *, even: bool = False) -> dict[str, float]:
    """Bytes of one device by part that are there all the time, whatever a micro-batch takes.

    even: with optimizer state as if all devices owned as much, which takes a hundredth of the time and is no more.
    """
    state = optimizer_state_bytes(config, layout, method, even=even)
    held = device_parameters(config, layout, method)
    memory = {
        "weights": weight_bytes(config, layout, method),
        "gradients": held.trained * method.gradient_bytes,
        "optimizer": 0.0 if method.offload else state,
    }
    if method.lora_rank:
        memory["adapters"] = held.trained * method.weight_bytes
    return memory


def weight_bytes(config: K3Config, layout: Layout, method: Method, *, whole: bool = False) -> float:
    """Bytes of a device's weights; whole: before frozen ones are cut over ranks."""
    held = device_parameters(config, layout, method)
    all_bytes = held.routed * (PACKED_BYTES if method.lora_rank else method.weight_bytes)
    all_bytes += held.rest * method.weight_bytes
    if whole or method.shard_frozen == 1:
        return all_bytes
    return all_bytes - cut_bytes(config, method, held) * (1 - 1 / method.shard_frozen)


def optimizer_state_bytes(config: K3Config, layout: Layout, method: Method, *, even: bool = False) -> float:
    """Bytes of masters and momentum on the device that owns most; even: see `standing_memory`."""
    muon, adamw = owned_state(config, layout, method, even=even)
    return muon * (MASTER_BYTES + method.momentum_bytes) + adamw * ADAMW_BYTES


def owned_state(config: K3Config, layout: Layout, method: Method, *, even: bool = False) -> tuple[float, float]:
    """Numbers that Muon and that AdamW trains, of those whose state the device keeps that has most bytes of it.

    Owners of whole matrices as `k3rl.parallel` chooses them; adapters, and stages of a pipeline, are divided evenly.
    """
    if not even and _exact_owners(layout, method):
        owned = owned_numbers(config, layout, method)
        muon, adamw = owned[int(np.argmax(_state_bytes(owned, method)))]
        return float(muon), float(adamw)
    held = device_parameters(config, layout, method)
    routed, rest = held.owned(layout, method)
    if method.lora_rank:
        return 0.0, routed + rest
    groups = optimizer_costs(config, method.optimizer)
    shares = [
        groups.muon[is_routed] / max(1, groups.muon[is_routed] + groups.adamw[is_routed]) for is_routed in (True, False)
    ]
    muon = routed * shares[0] + rest * shares[1]
    return muon, routed + rest - muon


def _exact_owners(layout: Layout, method: Method) -> bool:
    return method.shard_optimizer and not method.lora_rank and layout.pipeline == 1 and layout.devices > 1


def _state_bytes(owned: np.ndarray, method: Method) -> np.ndarray:
    """Bytes of state [ranks] for owned numbers [ranks, 2]."""
    return owned @ np.array([MASTER_BYTES + method.momentum_bytes, ADAMW_BYTES])


def least_gib(config: K3Config, method: Method, devices: int) -> float:
    """GiB a device that no layout can go below: everything that is trained or held, divided by all devices."""
    facts = model_counts(config)
    total = sum(facts.counts.values())
    if method.lora_rank:
        return (facts.routed * 0.53 + (total - facts.routed) * method.weight_bytes) / devices / GIB
    state = 0 if method.offload else 4 + (8 if method.optimizer == "adamw" else method.momentum_bytes)
    return total * (method.weight_bytes + method.gradient_bytes + state) / devices / GIB


def host_gib(config: K3Config, cluster: Cluster, layout: Layout, method: Method) -> float:
    """GiB on one node: the optimizer's state, with offload; or, if more, models before their frozen weights are cut."""
    ranks = min(cluster.node, layout.devices)
    state = 0.0
    if method.offload and _exact_owners(layout, method):
        each = _state_bytes(owned_numbers(config, layout, method), method)
        state = max(float(each[at : at + ranks].sum()) for at in range(0, len(each), ranks))
    elif method.offload:
        state = optimizer_state_bytes(config, layout, method) * ranks
    models = weight_bytes(config, layout, method, whole=True) * ranks if method.shard_frozen > 1 else 0.0
    return max(state, models) / GIB


def with_publication(memory: dict[str, float], config: K3Config, layout: Layout, method: Method) -> dict[str, float]:
    """The memory of a device of a learner that publishes its weights.

    `published` is the buffer in which a rank keeps what it sends of a version, as stored. Where versions are gathered
    on one device, for a delta or for engines of another kind, and where a checkpoint is written, a layer's experts
    arrive there whole; `gathered` replaces what the step takes if it is more. Of adapters neither is there.
    """
    if method.lora_rank:
        return memory
    held, facts = device_parameters(config, layout, method), model_counts(config)
    packed = PACKED_BYTES if config.quantization.weights != "none" else 2.0
    memory = memory | {"published": held.routed * packed + held.rest * 2.0}
    layer = facts.routed / max(1, facts.moe) * packed if layout.expert > 1 else 0.0
    working = {name: memory[name] for name in WORKING if name in memory}
    if layer > sum(working.values()):
        memory = {name: value for name, value in memory.items() if name not in working} | {"gathered": layer}
    return memory


def head_activations(config: K3Config, batch: MicroBatch) -> float:
    """Bytes that the loss keeps: the targets' rows, and their table of log probabilities or, where it is large, a
    number for each target."""
    wide = batch.wide_bytes
    if batch.targets * config.vocab_size > TABLE_ELEMENTS:
        return batch.targets * (batch.bytes_each * config.hidden_size + wide)
    row = (wide if batch.bytes_each < wide else 0) + batch.bytes_each
    return batch.targets * (row * config.hidden_size + wide * config.vocab_size)


@cache
def _layer_activations(config: K3Config, batch: MicroBatch) -> Mapping[str, float]:
    return costs.activations(config, batch)


def activation_memory(
    config: K3Config, layout: Layout, method: Method, batch: MicroBatch, *, replacing: float = 0.0
) -> dict[str, float]:
    """Bytes of one forward-backward at its peak, by part: saved tensors of all layers, or the stream and one layer.

    batch: of each rank in the mean; the result is of the one that needs most. replacing: bytes of gradients that take
    the place of activations.
    """
    return dict(_activation_memory(config, replace(layout, data=1), method, batch, replacing))


@lru_cache(maxsize=1 << 14)
def _activation_memory(
    config: K3Config, layout: Layout, method: Method, batch: MicroBatch, replacing: float
) -> dict[str, float]:
    """`activation_memory`, the same on every data rank."""
    on_ranks = fullest_micro_batches(
        config, batch, experts=layout.expert, context=layout.context, lora=bool(method.lora_rank)
    )
    every = (_rank_activation_memory(config, layout, method, own, replacing) for own in on_ranks)
    return max(every, key=lambda parts: sum(parts.values()))


def _rank_activation_memory(
    config: K3Config, layout: Layout, method: Method, batch: MicroBatch, replacing: float
) -> dict[str, float]:
    """`activation_memory` of one rank."""
    layers = _layer_activations(config, batch)
    table = min(batch.targets * config.vocab_size, tile_elements(batch.kernels))
    head = head_activations(config, batch) + 2.0 * table * batch.wide_bytes  # the table's gradient and the logits'
    if batch.kernels and batch.targets * config.vocab_size > TABLE_ELEMENTS:
        head += batch.targets * config.hidden_size * batch.wide_bytes  # sums of the rows' gradients
    recomputed = method.recompute == "layer"
    layer = _largest_site(config, layers) if recomputed else sum(layers.values()) / model_counts(config).layers
    # What the last layer's gradients take besides what it kept.
    during = costs.backward_rows(config, batch) if batch.kernels else 0.5 * layer
    if recomputed:
        during += layer
        head = max(0.0, head - during)  # the head is done before the first site runs again
    found = {
        "activations": max(0.0, _stage_activations(config, layout, method, batch) - replacing) + during,
        "logits": head,
        "working": _layer_gradient(config, layout, method),
    }
    if layout.expert > 1:
        rows = batch.tokens * config.num_experts_per_token * config.expert_hidden_size * batch.bytes_each
        found["all_to_all"] = 4.0 * rows
    return found


def _stage_activations(config: K3Config, layout: Layout, method: Method, batch: MicroBatch) -> float:
    """Bytes that the layers of a stage keep until their backward, of all micro-batches that are under way."""
    count = model_counts(config).layers
    share = math.ceil(count / layout.pipeline) / count
    if method.recompute == "layer":
        bank = block_sums(config) + 1
        layers = batch.tokens * config.hidden_size * (2.0 * count * batch.bytes_each + bank * batch.wide_bytes)
    else:
        layers = sum(_layer_activations(config, batch).values())
    return layers * share * layout.pipeline  # the first stage holds as many micro-batches as there are stages


def _largest_site(config: K3Config, layers: Mapping[str, float]) -> float:
    """Bytes that the attention or the MLP of one layer keeps, whichever is more."""
    counts = model_counts(config)
    experts = sum(layers.get(part, 0.0) for part in (ROUTED, "router", "shared_experts", "latent_projections"))
    sites = (
        (layers.get("kda", 0.0), counts.kda),
        (layers.get("mla", 0.0), counts.mla),
        (experts, counts.moe),
        (layers.get("dense_mlp", 0.0), counts.layers - counts.moe),
    )
    return max(total / count for total, count in sites if count)


def _layer_gradient(config: K3Config, layout: Layout, method: Method) -> float:
    """The gradient of one layer's experts, or of the largest other matrix, before it joins the sum."""
    moe = max(1, model_counts(config).moe)
    held = expert_load(config, layout.expert) / layout.expert
    bank = model_counts(config).routed * held / moe
    if method.lora_rank:  # and the experts of that layer, decoded
        adapters = lora_parameters(config, method.lora_rank)[True] * held / moe
        return (adapters + bank) * method.weight_bytes
    return max(bank, float(config.vocab_size * config.hidden_size)) * method.weight_bytes


def _step_workspace(config: K3Config, method: Method, owned: float) -> float:
    """Temporaries of the optimizer's largest bucket, and copies of state that is fetched or widened for it.

    owned: numbers whose state the device keeps.
    """
    if method.lora_rank:
        return min(owned, BUCKET_ELEMENTS) * (WIDE + (3 * WIDE if method.offload else 0))
    on_gpu = method.weight_bytes == 2  # products in bf16, and copies while others are computed with
    found = optimizer_costs(config, method.optimizer, 2 if on_gpu else WIDE)
    adamw = method.optimizer == "adamw"
    least = owned * WIDE * (1 if adamw else 6)  # everything in one bucket
    copied = float(WIDE * (method.momentum_bytes == 2 and not adamw))
    if method.offload:
        state = 3 * WIDE if adamw else WIDE + method.momentum_bytes
        copied += state * (SLOTS if on_gpu else 1)
    bucket = float(max(BUCKET_ELEMENTS, config.vocab_size * config.hidden_size)) if adamw else found.bucket
    return min(found.workspace, least) + copied * min(owned, bucket)
