"""The learner's step on one GPU: share of the matrix rate, memory and time against plain eager code, the real width.

    python benchmarks/learner_gpu.py --out FILE [--parts step wide eager capture split plain] [--budget-s 400]
    python benchmarks/learner_gpu.py --dry         # the same control flow on a CPU with a tiny model

k3-small in bf16 with float32 masters, 8,192 packed tokens in documents of 2,048, MXFP4 experts, MXFP8 activations.
`step` rows: a whole step, and the passes alone; `plain` rows: the passes not captured, without fusing, without kernels.
`share_of_peak` is the work over the time over 989 TFLOP/s, the datasheet's dense bf16 rate; the floor is the work at
790, what a large product reaches. The passes of `step` are captured where the trainer captures; `capture` checks that
they equal the ordinary ones, beside what those differ by from run to run. Work, counted for forward and twice that for
backward (recomputation is not counted):

    2 x parameters of all matrices but the embedding, routed experts by k / E of them, a token
    KDA   h (10 C D + 6 D^2 + 2 C^2) a token and layer, C = 32 tokens a chunk, D head width, h heads
    MLA   2 (L / 2) h (D_key + D_value) a token and layer, L tokens a document

`peak_gib` is that of a later call, CUDA graphs' own memory included, and `plan_gib` what `k3rl plan` says of the same
trainer on one GPU; `plan_over_measured` should be within 15 %. `part` rows: what a step is made of. `split`
rows: forward and backward of one layer's part by itself, times its layers. `eager` rows: the same model in plain
operations with every logit materialized (`benchmarks/eager_k3.py`, "absent" where that is not there) with torch's fused
AdamW, on the same tokens, and its peak memory beside ours. `wide` rows: one group
of K3's real width (3 KDA and 1 MLA layers, 56 experts, hidden 7168; a vocabulary of 512 stands for embedding and head,
3.7 M numbers each), 2,048 tokens, with momentum in bf16 and with the optimizer's state on the host: the fastest of the
steps after the first. Their floor is the work, Newton-Schulz included, at 790, or the state over PCIe at 55 GB/s and
direction where that is longer; `set_up_s`: to make weights and trainer. `optimizer` rows: what its step is made of.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.model.attn_res import ResidualStream
from k3rl.model.costs import MicroBatch
from k3rl.model.fuse import fusing
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.layout import Layout
from k3rl.model.mla import GatedMLA
from k3rl.optim import buckets
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.parallel.captured import CapturedForwardBackward
from k3rl.parallel.forward_backward import ForwardBackward
from k3rl.planner import Layout as Degrees
from k3rl.planner import Method, learner_memory, optimizer_costs

if "gpu" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("gpu", Path(__file__).with_name("gpu.py"))
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["gpu"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["gpu"])
gpu = sys.modules["gpu"]

PARTS = ("step", "wide", "eager", "capture", "split", "plain")
PEAK = 989e12  # the datasheet's dense bf16 rate
CHUNK = 32
WAYS: dict[str, dict[str, Any]] = {
    "momentum in bf16": {"momentum_dtype": "bfloat16"},
    "state on the host": {"offload_optimizer": True},
}
PCIE = 55e9  # bytes a second, each way
GIB = 2.0**30


class Setting:
    """Sizes of a run on a GPU, or of a dry one."""

    def __init__(self, dry: bool, way: str | None = None) -> None:
        self.dry, self.way = dry, way
        self.device = torch.device("cpu") if dry else torch.device("cuda", 0)
        self.dtype = torch.bfloat16
        self.small = gpu.dry_model() if dry else K3Config.named("k3-small")
        self.tokens, self.length = (96, 32) if dry else (8192, 2048)
        self.wide_tokens, self.wide_length = (64, 32) if dry else (2048, 1024)
        self.wide = gpu.dry_model() if dry else gpu.wide_group()
        self.repeats = 1 if dry else 5

    def model(self, config: K3Config) -> K3ForCausalLM:
        return gpu.filled(config, self.device, self.dtype)


def batch_of(config: K3Config, tokens: int, length: int) -> TrainBatch:
    """Packed documents of random tokens; every token but the first of a document is a target."""
    rng, nothing = np.random.default_rng(0), np.zeros(length, np.float32)
    mask = np.arange(length) > 0
    return TrainBatch.pack(
        [
            TrainSequence(f"s{n}", rng.integers(4, config.vocab_size, length), mask, nothing, nothing)
            for n in range(tokens // length)
        ]
    )


def forward_work(model: K3ForCausalLM, length: int) -> float:
    """Operations of one token's forward, by the formula above."""
    config = model.config
    share = config.num_experts_per_token / config.num_experts
    matrices = 0.0
    for name, parameter in model.official_parameters():
        if parameter.dim() == 2 and "embed_tokens" not in name and "_res_proj" not in name:
            matrices += parameter.numel() * (share if ".experts." in name else 1.0)
    linear = config.linear_attn_config
    h, d = linear.num_heads, linear.head_dim
    kda = h * (10 * CHUNK * d + 6 * d * d + 2 * CHUNK * CHUNK) * len(config.kda_layers)
    widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    mla = length * config.num_attention_heads * widths * len(config.mla_layers)
    return 2 * matrices + kda + mla


def peak(setting: Setting, call: Callable[[], object], trainer: Trainer | None = None) -> float | None:
    """GiB at the peak of a call, what was there before and a trainer's graphs included; None on a CPU."""
    if setting.device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    held = 0 if trainer is None else trainer.backend.graph_bytes
    return round((torch.cuda.max_memory_allocated() + held) / GIB, 3)


def step_peak(setting: Setting, trainer: Trainer, batch: TrainBatch) -> float | None:
    """The same of a whole step, which counts anew when it is over."""
    trainer.memory()
    found = trainer.train(batch, CrossEntropy()).values().get("memory/peak")
    return None if found is None else round(found / GIB, 3)


def planned(trainer: Trainer, tokens: int, length: int, *, step: bool = True) -> dict[str, Any]:
    """What `k3rl plan` says of this trainer's passes of so many tokens, and of its steps, on one GPU."""
    config = trainer.model.config
    method = Method.of(trainer.config, config, "h200")
    forward_backward = trainer.native.forward_backward
    if not isinstance(forward_backward, CapturedForwardBackward) or not forward_backward.capture:
        method = dataclasses.replace(method, capture=False)
    mix = MicroBatch(tokens, length, tokens - tokens // length, kernels=method.kernels)
    memory = learner_memory(config, Degrees(), method, mix, only_one=True)
    if not step:
        memory.pop("step", None)
    parts = {name: round(value / GIB, 3) for name, value in memory.items()}
    return {"plan_gib": round(sum(memory.values()) / GIB, 3), "plan_parts_gib": parts}


def beside_plan(plan: dict[str, Any], gib: float | None) -> dict[str, Any]:
    """Measured and planned peaks of a row."""
    return {"peak_gib": gib, **plan, "plan_over_measured": round(plan["plan_gib"] / gib, 3) if gib else None}


def passes_of(trainer: Trainer, batch: TrainBatch) -> Callable[[], object]:
    """Forward and backward of a batch, without the optimizer."""

    def passes() -> None:
        trainer.gradients(batch, CrossEntropy())
        trainer.balancer.clear()

    return passes


def eager_of(trainer: Trainer) -> ForwardBackward:
    """The eager path of a trainer, which may be its only one."""
    found = trainer.native.forward_backward
    return found.eager if isinstance(found, CapturedForwardBackward) else found


def trainer_of(setting: Setting, **options: Any) -> Trainer:
    return Trainer(setting.model(setting.small), TrainerConfig(micro_batch_tokens=setting.tokens, **options))


class _Steps:
    """A trainer of k3-small, its batch, and rows of what they take."""

    def __init__(self, report: Any, setting: Setting, **options: Any) -> None:
        self.report, self.setting = report, setting
        self.trainer = trainer_of(setting, **options)
        self.batch = batch_of(setting.small, setting.tokens, setting.length)
        self.work = 3 * forward_work(self.trainer.model, setting.length) * setting.tokens
        self.shape = f"k3-small, {setting.tokens} tokens in documents of {setting.length}"
        self.passes = passes_of(self.trainer, self.batch)

    def row(self, name: str, took: float, gib: float | None, *, step: bool = False) -> None:
        plan = planned(self.trainer, self.setting.tokens, self.setting.length, step=step)
        self.report.row(
            name, self.shape, took, floor_s=self.work / gpu.MATRIX_RATE,
            share_of_peak=round(self.work / took / PEAK, 4), tokens_per_s=round(self.setting.tokens / took),
            tera_operations=round(self.work / 1e12, 3), **(self.captured() if step else {}), **beside_plan(plan, gib),
        )  # fmt: skip

    def captured(self) -> dict[str, Any]:
        """Which parts of the optimizer are replayed, and why one is not: what cannot be captured, or what moves."""
        optimizer = self.trainer.native.optimizer
        if optimizer.gradients.captured is None or optimizer.captured_step is None:
            return {}
        both = {"norm": optimizer.gradients.captured, "step": optimizer.captured_step}
        first = len(optimizer.gradients.addresses()) - len(optimizer.params)
        names = [f"bucket {number}" for number in range(first)] + list(optimizer.params)
        before, now = (key[0] if isinstance(key, tuple) else () for key in (both["norm"].previous, both["norm"].key))
        moved = [name for name, one, other in zip(names, before, now, strict=False) if one != other]
        return {
            "optimizer_replayed": {name: one.is_captured for name, one in both.items()},
            "optimizer_refused": {name: one.refused for name, one in both.items()},
            "optimizer_keys": {name: 1 + one.changes for name, one in both.items()},
            "optimizer_moved": [len(moved), *moved[:3]],
        }

    def rows(self, suffix: str = "") -> None:
        """Of the passes and of the whole step."""
        setting, warm = self.setting, 1 if self.setting.dry else 3
        took = gpu.wall(self.passes, setting.device, setting.repeats, warm)
        self.row(f"step without optimizer{suffix}", took, peak(setting, self.passes, self.trainer))
        took = gpu.wall(lambda: self.trainer.train(self.batch, CrossEntropy()), setting.device, setting.repeats, warm)
        self.row(f"step{suffix}", took, step_peak(setting, self.trainer, self.batch), step=True)


def step(report: Any, setting: Setting) -> None:
    """A step as it is, and without CUDA graphs."""
    own = _Steps(report, setting)
    own.rows()
    part_rows(report, setting, own.trainer, own.batch, own.shape)
    del own
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    _Steps(report, setting, capture="off").rows(", capture off")


def plain(report: Any, setting: Setting) -> None:
    """The passes without capture, without fusing, and without kernels: the last take minutes to compile and run."""
    own = _Steps(report, setting)
    own.trainer.native.forward_backward = eager_of(own.trainer)
    contexts = {"not captured": contextlib.nullcontext(), "fusing off": fusing(False)}
    for name, context in (contexts | {"kernels off": gpu.without_kernels()}).items():
        if report.time_left(f"step without optimizer, {name}"):
            with context:
                took = gpu.wall(own.passes, setting.device, 1 if "off" in name else setting.repeats, 1)
                own.row(f"step without optimizer, {name}", took, peak(setting, own.passes))


def capture(report: Any, setting: Setting) -> None:
    """Forward and backward as a captured step beside the eager one: what they add up to, and their time."""
    trainer = trainer_of(setting, capture="on")
    replaying, eager = trainer.native.forward_backward, eager_of(trainer)
    assert isinstance(replaying, CapturedForwardBackward)
    cases = {
        "full": batch_of(setting.small, setting.tokens, setting.length),
        "padded": batch_of(setting.small, setting.tokens, setting.length).select([0]),
    }
    for name, batch in cases.items():
        found = []
        for path in (eager, eager, replaying, replaying):  # the first two say what one path differs by from itself
            trainer.native.forward_backward = path
            metrics, largest = trainer.gradients(batch, CrossEntropy())
            grads = {n: p.grad.clone() for n, p in trainer.native.shards.params.items() if p.grad is not None}
            counted = [tensor.clone() for tensor in trainer.balancer.tensors()]
            trainer.balancer.clear()
            found.append((metrics.values(), largest, grads, counted))
        for what, one, other in (("itself", 0, 1), ("captured", 0, 2), ("replayed", 0, 3)):
            report.check(f"passes, {name}, {what}", **differences(found[one], found[other]), notes=trainer.notes)
    print(f"captured shape buckets: {replaying.captured}", flush=True)
    batch = cases["full"]
    for name, path in (("replayed", replaying), ("eager", eager)):
        trainer.native.forward_backward = path
        took = gpu.wall(passes_of(trainer, batch), setting.device, setting.repeats, 1 if setting.dry else 3)
        report.row(f"passes, {name}", f"k3-small, {setting.tokens} tokens", took, captured=replaying.captured,
                   peak_gib=peak(setting, passes_of(trainer, batch), trainer))  # fmt: skip


def differences(one: tuple[Any, ...], other: tuple[Any, ...]) -> dict[str, Any]:
    """How far two passes are apart: bits of each gradient, the largest distance in units of its norm, and the rest."""
    grads, others = one[2], other[2]
    shared = grads.keys() & others.keys()
    apart = {n: float((grads[n] - others[n]).norm() / grads[n].norm().clamp_min(1e-30)) for n in shared}
    worst = max(apart, key=lambda name: apart[name])
    return {
        "loss": one[0]["loss/mean"] - other[0]["loss/mean"],
        "same_names": grads.keys() == others.keys(),
        "not_bit_equal": sum(not torch.equal(grads[n], others[n]) for n in shared),
        "gradients": len(shared),
        "worst": [worst, apart[worst]],
        "largest_logits": max((float((one[1][n] - other[1][n]).abs().max()) for n in one[1]), default=0.0),
        "counts_equal": [bool(torch.equal(a, b)) for a, b in zip(one[3], other[3], strict=True)],
    }


def part_rows(report: Any, setting: Setting, trainer: Trainer, batch: TrainBatch, shape: str) -> None:
    """The time of a step by what it does, each with the device waited for before and after."""
    spent: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        gpu.synchronize(setting.device)
        began = time.perf_counter()
        found = call()
        gpu.synchronize(setting.device)
        spent.setdefault(name, []).append(time.perf_counter() - began)
        return found

    for _ in range(setting.repeats):
        timed("gradients to zero", trainer.native.reduction.zero_grad)
        loss = timed("forward and loss", lambda: CrossEntropy()(trainer.target_inputs(batch)).loss)
        timed("backward", loss.backward)
        timed("gradients of experts", trainer.native.reduction.collect)
        timed("gradient norm", trainer.native.clipping.clip)
        timed("optimizer, masters to stored values", trainer.native.optimizer.step_clipped)
    for name, took in spent.items():
        report.row(f"part, {name}", shape, min(took))


def split(report: Any, setting: Setting) -> None:
    """Forward and backward of the parts of one layer on the same rows."""
    model = setting.model(setting.small)
    config, lengths = model.config, [setting.length] * (setting.tokens // setting.length)
    layers = model.language_model.model.layers
    x = torch.randn(setting.tokens, config.hidden_size, device=setting.device).to(setting.dtype).requires_grad_()
    up = torch.randn_like(x)
    kda = next(m for m in layers.modules() if isinstance(m, KimiDeltaAttention))
    mla = next(m for m in layers.modules() if isinstance(m, GatedMLA))
    moe, last = next(iter(model.moe_parts())), layers[-1]

    def residual() -> torch.Tensor:
        stream = ResidualStream(x, config.rms_norm_eps)
        for _ in range(max(1, config.num_hidden_layers // config.attn_res_block_size // 2)):
            stream.push()
            stream.add(x)
        return last._read(stream, "self_attention", last.input_layernorm)

    layout = Layout(lengths, setting.device)
    parts: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
        "KDA layer": (lambda: kda(x, layout, None), len(config.kda_layers)),
        "MLA layer": (lambda: mla(x, layout, None, None), len(config.mla_layers)),
        "MoE": (lambda: moe(x, None, None)[0], len(config.moe_layers)),
        "residual mix and norm": (residual, 2 * config.num_hidden_layers + 1),
    }
    for name, (call, count) in parts.items():
        model.zero_grad()
        forward = gpu.wall(call, setting.device, setting.repeats)
        both = gpu.wall(lambda own=call: own().backward(up), setting.device, setting.repeats)
        report.row(f"split, {name}", f"k3-small, {setting.tokens} tokens", both * count,
                   forward_ms=round(1e3 * forward * count, 4), each_ms=round(1e3 * both, 4), times=count)  # fmt: skip


def own_figures(setting: Setting, batch: TrainBatch) -> dict[str, tuple[float, float | None]]:
    """(seconds, GiB at the peak) of our passes and our step; nothing of them stays in memory."""
    trainer = trainer_of(setting)
    calls = {"passes": passes_of(trainer, batch), "step": lambda: trainer.train(batch, CrossEntropy())}
    return {
        name: (gpu.wall(call, setting.device, setting.repeats, 2), peak(setting, call, trainer))
        for name, call in calls.items()
    }


def eager(report: Any, setting: Setting) -> None:
    """Our passes and step against plain code, turn by turn, and both peaks."""
    plain_code = gpu.beside("eager_k3")
    shape = f"k3-small, {setting.tokens} tokens in documents of {setting.length}"
    if plain_code is None:
        report.row("eager, passes", shape, None, peer="absent: benchmarks/eager_k3.py is not there")
        return
    batch = batch_of(setting.small, setting.tokens, setting.length)
    ids = torch.from_numpy(batch.input_ids).view(-1, setting.length).to(setting.device)
    ours = own_figures(setting, batch)
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    model = setting.model(setting.small)
    plain = plain_code.EagerK3(model)
    adamw = torch.optim.AdamW([p for p in plain.weights.values() if p.requires_grad], lr=1e-4)

    def passes() -> None:
        adamw.zero_grad()
        plain.loss(ids).backward()

    def whole() -> None:
        passes()
        adamw.step()

    for name, call in (("passes", passes), ("step", whole)):
        theirs = gpu.wall(call, setting.device, 1 if setting.dry else 3, 1)
        gib = peak(setting, call)
        took, mine = ours[name]
        report.row(f"eager, {name}", shape, took, peer="plain operations, AdamW", peer_s=theirs, peak_gib=mine,
                   peer_peak_gib=gib, memory_ratio=round(mine / gib, 3) if mine and gib else None)  # fmt: skip


def wide(report: Any, setting: Setting) -> None:
    """A step of the real-width group with either way to keep the optimizer's state small."""
    experts, hidden = setting.wide.num_experts, setting.wide.hidden_size
    shape = f"3 KDA + 1 MLA, {experts} experts, hidden {hidden}, {setting.wide_tokens} tokens"
    batch = batch_of(setting.wide, setting.wide_tokens, setting.wide_length)
    for name, option in WAYS.items():
        if setting.way not in (None, name):
            continue
        if not report.time_left(f"wide, {name}"):
            continue
        try:
            wide_row(report, setting, f"wide, {name}", shape, batch, option)
        except Exception as error:  # out of memory is a result here
            report.failed(f"wide, {name}", shape, error)
        gc.collect()  # a trainer is in circles of references, and the next one needs its memory
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    if setting.way != "momentum in bf16" and report.time_left("state on the host, bits of a resident one"):
        host_check(report, setting)


def host_check(report: Any, setting: Setting) -> None:
    """Steps of a small model with its state on the host and on the GPU, on equal gradients: equal bits."""
    batch = batch_of(setting.small, setting.tokens, setting.length)
    here, away = (trainer_of(setting, capture="off", **option) for option in ({}, WAYS["state on the host"]))
    for _ in range(2):
        here.gradients(batch, CrossEntropy())
        here.balancer.clear()
        here.native.clipping.clip()  # sums have an order, of how gradients lie
        for name, parameter in here.native.shards.params.items():
            away.native.shards.params[name].grad = None if parameter.grad is None else parameter.grad.clone()
        for trainer in (here, away):
            trainer.native.optimizer.step_clipped()
    states = [trainer.native.optimizer.state_tensors() for trainer in (here, away)]
    unequal = [name for name, tensor in states[0].items() if not torch.equal(tensor.cpu(), states[1][name].cpu())]
    report.check(
        "state on the host, bits of a resident one", ok=not unequal, tensors=len(states[0]), unequal=unequal[:4]
    )


def wide_row(
    report: Any, setting: Setting, name: str, shape: str, batch: TrainBatch, option: dict[str, Any]
) -> None:  # fmt: skip
    gpu.synchronize(setting.device)
    began = time.perf_counter()
    model = setting.model(setting.wide)
    work = 3 * forward_work(model, setting.wide_length) * setting.wide_tokens
    config = TrainerConfig(micro_batch_tokens=setting.wide_tokens, capture="off", **option)  # for its memory
    trainer = Trainer(model, config)
    gpu.synchronize(setting.device)
    set_up = time.perf_counter() - began
    print(f"{name}: set up after {set_up:.1f} s", flush=True)
    passes = passes_of(trainer, batch)
    passes()
    gib = peak(setting, passes, trainer)
    alone = gpu.wall(passes, setting.device, 2, 0)
    print(f"{name}: passes of {1e3 * alone:.0f} ms, {gib} GiB", flush=True)
    took, peaks = [], []
    for _ in range(2 if setting.dry else 3):
        gpu.synchronize(setting.device)
        began = time.perf_counter()
        peaks.append(step_peak(setting, trainer, batch))
        gpu.synchronize(setting.device)
        took.append(time.perf_counter() - began)
        print(f"{name}: a step of {took[-1]:.3f} s", flush=True)
    newton_schulz = sum(optimizer_costs(setting.wide).flops.values())
    floor = (work + newton_schulz) / gpu.MATRIX_RATE
    if config.offload_optimizer:
        floor = max(floor, trainer.native.optimizer.nbytes / PCIE)
    plan = planned(trainer, setting.wide_tokens, setting.wide_length)
    report.row(name, shape, min(took[1:]), floor_s=floor, first_ms=round(1e3 * took[0], 1), set_up_s=round(set_up, 2),
               without_optimizer_ms=round(1e3 * alone, 2), parameters=model.parameter_count(),
               share_of_peak_without_optimizer=round(work / alone / PEAK, 4), tera_operations=round(work / 1e12, 1),
               tera_operations_newton_schulz=round(newton_schulz / 1e12, 1),
               state_bytes=trainer.native.optimizer.nbytes,
               peak_gib_without_optimizer=gib, **beside_plan(plan, peaks[-1]))  # fmt: skip
    parts = optimizer_split(setting, trainer, batch)
    report.row(f"{name}, optimizer", shape, (parts["norm"] + parts["step"]) / 1e3,
               floor_s=newton_schulz / gpu.MATRIX_RATE, optimizer_ms=parts)  # fmt: skip


class _Spans:
    """Milliseconds between marks on the device's stream, by name; on a CPU of the host."""

    def __init__(self, setting: Setting) -> None:
        self._cuda = setting.device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            found = call(*args, **kwargs)
            self._marks.append((name, began, self._now()))
            return found

        return timed

    def totals(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, began, ended in self._marks:
            took = began.elapsed_time(ended) if self._cuda else 1e3 * (ended - began)
            found[name] = found.get(name, 0.0) + took
        return {name: round(took, 2) for name, took in found.items()}


def optimizer_split(setting: Setting, trainer: Trainer, batch: TrainBatch) -> dict[str, float]:
    """What the norm and the optimizer's step are made of; `other` are AdamW, copies and waiting for state."""
    spans, optimizer = _Spans(setting), trainer.native.optimizer
    trainer.gradients(batch, CrossEntropy())
    trainer.balancer.clear()
    state = optimizer.state
    kept = buckets.iterated, buckets.muon.start, buckets.muon.finish, state.project
    buckets.iterated = spans.around("Newton-Schulz", kept[0])
    buckets.muon.start = spans.around("momentum and start", kept[1])
    buckets.muon.finish = spans.around("masters", kept[2])
    if kept[3] is not None:
        state.project = spans.around("stored values", kept[3])
    try:
        spans.around("norm", trainer.native.clipping.clip)()
        spans.around("step", optimizer.step_clipped)()
        gpu.synchronize(setting.device)
    finally:
        buckets.iterated, buckets.muon.start, buckets.muon.finish, state.project = kept
    found = spans.totals()
    return found | {"other": round(2 * found["step"] + found["norm"] - sum(found.values()), 2)}


def measured(report: Any, setting: Setting, parts: tuple[str, ...]) -> None:
    run = {"step": step, "wide": wide, "eager": eager, "capture": capture, "split": split, "plain": plain}
    for part in parts:
        if not report.time_left(part):
            continue
        try:
            run[part](report, setting)
        except Exception as error:  # a part that failed must not take the others along; it is in the report
            report.failed(part, "the part", error)
            import traceback

            traceback.print_exc()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def results(budget_s: float = 400.0) -> list[dict[str, Any]]:
    """The rows of all parts, for `benchmarks/learner.py`."""
    setting = Setting(dry=False)
    report = gpu.Report(setting.device, None, budget_s)
    measured(report, setting, PARTS)
    return report.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--way", choices=tuple(WAYS), help="of `wide`, one alone")
    parser.add_argument("--budget-s", type=float, default=400.0, help="no measurement is begun after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --dry runs its control flow on a CPU")
    setting = Setting(arguments.dry, arguments.way)
    report = gpu.Report(setting.device, arguments.out, arguments.budget_s)
    measured(report, setting, tuple(part for part in PARTS if part in arguments.parts))
    if arguments.json:
        print(json.dumps(report.json()))


if __name__ == "__main__":
    main()
