"""`k3rl plan`: memory, traffic and time of post-training a model on a cluster, before anybody pays for it.

Formulas and what they leave out are in `docs/plan.md`; every result lists what it assumed. Bytes are bytes, GiB are
2^30 of them, GB/s are 1e9 bytes a second and direction.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3rl.model import K3Config
from k3rl.planner.engine import engine_size, fastest_engine
from k3rl.planner.inputs import GIB, Cluster, Layout, Method, PlanError, Workload
from k3rl.planner.memory import host_gib, learner_memory, with_publication
from k3rl.planner.shares import device_tokens, micro_batch
from k3rl.planner.traffic import traffic
from k3rl.planner.work import train_flops, train_times


@dataclass(frozen=True)
class Plan:
    """What one layout takes. Bytes and seconds are of the device that has most; links count one direction of one
    device.

    memory and engine_memory: bytes of a learner's and of an engine's device by part; step_s: seconds by phase; flops:
    operations of a step's training by phase, of all devices together; traffic: {link: {purpose: bytes}}.
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
    def unsupported(self) -> list[str]:
        """Degrees above 1 that k3rl does not run."""
        return self.layout.unsupported

    @property
    def bottleneck(self) -> str:
        """The longest phase of the longer side, or the publication, for which both wait."""
        phases = max(self._sides, key=lambda side: sum(side.values()))
        phases |= {"publish": self.step_s["publish"]} if "publish" in self.step_s else {}
        return max(phases, key=lambda name: phases[name])


def plan_layout(
    config: K3Config, cluster: Cluster, workload: Workload, method: Method, layout: Layout, *, rollout_gpus: int
) -> Plan:
    """The plan of one layout. Raises PlanError when the degrees do not fit the model or the cluster."""
    _check(config, cluster, workload, layout, rollout_gpus)
    _check_frozen(method, layout)
    batch = micro_batch(workload, method)
    only_one = device_tokens(workload, layout) <= batch.tokens
    memory = learner_memory(config, layout, method, batch, only_one=only_one)
    if workload.kind != "sft":
        memory = with_publication(memory, config, layout, method)
    engine_gpus, engines, engine, sampling = fastest_engine(config, cluster, workload, rollout_gpus)
    moved = traffic(config, cluster, workload, method, layout, engines)
    times = train_times(config, cluster, workload, method, layout)
    for link, each in moved.items():
        rate = getattr(cluster.gpu, link) * 1e9 * cluster.efficiency.link
        for purpose, sent in each.items():
            name = "publish" if purpose == "weights to engines" else f"{purpose} ({link})"
            times[name] = times.get(name, 0.0) + sent / rate
    host = host_gib(config, cluster, layout, method)
    problems = [
        *_too_large(cluster, memory, "a learner's device"),
        *([f"{host:,.0f} GiB of host memory on a node that has {cluster.host_gib:,.0f}"] * (host > cluster.host_gib)),
        *_too_few_engines(config, cluster, workload, rollout_gpus, engines),
        *_too_long(workload, layout),
        *_too_large(cluster, engine, "an engine's device"),
    ]
    return Plan(
        layout, method, layout.devices, rollout_gpus, engine_gpus, memory, engine, host, times | sampling,
        train_flops(config, workload, method, layout), moved, not problems, problems, workload.micro_batch_tokens,
    )  # fmt: skip


def _too_large(cluster: Cluster, memory: dict[str, float], where: str) -> list[str]:
    needed = sum(memory.values()) / GIB
    return [f"{needed:,.0f} GiB on {where}; {cluster.free_gib:,.0f} GiB are free"] if needed > cluster.free_gib else []


def _too_few_engines(
    config: K3Config, cluster: Cluster, workload: Workload, rollout_gpus: int, engines: int
) -> list[str]:
    if workload.kind == "sft" or engines:
        return []
    least = engine_size(config, cluster)
    return [f"{rollout_gpus} devices are left to sample, and one engine of this model takes {least}"]


def _too_long(workload: Workload, layout: Layout) -> list[str]:
    budget = workload.micro_batch_tokens * layout.context
    if workload.length <= budget:
        return []
    return [
        f"sequences of {workload.length:,} tokens, where {layout.context} context ranks take {budget:,} at a time; "
        "plan with a larger --context or --micro-batch-tokens"
    ]


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
