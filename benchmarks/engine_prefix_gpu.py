"""Time to the first token behind cached prefixes, and checks of the steps that compute the new ones (engine_gpu.py).

`first_token` rows: so many cached tokens and so many new ones, against the same prompt cold. Variants: "as it is",
where chunks of few tokens are captured steps; "uncaptured", the same steps run as they are written; "ordinary
path", without them. cached_share: what a cached token costs, (hit - new tokens alone) / cached ones, over what a token
of the cold prompt costs. The figures of a variant are the least of several prompts; the first two, which compile and
capture, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gpu
import numpy as np
import torch

from k3rl.engine import Engine, PrefixCache, SamplingParams
from k3rl.kernels.mla import chunked_prefill
from k3rl.model import K3Config, K3ForCausalLM

VARIANTS = ("as it is", "uncaptured", "ordinary path")
OTHER = "ordinary path, other chunks"
ONE = SamplingParams(max_tokens=1, seed=0)


def prompt(config: K3Config, length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, config.vocab_size, length).tolist()


def seconds(engine: Engine, ids: list[int], device: torch.device) -> float:
    """To the first token of one request."""
    gpu.synchronize(device)
    began = time.perf_counter()
    engine.generate([ids], ONE)
    gpu.synchronize(device)
    return time.perf_counter() - began


def engine_of(model: K3ForCausalLM, setting: Any, variant: str, *, cached: bool) -> Engine:
    room = max(setting.prefixes) + max(setting.fresh) + 64
    chunk = 192 if variant == OTHER else 8192
    engine = Engine(
        model, max_running=1, max_context=room, prefill_tokens=chunk, static_decode=True if setting.dry else None,
        prefix_cache=PrefixCache.of_bytes(8 << 30) if cached else None,
    )  # fmt: skip
    if engine.captured_prefill is not None:
        if variant not in VARIANTS[:2]:
            setattr(engine.captured_prefill, "takes", lambda *_: False)  # noqa: B010, as mypy wants it
        elif variant == "uncaptured":
            engine.captured_prefill.buckets.stop_capturing()
    return engine


def rows(report: Any, setting: Any, model: K3ForCausalLM, variant: str) -> None:
    """Hits of every length, with every number of new tokens."""
    config, device, repeats = model.config, setting.device, 1 if setting.dry else 5
    skipped = 0 if setting.dry else 2
    cold, warm = (engine_of(model, setting, variant, cached=cached) for cached in (False, True))
    lengths = setting.prefixes if variant == "as it is" else (setting.prefixes[0], setting.prefixes[-1])
    for length in lengths:
        before = prompt(config, length, length)
        warm.generate([before], ONE)
        for fresh in setting.fresh:
            took: dict[str, list[float]] = {"cold": [], "warm": [], "new": []}
            for repeat in range(repeats):
                new = prompt(config, fresh, 1 + repeat + fresh)
                took["warm"].append(seconds(warm, before + new, device))
                took["new"].append(seconds(cold, new, device))
                if variant == "as it is" and repeat < skipped + 2:
                    took["cold"].append(seconds(cold, before + new, device))
            warm_s, new_s = (min(took[kind][skipped:]) for kind in ("warm", "new"))
            cold_s = min(took["cold"][skipped:]) if took["cold"] else cold_seconds[length, fresh]
            cold_seconds[length, fresh] = cold_s
            cached_us, fresh_us = 1e6 * max(warm_s - new_s, 0.0) / length, 1e6 * cold_s / (length + fresh)
            counters = warm.prefix_cache.counters
            report.row(
                f"first_token, {variant}", f"k3-small, {length} cached tokens, {fresh} new", warm_s,
                peer="the same prompt cold", peer_s=cold_s, share_of_cold=round(warm_s / cold_s, 4),
                new_alone_ms=round(1e3 * new_s, 4), cached_token_us=round(cached_us, 4),
                fresh_token_us=round(fresh_us, 4), cached_share=round(cached_us / fresh_us, 4), hits=counters.hits,
                captured=0 if warm.captured_prefill is None else warm.captured_prefill.buckets.captured,
            )  # fmt: skip


cold_seconds: dict[tuple[int, int], float] = {}


def check_attention(report: Any, setting: Any) -> None:
    """Attention of packed tokens over pages of latents against its definition in float64, relative to the largest."""
    generator = torch.Generator().manual_seed(0)
    cases = (([16], [65536 if not setting.dry else 500], 8, 256), ([3, 0, 200, 1], [0, 5, 700, 64], 8, 256),
             ([33, 31], [0, 130], 96, 512), ([1000], [24], 8, 256))  # fmt: skip
    for lengths, before, h, z in cases:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        past = torch.cat([torch.arange(n) + b for n, b in zip(lengths, before, strict=True)])
        blocks, n = int(past.max()) // 64 + 1, len(past)
        table = torch.randperm(len(lengths) * blocks, generator=generator).view(len(lengths), blocks)
        given = [torch.randn(*shape, generator=generator).to(setting.device, setting.dtype)
                 for shape in ((h, n, z), (n, h, 64), (table.numel(), 64, z + 64))]  # fmt: skip
        where = [x.to(setting.device) for x in (table, past, ends)]
        found = chunked_prefill.attend(*given, *where, 0.05).double()
        wanted = chunked_prefill.attend_reference(*(x.double() for x in given), *where, 0.05)
        gap = float((found - wanted).abs().max() / wanted.abs().max())
        again = chunked_prefill.attend(*given, *where, 0.05).double()
        report.check(f"latent attention of {lengths} tokens behind {before}, {h} heads, {z} + 64",
                     ok=gap < 1e-2 and torch.equal(found, again), gap=gap)  # fmt: skip
        call = lambda own=given, at=where: chunked_prefill.attend(*own, *at, 0.05)  # noqa: E731
        report.row("latent attention of a chunk", f"{lengths} tokens behind {before}, {h} heads, {z} + 64",
                   gpu.replayed(call, setting.device))  # fmt: skip


def check_chunks(
    report: Any,
    setting: Any,
    model: K3ForCausalLM,
    distance: Callable[[Any, list[list[int]], list[Any]], dict[str, Any]],
) -> None:
    """Turns behind a cached prefix: how far each way of computing them is from the learner with the sampler's routes.

    The ways among themselves differ more, and that says less: a route that flips, or a value that MXFP8 rounds the
    other way, changes a logprob by tenths on random weights. So the ordinary path in chunks of another size is a
    contender: what it differs by from itself is no fault of the captured steps.
    """
    config, tokens = model.config, 4 if setting.dry else 32
    own = SamplingParams(max_tokens=tokens, seed=3, return_routes=True)
    turns = [prompt(config, n, n) for n in ((5, 20) if setting.dry else (5, 16, 100, 700))]
    kl, first, every = {}, {}, {}
    said: list[tuple[int, ...]] = []
    for variant in (*VARIANTS, OTHER, "no cache"):
        engine = engine_of(model, setting, variant, cached=variant != "no cache")
        ids, given, done = prompt(config, setting.prefixes[0], 7), [], []
        for number, turn in enumerate(turns):
            given.append(list(ids))
            done += engine.generate([ids], own)
            said += [done[-1].token_ids] if variant == VARIANTS[0] else []
            ids += [*said[number], *turn]
        given.append(list(ids))
        done += engine.generate([ids], own)
        kl[variant] = distance(model, given, done)
        first[variant] = [(completion.token_ids[0], completion.logprobs[0]) for completion in done]
        every[variant] = [completion.logprobs for completion in done]
    usual = kl["ordinary path"]["mean_kl"]
    for variant, found in kl.items():
        ok = found["mean_kl"] < max(1e-4, 3 * usual)
        report.check(f"turns behind a cached prefix against the learner, {variant}", **(found | {"ok": ok}))
    same = every[VARIANTS[0]] == every["uncaptured"]
    report.check("turns behind a cached prefix, captured against uncaptured", ok=same)
    gaps = {}
    for one in (VARIANTS[0], OTHER, "no cache"):
        pairs = zip(first[one], first["ordinary path"], strict=True)
        gaps[one] = max((abs(a[1] - b[1]) for a, b in pairs if a[0] == b[0]), default=None)  # another draw says nothing
    report.check("first tokens of the turns, largest difference from the ordinary path in nats", ok=True, **gaps)
