"""`k3rl plan`: memory, traffic and time of post-training a model on a cluster, before anybody pays for it.

Formulas and what they leave out are in `docs/plan.md`; every result lists what it assumed. Counts of one model are in
`k3rl.planner.costs`; this page divides them among devices and adds what moves; `k3rl.planner.search` looks for
a layout that fits.
Bytes are bytes, GiB are 2^30 of them, GB/s are 1e9 bytes a second and direction.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from k3rl.losses.logprob import TABLE_ELEMENTS
from k3rl.model import K3Config
from k3rl.optim.buckets import BUCKET_ELEMENTS
from k3rl.optim.offload import SLOTS
from k3rl.planner import costs
from k3rl.planner.costs import ROUTED, Mix
from k3rl.planner.engine import engine_size, fastest_engine, free_gib, part_flops, stored_bytes
from k3rl.planner.shares import expert_bytes, expert_load, mixes
from k3rl.planner.types import (
    GIB,
    GPUS,
    Cluster,
    Efficiency,
    Gpu,
    Layout,
    Method,
    PlanError,
    Workload,
    has_kernels,
)


@dataclass(frozen=True)
class Plan:
    """One layout judged. Bytes and seconds are of the device that has most; links count one direction of one device.

    flops: operations of a step's training by phase, of all devices together.
    """

    layout: Layout
    method: Method
    learner_gpus: int
    rollout_gpus: int
    engine_gpus: int
    memory: dict[str, float]
    engine_memory: dict[str, float]
    host_gib: float
    step_s: dict[str, float]
    flops: dict[str, float]
    traffic: dict[str, dict[str, float]]
    fits: bool
    why_not: list[str]
    micro_batch_tokens: int

    @property
    def gpu_gib(self) -> float:
        """Of a learner's device."""
        return sum(self.memory.values()) / GIB

    @property
    def seconds(self) -> float:
        """Of one step: sampling runs beside training, one step ahead."""
        training, sampling = self._sides
        return max(sum(training.values()), sum(sampling.values())) + self.step_s.get("publish", 0.0)

    @property
    def _sides(self) -> tuple[dict[str, float], dict[str, float]]:
        """Phases of training and of sampling, which run beside each other."""
        sampling = {name: value for name, value in self.step_s.items() if name.startswith("rollout")}
        return {n: value for n, value in self.step_s.items() if n not in sampling and n != "publish"}, sampling

    @property
    def not_yet(self) -> list[str]:
        """What of it k3rl does not run."""
        return self.layout.not_yet

    @property
    def bottleneck(self) -> str:
        """The longest phase of the longer side, or the publication, for which both wait."""
        phases = max(self._sides, key=lambda side: sum(side.values()))
        phases |= {"publish": self.step_s["publish"]} if "publish" in self.step_s else {}
        return max(phases, key=lambda name: phases[name])


@cache
def lora_parameters(config: K3Config, rank: int) -> dict[bool, int]:
    """Numbers of the adapters {True: of routed experts, each its own; False: of attention and shared experts}."""
    found = {True: 0, False: 0}
    for entry in costs.tensor_table(config):
        if entry.part in ("kda", "mla", "shared_experts", ROUTED) and len(entry.shape) == 2:
            found[entry.part == ROUTED] += entry.copies * rank * sum(entry.shape)
    return found


@dataclass(frozen=True)
class ModelCounts:
    """What the sums below need of a configuration, counted once."""

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
def _optimizer(config: K3Config, variant: str, products: int = costs.WIDE) -> costs.OptimizerCosts:
    return costs.optimizer_costs(config, variant, products)


def forward_flops(config: K3Config, workload: Workload, method: Method) -> dict[str, float]:
    """Operations of one forward pass by part, as `costs.flops`."""
    return part_flops(config, _mix(workload, method))


@cache
def _saved(config: K3Config, mix: Mix) -> dict[str, float]:
    return costs.activations(config, mix)


@dataclass(frozen=True)
class _Held:
    """Numbers that the device which has most holds: of routed experts and of the rest; trained ones of each."""

    routed: float
    rest: float
    trained_routed: float
    trained_rest: float

    @classmethod
    def of(cls, config: K3Config, layout: Layout, method: Method) -> _Held:
        facts = model_counts(config)
        share = math.ceil(facts.layers / layout.pipeline) / facts.layers
        ends = max(facts.first, facts.last) if layout.pipeline > 1 else facts.first + facts.last
        experts = share * expert_load(config, layout.expert) / layout.expert
        held_rest, held_routed = facts.rest * share + ends, facts.routed * experts
        if not method.lora_rank:
            return cls(held_routed, held_rest, held_routed, held_rest)
        adapters = lora_parameters(config, method.lora_rank)
        return cls(held_routed, held_rest, adapters[True] * experts, adapters[False] * share)


def learner_memory(
    config: K3Config, layout: Layout, method: Method, mix: Mix, *, one_pass: bool = False
) -> dict[str, float]:
    """Bytes of one device of the learner, by part, when a pass is at its peak and gradients of earlier ones are there.

    With LoRA the frozen experts stay packed, half a byte a number and a scale for 32. `step` replaces `activations`
    during the optimizer's step; only the larger of the two counts, but for CUDA graphs, which keep the memory of both.
    one_pass: there are no earlier passes; gradients of all but experts then come as activations go.
    """
    held = _Held.of(config, layout, method)
    everyone = layout.data * layout.expert * layout.context
    shards = (layout.data * layout.context, everyone) if method.shard_optimizer else (1, 1)
    routed_bytes = (0.5 + 1 / 32) if method.lora_rank else method.weight_bytes
    sharded = held.trained_routed / shards[0] + held.trained_rest / shards[1]
    state = _state_bytes(config, layout, method, held)
    away = _cut(config, method, held) * (1 - 1 / method.shard_frozen) if method.shard_frozen > 1 else 0.0
    memory = {
        "weights": held.routed * routed_bytes + held.rest * method.weight_bytes - away,
        "gradients": (held.trained_routed + held.trained_rest) * method.gradient_bytes,
        "optimizer": 0.0 if method.offload else state,
    }
    if method.lora_rank:
        memory["adapters"] = (held.trained_routed + held.trained_rest) * method.weight_bytes
    if method.shard_frozen > 1:
        memory["gathered"] = _window(config) * method.weight_bytes
    # Gradients of all but experts that one pass alone makes come as activations go.
    coming = held.trained_rest * method.gradient_bytes if one_pass and not method.lora_rank else 0.0
    working = activation_memory(config, layout, method, mix, coming=0.0 if method.captures(layout) else coming)
    step = _workspace(config, method, sharded)
    if method.captures(layout):
        # A graph's backward hands all but experts' gradients over together, as they come, to be added.
        handed = held.trained_rest * method.weight_bytes
        return memory | working | {"handed_over": handed, "step": step}
    if sum(working.values()) >= step:
        return memory | working
    return memory | {"step": step}


def held_bytes(config: K3Config, layout: Layout, method: Method) -> float:
    """Bytes of one device of the learner that are there all the time, whatever a pass takes."""
    held = _Held.of(config, layout, method)
    trained = held.trained_routed + held.trained_rest
    routed_bytes = (0.5 + 1 / 32) if method.lora_rank else method.weight_bytes
    away = _cut(config, method, held) * (1 - 1 / method.shard_frozen) if method.shard_frozen > 1 else 0.0
    own = method.gradient_bytes + (method.weight_bytes if method.lora_rank else 0)
    state = 0.0 if method.offload else _state_bytes(config, layout, method, held)
    return held.routed * routed_bytes + held.rest * method.weight_bytes - away + trained * own + state


@cache
def _parts(config: K3Config) -> tuple[int, ...]:
    return tuple(costs.frozen_parts(config))


def _cut(config: K3Config, method: Method, held: _Held) -> float:
    """Bytes of the frozen weights of a stage that ranks may share."""
    facts = model_counts(config)
    return held.rest * method.weight_bytes * sum(_parts(config)) / (facts.rest + facts.first + facts.last)


def _window(config: K3Config) -> int:
    """Numbers of the two largest parts in a row: the one that runs, and the one that comes or has just run."""
    parts = _parts(config)
    return max(one + other for one, other in itertools.pairwise(parts))


def _state_bytes(config: K3Config, layout: Layout, method: Method, held: _Held | None = None) -> float:
    """Bytes of masters and momentum that one device owns."""
    held = held or _Held.of(config, layout, method)
    replicas, everyone = layout.data * layout.context, layout.data * layout.expert * layout.context
    shards = (replicas, everyone) if method.shard_optimizer else (1, 1)
    routed, rest = _state_each(config, method)
    return held.trained_routed / shards[0] * routed + held.trained_rest / shards[1] * rest


def _state_each(config: K3Config, method: Method) -> tuple[float, float]:
    """Bytes of master and momentum of one number of routed experts, and of all else on average."""
    adamw = 4.0 + 8
    if method.lora_rank:
        return adamw, adamw
    muon, groups = 4.0 + method.momentum_bytes, _optimizer(config, method.optimizer)
    both = [(groups.muon[routed], groups.adamw[routed]) for routed in (True, False)]
    found = [(muon * one + adamw * other) / max(1, one + other) for one, other in both]
    return found[0], found[1]


def _kept(config: K3Config, layout: Layout, method: Method, mix: Mix) -> float:
    """Bytes that the layers of a stage keep until their backward, of all passes that are under way."""
    count = model_counts(config).layers
    share = math.ceil(count / layout.pipeline) / count
    layers = sum(value for name, value in _saved(config, mix).items() if name != "head")
    if method.recompute == "layer":
        bank = math.ceil(count / config.attn_res_block_size) + 1
        layers = mix.tokens * config.hidden_size * (2 * count * mix.bytes_each + bank * mix.wide)
    return layers * share * layout.pipeline  # the first stage holds as many passes as there are stages


def activation_memory(
    config: K3Config, layout: Layout, method: Method, mix: Mix, *, coming: float = 0.0
) -> dict[str, float]:
    """Bytes of one pass at its peak, by part: saved tensors of all layers, or the stream and one layer.

    mix: of each rank in the mean; the result is of the one that needs most. coming: bytes of gradients that take the
    place of activations.
    """
    return dict(_activation_memory(config, replace(layout, data=1), method, mix, coming))


@lru_cache(maxsize=1 << 14)
def _activation_memory(config: K3Config, layout: Layout, method: Method, mix: Mix, coming: float) -> dict[str, float]:
    """`activation_memory`, the same on every data rank."""
    on_ranks = mixes(config, mix, experts=layout.expert, context=layout.context, lora=bool(method.lora_rank))
    every = (_pass_memory(config, layout, method, own, coming) for own in on_ranks)
    return max(every, key=lambda parts: sum(parts.values()))


def _pass_memory(config: K3Config, layout: Layout, method: Method, mix: Mix, coming: float) -> dict[str, float]:
    """`activation_memory` of one rank."""
    saved = _saved(config, mix)
    table = min(mix.targets * config.vocab_size, TABLE_ELEMENTS)
    head = saved["head"] + 2.0 * table * mix.wide  # the table's gradient and the logits'
    layer = sum(value for name, value in saved.items() if name != "head") / model_counts(config).layers
    again = method.recompute == "layer"
    if again:
        layer = _largest_site(config, saved)
    # What the last layer's gradients take besides what it kept.
    during = costs.backward_rows(config, mix) if mix.kernels else 0.5 * layer
    if again:
        during += layer
        head = max(0.0, head - during)  # the head is done before the first site runs again
    found = {
        "activations": max(0.0, _kept(config, layout, method, mix) - coming) + during,
        "logits": head,
        "working": _layer_gradient(config, layout, method),
    }
    if layout.expert > 1:
        rows = mix.tokens * config.num_experts_per_token * config.expert_hidden_size * mix.bytes_each
        found["all_to_all"] = 4.0 * rows
    return found


def _largest_site(config: K3Config, saved: dict[str, float]) -> float:
    """Bytes that the attention or the MLP of one layer keeps, whichever is more."""
    counts = model_counts(config)
    experts = sum(saved.get(part, 0.0) for part in (ROUTED, "router", "shared_experts", "latent_projections"))
    sites = (
        (saved.get("kda", 0.0), counts.kda),
        (saved.get("mla", 0.0), counts.mla),
        (experts, counts.moe),
        (saved.get("dense_mlp", 0.0), counts.layers - counts.moe),
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


def _workspace(config: K3Config, method: Method, sharded: float) -> float:
    """Temporaries of the optimizer's largest bucket, and what of its state rests elsewhere and visits."""
    if method.lora_rank:
        return min(sharded, BUCKET_ELEMENTS) * (costs.WIDE + (3 * costs.WIDE if method.offload else 0))
    on_gpu = method.weight_bytes == 2  # products in bf16, and copies while others are computed with
    found = _optimizer(config, method.optimizer, 2 if on_gpu else costs.WIDE)
    adamw = method.optimizer == "adamw"
    least = sharded * costs.WIDE * (1 if adamw else 6)  # everything in one bucket
    visits = float(costs.WIDE * (method.momentum_bytes == 2 and not adamw))
    if method.offload:
        state = 3 * costs.WIDE if adamw else costs.WIDE + method.momentum_bytes
        visits += state * (SLOTS if on_gpu else 1)
    bucket = float(max(BUCKET_ELEMENTS, config.vocab_size * config.hidden_size)) if adamw else found.bucket
    return min(found.workspace, least) + visits * min(sharded, bucket)


def plan_layout(
    config: K3Config,
    cluster: Cluster,
    workload: Workload,
    method: Method,
    layout: Layout,
    *,
    rollout_gpus: int,
    efficiency: Efficiency | None = None,
) -> Plan:
    """Judges one layout. Raises PlanError when the degrees do not fit the model or the cluster."""
    _check(config, cluster, workload, layout, rollout_gpus)
    _check_frozen(method, layout)
    efficiency = efficiency or Efficiency()
    mix = _mix(workload, method)
    memory = learner_memory(config, layout, method, mix, one_pass=_own_tokens(workload, layout) <= mix.tokens)
    engine_gpus, engines, engine, sampling = fastest_engine(config, cluster, workload, rollout_gpus, efficiency)
    traffic = _traffic(config, cluster, workload, method, layout, engines)
    times = _train_times(config, cluster, workload, method, layout, efficiency)
    for link, each in traffic.items():
        rate = getattr(cluster.gpu, link) * 1e9 * efficiency.link
        for purpose, moved in each.items():
            name = "publish" if purpose == "weights to engines" else f"{purpose} ({link})"
            times[name] = times.get(name, 0.0) + moved / rate
    times |= sampling
    host = _host_gib(config, cluster, layout, method)
    room = free_gib(cluster)
    problems = []
    if sum(memory.values()) > room * GIB:
        problems.append(f"{sum(memory.values()) / GIB:,.0f} GiB on a learner's device; {room:,.0f} GiB are free")
    if host > cluster.host_gib:
        problems.append(f"{host:,.0f} GiB of host memory on a node that has {cluster.host_gib:,.0f}")
    if workload.kind != "sft" and not engines:
        least = engine_size(config, cluster)
        problems.append(f"{rollout_gpus} devices are left to sample, and one engine of this model takes {least}")
    budget = workload.micro_batch_tokens * layout.context
    if workload.length > budget:
        problems.append(
            f"sequences of {workload.length:,} tokens, where {layout.context} context ranks take {budget:,} at a time; "
            "plan with a larger --context or --micro-batch-tokens"
        )
    if engines and sum(engine.values()) > room * GIB:
        problems.append(f"{sum(engine.values()) / GIB:,.0f} GiB on an engine's device; {room:,.0f} GiB are free")
    return Plan(
        layout, method, layout.devices, rollout_gpus, engine_gpus, memory, engine, host, times,
        _train_flops(config, workload, method, layout), traffic, not problems, problems, workload.micro_batch_tokens,
    )  # fmt: skip


def _check(config: K3Config, cluster: Cluster, workload: Workload, layout: Layout, rollout_gpus: int) -> None:
    if layout.devices + rollout_gpus > cluster.gpus:
        raise PlanError(
            f"{layout.devices} learner and {rollout_gpus} rollout devices are more than the cluster's {cluster.gpus}",
            key="--gpus", got=cluster.gpus, wanted=f"at least {layout.devices + rollout_gpus}",
        )  # fmt: skip
    if layout.expert > config.num_experts:
        raise PlanError(
            f"{layout.expert} expert ranks are more than {config.num_experts} experts; plan with at most as many",
            key="--expert", got=layout.expert, wanted=f"at most {config.num_experts}",
        )  # fmt: skip
    if layout.pipeline > config.num_hidden_layers:
        raise PlanError(
            f"{layout.pipeline} stages are more than {config.num_hidden_layers} layers",
            key="--pipeline", got=layout.pipeline, wanted=f"at most {config.num_hidden_layers}",
        )  # fmt: skip
    if workload.length > config.max_position_embeddings:
        raise PlanError(
            f"sequences of {workload.length} tokens exceed the model's {config.max_position_embeddings}",
            key="--new-tokens", got=workload.new_tokens, wanted="prompt and new tokens within the context",
        )  # fmt: skip


def _check_frozen(method: Method, layout: Layout) -> None:
    stage = layout.devices // layout.pipeline
    if method.shard_frozen > 1 and (not method.lora_rank or stage % method.shard_frozen):
        raise PlanError(
            f"{method.shard_frozen} ranks do not divide the {stage} that hold the same layers; plan with a number that "
            "does" if method.lora_rank else "all weights are trained and none are frozen; plan with --lora-rank",
            key="--shard-frozen", got=method.shard_frozen, wanted=f"a divisor of {stage}, with --lora-rank",
        )  # fmt: skip


def _mix(workload: Workload, method: Method) -> Mix:
    tokens = workload.micro_batch_tokens
    share = workload.new_tokens / workload.length if workload.new_tokens else 1.0
    return Mix(tokens, workload.length, math.ceil(tokens * share), method.weight_bytes, method.kernels)


def _own_tokens(workload: Workload, layout: Layout) -> float:
    """Tokens of a device that has most of them: a sequence is whole on the ranks of one context axis."""
    sequences = math.ceil(workload.prompts * workload.group / (layout.data * layout.expert))
    return sequences * workload.length / layout.context


def _split(size: int, node: int) -> dict[str, float]:
    """Of what one member of a group of `size` sends to all others, the share over NVLink and over the network."""
    if size <= 1:
        return {}
    inside = min(size, node)
    return {"nvlink": (inside - 1) / (size - 1), "network": (size - inside) / (size - 1)}


def gradient_bytes(config: K3Config, layout: Layout, method: Method) -> tuple[float, float]:
    """Bytes that a rank sends in a step, gradients to owners and weights from them: (all but experts, experts)."""
    held = _Held.of(config, layout, method)
    everyone, replicas = layout.data * layout.expert * layout.context, layout.data * layout.context
    both = method.gradient_bytes + method.weight_bytes
    return both * held.trained_rest * (everyone - 1) / everyone, both * held.trained_routed * (replicas - 1) / replicas


def _traffic(
    config: K3Config, cluster: Cluster, workload: Workload, method: Method, layout: Layout, engines: int
) -> dict[str, dict[str, float]]:
    """Bytes that one device sends in one step: {link: {purpose: bytes}}."""
    found: dict[str, dict[str, float]] = {"nvlink": {}, "network": {}, "pcie": {}}

    def add(purpose: str, moved: float, size: int) -> None:
        for link, share in _split(size, cluster.node).items():
            if moved * share:
                found[link][purpose] = found[link].get(purpose, 0.0) + moved * share

    tokens = _own_tokens(workload, layout)
    stages = math.ceil(config.num_hidden_layers / layout.pipeline) / config.num_hidden_layers
    forward, backward = expert_bytes(config, layout.expert, method.weight_bytes)
    each = (1 + (method.recompute == "layer")) * forward + backward
    add("experts", tokens * each * model_counts(config).moe * stages, layout.expert)
    if layout.context > 1:
        linear = config.linear_attn_config
        calls = math.ceil(tokens / workload.micro_batch_tokens)
        border = linear.num_heads * linear.head_dim**2 * costs.WIDE + 3 * config.hidden_size * method.weight_bytes
        readers = (layout.context - 1) / 2  # ranks to the right in a forward, to the left in a backward
        latents = tokens * (config.kv_lora_rank + config.qk_rope_head_dim) * method.weight_bytes * readers
        each = border * calls * model_counts(config).kda + latents * model_counts(config).mla
        add("context", (2 + (method.recompute == "layer")) * each * stages, layout.context)
    rest, routed = gradient_bytes(config, layout, method)
    add("gradients", rest, layout.data * layout.expert * layout.context)
    add("gradients", routed, layout.data * layout.context)
    if layout.pipeline > 1:
        bank = math.ceil(config.num_hidden_layers / config.attn_res_block_size) + 1
        sent = 2 * tokens * config.hidden_size * method.weight_bytes * bank
        found["network"]["stages"] = sent
    if method.shard_frozen > 1:
        parts, share = _parts(config), 1 - 1 / method.shard_frozen
        sweeps = (
            2 * _cut(config, method, _Held.of(config, layout, method))
            - (parts[0] + parts[-1]) / layout.pipeline * method.weight_bytes
        )
        add("frozen weights", math.ceil(tokens / workload.micro_batch_tokens) * sweeps * share, method.shard_frozen)
    if method.offload:
        found["pcie"]["optimizer"] = _state_bytes(config, layout, method)
    if engines:
        moved = stored_bytes(config) * workload.publish_share
        if method.lora_rank:
            moved = sum(lora_parameters(config, method.lora_rank).values()) * method.weight_bytes
        found["network"]["weights to engines"] = moved * engines / layout.devices
    return found


def _train_flops(
    config: K3Config, workload: Workload, method: Method, layout: Layout, load: float = 1.0
) -> dict[str, float]:
    """Operations of a step by phase, of all devices of the learner together.

    load: over the mean, of routed experts; with it all devices are counted as busy as the one that has most.
    """
    mix = _mix(workload, method)
    parts = part_flops(config, mix)
    forward = (sum(parts.values()) + (load - 1) * parts.get(ROUTED, 0.0)) / mix.tokens * workload.tokens
    # Frozen weights need no gradient of their own.
    found = {"forward": forward, "backward": (1.0 if method.lora_rank else 2.0) * forward}
    if method.recompute == "layer":
        found["recompute"] = forward
    if not method.lora_rank:
        orthogonal = _optimizer(config, method.optimizer).flops
        everyone, replicas = layout.devices // layout.pipeline, layout.data * layout.context
        repeated = (1, 1) if method.shard_optimizer else (replicas, everyone)
        found["optimizer"] = load * orthogonal[True] * repeated[0] + orthogonal[False] * repeated[1]
    return found


def _train_times(
    config: K3Config, cluster: Cluster, workload: Workload, method: Method, layout: Layout, efficiency: Efficiency
) -> dict[str, float]:
    """Seconds of arithmetic on the device that has most."""
    rate = cluster.gpu.tflops * 1e12
    most = _train_flops(config, workload, method, layout, expert_load(config, layout.expert))
    flops = {name: each / layout.devices for name, each in most.items()}
    work = flops.pop("optimizer", 0.0) / (rate * efficiency.optimizer)
    tokens = _own_tokens(workload, layout)
    most_tokens = tokens * layout.data * layout.expert * layout.context / workload.tokens
    times = {name: each * most_tokens / (rate * efficiency.train) for name, each in flops.items()}
    if layout.pipeline > 1:
        passes = max(1.0, tokens / workload.micro_batch_tokens)
        times["bubble"] = sum(times.values()) * (layout.pipeline - 1) / passes
    held = _Held.of(config, layout, method)
    replicas, everyone = layout.data * layout.context, layout.data * layout.expert * layout.context
    shards = (replicas, everyone) if method.shard_optimizer else (1, 1)
    owned = held.trained_routed / shards[0] + held.trained_rest / shards[1]
    moved = owned * (method.gradient_bytes + method.weight_bytes) + 2 * _state_bytes(config, layout, method, held)
    times["optimizer"] = work + moved / (cluster.gpu.hbm * 1e9 * efficiency.hbm)
    return times


def _host_gib(config: K3Config, cluster: Cluster, layout: Layout, method: Method) -> float:
    """GiB on one node: the optimizer's state, with offload; or, if more, models before their frozen weights are cut."""
    state = _state_bytes(config, layout, method) if method.offload else 0.0
    held = _Held.of(config, layout, method)
    whole = held.routed * (0.5 + 1 / 32) + held.rest * method.weight_bytes if method.shard_frozen > 1 else 0.0
    return max(state, whole) * min(cluster.node, layout.devices) / GIB


__all__ = [
    "GIB",
    "GPUS",
    "Cluster",
    "Efficiency",
    "Gpu",
    "Layout",
    "Method",
    "Plan",
    "PlanError",
    "Workload",
    "activation_memory",
    "engine_size",
    "expert_bytes",
    "forward_flops",
    "gradient_bytes",
    "has_kernels",
    "held_bytes",
    "learner_memory",
    "lora_parameters",
    "model_counts",
    "plan_layout",
]
