"""`k3rl plan`."""

from __future__ import annotations

import dataclasses
import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.cli.output import print_json
from k3rl.cli.parser import Parser
from k3rl.config import ConfigError

if TYPE_CHECKING:
    from k3rl.model import K3Config
    from k3rl.planner import Cluster, Method, Plan, Workload

MOST_GPUS = 1_000_000  # beyond which a search takes minutes and means nothing


def plan(words: Sequence[str]) -> int:
    """The `k3rl plan` command."""
    parser = _parser()
    given = parser.read(words)
    if given is None:
        return 0
    from k3rl.planner import compare_methods, memory_savers, plan_report, smallest_clusters

    config = _config(given.model)
    cluster, workload, method = _cluster(given), _workload(given, config), _method(given, config)
    methods = memory_savers(method, cluster) if given.recompute == "auto" else [method]
    chosen = _chosen(given, config, cluster, workload, methods)
    result: dict[str, Any] = {"model": given.model, "gpus": given.gpus}
    result |= plan_report(config, cluster, workload, chosen)
    result["here"] = compare_methods(config, cluster, workload, method) if given.suggest else []
    result["smallest"] = smallest_clusters(config, cluster, workload, method) if given.suggest else []
    if given.json:
        print_json(result)
    else:
        _show(result)
    return 0


def _chosen(given: Namespace, config: K3Config, cluster: Cluster, workload: Workload, methods: list[Method]) -> Plan:
    """The plan of the layout that is given, or the fastest that fits."""
    from k3rl.planner import Layout, fastest_plan, fastest_plan_of_layout

    degrees = (given.data, given.expert, given.context, given.pipeline)
    if all(degree is None for degree in degrees):
        return fastest_plan(config, cluster, workload, methods)
    layout = Layout(*(degree or 1 for degree in degrees))
    left = max(0, cluster.gpus - layout.devices) if given.rollout_gpus is None else given.rollout_gpus
    rollout_gpus = 0 if given.kind == "sft" else left
    return fastest_plan_of_layout(config, cluster, workload, methods, layout, rollout_gpus=rollout_gpus)


def _cluster(given: Namespace) -> Cluster:
    from k3rl.planner import GPUS, Cluster

    asked = {name: getattr(given, name) for name in _DEVICE} | {"gib": given.gpu_gib}
    known = {name: value for name, value in asked.items() if value is not None}
    return Cluster(given.gpus, dataclasses.replace(GPUS[given.gpu], **known), given.node, given.host_gib)


def _workload(given: Namespace, config: K3Config) -> Workload:
    """A model of a short context gets the tokens that it has room for, where none are given."""
    from k3rl.planner import Workload

    longest = config.max_position_embeddings
    prompt = min(2048, longest) if given.prompt_tokens is None else given.prompt_tokens
    sampled = given.new_tokens
    if sampled is None:
        sampled = 0 if given.kind == "sft" else max(0, min(6144, longest - prompt))
    return Workload(
        given.kind, given.prompts, given.group, prompt, sampled, given.micro_batch_tokens or 8192, given.rollout_gpus,
        given.publish_share, smaller_micro_batches=given.micro_batch_tokens is None,
    )  # fmt: skip


def _method(given: Namespace, config: K3Config) -> Method:
    from k3rl.planner import Method, has_kernels

    if given.momentum_bytes == 2 and (given.lora_rank or given.optimizer == "adamw"):
        raise ConfigError(
            "--momentum-bytes 2 is Muon's momentum, and neither adapters nor --optimizer adamw have one; leave it out",
            key="--momentum-bytes", got=2, wanted="4",
        )  # fmt: skip
    kernels = has_kernels(config, given.gpu)
    return Method(
        lora_rank=given.lora_rank,
        optimizer=given.optimizer,
        momentum_bytes=given.momentum_bytes,
        offload=given.offload,
        recompute="none" if given.recompute == "auto" else given.recompute,
        shard_frozen=given.shard_frozen,
        kernels=kernels,
        capture=given.capture and kernels,
    )


def _parser() -> Parser:
    parser = Parser("plan", "Memory, traffic and time of post-training a model on a cluster, and a layout that fits.")
    parser.add_argument(
        "model", help="a named size, such as k3-small or kimi-linear-48b, or a folder with a config.json"
    )
    parser.add_argument("--gpus", type=_devices, required=True, help="devices of the whole cluster")
    parser.add_argument("--gpu", choices=("h100", "h200", "b200", "b300"), default="h200")
    parser.add_argument("--gpu-gib", type=_above_0, help="memory of one device, where it differs")
    for name, what in _DEVICE.items():
        parser.add_argument(f"--{name}", type=_above_0, help=f"{what}, where it differs")
    parser.add_argument("--node", type=_positive, default=8, help="devices of one node (8)")
    parser.add_argument("--host-gib", type=_above_0, default=1900.0, help="memory of one node (1900)")
    parser.add_argument("--kind", choices=("sft", "rl", "distill"), default="rl")
    parser.add_argument("--prompts", type=_positive, default=64, help="groups of one step (64)")
    parser.add_argument("--group", type=_positive, default=8, help="sequences of one group (8)")
    parser.add_argument("--prompt-tokens", type=_positive, help="(2048)")
    parser.add_argument(
        "--new-tokens",
        type=_natural,
        help="tokens sampled for each sequence (6144, or what the model has room for; none in sft)",
    )
    parser.add_argument(
        "--micro-batch-tokens", type=_positive, help="on one device (8192, or less where only that fits)"
    )
    parser.add_argument("--rollout-gpus", type=_natural, help="devices that sample; chosen where not given")
    parser.add_argument("--publish-share", type=_share, default=1.0, help="bytes of a version that move, of all")
    parser.add_argument("--lora-rank", type=_natural, default=0, help="0 trains all weights")
    parser.add_argument(
        "--shard-frozen", type=_positive, default=1,
        help="with LoRA: ranks that share what is frozen beside the experts; those of a node where nothing else fits",
    )  # fmt: skip
    parser.add_argument("--optimizer", choices=("per_head_muon", "muon_whole", "adamw"), default="per_head_muon")
    parser.add_argument("--momentum-bytes", type=int, choices=(2, 4), default=4)
    parser.add_argument("--offload", action="store_true", help="optimizer state in host memory")
    parser.add_argument(
        "--recompute",
        choices=("auto", "none", "layer"),
        default="auto",
        help="auto: layers, where that is faster or nothing else fits",
    )
    parser.add_argument(
        "--no-capture", dest="capture", action="store_false", help="no CUDA graphs (`trainer.capture` off)"
    )
    for degree in ("data", "expert", "context", "pipeline"):
        parser.add_argument(f"--{degree}", type=_positive, help=f"{degree} degree; a layout is searched where none is")
    parser.add_argument("--no-suggest", dest="suggest", action="store_false", help="this plan only, without others")
    parser.add_argument("--json", action="store_true")
    return parser


_DEVICE = {
    "tflops": "dense bf16 TFLOP/s of one device",
    "hbm": "GB/s of its memory",
    "nvlink": "GB/s to the others of its node, in one direction",
    "network": "GB/s of its network port",
    "pcie": "GB/s to the host",
}


def _above_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text!r}; wanted a number above 0")
    return number


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}; wanted a whole number from 1 on")
    return int(text)


def _devices(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_GPUS:
        raise ArgumentTypeError(f"{text!r}; wanted a whole number from 1 to {MOST_GPUS:,}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r}; wanted a whole number, 0 or more")
    return int(text)


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise ArgumentTypeError(f"{text!r}; wanted a share above 0 and at most 1")
    return number


def _config(model: str) -> K3Config:
    from k3rl.model import K3Config

    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{model} has no config.json", key="model", got=model, wanted="a checkpoint folder")
        return K3Config.from_json(path / "config.json")
    return K3Config.named(model)


def _show(result: dict[str, Any]) -> None:
    verdict = "fits" if result["fits"] else "does not fit: " + "; ".join(result["why_not"])
    degrees = "  ".join(f"{name} {value}" for name, value in result["layout"].items() if value > 1) or "one device"
    print(f"{result['model']} on {result['gpus']} devices, {result['method']}: {verdict}")
    print(
        f"layout: {degrees}  ({result['learner_gpus']} learner, {result['rollout_gpus']} rollout devices), "
        f"{result['micro_batch_tokens']:,} tokens a micro-batch"
    )
    if result["not_run_today"]:
        print(f"  k3rl does not run this yet: {', '.join(result['not_run_today'])}")
    print(f"learner device: {result['gpu_gib']:,.1f} GiB")
    for name, value in result["memory_gib"].items():
        print(f"  {name:<14} {value:>10,.2f}")
    if result["engine_memory_gib"]:
        print(
            f"engine device ({result['engine_gpus']} an engine): {sum(result['engine_memory_gib'].values()):,.1f} GiB"
        )
    if result["host_gib"]:
        print(f"host memory of a node: {result['host_gib']:,.1f} GiB")
    print(f"one step: {result['seconds']:,.1f} s, longest: {result['bottleneck']}")
    for name, value in result["step_s"].items():
        print(f"  {name:<26} {value:>10,.2f} s")
    for link, value in result["bytes"].items():
        print(f"over {link}: {value / 1e9:,.1f} GB a device")
    if result["here"]:
        print("on these devices:")
    for row in result["here"]:
        verdict = "fits" if row["fits"] else "does not fit"
        print(f"  {row['method']}: {verdict}, {_said(row)}, {row['seconds']:,.1f} s a step{_unrun(row)}")
    if result["smallest"]:
        print("smallest clusters that fit:")
    for row in result["smallest"]:
        count = row["gpus"]
        where = "none up to 8,192 devices" if count is None else f"{count} devices, {_said(row)}"
        today = "" if not row.get("not_run_today") else f"; as it runs today: {row['gpus_today'] or 'none'}"
        print(f"  {row['method']}: {where}{_unrun(row)}{today}")
    print("assumed:")
    for line in result["assumptions"]:
        print(f"  {line}")


def _said(row: dict[str, Any]) -> str:
    degrees = " x ".join(f"{name} {value}" for name, value in row["layout"].items() if value > 1) or "one device"
    host = f", {row['host_gib']:,.0f} of a node's host" if row["host_gib"] else ""
    return f"{row['gpu_gib']:,.1f} GiB each{host} ({degrees}; {row['rollout_gpus']} sample)"


def _unrun(row: dict[str, Any]) -> str:
    return f"; k3rl does not run this yet: {', '.join(row['not_run_today'])}" if row.get("not_run_today") else ""
