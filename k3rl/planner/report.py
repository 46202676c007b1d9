"""A plan as plain values: what `k3rl plan` prints, with what it assumed in sentences."""

from __future__ import annotations

import dataclasses
from typing import Any

from k3rl.model import K3Config
from k3rl.planner.inputs import GIB, Cluster, Method, Workload
from k3rl.planner.plan import Plan
from k3rl.planner.shares import micro_batch
from k3rl.planner.work import part_flops


def plan_report(config: K3Config, cluster: Cluster, workload: Workload, plan: Plan) -> dict[str, Any]:
    """A plan as one JSON-ready object with the keys of `k3rl plan --json`."""
    return {
        "fits": plan.fits,
        "why_not": plan.why_not,
        "method": plan.method.words,
        "layout": dataclasses.asdict(plan.layout),
        "micro_batch_tokens": plan.micro_batch_tokens,
        "runs_today": not plan.unsupported,
        "not_run_today": plan.unsupported,
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
        "flops": {name: round(value) for name, value in _forward_flops(config, workload, plan).items()},
        "step_flops": {name: round(value) for name, value in plan.flops.items()},
        "assumptions": assumptions(cluster, workload, plan.method),
    }


def _forward_flops(config: K3Config, workload: Workload, plan: Plan) -> dict[str, float]:
    """Operations of one forward of `micro_batch_tokens`, by part."""
    chosen = dataclasses.replace(workload, micro_batch_tokens=plan.micro_batch_tokens)
    return part_flops(config, micro_batch(chosen, plan.method))


def _momentum(method: Method) -> str:
    return "moments 8" if method.optimizer == "adamw" else f"momentum {method.momentum_bytes} (AdamW's moments 8)"


def _activations(method: Method) -> str:
    if not method.kernels:
        return "activations are those of the torch code, KDA states at every 16 tokens included"
    said = "activations are those of the kernels, KDA states at every 32 tokens included"
    if method.capture and not method.lora_rank:
        said += (
            "; where one rank holds all experts and whole documents, forward-backward and step are CUDA graphs, which "
        )
        said += "keep the memory of both"
    return said


def _frozen(method: Method) -> str:
    if method.shard_frozen == 1:
        return "what is no expert is whole on every rank of a stage"
    return (
        f"what is no expert is cut over {method.shard_frozen} neighbouring ranks, gathered a part of a layer at a time "
        "in each forward and backward, and whole in host memory while a model is loaded"
    )


def assumptions(cluster: Cluster, workload: Workload, method: Method) -> list[str]:
    """What the figures take for granted, in sentences."""
    gpu, efficiency = cluster.gpu, cluster.efficiency
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
