"""Steps of an adapter on several ranks, its frozen weights whole on each and cut over them (`trainer.shard_frozen`).

    python benchmarks/frozen.py [--json] [--ranks 2] [--device cpu|cuda] [--model k3-nano] [--tokens 1024]
                                [--length 128] [--repeats 3] [--recompute] [--out FILE]

Ranks are processes of one thread over gloo, or each with a GPU of its own over NCCL. Both trainers take turns; a figure
is the fastest of the repeats on the slowest rank. `weights_bytes`: what a rank holds between passes, whole and cut;
`peak_bytes`: that and what a step takes besides, on a GPU; `waiting_ms`: of rank 0, in a mean step, until gathered
weights were there. `difference`: of gradients at equal adapters, that of the tensor that differs most,
in units of its norm, and `from_itself` that of the whole model's second time from its first: on a GPU some
sums have no fixed order.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM, LoraConfig
from k3rl.parallel import Mesh, Trainer, TrainerConfig, World, balanced_shares
from k3rl.parallel.frozen import SlicedPart

_spec = importlib.util.spec_from_file_location("gpu", Path(__file__).with_name("gpu.py"))
if _spec is None or _spec.loader is None:
    raise ImportError("gpu.py is not beside this file")
gpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu)

BOTH = ("attention", "mlp")


def batch_of(config: K3Config, tokens: int, length: int) -> TrainBatch:
    """Packed sequences of random tokens; every token but the first of a sequence is a target."""
    rng, nothing, mask = np.random.default_rng(0), np.zeros(length, np.float32), np.arange(length) > 0
    ids = rng.integers(0, config.vocab_size, (tokens // length, length))
    return TrainBatch.pack([TrainSequence(f"s{n}", row, mask, nothing, nothing) for n, row in enumerate(ids)])


def trainer_of(config: K3Config, mesh: Mesh, ranks: int, given: argparse.Namespace) -> Trainer:
    if given.device == "cuda":
        model = gpu.filled(config, mesh.world.device, torch.bfloat16)
        model = model.cpu() if ranks > 1 else model  # a trainer moves what it cuts
    else:
        model = K3ForCausalLM(config, dtype=torch.float32)
        model.init_weights(0)
    again = BOTH if given.recompute else ()
    settings = TrainerConfig(
        micro_batch_tokens=given.tokens, lora=LoraConfig(rank=8, alpha=16.0), recompute=again, shard_frozen=ranks
    )
    return Trainer(model, settings, mesh)


def gradients(trainer: Trainer, batch: TrainBatch) -> dict[str, torch.Tensor]:
    trainer.gradients(batch, CrossEntropy())
    trainer.balancer.clear()
    return {n: p.grad.double() for n, p in trainer.native.shards.params.items() if p.grad is not None}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[Any]:
    """(distance, name, tensors that are not bit-equal) of the tensor that differs most, in units of its norm."""
    gaps = {n: float((g - other[n]).norm() / g.norm().clamp_min(1e-30)) for n, g in one.items()}
    worst = max(gaps, key=lambda n: gaps[n])
    return [gaps[worst], worst, sum(not torch.equal(g, other[n]) for n, g in one.items())]


def rank_main(given: argparse.Namespace) -> None:
    """What one rank measures; it leaves a file in `--folder`."""
    torch.set_num_threads(1)
    device = torch.device("cuda", given.rank) if given.device == "cuda" else torch.device("cpu")
    world = World(given.rank, given.ranks, given.address, timeout_s=240, device=device)
    mesh, config = Mesh(world), K3Config.named(given.model)
    whole = batch_of(config, given.tokens * given.ranks, given.length)
    own = whole.select(balanced_shares(whole.lengths.tolist(), mesh.batch_size)[mesh.batch_rank])
    waited, inner = [0.0], SlicedPart.whole

    def waiting(part: SlicedPart) -> torch.Tensor:
        began = time.perf_counter()
        gathered = inner(part)
        waited[0] += time.perf_counter() - began
        return gathered

    SlicedPart.whole = waiting  # type: ignore[method-assign]
    trainers = [trainer_of(config, mesh, ranks, given) for ranks in (1, given.ranks)]
    seconds, peaks, total = [float("inf")] * 2, [0, 0], 0.0
    for turn in range(given.repeats + 1):
        for number, trainer in enumerate(trainers):
            waited[0] = 0.0
            held = 0
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()  # the other trainer's too
            began = time.perf_counter()
            metrics = trainer.train(own, CrossEntropy())
            if device.type == "cuda":
                torch.cuda.synchronize()
                peaks[number] = int(metrics.values()["memory/peak"]) - held + trainer.memory()["weights"]
            if turn:
                seconds[number] = min(seconds[number], time.perf_counter() - began)
                total += waited[0]
    # Steps of both went their own ways where sums have no fixed order; from here on the adapters are equal.
    trainers[1].load_state_tensors(trainers[0].state_tensors())
    first, again, cut = (gradients(trainer, own) for trainer in (trainers[0], *trainers))
    found = {
        "seconds": seconds, "peaks": peaks, "weights": [trainer.memory()["weights"] for trainer in trainers],
        "waiting": total / given.repeats, "difference": apart(first, cut), "from_itself": apart(first, again),
    }  # fmt: skip
    (given.folder / f"{given.rank}.json").write_text(json.dumps(found))
    world.close()
    os._exit(0)  # threads of a process group may outlive the interpreter, which then aborts


def results(given: argparse.Namespace) -> dict[str, Any]:
    """The row of this configuration."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        words = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--address", address]
        running = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in range(given.ranks)]
        try:
            for process in running:
                if process.wait(timeout=900):
                    raise RuntimeError(f"a rank ended with {process.returncode}; its words are above")
        finally:
            for process in running:
                process.kill()
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(given.ranks)]
    whole, cut = (max(each["seconds"][n] for each in found) for n in (0, 1))
    return {
        "name": "frozen weights over ranks",
        "shape": f"{given.model}, {given.ranks} ranks, {given.tokens} tokens of {given.length} a rank"
        + (", recomputed" if given.recompute else ""),
        "regime": f"{given.device}, {'bf16, NCCL' if given.device == 'cuda' else 'float32, gloo, 1 thread'}",
        "peer": "whole on every rank", "ours_ms": round(1e3 * cut, 3), "peer_ms": round(1e3 * whole, 3),
        "ratio": round(whole / cut, 3), "floor_ms": None, "share_of_floor": None,
        "waiting_ms": round(1e3 * found[0]["waiting"], 3), "weights_bytes": found[0]["weights"],
        "peak_bytes": [max(each["peaks"][n] for each in found) or None for n in (0, 1)],
        "difference": max(each["difference"] for each in found),
        "from_itself": max(each["from_itself"] for each in found),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="k3-nano")
    for name, default in (("tokens", 1024), ("length", 128), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given)
    about = {"machine": platform.processor() or platform.machine(), "load_average": os.getloadavg()[0]}
    if given.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    said = about | {"versions": {"torch": version("torch")}, "results": [results(given)]}
    if given.out is not None:
        given.out.write_text(json.dumps(said, indent=1) + "\n")
    print(json.dumps(said, indent=None if given.json else 1))


if __name__ == "__main__":
    main()
