"""The learner: time of a step by part, ranks that talk over gloo, memory against the plan, plain eager code, DeepSpeed.

    python benchmarks/learner.py [--json] [--models k3-nano k3-mini] [--tokens 1024] [--length 128] [--repeats 3]
                                 [--parts step eager memory layouts adamw] [--layouts dp2 ep2 cp2 dp2xep2]
                                 [--variants plain recompute offload bf16-momentum lora] [--out FILE]

`step` rows: one optimizer step of packed sequences on one process in float32, `parts_ms` of it, tokens a second; the
floor is the work of its matrix products (`k3rl.model.costs`: three forwards, and Newton-Schulz) at the rate of a
large product timed here. `eager` rows: the same model in plain operations with every logit materialized
(`benchmarks/eager_k3.py`) and `torch.optim.AdamW`, on the same tokens, turn by turn with ours: with AdamW and without
the optimizer; `loss_difference` says that both computed the same. `memory` rows: live bytes of a step of one
pass (`k3rl.planner.live_bytes`) beside what `k3rl plan` predicts, no time. `layout` rows: a step on several processes
of one thread against one process that takes all the tokens; `communication_share` is the time that the first rank
spends in collectives, waiting included; `expert_bytes` are counted, beside the plan's. `adamw` row: the native AdamW
on two ranks against DeepSpeed's ZeRO-2, where that is installed. Contenders take turns; a figure is the fastest of the
repeats. On a machine with a GPU the results of `benchmarks/learner_gpu.py` follow, if it is there: its `results()`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM, LoraConfig
from k3rl.model.costs import MicroBatch, flops
from k3rl.parallel import (
    DeepSpeedConfig,
    LearnerConfig,
    Mesh,
    Trainer,
    TrainerConfig,
    World,
    balanced_shares,
    make_trainer,
)
from k3rl.planner import Layout, LiveBytes, Method, expert_bytes, learner_memory, optimizer_costs

PARTS = ("step", "eager", "memory", "layouts", "adamw")
LAYOUTS = {"dp2": (2, 1, 1), "ep2": (1, 2, 1), "cp2": (1, 1, 2), "dp2xep2": (2, 2, 1), "ep2xcp2": (1, 2, 2),
           "cp4": (1, 1, 4)}  # fmt: skip
BOTH = ("attention", "mlp")
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the trainer's configuration, and the plan's method
    "plain": ({}, {}),
    "recompute": ({"recompute": BOTH}, {"recompute": "layer"}),
    "offload": ({"offload_optimizer": True}, {"offload": True}),
    "bf16-momentum": ({"momentum_dtype": "bfloat16"}, {"momentum_bytes": 2}),
    "lora": ({"lora": LoraConfig(rank=8, alpha=16.0)}, {"lora_rank": 8}),
}
Row = dict[str, Any]


def row(
    name: str, shape: str, peer: str, ours_s: float | None, peer_s: float | None, floor_s: float | None, **more: Any
) -> Row:
    def ms(value: float | None) -> float | None:
        return None if value is None else round(1e3 * value, 3)

    return {
        "name": name, "shape": shape, "regime": "cpu, float32, 1 thread", "peer": peer, "ours_ms": ms(ours_s),
        "peer_ms": ms(peer_s), "ratio": None if peer_s is None or ours_s is None else round(peer_s / ours_s, 3),
        "floor_ms": ms(floor_s),
        "share_of_floor": None if floor_s is None or ours_s is None else round(floor_s / ours_s, 3), **more,
    }  # fmt: skip


def beside(name: str) -> Any:
    """The module of a file in this folder, or None where there is none."""
    path = Path(__file__).with_name(f"{name}.py")
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------- what is trained


def batch_of(config: K3Config, tokens: int, length: int) -> TrainBatch:
    """Packed sequences of random tokens; every token but the first of a sequence is a target."""
    rng, nothing = np.random.default_rng(0), np.zeros(length, np.float32)
    mask = np.arange(length) > 0
    return TrainBatch.pack(
        [
            TrainSequence(f"s{n}", rng.integers(0, config.vocab_size, length), mask, nothing, nothing)
            for n in range(tokens // length)
        ]
    )


def trainer_of(name: str, mesh: Mesh, tokens: int, **config: Any) -> Trainer:
    built = K3Config.named(name)
    model = K3ForCausalLM(built, experts=mesh.experts(built.num_experts))
    model.init_weights(0)
    degrees = {"expert_parallel": mesh.expert.size, "context_parallel": mesh.context.size}
    return Trainer(model, TrainerConfig(micro_batch_tokens=tokens, **degrees, **config), mesh)


def fastest(repeats: int, *calls: Callable[[], Any]) -> list[float]:
    """Seconds of each call, taken in turn; the first round is not counted."""
    best = [float("inf")] * len(calls)
    for turn in range(repeats + 1):
        for place, call in enumerate(calls):
            began = time.perf_counter()
            call()
            if turn:
                best[place] = min(best[place], time.perf_counter() - began)
    return best


class Clock:
    """Seconds spent in methods, by label; `wrap` replaces a method of one object."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, label: str) -> None:
        inner = getattr(owner, method)

        @wraps(inner)
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                self.seconds[label] += time.perf_counter() - began

        setattr(owner, method, timed)

    def wrap_context(self, owner: Any, method: str, label: str) -> None:
        inner = getattr(owner, method)

        @contextmanager
        def timed(*args: Any, **options: Any) -> Iterator[None]:
            began = time.perf_counter()
            try:
                with inner(*args, **options):
                    yield
            finally:
                self.seconds[label] += time.perf_counter() - began

        setattr(owner, method, timed)

    def watch(self, trainer: Trainer) -> None:
        self.wrap(trainer.native.forward_backward, "loss_of", "forward and loss")
        self.wrap(trainer.native, "accumulate", "forward, loss and backward")
        self.wrap(trainer.native, "reduce_gradients", "reduce gradients")
        self.wrap(trainer.native.optimizer, "step_clipped", "optimizer")
        self.wrap(trainer.native.clipping, "clip", "gradient norm")
        self.wrap(trainer.native.shards, "share_parameters", "send parameters")
        self.wrap(trainer.balancer, "update", "balance")
        self.wrap_context(trainer.mesh.world, "during", "communication")

    def parts(self, steps: int, whole_s: float) -> dict[str, float]:
        """Milliseconds of a step by part; `rest` is what no part has."""
        mean = {label: value / steps for label, value in self.seconds.items()}
        both, forward = mean.pop("forward, loss and backward"), mean.get("forward and loss", 0.0)
        mean.pop("communication", None)  # it is inside the others
        mean["backward"] = both - forward
        mean["rest"] = max(0.0, whole_s - sum(mean.values()))
        return {label: round(1e3 * value, 2) for label, value in mean.items()}


def timed_steps(trainer: Trainer, batch: TrainBatch | None, repeats: int) -> tuple[float, dict[str, float], float]:
    """(seconds of the fastest step, milliseconds by part in the mean, share of time in communication)."""
    trainer.train(batch, CrossEntropy())
    clock, every = Clock(), []
    clock.watch(trainer)
    for _ in range(repeats):
        began = time.perf_counter()
        trainer.train(batch, CrossEntropy())
        every.append(time.perf_counter() - began)
    mean = sum(every) / repeats
    return min(every), clock.parts(repeats, mean), clock.seconds["communication"] / sum(every)


def product_rate() -> float:
    """Floating-point operations per second of a large float32 product."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / fastest(5, lambda: a @ b)[0]


def floor_s(config: K3Config, mix: MicroBatch, optimizer: str = "per_head_muon") -> float:
    """Seconds of the matrix products of a step at the rate of a large one."""
    work = 3 * sum(flops(config, mix).values())
    if optimizer != "adamw":
        work += sum(optimizer_costs(config, optimizer).flops.values())
    return work / product_rate()


# --------------------------------------------------------------------------------------------------- one process


def step_rows(name: str, given: argparse.Namespace) -> Iterator[Row]:
    config, mix = K3Config.named(name), MicroBatch(given.tokens, given.length, given.tokens, 4)
    for variant in given.variants:
        options, _ = VARIANTS[variant]
        trainer = trainer_of(name, Mesh.alone(), given.tokens, **options)
        best, parts, _ = timed_steps(trainer, batch_of(config, given.tokens, given.length), given.repeats)
        floor = None if variant == "lora" else floor_s(config, mix)
        shape = f"{name}, {variant}, {given.tokens} tokens of {given.length}"
        yield row(
            "step", shape, "none", best, None, floor, parts_ms=parts, tokens_per_s=round(given.tokens / best),
            parameters=trainer.model.parameter_count(),
        )  # fmt: skip


def eager_rows(name: str, given: argparse.Namespace) -> Iterator[Row]:
    """The same function, gradients and optimizer in plain code."""
    config, shape = K3Config.named(name), f"{name}, {given.tokens} tokens of {given.length}"
    batch = batch_of(config, given.tokens, given.length)
    ids = torch.from_numpy(batch.input_ids).view(-1, given.length)
    ours = trainer_of(name, Mesh.alone(), given.tokens, optimizer="adamw", balance="freeze")
    model = K3ForCausalLM(config)
    model.init_weights(0)
    plain = beside("eager_k3").EagerK3(model)
    trained = [value for value in plain.weights.values() if value.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-4)

    def passes() -> float:
        adamw.zero_grad()
        loss = plain.loss(ids)
        loss.backward()
        return float(loss.detach())

    def our_passes() -> float:
        metrics, _ = ours.gradients(batch, CrossEntropy())
        ours.balancer.clear()
        return metrics.values()["loss/mean"]

    apart = abs(passes() - our_passes())
    peaks = []
    for run in (our_passes, passes):
        live = LiveBytes([*ours.model.parameters(), *trained])
        with live:
            run()
        peaks.append(live.peak)
    ours_s, plain_s = fastest(given.repeats, our_passes, passes)
    yield row(
        "passes against eager", shape, "plain eager code", ours_s, plain_s, None, loss_difference=apart,
        peak_bytes=peaks[0], peer_peak_bytes=peaks[1], memory_ratio=round(peaks[0] / peaks[1], 3),
    )  # fmt: skip
    ours_s, plain_s = fastest(
        given.repeats, lambda: ours.train(batch, CrossEntropy()), lambda: (passes(), adamw.step())
    )
    yield row("step against eager", shape, "plain eager code, torch.optim.AdamW", ours_s, plain_s, None)


def memory_rows(name: str, given: argparse.Namespace) -> Iterator[Row]:
    config, batch = K3Config.named(name), batch_of(K3Config.named(name), given.tokens, given.length)
    for variant in given.variants:
        options, method = VARIANTS[variant]
        trainer = trainer_of(name, Mesh.alone(), given.tokens, **options)
        mix = MicroBatch(given.tokens, given.length, given.tokens, 4)
        planned = learner_memory(config, Layout(), Method(weight_bytes=4, **method), mix, only_one=True)
        yield memory_row(f"{name}, {variant}, {given.tokens} tokens of {given.length}", trainer, batch, planned)


def memory_row(shape: str, trainer: Trainer, batch: TrainBatch | None, planned: dict[str, float]) -> Row:
    """Live bytes of a step beside the plan's. Weights, stored state and sums of experts' gradients, which are there
    before it, are added from their own sizes."""
    model, held = trainer.model, trainer.memory()
    sums = [total for part in model.moe_parts() if part.bank.sums is not None for total in part.bank.gradients()]
    state = trainer.native.optimizer.state.tensors()
    kept = [value for bank in model.packed_banks.values() for n in model.experts for leaf in ("w1", "w2", "w3")
            for value in bank.stored(n, leaf)]  # fmt: skip
    own = [p for p in model.parameters() if not p.is_meta]
    live = LiveBytes([*own, *kept, *(p for _, p in model.trained_parameters()), *state, *sums])
    trainer.train(batch, CrossEntropy())
    with live:
        trainer.train(batch, CrossEntropy())
    found = {part: held.get(part, 0) for part in ("weights", "adapters", "optimizer")} | {
        "gradients and work": live.peak + sum(total.nbytes for total in sums)
    }
    total, expected = sum(found.values()), sum(planned.values())
    return row(
        "memory", shape, "k3rl plan", None, None, None, peak_bytes=total, planned_bytes=round(expected),
        planned_over_measured=round(expected / total, 3), measured={k: v for k, v in found.items() if v},
        planned={part: round(value) for part, value in planned.items()},
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------- several processes


def rank_main(given: argparse.Namespace) -> None:
    """What one rank of a layout measures; it leaves a file in `--folder`."""
    name, degrees = given.models[0], (1, 1, 1) if given.layouts[0] == "one" else LAYOUTS[given.layouts[0]]
    _, expert, context = degrees
    size = degrees[0] * expert * context
    world = World(given.rank, size, given.address, timeout_s=300) if size > 1 else World.alone()
    mesh, config = Mesh(world, expert=expert, context=context), K3Config.named(name)
    whole = batch_of(config, given.tokens * size, given.length)  # each rank has `tokens` of it
    members = balanced_shares(whole.lengths.tolist(), mesh.batch_size)[mesh.batch_rank]
    own = whole.select(members) if len(members) < len(whole.lengths) else whole
    if given.backend:
        settings = DeepSpeedConfig(stage=2, dtype="fp32")
        learner = LearnerConfig(backend=given.backend, deepspeed=settings)
        model = K3ForCausalLM(config)
        model.init_weights(0)
        options = TrainerConfig(optimizer="adamw", micro_batch_tokens=given.tokens, balance="freeze")
        trainer = make_trainer(model, options, learner, mesh)
        best = fastest(given.repeats, lambda: trainer.train(own, CrossEntropy()))[0]
        found: Row = {"seconds": best}
    else:
        trainer = trainer_of(name, mesh, given.tokens)
        best, parts, share = timed_steps(trainer, own, given.repeats)
        sent = trainer.on_mesh.sent_bytes / (given.repeats + 1)
        layout, mix = Layout(*degrees), MicroBatch(given.tokens, given.length, given.tokens, 4)
        planned = learner_memory(config, layout, Method(weight_bytes=4), mix, only_one=True)
        memory = memory_row("", trainer_of(name, mesh, given.tokens), own, planned)
        found = {"seconds": best, "parts_ms": parts, "communication_share": share, "expert_bytes": sent} | {
            key: memory[key] for key in ("peak_bytes", "planned_bytes", "planned_over_measured")
        }
    (given.folder / f"{given.rank}.json").write_text(json.dumps(found))
    world.close()
    os._exit(0)  # threads of a process group may outlive the interpreter, which then aborts


def ranks(name: str, layout: str, given: argparse.Namespace, backend: str = "") -> list[Row]:
    """What every rank of a layout measured, each a process of its own."""
    degrees = (1, 1, 1) if layout == "one" else LAYOUTS[layout]
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        words = [
            sys.executable, __file__, "--models", name, "--layouts", layout, "--tokens", str(given.tokens), "--length",
            str(given.length), "--repeats", str(given.repeats), "--folder", folder, "--address", address,
            "--backend", backend,
        ]  # fmt: skip
        count = degrees[0] * degrees[1] * degrees[2]
        running = [subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.DEVNULL) for rank in range(count)]
        try:
            for process in running:
                if process.wait(timeout=1200):
                    raise RuntimeError(f"a rank of {layout} ended with {process.returncode}; its words are above")
        finally:
            for process in running:
                process.kill()
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]


def layout_rows(name: str, given: argparse.Namespace) -> Iterator[Row]:
    config = K3Config.named(name)
    alone = {size: None for size in (2, 4)}
    for layout in given.layouts:
        data, expert, context = LAYOUTS[layout]
        size = data * expert * context
        if alone[size] is None:
            trainer = trainer_of(name, Mesh.alone(), max(given.tokens, given.length))
            alone[size] = timed_steps(trainer, batch_of(config, given.tokens * size, given.length), given.repeats)[0]
        found = ranks(name, layout, given)
        first = found[0]
        forward, backward = expert_bytes(config, expert, 4) if expert > 1 else (0.0, 0.0)
        yield row(
            "layout", f"{name}, {layout}, {given.tokens} tokens of {given.length} a rank",
            "one process with all the tokens", max(part["seconds"] for part in found), alone[size], None,
            tokens_per_s=round(given.tokens * size / max(part["seconds"] for part in found)),
            parts_ms=first["parts_ms"],
            communication_share=round(first["communication_share"], 3),
            expert_bytes=round(sum(part["expert_bytes"] for part in found) / size),
            planned_expert_bytes=round((forward + backward) * given.tokens * len(config.moe_layers)),
            peak_bytes=max(part["peak_bytes"] for part in found), planned_bytes=first["planned_bytes"],
            planned_over_measured=round(first["planned_bytes"] / max(part["peak_bytes"] for part in found), 3),
        )  # fmt: skip


def adamw_rows(name: str, given: argparse.Namespace) -> Iterator[Row]:
    shape = f"{name}, dp2, {given.tokens} tokens of {given.length} a rank"
    ours = max(part["seconds"] for part in ranks(name, "dp2", given, "native"))
    peer, why = None, "not installed"
    if importlib.util.find_spec("deepspeed") is not None:
        peer, why = max(part["seconds"] for part in ranks(name, "dp2", given, "deepspeed")), version("deepspeed")
    yield row("adamw", shape, f"DeepSpeed ZeRO-2 ({why})", ours, peer, None)


# ------------------------------------------------------------------------------------------------------------ main


def gpu_rows() -> tuple[str, list[Row]]:
    """What became of the part that needs a GPU, and its rows."""
    if not torch.cuda.is_available():
        return "no CUDA device", []
    module = beside("learner_gpu")
    return ("absent", []) if module is None else ("run", list(module.results()))


def installed(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["k3-nano", "k3-mini"])
    parser.add_argument("--tokens", type=int, default=1024, help="of one rank and step")
    parser.add_argument("--length", type=int, default=128, help="of a sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layouts", nargs="*", choices=[*LAYOUTS, "one"], default=["dp2", "ep2", "cp2", "dp2xep2"])
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if given.rank is not None:
        rank_main(given)
        return
    load = os.getloadavg()[0]
    makers = dict(zip(PARTS, (step_rows, eager_rows, memory_rows, layout_rows, adamw_rows), strict=True))
    rows = [made for part in given.parts for name in given.models for made in makers[part](name, given)]
    state, more = gpu_rows()
    report = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_average": round(load, 1),  # of other work before the first row: above 0, times are not to be trusted
        },
        "versions": installed("torch", "numpy", "deepspeed") | {"python": platform.python_version()},
        "gpu": state,
        "results": rows + more,
    }
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not given.json:
        for entry in report["results"]:
            print(json.dumps(entry))
    print(json.dumps(report) if given.json else f"gpu: {state}")


if __name__ == "__main__":
    main()
