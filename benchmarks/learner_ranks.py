"""The learner on several ranks over NCCL, a GPU each: gradients against one process, time, bytes, a dead rank.

    python benchmarks/learner_ranks.py --out FILE [--ranks 2] [--steps 4] [--limit-s 140]
    python benchmarks/learner_ranks.py --wide --out FILE [--steps 2]   # one group of K3's width
    python benchmarks/learner_ranks.py --dry         # the same over gloo on CPUs, a small model

Checks first, in float64 with quantization on: the gradients of a batch that data, expert and context ranks share are
those of one process (1e-8 of each norm). Then rows: `k3-small` in bf16, 8,192 tokens a rank in documents of 2,048, on
one rank, on data ranks (with and without `trainer.overlap`) and on expert ranks; one rank takes the same global batch
as micro-batches. Then one document of as many tokens, on one rank and on context ranks, whose kernels are checked in
bf16 first. A time is the fastest step of the slowest rank, `median_ms` the median. `share_of_peak` is the work over the
time over 989 TFLOP/s a rank (`benchmarks/learner_gpu.py` has the formula); `waiting_ms`: of rank 0 in collectives,
waiting for others included; bytes are those that rank 0 sends in a step: `expert_bytes` rows to experts,
`gradient_bytes` gradients to their owners and weights from them, `planned_gradient_bytes` what `k3rl plan` counts for
the latter. `loss_gap`: of the first step, from one rank's, in nats; `peak_gib` of the rank that needs most, `plan_gib`
what `k3rl plan` says; `profile`: where rank 0's host spends a step, in milliseconds of each function by itself.
Last, in a group of its own, a rank ends without a word, and the others must name it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib.util
import json
import os
import pstats
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from k3rl.data.batch import TrainBatch
from k3rl.kernels.kda.operator import kda
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM, flash
from k3rl.model.costs import MicroBatch
from k3rl.model.fuse import fusing
from k3rl.model.layout import Layout as Rows
from k3rl.parallel import (
    Mesh,
    RankFailed,
    Trainer,
    TrainerConfig,
    World,
    balanced_shares,
    flat_bucket,
    gather_tensors,
)
from k3rl.parallel.captured import CapturedForwardBackward
from k3rl.parallel.context import ContextParallel
from k3rl.planner import Layout, Method, gradient_bytes, learner_memory

_spec = importlib.util.spec_from_file_location("learner_gpu", Path(__file__).with_name("learner_gpu.py"))
if _spec is None or _spec.loader is None:
    raise ImportError("learner_gpu.py is not beside this file")
learner_gpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(learner_gpu)
gpu = learner_gpu.gpu

TOLERANCE = 1e-8  # of a gradient's norm, float64: orders of summation differ
KERNEL_TOLERANCE = 1.5e-2  # relative Frobenius norm: states are rounded to bf16 at other places (docs/kernels.md)
LOSS_TOLERANCE = {"cuda": 0.02, "cpu": 1e-4}  # nats; bf16 sums of other batch shapes round, and route, otherwise
DEAD_S = 15.0  # timeout of the ranks of which one ends
DEGREES = {"data": (1, 1), "expert": (0, 1), "context": (1, 0)}  # expert and context; 0 stands for all ranks


class Row(NamedTuple):
    """Ranks of one kind, more of their trainer's configuration, and the row that a time is put beside."""

    name: str
    ranks: str
    options: dict[str, Any] = {}
    whole: bool = False  # one document of all tokens
    base: int = 0


SMALL = (
    Row("one rank", "alone"),
    Row("data ranks", "data", {"overlap": "off"}),
    Row("data ranks, sums overlapped with the backward", "data", {"overlap": "on"}),
    Row("expert ranks", "expert"),
    Row("one rank, one document", "alone", whole=True, base=4),
    Row("context ranks, one document", "context", whole=True, base=4),
)
FOR_MEMORY = {"momentum_dtype": "bfloat16", "capture": "off"}
WIDE = (
    Row("one rank", "alone", FOR_MEMORY),
    Row("expert ranks", "expert", FOR_MEMORY),
    Row("context ranks, one document", "context", FOR_MEMORY, whole=True),
)


def rows_of(given: argparse.Namespace) -> tuple[Row, ...]:
    return WIDE if given.wide else SMALL


def config_of(given: argparse.Namespace) -> K3Config:
    if given.wide:
        return gpu.dry_model() if given.dry else gpu.wide_group()
    return K3Config.named("k3-nano" if given.dry else given.model)


def degrees_of(name: str, ranks: int) -> tuple[int, int]:
    expert, context = DEGREES[name]
    return expert or ranks, context or ranks


def trainer_of(config: K3Config, mesh: Mesh, dtype: torch.dtype, **options: Any) -> Trainer:
    """Equal weights on all ranks: each draws all of them where it computes, and keeps its experts."""
    model = gpu.filled(config, mesh.world.device, dtype, seed=3)
    if mesh.expert.size > 1:
        drawn = dict(model.official_parameters())
        held = mesh.experts(config.num_experts)
        model = K3ForCausalLM(config, dtype=dtype, experts=held, device=mesh.world.device)
        with torch.no_grad():
            for name, parameter in model.official_parameters():
                parameter.copy_(drawn[name])
    degrees = {"expert_parallel": mesh.expert.size, "context_parallel": mesh.context.size}
    return Trainer(model, TrainerConfig(**degrees, **options), mesh)


def share(whole: TrainBatch, mesh: Mesh) -> TrainBatch:
    return whole.select(balanced_shares(whole.lengths.tolist(), mesh.batch_size)[mesh.batch_rank])


def total_loss(metrics: Any, mesh: Mesh) -> float:
    """The loss of all ranks' targets."""
    first = mesh.first_of_context or mesh.context.size > 1  # context ranks have targets of their own
    pairs = metrics.pairs().get("loss/mean", (0.0, 0.0))
    both = torch.tensor(pairs if first else (0.0, 0.0), dtype=torch.float64, device=mesh.world.device)
    mesh.world.sum(both)
    return float(both[0] / both[1])


# ---- what one rank does


def check_gradients(world: World, found: dict[str, Any]) -> None:
    """Gradients in float64 of every kind of rank against one process, here on each of them."""
    config = K3Config.named("k3-nano").replace(num_experts=4)
    batch = learner_gpu.batch_of(config, 32 * world.size * 2, 32)
    alone = trainer_of(config, Mesh.alone(world.device), torch.float64)
    metrics, _ = alone.gradients(batch, CrossEntropy())
    wanted = {name: p.grad for name, p in alone.native.shards.params.items() if p.grad is not None}
    for name in DEGREES:
        expert, context = degrees_of(name, world.size)
        mesh = Mesh(world, expert=expert, context=context)
        trainer = trainer_of(config, mesh, torch.float64)
        own, _ = trainer.gradients(share(batch, mesh), CrossEntropy())
        loss = total_loss(own, mesh)
        params = trainer.native.shards.params.items()
        mine = {n: p.grad for n, p in params if p.grad is not None and n in trainer.native.shards.counted}
        every = gather_tensors(world, mine)
        gaps = {n: float((every[n] - g).norm() / g.norm().clamp_min(1e-30)) for n, g in wanted.items() if n in every}
        worst = max(gaps, key=lambda n: gaps[n])
        loss_gap = abs(loss - metrics.values()["loss/mean"])
        found["checks"][f"{name} ranks, gradients"] = {
            "ok": every.keys() == wanted.keys() and gaps[worst] <= TOLERANCE and loss_gap <= TOLERANCE,
            "gradients": len(every), "of": len(wanted), "worst": [worst, gaps[worst]], "loss_gap": loss_gap,
        }  # fmt: skip
        if world.rank == 0:
            print(f"{name} ranks: gradients {gaps[worst]:.1e} from one process", flush=True)


def check_context_kernels(world: World, found: dict[str, Any], tokens: int = 4096) -> None:
    """KDA and attention of three documents that ranks share, in bf16, against the same kernels over all rows."""
    device, heads = world.device, 4
    batch = learner_gpu.batch_of(K3Config.named("k3-nano"), tokens, tokens // 3)
    tokens = batch.tokens
    torch.manual_seed(5)
    rows = [torch.randn(1, tokens, heads, 128, device=device, dtype=torch.bfloat16) for _ in range(4)]
    beta = torch.randn(1, tokens, heads, device=device, dtype=torch.bfloat16)
    own = [0.3 * torch.randn(n, device=device) for n in (heads, heads * 128)]
    up = torch.randn_like(rows[0])
    mesh = Mesh(world, context=world.size)
    cuts = np.linspace(0, tokens, world.size + 1).astype(np.int64)
    share = ContextParallel(mesh.context, world).split(batch, -1, cuts)
    here, ends = share.rows, torch.from_numpy(share.cu_seqlens).to(device, torch.int32)
    layout, whole = Rows(np.diff(share.cu_seqlens).tolist(), device, share.communicator), batch.lengths.tolist()
    every = Rows(whole, device)

    def operators(part: slice, ends: torch.Tensor, context: Any, own_layout: Rows) -> list[torch.Tensor]:
        leaves = [x[:, part].detach().requires_grad_() for x in (*rows, beta)]
        gates = [x.detach().requires_grad_() for x in own]
        o, _ = kda(*leaves, *gates, cu_seqlens=ends, context=context)
        grads = torch.autograd.grad(o, [*leaves, *gates], up[:, part])
        q, k, v = (x[0, part].detach().requires_grad_() for x in rows[:3])
        keys, seen = own_layout, [k, v]
        if context is not None:
            before = [context.rows_before(x) for x in (k, v)]
            seen = [torch.cat([b, x]) for b, x in zip(before, (k, v), strict=True)]
            keys = own_layout.with_before(torch.tensor([len(before[0])] + [0] * (own_layout.n_segments - 1)))
        attended = flash.attention(q, *seen, own_layout, keys, 128**-0.5)
        largest = flash.largest_logits(q.detach(), seen[0].detach(), own_layout, 1.0, keys)
        return [o, *grads, attended, *torch.autograd.grad(attended, [q, k, v], up[0, part]), largest]

    got = operators(here, ends, share.communicator, layout)
    wanted = operators(slice(None), every.cu_seqlens, None, every)
    gaps = {}
    names = ("o", "q", "k", "v", "gate", "beta", "A_log", "dt_bias", "attention", "its q", "its k", "its v", "logits")
    for place, name in enumerate(names):
        mine, all_of_it = got[place].detach().double(), wanted[place].detach().double()
        if name in ("A_log", "dt_bias"):
            world.sum(mine)
        elif name == "logits":
            world.maximum(mine)
        else:
            all_of_it = all_of_it[here] if place >= 8 else all_of_it[:, here]
        gaps[name] = float((mine - all_of_it).norm() / all_of_it.norm())
    worst = torch.tensor(list(gaps.values()), dtype=torch.float64, device=device)
    world.maximum(worst)
    found["checks"]["context ranks, kernels in bf16"] = {
        "ok": float(worst.max()) <= KERNEL_TOLERANCE, "relative": dict(zip(names, worst.tolist(), strict=True))
    }  # fmt: skip


@contextmanager
def counted(world: World) -> Iterator[dict[str, float]]:
    """Seconds in collectives, and bytes of gradients and weights that this rank sends."""
    seen = {"waiting": 0.0, "bytes": 0.0}
    during, inner = World.during, flat_bucket.dist

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def reduce(self, flat: torch.Tensor, dst: int, group: Any = None, **how: Any) -> Any:
            seen["bytes"] += flat.nbytes * (dst != world.rank)
            return inner.reduce(flat, dst=dst, group=group, **how)

        def broadcast(self, flat: torch.Tensor, src: int, group: Any = None, **how: Any) -> Any:
            others = inner.get_world_size(group) - 1
            seen["bytes"] += flat.nbytes * others * (src == world.rank)
            return inner.broadcast(flat, src=src, group=group, **how)

    @contextmanager
    def timed(self: World, what: str) -> Iterator[None]:
        began = time.perf_counter()
        with during(self, what):
            yield
        seen["waiting"] += time.perf_counter() - began

    World.during, flat_bucket.dist = timed, Counting()  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        World.during, flat_bucket.dist = during, inner  # type: ignore[method-assign]


def timed_steps(world: World, mesh: Mesh, given: argparse.Namespace, row: Row, found: dict[str, Any]) -> None:
    """Steps of one layout; `found` gets what this rank saw."""
    alone, tokens, config = mesh.world.size == 1, given.tokens * world.size, config_of(given)
    length = tokens if row.whole else given.length
    whole = learner_gpu.batch_of(config, tokens, length)
    dtype = torch.float32 if given.dry else torch.bfloat16
    budget = tokens if row.whole and alone else given.tokens
    trainer = trainer_of(config, mesh, dtype, micro_batch_tokens=budget, **row.options)
    batch = whole if alone else share(whole, mesh)
    losses, seconds, sent, waited, gradient_bytes = [], [], 0.0, 0.0, 0.0
    for _ in range(given.warm + given.steps):
        gpu.synchronize(world.device)
        world.sum(torch.zeros(1, device=world.device))  # they begin together
        with counted(world) as seen:
            began = time.perf_counter()
            metrics = trainer.train(batch, CrossEntropy())
            gpu.synchronize(world.device)
            seconds.append(time.perf_counter() - began)
        losses.append(total_loss(metrics, mesh))
        sent = metrics.pairs().get("perf/expert_bytes", (0.0, 0.0))[0]
        waited, gradient_bytes = seen["waiting"], seen["bytes"]
    if world.rank == 0:
        print(f"{'x'.join(map(str, mesh.shape))}: steps of {[round(1e3 * s, 1) for s in seconds]} ms", flush=True)
    timed = seconds[given.warm :]
    passes = gpu.wall(lambda: drop(trainer, trainer.gradients(batch, CrossEntropy())), world.device, 2, 1)
    path = trainer.native.forward_backward
    found["rows"].append({
        "seconds": min(timed), "median": statistics.median(timed), "losses": losses, "waiting": waited,
        "expert_bytes": sent, "gradient_bytes": gradient_bytes, "passes": passes,
        "captured": isinstance(path, CapturedForwardBackward) and path.captured > 0,
        "work": 3 * learner_gpu.forward_work(trainer.model, length) * tokens if mesh.expert.size == 1 else None,
        "peak_gib": metrics.values().get("memory/peak", 0.0) / learner_gpu.GIB or None, "notes": trainer.notes,
        "profile": profile_of(lambda: trainer.train(batch, CrossEntropy())),
    })  # fmt: skip


def drop(trainer: Trainer, _: Any) -> None:
    trainer.balancer.clear()


def profile_of(call: Callable[[], object], most: int = 14) -> dict[str, float]:
    """Milliseconds of the functions that take most by themselves, by file, line and name."""
    profile = cProfile.Profile()
    profile.runcall(call)
    found = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    ordered = sorted(found.items(), key=lambda item: -item[1][2])[:most]
    return {f"{Path(file).name}:{line} {name} x{calls}": round(1e3 * own, 2)
            for (file, line, name), (_, calls, own, *_) in ordered}  # fmt: skip


def named_after_death(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What the others say when the last rank has ended without a word."""
    world = World(given.rank, given.ranks, given.address, timeout_s=DEAD_S, device=device)
    world.sum(torch.zeros(1, device=device))
    if given.rank == given.ranks - 1:
        os._exit(9)
    began = time.perf_counter()
    try:
        for _ in range(2):  # on a GPU the first one returns before it is done
            world.sum(torch.zeros(1, device=device))
            gpu.synchronize(device)
    except RankFailed as error:
        said = {"ok": error.rank == given.ranks - 1, "said": str(error)[:300]}
        return said | {"seconds": round(time.perf_counter() - began, 1)}
    return {"ok": False, "said": "the sum was taken"}


def rank_main(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu") if given.dry else torch.device("cuda", given.rank)
    found: dict[str, Any] = {"checks": {}, "rows": []}

    def keep() -> None:
        (given.folder / f"{given.rank}.json").write_text(json.dumps(found))

    if given.dying:
        found["dead"] = named_after_death(given, device)
        keep()
        os._exit(0)
    world = World(given.rank, given.ranks, given.address, timeout_s=90.0, device=device)
    with fusing(False):  # to compile for float64 would take longer than all of it
        check_gradients(world, found)
    if not given.dry:
        check_context_kernels(world, found)
    keep()
    for row in rows_of(given):
        expert, context = degrees_of(row.ranks, given.ranks) if row.ranks != "alone" else (1, 1)
        mesh = Mesh.alone(device) if row.ranks == "alone" else Mesh(world, expert=expert, context=context)
        timed_steps(world, mesh, given, row, found)
        keep()
        gc.collect()  # a trainer is in circles of references, and the next one needs its memory
        if not given.dry:
            torch.cuda.empty_cache()
    world.close()
    os._exit(0)  # threads of a process group may outlive the interpreter, which then aborts


# ---- what the parent says


def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def ran(given: argparse.Namespace, limit_s: float, *more: str) -> list[dict[str, Any]]:
    """What each rank left; of those that took too long, what they had. A dead rank's GPU is busy for its peers' wait,
    so nothing else runs beside that group."""
    nothing: dict[str, Any] = {"checks": {}, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, *sys.argv[1:], *more, "--address", address(), "--folder", folder]
        running = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in range(given.ranks)]
        deadline = time.monotonic() + limit_s
        try:
            for process in running:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"not all ranks ended within {limit_s:g} s", flush=True)
        finally:
            for process in running:
                process.kill()
        files = [Path(folder) / f"{rank}.json" for rank in range(given.ranks)]
        return [json.loads(file.read_text()) if file.exists() else nothing for file in files]


def planned_bytes(config: K3Config, layout: Layout, given: argparse.Namespace) -> float:
    """Gradients and weights that a rank sends in a step by the plan."""
    return sum(gradient_bytes(config, layout, Method(weight_bytes=4 if given.dry else 2)))


def planned_gib(config: K3Config, row: Row, layout: Layout, given: argparse.Namespace) -> float:
    """The peak of a rank by the plan. One process takes the global batch in as many passes as there are ranks."""
    tokens, parallel = given.tokens * given.ranks, row.ranks != "alone"
    length = tokens if row.whole else given.length
    settings = TrainerConfig(
        micro_batch_tokens=tokens if row.whole and not parallel else given.tokens, **row.options,
        expert_parallel=layout.expert, context_parallel=layout.context,
    )  # fmt: skip
    method = Method.of(settings, config, "h200")
    own = settings.micro_batch_tokens
    mix = MicroBatch(own, length, own - max(1, own // length), kernels=method.kernels)
    one_pass = parallel or row.whole
    return sum(learner_memory(config, layout, method, mix, only_one=one_pass).values()) / learner_gpu.GIB


def say(report: Any, given: argparse.Namespace) -> bool:
    """Rows and checks of what the ranks found; whether all is well."""
    ranks = ran(given, given.limit_s)
    fine = True
    for name, check in ranks[0]["checks"].items():
        fine &= check["ok"]
        report.check(name, **check)
    config, rows = config_of(given), rows_of(given)
    degrees = {"alone": (1, 1, 1), "data": (given.ranks, 1, 1)} | {
        name: (1, *degrees_of(name, given.ranks)) for name in ("expert", "context")
    }
    model = "real width" if given.wide else "k3-nano" if given.dry else given.model
    shape = f"{config.num_hidden_layers} layers, {given.tokens} tokens of {given.length} a rank, {given.ranks} ranks"
    complete = min(len(each["rows"]) for each in ranks)
    for number, row in enumerate(rows[:complete]):
        layout = Layout(*degrees[row.ranks])
        own, first, parallel = ranks[0]["rows"][number], ranks[0]["rows"][row.base], row.ranks != "alone"
        work = own["work"] or first["work"]
        places = (row.base, "seconds"), (number, "seconds"), (number, "median"), (number, "passes")
        alone, took, median, passes = (max(each["rows"][n][key] for each in ranks) for n, key in places)
        gap = abs(own["losses"][0] - first["losses"][0])
        alike = row.whole == rows[row.base].whole  # in documents
        fine &= not alike or gap <= LOSS_TOLERANCE["cpu" if given.dry else "cuda"]
        report.row(
            f"{model} on {row.name}", shape, took,
            peer="one rank, all tokens", peer_s=alone if parallel else None,
            floor_s=work / gpu.MATRIX_RATE / (given.ranks if parallel else 1),
            median_ms=round(1e3 * median, 2), passes_ms=round(1e3 * passes, 2),
            share_of_peak=round(work / took / learner_gpu.PEAK / (given.ranks if parallel else 1), 4),
            tokens_per_s=round(given.tokens * given.ranks / took), loss_gap=gap if alike else None,
            losses=own["losses"], waiting_ms=round(1e3 * own["waiting"], 2), expert_bytes=own["expert_bytes"],
            gradient_bytes=own["gradient_bytes"],
            planned_gradient_bytes=round(planned_bytes(config, layout, given)) if parallel else None,
            captured=own["captured"], peak_gib=max(each["rows"][number]["peak_gib"] or 0.0 for each in ranks) or None,
            plan_gib=None if given.dry else round(planned_gib(config, row, layout, given), 2),
            notes=own["notes"], profile=own["profile"],
        )  # fmt: skip
    dead = ran(given, 3 * DEAD_S, "--dying")[0].get("dead") or {"ok": False, "said": "it did not come so far"}
    report.check("a rank that ends is named", **dead)
    return bool(fine and dead["ok"] and complete == len(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="k3-small")
    parser.add_argument("--wide", action="store_true", help="a group of K3's width instead, 2,048 tokens a rank")
    parser.add_argument("--tokens", type=int, help="of a rank; default 8192 (wide 2048), dry 128")
    parser.add_argument("--length", type=int, help="of a document; default 2048, dry 32")
    parser.add_argument("--warm", type=int, help="steps before the timed ones; default 3, dry 1")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=300.0, help="ranks that take longer are ended")
    parser.add_argument("--out", type=Path)
    for word, kind in (("--rank", int), ("--folder", Path)):
        parser.add_argument(word, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--dying", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    for name, small, large in (("tokens", 128, 2048 if given.wide else 8192), ("length", 32, 2048), ("warm", 1, 3)):
        if getattr(given, name) is None:
            setattr(given, name, small if given.dry else large)
    if given.rank is not None:
        rank_main(given)
    if not given.dry and torch.cuda.device_count() < given.ranks:
        parser.error(
            f"{given.ranks} ranks need as many GPUs; {torch.cuda.device_count()} are here, and --dry needs none"
        )
    report = gpu.Report(torch.device("cpu" if given.dry else "cuda"), given.out, given.limit_s)
    return 0 if say(report, given) else 1


if __name__ == "__main__":
    sys.exit(main())
