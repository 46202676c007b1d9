"""Publishing weights straight into an engine's process, through shared GPU memory or by a broadcast, against the host.

    python benchmarks/transfer.py --transport ipc --out FILE                      # learner and engine on one GPU
    python benchmarks/transfer.py --transport broadcast --out FILE [--engines N]  # each on a GPU of its own, NCCL
    python benchmarks/transfer.py --transport broadcast --device cpu --model k3-nano   # the same through gloo

The learner's weights lie on its device; two processes at least, without Ray. Checks first: after each publication every
digest of the engine equals the learner's, and both agree on a canary: the median difference of the sampled tokens'
logprobs, in nats, with the experts that the engine recorded (`own_experts_nats` is without them: bf16 sums of
another batch shape may choose others). The same for a delta; a bucket with a flipped byte is refused, the old version
serves on, and the next one arrives. Rows time a whole version: `sent` from the first bucket packed until every engine
has the last, `proved` until every engine has compared its digests and built the second model. The peer is what the
object store does: buckets packed on the host and put into shared host memory, then copied out, one after the other, by
the engine. Common to all and apart: `gathered` (stored tensors to the host) and `digested` (the learner's manifest).
A last row is a delta in which nearly every tensor changed a little, as after a step of RL, against the whole version by
the same transport: from the first record made until it is proved; `sent_s` of it until the engine has all, `proof_s`
after.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from k3rl.actors.weight_sync import BytesBucket, Link, Receiver, Sender, content_of, tensor_buckets, tensors_in
from k3rl.checkpoint import assign_official_tensors, load_checkpoint, official_tensors, save_checkpoint
from k3rl.checkpoint.delta import BUCKET_BYTES, encode
from k3rl.checkpoint.manifest import manifest_digest, manifest_of
from k3rl.config import K3Error
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.engine import Engine, SamplingParams
from k3rl.model import K3Config
from k3rl.parallel import Trainer, TrainerConfig

PROMPT = [40 + i for i in range(24)]
TOLERANCE = {"cuda": 0.5, "cpu": 1e-4}  # nats; bf16 sums depend on how tokens are batched, as in `docs/parallel.md`

_spec = importlib.util.spec_from_file_location("gpu", Path(__file__).with_name("gpu.py"))
if _spec is None or _spec.loader is None:
    raise ImportError("gpu.py is not beside this file")
gpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu)


# ---- an engine's process


class Peer:
    """What an engine's process answers to; each method is called over a pipe."""

    def __init__(self, directory: str, device: str) -> None:
        self.device = torch.device(device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.engine = Engine(load_checkpoint(directory, dtype, self.device), max_running=4, max_context=256)
        self.receiver: Receiver | None = None

    def join(self, link: Link, number: int) -> None:
        self.receiver = Receiver(link, number, self.device)
        self.receiver.join()

    def stream(self, version: int, manifest: dict[str, str], header: bytes, flip: bool) -> float:
        """Receives and proves a version; returns the seconds of the proof."""
        if self.receiver is None:
            raise RuntimeError("join first")
        self._open(version, manifest, header)
        asyncio.run(self.receiver.receive(f"{version}", lambda m: self._take(m, header, flip)))
        return self._prove()

    def _open(self, version: int, manifest: dict[str, str], header: bytes) -> None:
        if header:
            self.engine.start_weight_delta(header)
        else:
            self.engine.start_weight_update(version, manifest)

    def _take(self, bucket: Tensor, header: bytes, flip: bool) -> None:
        if flip:
            bucket[-1] ^= 1
        if header:
            self.engine.update_weights_by_delta(content_of(bucket))
        else:
            self.engine.update_weights(tensors_in(bucket))

    def copied(self, version: int, manifest: dict[str, str], names: list[tuple[str, int]]) -> float:
        """The same from buckets in shared host memory."""
        self._open(version, manifest, b"")
        for name, size in names:
            memory = SharedMemory(name)
            self.engine.update_weights(load(bytes(memory.buf[:size])).items())
            memory.close()
        return self._prove()

    def _prove(self) -> float:
        began = time.perf_counter()
        self.engine.verify_weight_update()
        gpu.synchronize(self.device)
        return time.perf_counter() - began

    def commit(self, version: int) -> str:
        """The digest of what is served from now on, computed anew from the model."""
        self.engine.finish_weight_update(version)
        return manifest_digest(manifest_of(official_tensors(self.engine.model)))

    def served(self) -> int:
        self.engine.abort_weight_update()
        return self.engine.version

    def canary(self) -> tuple[tuple[int, ...], list[float], np.ndarray]:
        self.engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=16, return_routes=True))
        while True:
            for _, done in self.engine.step():
                return done.token_ids, list(done.logprobs), done.routes

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


def engine_process(pipe: Any, directory: str, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    peer = Peer(directory, device)
    pipe.send(("ready", None))
    while (call := pipe.recv()) is not None:
        name, args = call
        try:
            pipe.send(("ok", getattr(peer, name)(*args)))
        except K3Error as error:
            pipe.send((type(error).__name__, str(error)))


class Engines:
    """The processes of all engines, each with a GPU of its own or all on the learner's."""

    def __init__(self, count: int, directory: str, device: str, *, apart: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        for number in range(count):
            own, other = context.Pipe()
            if apart:
                os.environ["CUDA_VISIBLE_DEVICES"] = f"{number + 1}"
            process = context.Process(
                target=engine_process, args=(other, directory, device, torch.get_num_threads()), daemon=True
            )
            process.start()
            self.pipes.append(own)
            self.processes.append(process)
        if apart:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
        self.answers(limit_s=300)

    def start(self, name: str, *args: Any, numbered: bool = False) -> None:
        for number, pipe in enumerate(self.pipes):
            pipe.send((name, (*args, number) if numbered else args))

    def answers(self, limit_s: float = 120) -> list[tuple[str, Any]]:
        for number, pipe in enumerate(self.pipes):
            if not pipe.poll(limit_s):
                raise TimeoutError(f"engine {number} gave no answer within {limit_s} s")
        return [pipe.recv() for pipe in self.pipes]

    def call(self, name: str, *args: Any) -> list[Any]:
        self.start(name, *args)
        return self.values()

    def values(self) -> list[Any]:
        found = self.answers()
        if wrong := [answer for answer in found if answer[0] != "ok"]:
            raise RuntimeError(f"an engine failed: {wrong[0]}")
        return [value for _, value in found]

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(30)


# ---- the learner's process


class Publisher:
    """The learner's side: its model, what it stored last, and the sender."""

    def __init__(self, model: Any, sender: Sender, engines: Engines, report: Any) -> None:
        self.model, self.sender, self.engines, self.report = model, sender, engines, report
        self.device = model.device
        self.trainer = Trainer(model, TrainerConfig())
        self.version = 0
        self.stored = self.gathered()
        self.manifest = manifest_of(self.stored.items())

    def gathered(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in official_tensors(self.model)}

    def change(self, share: float = 0.02) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Moves a share of the values of nearly every tensor by one place; returns what was stored before."""
        before, generator = (self.stored, self.manifest), torch.Generator().manual_seed(self.version)
        after = {}
        for name, tensor in self.stored.items():
            words = tensor.clone()
            chosen = torch.rand(tensor.shape, generator=generator) < share
            if tensor.dtype == torch.bfloat16 and "norm" not in name:
                words.view(torch.int16).bitwise_xor_(chosen.to(torch.int16))
            elif name.endswith("_packed"):  # the first code of a byte or the second
                second = torch.randint(2, tensor.shape, generator=generator, dtype=torch.uint8)
                words ^= chosen.to(torch.uint8) << 4 * second
            after[name] = words
        assign_official_tensors(self.model, {name: tensor.to(self.device) for name, tensor in after.items()})
        self.stored = self.gathered()
        self.manifest = manifest_of(self.stored.items())
        return before

    def whole(self, flip: bool = False) -> tuple[float, float, int, list[tuple[str, Any]]]:
        """(seconds sent, seconds proved, bytes, answers) of a whole version."""
        self.version += 1
        began = time.perf_counter()
        self.engines.start("stream", self.version, self.manifest, b"", flip)
        source = tensor_buckets(official_tensors(self.model), BUCKET_BYTES)
        size = self.sender.send(f"{self.version}", source)
        sent = time.perf_counter() - began
        answers = self.engines.answers()
        return sent, time.perf_counter() - began, size, answers

    def delta(
        self, base: tuple[dict[str, Tensor], dict[str, str]], served: int
    ) -> tuple[float, float, int, list[tuple[str, Any]]]:
        """The same of a delta, which is made while it is sent."""
        self.version += 1
        header, buckets = encode(base[0], self.stored, (base[1], self.manifest), (served, self.version))
        began = time.perf_counter()
        self.engines.start("stream", self.version, {}, header.to_bytes(base[1]), False)
        size = self.sender.send(f"{self.version}", map(BytesBucket, buckets))
        sent = time.perf_counter() - began
        answers = self.engines.answers()
        return sent, time.perf_counter() - began, size, answers

    def by_host(self) -> tuple[float, float]:
        """(seconds until all lies in shared host memory, seconds proved) of a whole version."""
        self.version += 1
        began = time.perf_counter()
        held = [placed(each.to_bytes()) for each in tensor_buckets(self.stored.items(), BUCKET_BYTES)]
        sent = time.perf_counter() - began
        names = [(memory.name, size) for memory, size in held]
        self.engines.call("copied", self.version, self.manifest, names)
        took = time.perf_counter() - began
        for memory, _ in held:
            memory.close()
            memory.unlink()
        return sent, took

    def check(self, what: str) -> None:
        """Commits what was prepared, and compares digests and the canary."""
        wanted = manifest_digest(self.manifest)
        digests = self.engines.call("commit", self.version)
        answers = self.engines.call("canary")
        gap = max(self.gap(*answer) for answer in answers)
        own = max(self.gap(*answer[:2]) for answer in answers)
        equal = digests == [wanted] * len(digests)
        ok = equal and gap <= TOLERANCE[self.device.type]
        self.report.check(what, ok=ok, digests_equal=equal, canary_nats=gap, own_experts_nats=own)

    def gap(self, ids: tuple[int, ...], logprobs: list[float], routes: np.ndarray | None = None) -> float:
        row = np.asarray([*PROMPT, *ids], np.int64)
        mask = np.arange(row.size) >= len(PROMPT)
        zeros = np.zeros(row.size, np.float32)
        if routes is not None:
            last = np.broadcast_to(np.arange(routes.shape[2], dtype=np.int16), (1, *routes.shape[1:]))
            routes = np.concatenate([routes, last])
        batch = TrainBatch.pack([TrainSequence("canary", row, mask, zeros, zeros, routes=routes)])
        return float(np.median(np.abs(self.trainer.logprobs(batch)[len(PROMPT) :] - np.asarray(logprobs, np.float32))))


def placed(bucket: bytes) -> tuple[SharedMemory, int]:
    memory = SharedMemory(create=True, size=len(bucket))
    memory.buf[: len(bucket)] = bucket
    return memory, len(bucket)


def measure(publisher: Publisher, name: str, repeats: int) -> None:
    """All checks, then the rows."""
    report, engines = publisher.report, publisher.engines
    publisher.change()
    publisher.whole()
    publisher.check(f"{name}: a whole version")
    served = publisher.version
    base = publisher.change()
    *_, size, answers = publisher.delta(base, served)
    report.check(f"{name}: a delta is taken", ok=all(a[0] == "ok" for a in answers), bytes=size)
    publisher.check(f"{name}: a delta")
    served = publisher.version
    publisher.change()
    *_, answers = publisher.whole(flip=True)
    refused = [kind for kind, _ in answers]
    ok = refused == ["WeightUpdateError"] * len(refused) and engines.call("served") == [served] * len(refused)
    report.check(f"{name}: a flipped byte is refused", ok=ok, answers=[str(a)[:160] for a in answers])
    publisher.whole()
    publisher.check(f"{name}: the version after it")

    began = time.perf_counter()
    publisher.gathered()
    gathered = time.perf_counter() - began
    began = time.perf_counter()
    manifest_of(publisher.stored.items())
    digested = time.perf_counter() - began
    cuda = publisher.device.type == "cuda"
    direct, host, proofs, size, held = [], [], [], 0, 0
    for _ in range(repeats):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        sent, proved, size, answers = publisher.whole()
        held = torch.cuda.max_memory_allocated() - before if cuda else 0
        proofs.append(max(answer[1] for answer in answers))
        direct.append((sent, proved))
        engines.call("commit", publisher.version)
        host.append(publisher.by_host())
        engines.call("commit", publisher.version)
    for place, what in enumerate(("sent", "proved")):
        ours, peer = (statistics.median(pair[place] for pair in pairs) for pairs in (direct, host))
        report.row(
            f"whole version, {what}", f"{name}, {size / 1e6:.0f} MB, {len(engines.pipes)} engines", ours,
            peer="host memory, as through the object store", peer_s=peer, bytes=size, gigabytes_per_s=size / ours / 1e9,
            proof_s=statistics.median(proofs), gathered_s=gathered, digested_s=digested, learner_extra_bytes=held,
            engine_peak_bytes=max(engines.call("peak")),
        )  # fmt: skip

    deltas = []
    for _ in range(repeats):
        served, base = publisher.version, publisher.change()
        changed = sum(digest != base[1][key] for key, digest in publisher.manifest.items())
        deltas.append(publisher.delta(base, served))
        engines.call("commit", publisher.version)
    sent, took, size = (statistics.median(each[place] for each in deltas) for place in range(3))
    report.row(
        "delta, proved", f"{name}, {changed} of {len(publisher.manifest)} tensors, {len(engines.pipes)} engines", took,
        peer="the whole version by the same transport", peer_s=statistics.median(pair[1] for pair in direct),
        bytes=size, threads=torch.get_num_threads(), sent_s=sent,
        proof_s=statistics.median(max(answer[1] for answer in answers) for *_, answers in deltas),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--transport", choices=("ipc", "broadcast"), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="k3-small")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4, help="of the learner and of each engine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cuda = args.device == "cuda"
    if args.transport == "ipc" and not cuda:
        parser.error("ipc is GPU memory that two processes share; take --transport broadcast on a CPU")
    nccl = cuda and args.transport == "broadcast"
    if nccl and torch.cuda.device_count() <= args.engines:
        parser.error(f"{args.engines} engines and a learner need as many GPUs; {torch.cuda.device_count()} are here")
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    report = gpu.Report(device, args.out, 500)
    model = gpu.filled(K3Config.named(args.model), device, torch.bfloat16 if cuda else torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        directory = str(Path(folder) / "start")
        save_checkpoint(model, directory)
        engines = Engines(args.engines, directory, args.device, apart=nccl)
    sender = Sender(args.transport, args.engines, device, 60.0, nccl=nccl)
    engines.start("join", sender.link, numbered=True)
    sender.join()
    engines.values()
    name = f"{args.model} by {args.transport}" + ("" if cuda else " (gloo)")
    measure(Publisher(model, sender, engines, report), name, args.repeats)
    engines.stop()
    sender.close()
    return 0 if all(check["ok"] for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
