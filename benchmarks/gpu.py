"""What the GPU benchmarks share: a report written row by row, timers, weights made on the device."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from k3rl.kernels import dispatch, ptxas
from k3rl.model import K3Config, K3ForCausalLM, LinearAttnConfig, QuantizationConfig
from k3rl.numerics import project, stored_dtype

BANDWIDTH = 4.3e12  # bytes a second that a copy moves on an H200
MATRIX_RATE = 790e12  # bf16 operations a second of a large product there
IN_THE_LOOP = QuantizationConfig(weights="mxfp4", activations="mxfp8")


def beside(name: str) -> Any:
    """The module of a file in this folder, or None where there is none."""
    path = Path(__file__).with_name(f"{name}.py")
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Every layer on its torch path, on a GPU too."""
    before = dispatch.use_kernel
    dispatch.use_kernel = lambda *_, **__: False
    try:
        yield
    finally:
        dispatch.use_kernel = before


class Report:
    """Rows in the form of design section 4, in a file that is whole after every row; later parts stop at a deadline."""

    def __init__(self, device: torch.device, out: Path | None, budget_s: float) -> None:
        self.device, self._out, self._end = device, out, time.monotonic() + budget_s
        self.began = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.skipped: list[str] = []

    def time_left(self, what: str) -> bool:
        """Whether to start `what`; what is left out is said in the report."""
        if time.monotonic() < self._end:
            return True
        self.skipped.append(what)
        self._write()
        return False

    def check(self, name: str, **found: Any) -> None:
        """A comparison that precedes the timings; `ok` False does not stop the others."""
        self.checks.append({"name": name, **found})
        print(f"check {name}: {found}", flush=True)
        self._write()

    def row(
        self, name: str, shape: str, ours_s: float | None, *, peer: str = "none", peer_s: float | None = None,
        floor_s: float | None = None, **more: Any,
    ) -> None:  # fmt: skip
        def ms(value: float | None) -> float | None:
            return None if value is None else round(1e3 * value, 4)

        regime = "cuda, bf16" if self.device.type == "cuda" else "dry run on a CPU: no measurement"
        entry = {
            "name": name, "shape": shape, "regime": regime, "peer": peer, "ours_ms": ms(ours_s), "peer_ms": ms(peer_s),
            "ratio": round(peer_s / ours_s, 3) if peer_s and ours_s else None, "floor_ms": ms(floor_s),
            "share_of_floor": round(floor_s / ours_s, 4) if floor_s and ours_s else None, **more,
        }  # fmt: skip
        self.rows.append(entry)
        print(f"{time.monotonic() - self.began:6.1f} s  {json.dumps(entry)}", flush=True)
        self._write()

    def failed(self, name: str, shape: str, error: Exception) -> None:
        """A row that could not be measured, with its reason."""
        self.row(name, shape, None, failed=f"{type(error).__name__}: {str(error)[:300]}")

    def json(self) -> dict[str, Any]:
        versions = {"python": platform.python_version(), "ptxas": ".".join(map(str, _ptxas() or ())) or "none"}
        for package in ("torch", "triton", "numpy"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                versions[package] = "absent"
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else "none"
        return {
            "machine": {"gpu": gpu, "cores": os.cpu_count(), "processor": platform.machine()},
            "versions": versions, "checks": self.checks, "results": self.rows, "not_started": self.skipped,
            "seconds": round(time.monotonic() - self.began, 1),
        }  # fmt: skip

    def _write(self) -> None:
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            part = self._out.with_suffix(".part")
            part.write_text(json.dumps(self.json(), indent=1) + "\n", encoding="utf-8")
            part.replace(self._out)


def _ptxas() -> tuple[int, ...] | None:
    path = ptxas.path()
    return None if path is None else ptxas.version(path)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(call: Callable[[], object], device: torch.device, repeats: int = 5, warm: int = 2) -> float:
    """Median seconds of a call, the device's work included."""
    for _ in range(warm):
        call()
    took = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def replayed(call: Callable[[], object], device: torch.device, repeats: int = 30) -> float:
    """Seconds of a call's work on the device: of a captured graph, replayed back to back; on a CPU the wall time."""
    if device.type != "cuda":
        return wall(call, device, 2, 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / repeats


def filled(config: K3Config, device: torch.device, dtype: torch.dtype, seed: int = 0) -> K3ForCausalLM:
    """A model with random weights that a checkpoint could store, drawn where it is: the real width takes seconds."""
    model = K3ForCausalLM(config, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.official_parameters():
            if name.endswith((".A_log", ".e_score_correction_bias")):
                parameter.zero_()
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                deviation = 1.0 if "embed_tokens" in name else max(1, parameter[0].numel()) ** -0.5
                values = torch.randn(parameter.shape, device=device, generator=generator).mul_(deviation)
                kind = stored_dtype(name, config.quantization.weights)
                parameter.copy_(project(values, kind, config.quantization.scale_rule))
    return model


def wide_group(experts: int = 56, context: int = 4096, vocabulary: int = 512) -> K3Config:
    """One group of K3's width, 3 KDA and 1 MLA layers, each with `experts` experts and K3's 16 choices a token.

    A vocabulary of 512 leaves the layers alone; K3's, 163,840, adds its head and its draws.

    16 choices among 56 are the rows that one of 16 expert-parallel ranks has when each decodes as many tokens.
    """
    linear = LinearAttnConfig(num_heads=96, head_dim=128, kda_layers=(1, 2, 3), full_attn_layers=(4,))
    return K3Config.named("k3").replace(
        num_hidden_layers=4, num_experts=experts, first_k_dense_replace=0, vocab_size=vocabulary, bos_token_id=0,
        eos_token_id=1, pad_token_id=2, media_placeholder_token_id=3, linear_attn_config=linear, vision_config=None,
        max_position_embeddings=context, quantization=IN_THE_LOOP,
    )  # fmt: skip


def dry_model() -> K3Config:
    """Small, with heads that the kernels would take, for runs that prove the control flow."""
    linear = LinearAttnConfig(num_heads=1, head_dim=128, kda_layers=(1, 2), full_attn_layers=(3,))
    return K3Config.named("k3-nano").replace(
        num_hidden_layers=3, num_experts=8, linear_attn_config=linear, max_position_embeddings=2048
    )
