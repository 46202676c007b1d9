"""The rollout engine on one GPU: checks first, then decode, its split, prefixes and memory.

    python benchmarks/engine_gpu.py --out FILE [--parts checks decode split prefix memory group] [--budget-s 500]
    python benchmarks/engine_gpu.py --dry          # the same control flow on a CPU with a tiny model

`decode` rows: k3-small, as many requests as the shape says, 128 prompt tokens; `ours_ms` is one step of the engine,
sampling and host included, `device_ms` the replay of its graph alone. Variants: experts in bf16; graphs, kernels and
fusing off. `split` rows: parts of a step, each captured by itself, times its layers. `group` rows: one group of K3's
real width.
Floor: bytes that a step must move over 4.3 TB/s: weights once (routed experts: those that the batch's choices hit in
expectation, as stored, MXFP4), KDA states read and written, latents read. `floor_as_held_ms` counts experts as the
engine holds them: as stored, or, in the rows "experts in bf16", as their values. `first_token`: 16 new tokens behind a
cached prefix against the same prompt cold.
The file is whole after every row; `not_started` names what the budget did not allow.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.checkpoint.hf import load_checkpoint
from k3rl.engine import Engine, SamplingParams, padded_batch, sample_uncut
from k3rl.kernels.gemm import grouped_skinny, w4_grouped_skinny
from k3rl.kernels.mla import decode_attention
from k3rl.kernels.moe import decode_routing
from k3rl.kernels.sampling.draw import draw
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.model.attn_res import ResidualStream
from k3rl.model.exact import exact_logprobs
from k3rl.model.fuse import fusing
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.layout import Layout
from k3rl.model.mla import GatedMLA
from k3rl.model.moe_grouped import rounded, rounding_trial, rounds_exactly
from k3rl.numerics import mx


def _neighbour(name: str) -> Any:
    """The module of a file beside this one, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu, prefixes = _neighbour("gpu"), _neighbour("engine_prefix_gpu")

PARTS = ("checks", "decode", "split", "prefix", "memory", "group")
PROMPT = 128


class Setting:
    """Sizes of a run on a GPU, or of a dry one."""

    def __init__(self, dry: bool, checkpoint: Path | None = None) -> None:
        self.checkpoint = checkpoint
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", 0)
        self.dtype = torch.bfloat16
        self.small = gpu.dry_model() if dry else K3Config.named("k3-small")
        self.batches = (1, 3) if dry else (1, 16, 64, 256)
        self.steps = 3 if dry else 64
        self.prefixes = (40, 300) if dry else (1_024, 4_096, 16_384, 65_536)
        self.fresh = (5, 20) if dry else (16, 256)
        self.lengths = (100, 1_000) if dry else (1_000, 10_000, 100_000)
        self.context = 512 if dry else 2_048
        self.prompt = 8 if dry else PROMPT

    def model(self, config: K3Config, seed: int = 0) -> K3ForCausalLM:
        return gpu.filled(config, self.device, self.dtype, seed)


def prompts(config: K3Config, count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(4, config.vocab_size, (count, length)).tolist()


def started(model: K3ForCausalLM, batch: int, setting: Setting, **options: Any) -> Engine:
    """An engine with `batch` requests that are all being decoded, and go on for long enough."""
    own = {"max_running": batch, "max_context": setting.context, **options}
    engine = Engine(model, **own)
    params = SamplingParams(max_tokens=setting.context - setting.prompt - 1)
    for ids in prompts(model.config, batch, setting.prompt):
        engine.submit(ids, params)
    while int((engine.batch.table.count[:batch] > 0).sum()) < batch:
        engine.step()
    return engine


def step_seconds(engine: Engine, steps: int, device: torch.device) -> float:
    """Of one step among many: the host may run ahead of the device, so single ones mean little; median of 4 runs."""
    for _ in range(3):
        engine.step()
    took = []
    for _ in range(4):
        gpu.synchronize(device)
        began = time.perf_counter()
        for _ in range(max(1, steps // 4)):
            engine.step()
        gpu.synchronize(device)
        took.append((time.perf_counter() - began) / max(1, steps // 4))
    return statistics.median(took)


# ---------------------------------------------------------------------------------------------------- floors


def step_bytes(model: K3ForCausalLM, batch: int, tokens: int, expert_bytes: float) -> float:
    """Bytes that one decode step must move; expert_bytes: of one number of a routed expert."""
    config = model.config
    routed = sum(p.numel() for n, p in model.official_parameters() if ".experts." in n)
    rest = sum(p.nbytes for n, p in model.official_parameters() if ".experts." not in n and "embed_tokens" not in n)
    hit = 1 - (1 - config.num_experts_per_token / config.num_experts) ** batch
    linear = config.linear_attn_config
    state = linear.num_heads * linear.head_dim**2 * 4 + 9 * linear.num_heads * linear.head_dim * 2
    latent = (config.kv_lora_rank + config.qk_rope_head_dim) * 2 * tokens
    return rest + routed * hit * expert_bytes + batch * (
        2 * state * len(config.kda_layers) + latent * len(config.mla_layers)
    )  # fmt: skip


def floors(model: K3ForCausalLM, batch: int, tokens: int) -> tuple[float, float]:
    """Seconds with experts as stored (MXFP4 with scales), and as held in bf16."""
    stored, held = (step_bytes(model, batch, tokens, size) for size in (1 / 2 + 1 / 32, 2.0))
    return stored / gpu.BANDWIDTH, held / gpu.BANDWIDTH


# ---------------------------------------------------------------------------------------------------- checks


def checked_config(setting: Setting) -> K3Config:
    """k3-small with few layers: a CPU computes it in float32 beside the GPU."""
    small = setting.small
    linear = type(small.linear_attn_config)(
        num_heads=small.linear_attn_config.num_heads, head_dim=128, kda_layers=(1, 2), full_attn_layers=(3,)
    )
    return small.replace(num_hidden_layers=3, linear_attn_config=linear, attn_res_block_size=2)


def logprobs_of(model: K3ForCausalLM, ids: list[int], routes: np.ndarray | None = None) -> torch.Tensor:
    """float64 [T, V] of one whole pass, on the CPU."""
    device = model.device
    replay = None if routes is None else torch.from_numpy(routes)[None].to(device)
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([ids], device=device), routes=replay).hidden
        return model.logits(hidden)[0].double().log_softmax(-1).cpu()


def check_quantizer(report: Any, setting: Setting) -> None:
    """Every bf16 bit pattern, rounded on the device, has the bits that a CPU gives it; compiled or not."""
    trial = rounding_trial(setting.device)
    expected = mx.fake_quantize_mxfp8(trial.cpu(), "ceil")
    for name, found in (("eager", mx.fake_quantize_mxfp8(trial, "ceil")), ("used", rounded(trial, "ceil"))):
        own = found.cpu()
        same = bool(((own == expected) | (own.isnan() & expected.isnan())).all())
        report.check(f"MXFP8 on the device, {name}", ok=same, compiled_is_exact=rounds_exactly(trial.device, "ceil"))


def in_float32(model: K3ForCausalLM) -> K3ForCausalLM:
    """The same weights in float32 on the CPU."""
    wide = K3ForCausalLM(model.config, dtype=torch.float32)
    with torch.no_grad():
        for own, other in zip(wide.parameters(), model.parameters(), strict=True):
            own.copy_(other.cpu())
    return wide


def check_forward(report: Any, setting: Setting) -> None:
    """Teacher-forced logprobs on the GPU, kernels on and off, against the same weights in float32 on the CPU."""
    config = checked_config(setting)
    model = setting.model(config)
    wide = in_float32(model)
    (ids,) = prompts(config, 1, 40 if setting.dry else 300)
    with torch.no_grad():
        routes = wide.hidden(torch.tensor([ids])).routes[0].numpy()
    reference = logprobs_of(wide, ids, routes)
    for name, context in (("kernels", contextlib.nullcontext()), ("torch path", gpu.without_kernels())):
        with context:
            gap = (logprobs_of(model, ids, routes) - reference).abs()
        report.check(f"forward in bf16, {name}, against float32", ok=float(gap.mean()) < 0.05,
                     mean_nats=float(gap.mean()), largest_nats=float(gap.max()))  # fmt: skip


def check_gradients(report: Any, setting: Setting) -> None:
    """Gradients of packed documents on the device in bf16 against float32 on the CPU, relative, by part.

    Random weights make some of them differences of large numbers, so bf16 alone may be further off than 0.1: kernels
    may then be a quarter worse than plain torch in bf16.
    """
    config = checked_config(setting)
    model = setting.model(config)
    wide = in_float32(model)
    (ids,) = prompts(config, 1, 50 if setting.dry else 250)
    ends = torch.tensor([0, 20, 21, len(ids)])
    up = torch.randn(1, len(ids), config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        routes = wide.hidden(torch.tensor([ids]), cu_seqlens=ends).routes
    found = {}
    for name, own, context in (
        ("device", model, contextlib.nullcontext()),
        ("torch", model, gpu.without_kernels()),
        ("cpu", wide, contextlib.nullcontext()),
    ):
        given = torch.tensor([ids], device=own.device)
        own.zero_grad(set_to_none=True)
        with context:
            out = own.hidden(given, cu_seqlens=ends.to(own.device), routes=routes.to(own.device)).hidden
            out.backward(up.to(own.device, out.dtype))
        found[name] = {n: p.grad.float().cpu() for n, p in own.official_parameters() if p.grad is not None}
    parts = {"kda": ".layers.0.self_attn.", "mla": ".layers.2.self_attn.", "experts": ".experts.", "rest": ""}
    errors: dict[str, dict[str, float]] = {"device": {}, "torch": {}}
    for way, own_errors in errors.items():
        for part, piece in parts.items():
            names = [n for n in found["cpu"] if piece in n and n in found[way]]
            gap = sum(float((found[way][n] - found["cpu"][n]).square().sum()) for n in names)
            own_errors[part] = (gap / max(sum(float(found["cpu"][n].square().sum()) for n in names), 1e-30)) ** 0.5
    same = found["device"].keys() == found["cpu"].keys()
    fine = all(error < max(0.1, 1.25 * errors["torch"][part]) for part, error in errors["device"].items())
    report.check("gradients in bf16 against float32", ok=same and fine, same_parameters=same, **errors["device"],
                 torch_in_bf16=errors["torch"])  # fmt: skip


def check_route(report: Any, setting: Setting) -> None:
    """Choice, order by expert and sum on the device against their definitions there; scores that no rounding swaps."""
    generator = torch.Generator().manual_seed(0)
    for n, experts, k in ((1, 64, 8), (64, 64, 8), (256, 64, 8), (256, 896, 16), (8192, 64, 8)):
        logits = torch.stack([torch.randperm(experts, generator=generator) for _ in range(n)]) / (experts / 8) - 4
        bias = torch.randint(-1, 2, (experts,), generator=generator) / 64
        logits[0] = 0.5  # all equal
        logits, bias = logits.float().to(setting.device), bias.to(setting.device)
        weights, ids = decode_routing.choose(logits, bias, k, True, 2.5)
        weights2, ids2 = decode_routing.choose_reference(logits, bias, k, True, 2.5)
        clear = (torch.sort((logits.double().sigmoid() + bias), 1).values.diff(dim=1) > 1e-6).all(1)
        clear |= torch.tensor([True] + [False] * (n - 1), device=setting.device)
        sort, sort2 = decode_routing.sort_assignments(ids, experts), decode_routing.sort_reference(ids, experts)
        rows = torch.randn(n * k, 512, generator=generator).to(setting.device, setting.dtype)
        total = decode_routing.sum_choices(rows, sort.inverse, weights, setting.dtype).float()
        total2 = decode_routing.sum_reference(rows, sort.inverse, weights, setting.dtype).float()
        gap = float((weights - weights2)[clear].abs().max())
        off = float((total - total2).abs().max() / total2.abs().max())
        ok = torch.equal(ids[clear], ids2[clear]) and all(map(torch.equal, sort, sort2)) and gap < 1e-5 and off < 1e-2
        if experts == 64 and n < 1024:
            given = torch.randn(n, 512, generator=generator).to(setting.device, setting.dtype)
            matrices = torch.randn(experts, 128, 512, generator=generator).to(setting.device, setting.dtype)
            products = [call(given, sort.token, matrices, sort.ends).float()
                        for call in (grouped_skinny.product, grouped_skinny.product_reference)]  # fmt: skip
            ok &= float((products[0] - products[1]).abs().max() / products[1].abs().max()) < 1e-2
        report.check(f"routing of {n} tokens to {k} of {experts} experts", ok=ok, tokens_compared=int(clear.sum()),
                     weight_gap=gap, sum_gap=off)  # fmt: skip


def check_packed(report: Any, setting: Setting) -> None:
    """Experts as stored bytes against their values in bf16: decoded, multiplied with few rows, and in an engine."""
    generator = torch.Generator().manual_seed(0)
    for experts, b, a, rows in ((8, 512, 512, 60), (8, 512, 256, 400), (4, 128, 3584, 330)):
        packed = torch.randint(0, 256, (experts, b, a // 2), dtype=torch.uint8, generator=generator).to(setting.device)
        scale = torch.randint(100, 129, (experts, b, a // 32), dtype=torch.uint8, generator=generator)
        tiles = w4_grouped_skinny.tiled(packed, scale.to(setting.device))
        matrices = w4_grouped_skinny.decode(*tiles, torch.bfloat16)
        ok = torch.equal(matrices, mx.dequantize_mxfp4(packed, scale.to(setting.device), torch.bfloat16))
        ends = torch.sort(torch.randint(0, rows, (experts,), generator=generator)).values.to(torch.int32)
        ends[-1] = rows
        x = torch.randn(rows, a, generator=generator).to(setting.device, setting.dtype)
        found = w4_grouped_skinny.product(x, None, *tiles, ends.to(setting.device))
        wanted = grouped_skinny.product(x, None, matrices, ends.to(setting.device))
        report.check(f"packed experts [{experts}, {b}, {a}], {rows} rows", ok=ok and torch.equal(found, wanted))
    model = setting.model(checked_config(setting), seed=1)
    given = prompts(model.config, 4 if setting.dry else 48, 20)
    own = SamplingParams(max_tokens=8 if setting.dry else 40, seed=3)
    options = {"max_running": len(given), "max_context": setting.context}
    engines = [Engine(model, packed=packed, **options) for packed in (True, False)]
    done = [[(c.token_ids, c.logprobs) for c in engine.generate(given, own)] for engine in engines]
    report.check("engine with packed experts against values", ok=done[0] == done[1], packed=engines[0].model.packed)


def distance(
    model: K3ForCausalLM, prompts: list[list[int]], completions: list[Any], *, trained: bool = True
) -> dict[str, Any]:
    """Mean KL (k3 estimator) and gaps of the sampler's logprobs from the learner's, whose routes are the sampler's.

    The bound, and so `ok`, is of trained models: random weights make much of a value that rounds the other way.
    """
    kl, gaps = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = [*prompt, *completion.token_ids]
        routes = np.concatenate([completion.routes, completion.routes[-1:]])
        rows = logprobs_of(model, ids, routes)[len(prompt) - 1 : -1]
        ratio = rows[torch.arange(len(rows)), list(completion.token_ids)] - torch.tensor(completion.logprobs)
        gaps.append(ratio.abs())
        kl.append(ratio.exp() - 1 - ratio)
    mean = float(torch.cat(kl).mean())
    found = {"mean_kl": mean, "tokens": sum(map(len, kl)), "mean_nats": float(torch.cat(gaps).mean()),
             "largest_nats": float(torch.cat(gaps).max())}  # fmt: skip
    return {"ok": mean < 1e-4, **found} if trained else found


def check_trained(report: Any, setting: Setting) -> None:
    """Sampler against learner on a checkpoint (`--model`), over what the model itself writes behind `bos`."""
    if setting.checkpoint is None:
        return
    model = load_checkpoint(setting.checkpoint, dtype=setting.dtype, device=setting.device)
    given = [[model.config.bos_token_id]] * (4 if setting.dry else 32)
    tokens = min(16 if setting.dry else 256, model.config.max_position_embeddings - 1)
    own = [SamplingParams(max_tokens=tokens, seed=seed, return_routes=True) for seed in range(len(given))]
    for name, context in (("kernels", contextlib.nullcontext()), ("torch path", gpu.without_kernels())):
        with context:
            engine = Engine(model, max_running=len(given), static_decode=True if setting.dry else None)
            done = engine.generate(given, own)
            report.check(f"sampler against learner, trained model, {name}", **distance(model, given, done))


def check_draw(report: Any, setting: Setting) -> None:
    """Tokens and logprobs drawn on the device against those of its definition on the CPU."""
    generator = np.random.default_rng(0)
    for rows, tokens in ((1, 512), (64, 512), (256, 4000), (8, 163_840)):
        logits = torch.from_numpy(generator.normal(0, 4, (rows, tokens))).float()
        logits[-1, 1] = float("nan")
        heat, uniform = (torch.from_numpy(x) for x in (generator.choice([0.0, 0.7, 1.0], rows), generator.random(rows)))
        found = draw(*(x.to(setting.device) for x in (logits, heat, uniform))).cpu()[:-1]
        wanted = draw(logits, heat, uniform)[:-1]
        gap = float((found - wanted).abs().max()) if rows > 1 else 0.0
        report.check(f"draws of {rows} rows over {tokens} tokens", ok=gap < 1e-9, gap=gap)


def check_latents(report: Any, setting: Setting) -> None:
    """Attention over pages of latents against its definition in float64, relative to the largest number."""
    generator = torch.Generator().manual_seed(0)
    for rows, h, z, blocks in ((1, 8, 256, 32), (64, 8, 256, 4), (256, 8, 256, 2), (3, 96, 512, 8)):
        past = torch.randint(0, blocks * 64, (rows,), generator=generator)
        past[0] = 0
        table = torch.randperm(rows * blocks, generator=generator).view(rows, blocks)
        given = [torch.randn(*shape, generator=generator).to(setting.device, setting.dtype)
                 for shape in ((h, rows, z), (rows, h, 64), (rows * blocks, 64, z + 64))]  # fmt: skip
        where = (table.to(setting.device), past.to(setting.device), 0.05)
        found = decode_attention.attend(*given, *where).double()
        wanted = decode_attention.attend_reference(*(x.double() for x in given), *where)
        gap = float((found - wanted).abs().max() / wanted.abs().max())
        report.check(f"latent attention, {rows} rows, {h} heads, {z} + 64", ok=gap < 1e-2, gap=gap)


def check_engine(report: Any, setting: Setting) -> None:
    """Sampler against learner, batch against alone, graphs against none, exact mode against the exact learner."""
    model = setting.model(checked_config(setting), seed=1)
    given = prompts(model.config, 4 if setting.dry else 16, 20)
    own = SamplingParams(max_tokens=8 if setting.dry else 64, seed=3, return_routes=True)
    options = {"max_context": setting.context, "static_decode": True if setting.dry else None}
    done = Engine(model, max_running=len(given), **options).generate(given, own)
    report.check("sampler against learner, random weights", **distance(model, given, done, trained=False))
    alone = [Engine(model, max_running=1, **options).generate([prompt], own)[0] for prompt in given[:3]]
    differ = [np.abs(np.array(a.logprobs) - b.logprobs).max() if a.token_ids == b.token_ids else None
              for a, b in zip(alone, done, strict=False)]  # fmt: skip
    known = [float(value) for value in differ if value is not None]
    report.check("a request alone against in a batch", ok=max(known, default=0.0) < 0.1,
                 largest_nats=max(known, default=None), other_tokens=differ.count(None))  # fmt: skip
    engine = Engine(model, max_running=len(given), **options)
    if engine.captured_decode is not None:
        engine.captured_decode.buckets.stop_capturing()
    again = engine.generate(given, own)
    report.check("graphs on against off", ok=[c.logprobs for c in again] == [c.logprobs for c in done])
    exact = Engine(model, max_running=2, max_context=setting.context, exact=True).generate(given[:1], own)[0]
    ids = torch.tensor([*given[0], *exact.token_ids], device=setting.device)
    places = torch.arange(len(given[0]) - 1, len(ids) - 1, device=setting.device)
    recorded = torch.from_numpy(np.concatenate([exact.routes, exact.routes[-1:]])).to(setting.device)
    for name, routes in (("", None), (", recorded routes", recorded)):
        learned = exact_logprobs(model, ids, places, exact.token_ids, routes=routes)
        gap = float((learned - torch.tensor(exact.logprobs, dtype=torch.float64)).abs().max())
        report.check(f"exact mode against the exact learner{name}", ok=gap == 0.0, largest_nats=gap)


# ---------------------------------------------------------------------------------------------------- decode


def decode_row(report: Any, setting: Setting, model: K3ForCausalLM, name: str, batch: int, variant: str) -> None:
    context: Any = contextlib.ExitStack()
    with context:
        if variant == "kernels off":
            context.enter_context(gpu.without_kernels())
        if variant == "fusing off":
            context.enter_context(fusing(False))
        own: dict[str, Any] = {"static_decode": True} if setting.dry else {}
        own |= {"overlap": variant != "overlap off", "packed": variant != "experts in bf16"}
        engine = started(model, batch, setting, **own)
        if variant == "graphs off" and engine.captured_decode is not None:
            engine.captured_decode.buckets.stop_capturing()
        took = step_seconds(engine, setting.steps, setting.device)
        length = int(engine.batch.pool.cache.select(torch.arange(batch)).lengths.max())
        stored, held = floors(model, batch, length)
        held = stored if engine.model.packed else held
        device_s = replay_seconds(engine, batch) if variant == "as it is" else None
        report.row(
            f"decode, {variant}", f"{name}, {batch} sequences of {length} tokens", took, floor_s=stored,
            tokens_per_s=round(batch / took, 1), floor_as_held_ms=round(1e3 * held, 4),
            share_of_floor_as_held=round(held / took, 4),
            device_ms=None if device_s is None else round(1e3 * device_s, 4),
            captured=0 if engine.captured_decode is None else engine.captured_decode.buckets.captured,
        )  # fmt: skip


@torch.inference_mode()
def replay_seconds(engine: Engine, batch: int) -> float | None:
    """Seconds of a decode graph by itself, over padding rows, which move no state; None where nothing is captured."""
    decode, cache = engine.captured_decode, engine.batch.pool.paged
    if decode is None or cache is None:
        return None
    mine = [decode.buckets[shape] for shape in decode.shapes if shape[0] == padded_batch(batch)]
    captured = [bucket for bucket in mine if bucket.step.is_captured]
    if not captured:
        return None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    states = [tensor.clone() for tensor in cache.recurrent.values()]
    start.record()
    for _ in range(20):
        captured[-1].step()
    end.record()
    torch.cuda.synchronize()
    for tensor, before in zip(cache.recurrent.values(), states, strict=True):
        tensor.copy_(before)
    return start.elapsed_time(end) / 1e3 / 20


def decode(report: Any, setting: Setting) -> None:
    model = setting.model(setting.small)
    for variant in ("as it is", "experts in bf16", "overlap off", "graphs off", "fusing off", "kernels off"):
        batches = setting.batches if variant == "as it is" else setting.batches[-2:]
        for batch in batches:
            guarded(report, f"decode, {variant}", f"k3-small, {batch} sequences",
                    lambda b=batch, v=variant: decode_row(report, setting, model, "k3-small", b, v))  # fmt: skip


def split_rows(report: Any, setting: Setting, model: K3ForCausalLM, name: str, batch: int) -> None:
    """Each part captured by itself; the engine's own buffers, all rows live."""
    engine = started(model, batch, setting, **({"static_decode": True} if setting.dry else {}))
    decode, cache, model, config = engine.captured_decode, engine.batch.pool.paged, engine.model, model.config
    if decode is None or cache is None:
        raise RuntimeError("the engine decodes by the ordinary path here; there is no step of fixed shapes to split")
    engine.step()
    tokens, states = decode.buckets[list(decode.shapes)[-1]].inputs.read(cache)
    layers, layout = model.language_model.model.layers, Layout([1] * len(tokens), setting.device)
    x = torch.randn(len(tokens), config.hidden_size, device=setting.device).to(setting.dtype)
    kda = next(m for m in layers.modules() if isinstance(m, KimiDeltaAttention))
    mla = next(m for m in layers.modules() if isinstance(m, GatedMLA))
    moe = next(iter(model.moe_parts()))
    blocks = max(1, config.num_hidden_layers // config.attn_res_block_size)
    stream = ResidualStream(x, config.rms_norm_eps)
    for _ in range(max(1, blocks // 2)):
        stream.push()
        stream.add(x)
    last = layers[-1]

    def residual() -> torch.Tensor:
        return last._read(stream, "self_attention", last.input_layernorm)

    parts: dict[str, tuple[Callable[[], object], int]] = {
        "KDA layer": (lambda: kda(x, layout, states), len(config.kda_layers)),
        "MLA layer": (lambda: mla(x, layout, states, None), len(config.mla_layers)),
        "MoE": (lambda: moe(x, None, None, True), len(config.moe_layers)),
        "residual mix and norm": (residual, 2 * config.num_hidden_layers + 1),
        "head": (lambda: model.logits(x), 1),
    }
    with torch.inference_mode():
        for part, (call, count) in parts.items():
            took = gpu.replayed(call, setting.device)
            report.row(f"split, {part}", f"{name}, {batch} sequences", took * count, each_ms=round(1e3 * took, 4),
                       times=count)  # fmt: skip
        logits = model.logits(x)
        heat, uniform = np.ones(len(x)), np.full(len(x), 0.5)
        took = gpu.wall(lambda: sample_uncut(logits, heat, uniform), setting.device)
        report.row("split, sampling and its copy", f"{name}, {batch} sequences", took)


# ---------------------------------------------------------------------------------------------------- prefix, memory


def prefix(report: Any, setting: Setting) -> None:
    guarded(report, "check_attention", "checks", lambda: prefixes.check_attention(report, setting))
    model = setting.model(setting.small)
    guarded(report, "check_chunks", "checks", lambda: prefixes.check_chunks(report, setting, model, distance))
    for variant in prefixes.VARIANTS:
        guarded(report, f"first_token, {variant}", "k3-small",
                lambda v=variant: prefixes.rows(report, setting, model, v))  # fmt: skip


def memory(report: Any, setting: Setting) -> None:
    """Bytes that one request owns, and what the allocator handed out while it grew."""
    config = setting.small.replace(max_position_embeddings=max(setting.lengths) + 64)
    model = setting.model(config)
    engine = Engine(model, max_running=1, static_decode=True)
    pool, cache = engine.batch.pool, engine.batch.pool.paged
    if cache is None:
        raise RuntimeError("an engine that decodes in fixed shapes has no pages here; the bytes would be of others")
    before = torch.cuda.memory_allocated() if setting.device.type == "cuda" else 0
    view = pool.view([0])
    fixed = sum(view.recurrent(n).nbytes + view.conv(n).nbytes for n in config.kda_layers)
    for length in setting.lengths:
        pool.reset([0])
        pool.claim([0], [length])
        owned = sum(latent[0].nbytes * int(cache.table.held[0]) for latent in cache.latent.values())
        grown = torch.cuda.memory_allocated() - before if setting.device.type == "cuda" else 0
        values = owned / 2 / len(config.mla_layers) / length
        report.row("memory", f"k3-small, {length} tokens", None, kda_bytes=fixed, mla_bytes=owned,
                   mla_values_per_token_and_layer=round(values, 2), allocator_growth_bytes=grown)  # fmt: skip


def group(report: Any, setting: Setting) -> None:
    wide, own = gpu.wide_group, {"context": setting.context}
    model = setting.model(gpu.dry_model() if setting.dry else wide(**own, vocabulary=163_840))
    whole = "whole vocabulary"  # the head and the draw of each token are in these steps
    for batch in setting.batches:
        guarded(report, f"decode, {whole}", f"real-width group, {batch} sequences",
                lambda b=batch: decode_row(report, setting, model, "real-width group", b, whole))  # fmt: skip
    model = setting.model(gpu.dry_model() if setting.dry else wide(**own))
    for batch in setting.batches:
        guarded(report, "decode, as it is", f"real-width group, {batch} sequences",
                lambda b=batch: decode_row(report, setting, model, "real-width group", b, "as it is"))  # fmt: skip
    held = "experts in bf16"
    for batch in setting.batches[-2:]:
        guarded(report, f"decode, {held}", f"real-width group, {batch} sequences",
                lambda b=batch: decode_row(report, setting, model, "real-width group", b, held))  # fmt: skip
    for batch in setting.batches[-2:-1]:
        guarded(report, "split", f"real-width group, {batch} sequences",
                lambda b=batch: split_rows(report, setting, model, "real-width group", b))  # fmt: skip


def split(report: Any, setting: Setting) -> None:
    model = setting.model(setting.small)
    for batch in setting.batches[-2:]:
        guarded(report, "split", f"k3-small, {batch} sequences",
                lambda b=batch: split_rows(report, setting, model, "k3-small", b))  # fmt: skip


def checks(report: Any, setting: Setting) -> None:
    for check in (
        check_quantizer,
        check_route,
        check_draw,
        check_latents,
        check_packed,
        check_forward,
        check_gradients,
        check_engine,
        check_trained,
    ):
        guarded(report, check.__name__, "checks", lambda own=check: own(report, setting))


def guarded(report: Any, name: str, shape: str, call: Callable[[], object]) -> None:
    """Runs one measurement; a failure is a row, and the others go on."""
    if not report.time_left(f"{name}: {shape}"):
        return
    try:
        call()
    except Exception as error:  # a figure that failed must not take the others along; it is in the report
        report.failed(name, shape, error)
        import traceback

        traceback.print_exc()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--budget-s", type=float, default=500.0, help="no measurement is begun after this long")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, help="a trained checkpoint, for one more check")
    arguments = parser.parse_args()
    setting = Setting(arguments.dry, arguments.model)
    if not setting.dry and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --dry runs its control flow on a CPU")
    report = gpu.Report(setting.device, arguments.out, arguments.budget_s)
    run = {"checks": checks, "decode": decode, "split": split, "prefix": prefix, "memory": memory, "group": group}
    for part in PARTS:
        if part in arguments.parts:
            guarded(report, part, "the part", lambda own=run[part]: own(report, setting))
    if arguments.json:
        print(json.dumps(report.json()))


if __name__ == "__main__":
    main()
