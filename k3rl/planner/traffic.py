"""Bytes that one device of the learner sends in a step, by link and purpose."""

from __future__ import annotations

import math

from k3rl.model import K3Config
from k3rl.model.costs import WIDE, block_sums
from k3rl.numerics import mx
from k3rl.planner.engine import checkpoint_bytes
from k3rl.planner.frozen import cut_bytes, frozen_parts
from k3rl.planner.inputs import Cluster, Layout, Method, Workload
from k3rl.planner.memory import optimizer_state_bytes
from k3rl.planner.shares import device_parameters, device_tokens, lora_parameters, model_counts


def traffic(
    config: K3Config, cluster: Cluster, workload: Workload, method: Method, layout: Layout, engines: int
) -> dict[str, dict[str, float]]:
    """Bytes that one device sends in one step: {link: {purpose: bytes}}. engines: that get the new weights."""
    found: dict[str, dict[str, float]] = {"nvlink": {}, "network": {}, "pcie": {}}

    def add(purpose: str, moved: float, size: int) -> None:
        for link, share in _by_link(size, cluster.node).items():
            if moved * share:
                found[link][purpose] = found[link].get(purpose, 0.0) + moved * share

    facts, forwards = model_counts(config), 1 + (method.recompute == "layer")
    tokens = device_tokens(workload, layout)
    stage = math.ceil(facts.layers / layout.pipeline) / facts.layers
    forward, backward = expert_bytes(config, layout.expert, method.weight_bytes)
    add("experts", tokens * (forwards * forward + backward) * facts.moe * stage, layout.expert)
    if layout.context > 1:
        each = _context_bytes(config, workload, method, layout)
        add("context", (forwards + 1) * each * stage, layout.context)
    rest, routed = gradient_bytes(config, layout, method)
    add("gradients", rest, layout.stage_devices)
    add("gradients", routed, layout.replicas)
    if layout.pipeline > 1:
        bank = block_sums(config) + 1
        found["network"]["stages"] = 2 * tokens * config.hidden_size * method.weight_bytes * bank
    if method.shard_frozen > 1:
        add("frozen weights", _frozen_bytes(config, workload, method, layout), method.shard_frozen)
    if method.offload:
        found["pcie"]["optimizer"] = optimizer_state_bytes(config, layout, method)
    if engines:
        moved = checkpoint_bytes(config) * workload.publish_share
        if method.lora_rank:
            moved = sum(lora_parameters(config, method.lora_rank).values()) * method.weight_bytes
        found["network"]["weights to engines"] = moved * engines / layout.devices
    return found


def _by_link(size: int, node: int) -> dict[str, float]:
    """Of what one member of a group of `size` sends to all others, the share over NVLink and over the network."""
    if size <= 1:
        return {}
    inside = min(size, node)
    return {"nvlink": (inside - 1) / (size - 1), "network": (size - inside) / (size - 1)}


def gradient_bytes(config: K3Config, layout: Layout, method: Method) -> tuple[float, float]:
    """Bytes that a rank sends in a step, gradients to owners and weights from them: (all but experts, experts)."""
    held = device_parameters(config, layout, method)
    everyone, replicas = layout.stage_devices, layout.replicas
    both = method.gradient_bytes + method.weight_bytes
    return both * held.trained_rest * (everyone - 1) / everyone, both * held.trained_routed * (replicas - 1) / replicas


def expert_bytes(config: K3Config, ranks: int, bytes_each: int) -> tuple[float, float]:
    """Bytes that leave a rank for each of its tokens and MoE layers, (forward, backward), when routes are even.

    What `k3rl.parallel.expert` sends: a row once to each rank that holds one of its experts, in MXFP8 where experts
    read that; a result, with a note of 8 bytes and the routing weight, for each choice. How many
    rows each expert gets is not counted. Where runs of experts are not equal, of the rank with the shortest, which
    sends most.
    """
    k, latent, wide = config.num_experts_per_token, config.expert_hidden_size, max(WIDE, bytes_each)
    shorter, longer = config.num_experts // ranks, config.num_experts % ranks  # experts of a run, runs with one more

    def chosen(held: int) -> float:
        """The probability that a row goes to a rank with `held` experts."""
        elsewhere = config.num_experts - held
        return 1 - math.prod(max(0, elsewhere - n) / (config.num_experts - n) for n in range(k))

    rows = (ranks - longer - 1) * chosen(shorter) + longer * chosen(shorter + 1)
    choices = k * (1 - shorter / config.num_experts)
    rounded = config.quantization.computed_activations == "mxfp8"
    row = latent * (1 + 1 / mx.BLOCK) if rounded else latent * bytes_each
    forward = rows * row + choices * (8 + wide + latent * bytes_each)
    return forward, rows * latent * bytes_each + choices * (latent + 1) * bytes_each


def _context_bytes(config: K3Config, workload: Workload, method: Method, layout: Layout) -> float:
    """Bytes of all layers in one forward or backward: KDA states and convolution rows at borders, latents to
    readers.
    """
    linear, tokens = config.linear_attn_config, device_tokens(workload, layout)
    border = linear.num_heads * linear.head_dim**2 * WIDE + 3 * config.hidden_size * method.weight_bytes
    readers = (layout.context - 1) / 2  # ranks to the right in a forward, to the left in a backward
    latents = tokens * (config.kv_lora_rank + config.qk_rope_head_dim) * method.weight_bytes * readers
    calls = math.ceil(tokens / workload.micro_batch_tokens)
    return border * calls * model_counts(config).kda + latents * model_counts(config).mla


def _frozen_bytes(config: K3Config, workload: Workload, method: Method, layout: Layout) -> float:
    """Bytes of gathered frozen weights: every part in each forward and backward, but the two ends once."""
    parts = frozen_parts(config)
    both = 2 * cut_bytes(config, method, device_parameters(config, layout, method))
    both -= (parts[0] + parts[-1]) / layout.pipeline * method.weight_bytes
    calls = math.ceil(device_tokens(workload, layout) / workload.micro_batch_tokens)
    return calls * both * (1 - 1 / method.shard_frozen)
