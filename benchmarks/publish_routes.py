"""What `publish.py` times: one learner and one engine in two processes, weights published under running requests.

Both sides are those of a run (`WeightSource`, `WeightSink`) without Ray. Before each version a few values of nearly
every tensor are moved. By flat buffers, and by the way that deltas take (rank 0 gathers, digests and encodes; the
engine decodes): parts, and the longest gap between two steps of an engine that decodes meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from k3rl.actors.weight_sync import BaseVersion, Link, Payload, WeightSink, WeightSource, base_version
from k3rl.checkpoint import load_checkpoint, manifest_of, official_tensors, save_checkpoint
from k3rl.engine import Engine, SamplingParams
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.numerics import stored_dtype

ROWS, STEPS_AFTER = 16, 20

_spec = importlib.util.spec_from_file_location("gpu", Path(__file__).with_name("gpu.py"))
if _spec is None or _spec.loader is None:
    raise ImportError("gpu.py is not beside this file")
gpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu)


# ---- the engine's process


class Serving:
    """An engine that samples without end, in an event loop as a rollout actor's, and takes versions meanwhile."""

    def __init__(self, directory: str, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = load_checkpoint(directory, dtype, torch.device(device))
        self.engine = Engine(model, max_running=ROWS, max_context=2048, in_flight="carry")
        self.sink = WeightSink("cuda" if device == "cuda" else "cpu")
        self.gaps: list[tuple[float, float]] = []  # (when it began, seconds) between ends of steps
        self.stopped = False

    async def decode(self) -> None:
        """Steps without end; the last step's end to this one's is a gap."""
        last = None
        while not self.stopped:
            while self.engine.num_running + self.engine.num_waiting < ROWS:
                self.engine.submit([5, 9, 2], SamplingParams(max_tokens=1900, seed=len(self.gaps)))
            self.engine.step()
            now = time.perf_counter()
            if last is not None:
                self.gaps.append((last, now - last))
            last = now
            await asyncio.sleep(0)

    async def answer(self, pipe: Any) -> None:
        """Calls that come through the pipe, one after the other, while the engine steps."""
        while (call := await asyncio.to_thread(pipe.recv)) is not None:
            name, args = call
            try:
                found = getattr(self, name)(*args)
                pipe.send(("ok", await found if asyncio.iscoroutine(found) else found))
            except Exception as error:  # for the learner's process to show
                pipe.send((type(error).__name__, str(error)))
        self.stopped = True

    async def run(self, pipe: Any) -> None:
        """Until the other side says that it is enough."""
        await asyncio.gather(self.decode(), self.answer(pipe))

    async def warm(self) -> None:
        """Returns when kernels are compiled and steps captured."""
        while len(self.gaps) < STEPS_AFTER:
            await asyncio.sleep(0.01)

    async def join(self, link: Link) -> None:
        await self.sink.join([link], 0)

    def served(self) -> BaseVersion:
        return base_version(self.engine)

    async def prepare(self, version: int, manifest: dict[str, str], payload: Payload) -> dict[str, float]:
        began = time.perf_counter()
        parts = await self.sink.prepare(self.engine, version, manifest, payload)
        return {**parts, "prepared": time.perf_counter() - began, "began": began}

    def commit(self, version: int) -> float:
        return self.sink.commit(self.engine, version)

    async def longest_gap(self, since: float) -> tuple[float, float]:
        """Of steps from `since` on until some have passed: (the longest, the median of those before) in seconds."""
        seen = len(self.gaps)
        while len(self.gaps) < seen + STEPS_AFTER:
            await asyncio.sleep(0.001)
        before = [gap for when, gap in self.gaps if when < since][-50:]
        return max(gap for when, gap in self.gaps if when + gap > since), statistics.median(before or [0.0])

    def digest(self) -> dict[str, str]:
        return manifest_of(official_tensors(self.engine.model))


def serve(pipe: Any, directory: str, device: str) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    serving = Serving(directory, device)
    pipe.send(("ok", None))
    asyncio.run(serving.run(pipe))


class Engines:
    """The engine's process, seen from the learner's."""

    def __init__(self, directory: str, device: str, *, apart: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if apart:
            os.environ["CUDA_VISIBLE_DEVICES"] = "1" if before is None else before.split(",")[1]
        self.process = context.Process(target=serve, args=(other, directory, device), daemon=True)
        self.process.start()
        if apart:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
        self.value()
        self.call("warm")

    def start(self, name: str, *args: Any) -> None:
        self.pipe.send((name, args))

    def value(self, limit_s: float = 200) -> Any:
        if not self.pipe.poll(limit_s):
            raise TimeoutError(f"the engine gave no answer within {limit_s:g} s")
        kind, found = self.pipe.recv()
        if kind != "ok":
            raise RuntimeError(f"the engine failed: {kind}: {found}")
        return found

    def call(self, name: str, *args: Any) -> Any:
        self.start(name, *args)
        return self.value()

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join(30)
        self.process.kill()


# ---- the learner's process


def trainer_of(model: K3ForCausalLM) -> Any:
    """What a source asks of a trainer, without an optimizer."""

    @contextmanager
    def whole() -> Iterator[K3ForCausalLM]:
        yield model

    place = SimpleNamespace(rank=0, size=1, group=None)
    mesh = SimpleNamespace(data=place, context=place, expert=place, world=place)
    return SimpleNamespace(model=model, whole=whole, mesh=mesh)


@torch.no_grad()
def move(model: K3ForCausalLM, generator: torch.Generator, share: float = 0.02) -> None:
    """Changes a share of the values of nearly every tensor, to others that a checkpoint can store."""
    for name, parameter in model.official_parameters():
        chosen = torch.rand(parameter.shape, generator=generator, device=parameter.device) < share
        if stored_dtype(name, model.config.quantization.weights) == "mxfp4":
            parameter.copy_(torch.where(chosen, -parameter, parameter))
        elif "norm" not in name and not name.endswith("e_score_correction_bias"):
            _place_further(parameter, chosen)


def _place_further(parameter: Tensor, chosen: Tensor) -> None:
    """To the bfloat16 beside it."""
    stored = parameter.to(torch.bfloat16)
    stored.view(torch.int16).bitwise_xor_(chosen.to(torch.int16))
    parameter.copy_(stored)


class Publishing:
    """A source, and what it takes to bring a version to the engine by either way."""

    def __init__(self, model: K3ForCausalLM, engines: Engines, transport: str, nccl: bool) -> None:
        self.model, self.engines = model, engines
        self.generator = torch.Generator(model.device).manual_seed(1)
        self.source = WeightSource(model.device)
        self.source.attach(trainer_of(model))
        link = self.source.open(transport, 1, 60.0, nccl=nccl)  # type: ignore[arg-type]
        engines.start("join", link)
        self.source.join()
        engines.value()

    def flat(self) -> dict[str, float]:
        """Seconds of the parts of a version in flat buffers."""
        move(self.model, self.generator)
        gpu.synchronize(self.model.device)
        began = time.perf_counter()
        made = self.source.export()
        assert made.shard is not None
        exported = time.perf_counter()
        payload = Payload("flat", b"", (), 0, f"{made.version}", (made.shard,))
        self.engines.start("prepare", made.version, {}, payload)
        size = self.source.send()
        parts = self.engines.value()
        prepared = time.perf_counter()
        paused = self.engines.call("commit", made.version)
        whole = time.perf_counter() - began
        gap, step = self.engines.call("longest_gap", parts["began"])
        return {
            "gather and quantize": made.gather_seconds,
            "digest": made.digest_seconds,
            "transfer": parts["receive_seconds"],
            "verify and build": parts["verify_seconds"],
            "both, with messages": prepared - exported,
            "switch (pause)": paused,
            "whole": whole,
            "longest gap": gap,
            "a step": step,
            "bytes": float(size),
        }

    def by_rank_0(self) -> dict[str, float]:
        """The same by the other way: a delta where the engine serves the version before, else the whole."""
        move(self.model, self.generator)
        gpu.synchronize(self.model.device)
        began = time.perf_counter()
        served = self.engines.call("served")
        publication = self.source.publish([served], stream=True)
        assert publication is not None
        gathered = time.perf_counter()
        payload, number = publication.payloads[served], publication.version.number
        manifest = {} if payload.encoding == "delta" else publication.version.manifest
        self.engines.start("prepare", number, manifest, payload)
        size = self.source.send()
        parts = self.engines.value()
        prepared = time.perf_counter()
        paused = self.engines.call("commit", number)
        whole = time.perf_counter() - began
        gap, step = self.engines.call("longest_gap", parts["began"])
        return {
            "gather and digest": gathered - began,
            "transfer and proof": prepared - gathered,
            "switch (pause)": paused,
            "whole": whole,
            "longest gap": gap,
            "a step": step,
            "bytes": float(size),
            "delta": float(payload.encoding == "delta"),
        }

    def equal(self) -> bool:
        """Whether the engine computes with what the learner has, by the digests of stored tensors on the host."""
        return self.engines.call("digest") == manifest_of(official_tensors(self.model))


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


class Rows:
    """A report's rows, with the regime by its name."""

    def __init__(self, report: Any, regime: str) -> None:
        self._report, self._regime = report, regime
        self.check = report.check

    def row(self, *arguments: Any, **more: Any) -> None:
        self._report.row(*arguments, **more, regime=self._regime)


def measure(all_rows: Any, name: str, device: torch.device, transport: str, repeats: int, *, apart: bool) -> None:
    """All rows of one model by one transport, and a comparison of both sides after each way."""
    report = Rows(all_rows, "cuda, bf16" if device.type == "cuda" else "cpu, float32, one thread each")
    model = gpu.filled(K3Config.named(name), device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        directory = str(Path(folder) / "start")
        save_checkpoint(model, directory)
        engines = Engines(directory, device.type, apart=apart)
    nccl = device.type == "cuda" and transport == "broadcast"
    shape = f"{name} by {transport}" + (", two GPUs" if apart else "")
    publishing = Publishing(model, engines, transport, nccl)
    first = publishing.flat()
    report.row("first version, compilation and captures included", shape, first["whole"])
    publishing.flat()  # the engine makes its second model here, and has it from then on
    new = medians([publishing.flat() for _ in range(repeats)])
    report.check(f"{shape}: flat buffers", ok=publishing.equal())
    publishing.by_rank_0()  # whole, as the engine serves no base that rank 0 kept
    old = medians([publishing.by_rank_0() for _ in range(max(1, repeats // 2))])
    report.check(f"{shape}: through rank 0", ok=publishing.equal(), delta=bool(old["delta"]))
    size = new["bytes"]
    floors = {"gather and quantize": 2 * size, "digest": size, "transfer": 2 * size, "switch (pause)": 2 * size}
    for part in ("gather and quantize", "digest", "transfer", "verify and build", "switch (pause)", "whole"):
        floor = floors[part] / gpu.BANDWIDTH if device.type == "cuda" and part in floors else None
        report.row(
            part, shape, new[part], floor_s=floor, bytes=int(size),
            **({"peer": "gathered, digested and encoded by rank 0", "peer_s": old[part]} if part in old else {}),
        )  # fmt: skip
    for part in ("gather and digest", "transfer and proof"):
        report.row(f"through rank 0: {part}", shape, old[part], bytes=int(old["bytes"]), delta=bool(old["delta"]))
    report.row(
        "longest gap between two steps of the engine meanwhile", f"{shape}, {ROWS} rows decoding", new["longest gap"],
        peer="through rank 0", peer_s=old["longest gap"], usual_step_ms=round(1e3 * new["a step"], 3),
    )  # fmt: skip
    engines.stop()
    publishing.source.close()
