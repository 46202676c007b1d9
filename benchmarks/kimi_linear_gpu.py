"""Kimi Linear on one GPU: a cut of five layers at the real widths, and all 27 layers with MXFP4 experts.

    python benchmarks/kimi_linear_gpu.py --out FILE [--parts checks forward backward decode peer] [--budget-s 500]
    python benchmarks/kimi_linear_gpu.py --full --out FILE [--parts full_decode full_lora]
    python benchmarks/kimi_linear_gpu.py [--full] --dry      # the same control flow on a CPU with a tiny model

The cut has layers KDA KDA KDA MLA KDA, the first one dense: 8.28 G parameters in bf16, made on the device from a seed.

    forward    4 sequences of 2,048 tokens up to the final norm
    backward   the same, the mean cross entropy of every token, and its backward to all parameters, gradients in bf16
    decode     one step of the engine over 64 requests of 128 prompt tokens, sampling and host included; `device_ms` is
               the replay of its graph alone
    checks     hidden states in bf16 against the same weights in transformers' `KimiLinearForCausalLM`
    peer       that class on the same weights: the same three, its own cross entropy over all logits, decode one forward
               with its cache; "absent" where transformers cannot be imported

`--full`: 27 layers whose experts are random MXFP4 bytes, 29 GB. `full_decode`: the decode step. `full_lora`: a step of
LoRA (rank 32, experts too) on packed tokens beside experts that are kept packed. Rows have `peak_gib`; `plan_gib` is
what `k3rl plan` says of the same trainer. `made_s`: to make the model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rl.losses import CrossEntropy
from k3rl.losses.logprob import target_logprobs
from k3rl.model import K3Config, K3ForCausalLM, LoraConfig, QuantizationConfig
from k3rl.parallel import Trainer, TrainerConfig


def _neighbour(name: str) -> Any:
    """The module of a file beside this one, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu, engines, learner = _neighbour("gpu"), _neighbour("engine_gpu"), _neighbour("learner_gpu")

CUT_PARTS = ("checks", "forward", "backward", "decode", "peer")
FULL_PARTS = ("full_decode", "full_lora")
GIB = 2.0**30
SCALES = (116, 122)  # scale bytes of random experts: values around 2^-9


class Setting:
    """Sizes of a run on a GPU, or of a dry one."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", 0)
        self.dtype = torch.bfloat16
        self.whole = K3Config.named("kimi-linear-nano" if dry else "kimi-linear-48b")
        self.batch, self.length = (2, 24) if dry else (4, 2048)
        self.rows = 4 if dry else 64
        self.prompt, self.context, self.steps = (8, 128, 3) if dry else (128, 512, 64)
        self.lora_tokens, self.lora_length = (48, 24) if dry else (8192, 2048)
        self.checkpoint = None

    @property
    def cut(self) -> K3Config:
        """The first five layers."""
        linear = dataclasses.replace(self.whole.linear_attn_config, kda_layers=(1, 2, 3, 5), full_attn_layers=(4,))
        return self.whole.replace(
            num_hidden_layers=5, linear_attn_config=linear, attn_res_block_size=5, max_position_embeddings=4096
        )

    @property
    def full(self) -> K3Config:
        """All layers, experts in MXFP4."""
        return self.whole.replace(quantization=QuantizationConfig("mxfp4"), max_position_embeddings=4096)

    def ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        top = min(self.whole.vocab_size, 500) if self.dry else 163_000
        return torch.randint(4, top, (self.batch, self.length), generator=generator).to(self.device)


@torch.no_grad()
def made(config: K3Config, setting: Setting, *, packed: bool = False) -> K3ForCausalLM:
    """A model from a seed, drawn where it is; packed experts are random bytes."""
    model = K3ForCausalLM(config, dtype=setting.dtype, device=setting.device, packed=packed)
    generator = torch.Generator(setting.device).manual_seed(0)
    for bank in model.packed_banks.values():
        for stack in (bank._gate_up, bank._down):
            stack.packed.random_(0, 256, generator=generator)
            stack.scale.random_(*SCALES, generator=generator)
        bank._in_range = None
    for part in () if packed else model.moe_parts():
        for matrix in part.bank.matrices():
            matrix.normal_(std=matrix.shape[-1] ** -0.5, generator=generator)
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            _draw(name, parameter, generator)
    return model


def _draw(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """One parameter as a fresh model of transformers has it, projections by their inputs."""
    if name.endswith(".A_log"):
        parameter.uniform_(1, 16, generator=generator).log_()
    elif name.endswith(".dt_bias"):
        step = parameter.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        parameter.copy_(step + torch.log(-torch.expm1(-step)))
    elif name.endswith("e_score_correction_bias"):
        parameter.zero_()
    elif name.endswith("norm.weight"):
        parameter.fill_(1.0)
    else:
        deviation = 1.0 if "embed_tokens" in name else max(1, parameter[0].numel()) ** -0.5
        parameter.normal_(std=deviation, generator=generator)


@contextlib.contextmanager
def peak_of(setting: Setting) -> Iterator[Callable[[], float | None]]:
    """Within the block: a function that says the GiB at the peak since it began; None on a CPU."""
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield lambda: None if setting.device.type != "cuda" else round(torch.cuda.max_memory_allocated() / GIB, 3)


# ------------------------------------------------------------------------------------------------- the cut


class Cut:
    """The five layers, made once for all parts."""

    def __init__(self, report: Any, setting: Setting) -> None:
        self.report, self.setting = report, setting
        began = time.perf_counter()
        self.model = made(setting.cut, setting)
        gpu.synchronize(setting.device)
        self.ids = setting.ids()
        self.shape = f"5 layers, {setting.batch} x {setting.length} tokens"
        self.peer: Peer | None = None
        count = sum(p.numel() for p in self.model.parameters())
        print(f"{count:,} parameters in {time.perf_counter() - began:.1f} s", flush=True)

    @torch.no_grad()
    def hidden(self) -> Tensor:
        return self.model.hidden(self.ids).hidden

    def passes(self) -> float:
        """Forward, loss and backward; gradients are dropped before each."""
        self.model.zero_grad(set_to_none=True)
        for part in self.model.moe_parts():
            if part.bank.sums is not None:
                part.bank.sums.clear()
        rows = self.model.hidden(self.ids).hidden[:, :-1].flatten(0, 1)
        logprobs, _ = target_logprobs(rows, self.model.language_model.lm_head.weight, self.ids[:, 1:].flatten())
        loss = -logprobs.mean()
        loss.backward()
        return float(loss.detach())

    def forward(self) -> None:
        with peak_of(self.setting) as peak:
            took = gpu.wall(
                self.hidden, self.setting.device, 1 if self.setting.dry else 7, 1 if self.setting.dry else 3
            )
            self.report.row("forward", self.shape, took, peak_gib=peak(), **self.work(took, 1))

    def backward(self) -> None:
        setting = self.setting
        for part in self.model.moe_parts():
            part.bank.keep_sums(torch.zeros(self.model.config.num_experts, dtype=torch.int32, device=setting.device))
        try:
            with peak_of(setting) as peak:
                took = gpu.wall(self.passes, setting.device, 1 if setting.dry else 5, 1 if setting.dry else 2)
                self.report.row("forward and backward", self.shape, took, peak_gib=peak(), **self.work(took, 3))
        finally:
            self.model.zero_grad(set_to_none=True)
            for part in self.model.moe_parts():
                part.bank.keep_sums(None)

    def work(self, took: float, passes: int) -> dict[str, Any]:
        """Share of the datasheet's rate, by the formula of `learner_gpu.py`; without the head for one forward."""
        setting, config = self.setting, self.model.config
        each = learner.forward_work(self.model, setting.length)
        if passes == 1:
            each -= 2 * config.vocab_size * config.hidden_size
        work = passes * each * setting.batch * setting.length
        return {"tera_operations": round(work / 1e12, 2), "share_of_peak": round(work / took / learner.PEAK, 4)}

    def decode(self) -> None:
        decode_row(self.report, self.setting, self.model, "5 layers")

    # -- beside transformers

    def checks(self) -> None:
        peer = self._peer()
        if peer is None:
            self.report.check("hidden states against transformers", ok=None, peer="absent")
            return
        mine, other = self.hidden().float(), peer.hidden(self.ids).float()
        gaps = (mine - other).norm(dim=-1) / other.norm(dim=-1)  # a token that went to another expert is far off
        found = {"median": float(gaps.median()), "largest": float(gaps.max())}
        self.report.check("hidden states against transformers, bf16", ok=found["median"] < 0.05, **found)

    def against_peer(self) -> None:
        peer, setting = self._peer(), self.setting
        if peer is None:
            self.report.row("peer", self.shape, None, peer="transformers: absent")
            return
        repeats = 1 if setting.dry else 5
        for name, ours, theirs in (
            ("forward, beside transformers", self.hidden, lambda: peer.hidden(self.ids)),
            ("forward and backward, beside transformers", self.passes, lambda: peer.passes(self.ids)),
        ):
            with peak_of(setting) as peak:
                their_s = gpu.wall(theirs, setting.device, repeats, 1)
                their_gib = peak()
            took = gpu.wall(ours, setting.device, repeats, 1)
            self.report.row(name, self.shape, took, peer=peer.name, peer_s=their_s, peer_peak_gib=their_gib)
            self.model.zero_grad(set_to_none=True)
            peer.model.zero_grad(set_to_none=True)
        step = peer.decoder(setting)
        their_s = gpu.wall(step, setting.device, 2 if setting.dry else 8, 1 if setting.dry else 3)
        engine = engines.started(self.model, setting.rows, setting, **engine_options(setting))
        took = engines.step_seconds(engine, setting.steps, setting.device)
        self.report.row("decode, beside transformers", f"5 layers, {setting.rows} rows", took, peer=peer.name,
                        peer_s=their_s)  # fmt: skip

    def _peer(self) -> Peer | None:
        if self.peer is None and importlib.util.find_spec("transformers") is not None:
            self.peer = Peer(self.model, self.setting)
        return self.peer


class Peer:
    """transformers' own class on the same weights."""

    def __init__(self, model: K3ForCausalLM, setting: Setting) -> None:
        import transformers

        self.name = f"transformers {transformers.__version__}"
        config = transformers.KimiLinearConfig(**model.config.to_dict())
        with torch.device(setting.device):
            before = torch.get_default_dtype()
            torch.set_default_dtype(setting.dtype)
            try:
                self.model = transformers.KimiLinearForCausalLM(config)
            finally:
                torch.set_default_dtype(before)
        for name, parameter in self.model.named_parameters():
            if name.endswith((".A_log", ".dt_bias")):
                parameter.data = parameter.data.float()
        self.model.load_state_dict(dict(_in_memory(model)))
        self.model.eval()

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        return self.model.model(ids, use_cache=False).last_hidden_state

    def passes(self, ids: Tensor) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(ids, labels=ids, use_cache=False).loss.backward()

    @torch.no_grad()
    def decoder(self, setting: Setting) -> Callable[[], object]:
        """One step after a prompt: its cache grows with each call."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        ids = torch.randint(4, 400, (setting.rows, setting.prompt), device=setting.device)
        self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

        @torch.no_grad()
        def step() -> None:
            out = self.model(ids[:, -1:], past_key_values=cache, use_cache=True)
            out.logits[:, -1].float().softmax(-1).argmax(-1)

        return step


def _in_memory(model: K3ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """The parameters under the names that the class has in memory."""
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if ".experts." in name or ("_conv1d" in name and ".q_conv1d" not in name):
            continue
        if ".q_conv1d" in name:
            value = torch.cat([model.get_parameter(name.replace("q_conv1d", f"{s}_conv1d")) for s in "qkv"]).detach()
            name = name.replace("q_conv1d", "conv1d")
        for leaf in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{leaf}", f"self_attn.forget_gate.{leaf}")
        yield name.replace("block_sparse_moe", "mlp"), value
    for part in model.moe_parts():
        for leaf, matrix in zip(("gate_up_proj", "down_proj"), part.bank.matrices(), strict=True):
            yield f"model.layers.{part.layer}.mlp.experts.{leaf}", matrix


# ------------------------------------------------------------------------------------------------- decode


def engine_options(setting: Setting) -> dict[str, Any]:
    return {"static_decode": True} if setting.dry else {}


def decode_row(report: Any, setting: Setting, model: K3ForCausalLM, name: str, **more: Any) -> None:
    with peak_of(setting) as peak:
        engine = engines.started(model, setting.rows, setting, **engine_options(setting))
        took = engines.step_seconds(engine, setting.steps, setting.device)
        device_s = engines.replay_seconds(engine, setting.rows)
        length = int(engine.batch.pool.cache.select(torch.arange(setting.rows)).lengths.max())
        floor = engines.step_bytes(model, setting.rows, length, 17 / 32 if model.packed else 2.0) / gpu.BANDWIDTH
        report.row(
            "decode", f"{name}, {setting.rows} sequences of {length} tokens", took, floor_s=floor,
            tokens_per_s=round(setting.rows / took, 1), peak_gib=peak(),
            device_ms=None if device_s is None else round(1e3 * device_s, 4),
            captured=0 if engine.captured_decode is None else engine.captured_decode.buckets.captured, **more,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------- all layers


class Full:
    """The 27 layers with packed experts, made once."""

    def __init__(self, report: Any, setting: Setting) -> None:
        self.report, self.setting = report, setting
        with peak_of(setting) as peak:
            began = time.perf_counter()
            self.model = made(setting.full, setting, packed=True)
            gpu.synchronize(setting.device)
            self.about = {"made_s": round(time.perf_counter() - began, 1), "model_gib": peak()}
        print(f"made: {self.about}", flush=True)

    def decode(self) -> None:
        decode_row(self.report, self.setting, self.model, "27 layers, MXFP4 experts", **self.about)

    def lora(self) -> None:
        setting = self.setting
        config = TrainerConfig(lora=LoraConfig(), micro_batch_tokens=setting.lora_tokens)
        batch = learner.batch_of(setting.full, setting.lora_tokens, setting.lora_length)
        with peak_of(setting) as peak:
            trainer = Trainer(self.model, config)
            took = gpu.wall(lambda: trainer.train(batch, CrossEntropy()), setting.device, 1 if setting.dry else 3, 1)
            gib = peak()
        plan = learner.planned(trainer, setting.lora_tokens, setting.lora_length, step=True)
        self.report.row(
            "LoRA step", f"27 layers, {setting.lora_tokens} tokens in documents of {setting.lora_length}", took,
            tokens_per_s=round(setting.lora_tokens / took), **learner.beside_plan(plan, gib), **self.about,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--full", action="store_true", help="all 27 layers instead of the cut")
    parser.add_argument("--parts", nargs="+", choices=(*CUT_PARTS, *FULL_PARTS))
    parser.add_argument("--budget-s", type=float, default=500.0, help="no measurement is begun after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    setting = Setting(arguments.dry)
    if not setting.dry and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --dry runs its control flow on a CPU")
    report = gpu.Report(setting.device, arguments.out, arguments.budget_s)
    if arguments.full:
        whole = Full(report, setting)
        run: dict[str, Callable[[], None]] = {"full_decode": whole.decode, "full_lora": whole.lora}
    else:
        cut = Cut(report, setting)
        run = {
            "checks": cut.checks, "forward": cut.forward, "backward": cut.backward, "decode": cut.decode,
            "peer": cut.against_peer,
        }  # fmt: skip
    for part, call in run.items():
        if arguments.parts is None or part in arguments.parts:
            engines.guarded(report, part, "the part", call)
    if arguments.json:
        print(json.dumps(report.json()))


if __name__ == "__main__":
    main()
