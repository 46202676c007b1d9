"""The rollout engine: tokens per second by batch, time to the first token of cached prefixes, memory per request.

    python benchmarks/engine.py [--json] [--threads N] [--models k3-nano k3-30m] [--batches 1 16 64] [--sampled 256]
                                [--prefixes 1024 4096 16384 65536] [--repeats 3]
                                [--parts decode prefix turns memory exact]
                                [--out FILE]

`decode` rows: as many requests as the shape says, 128 prompt tokens and `--sampled` sampled ones each; `ours_ms` is
one decode step, `tokens_per_s` counts sampled tokens over the whole run, prefill included. The peer is `generate` of
transformers (when it is installed) on a dense Llama with the same active parameters, sampling from everything as the
engine does. `first_token` rows: a prompt whose prefix is cached against the same prompt cold; `cached_token_us` is the
time that is not the new tokens' own, by cached token, `fresh_token_us` the cold time by token, `cached_share` their
ratio. `prefix_cache` row: single-turn groups with the cache on against off. `turns` row: a conversation of 20 turns
with the cache on against off, in float64; `prefilled_per_new` is prompt tokens computed by new prompt token,
`logprob_gap` the largest difference of a sampled token's logprob. `memory` rows: bytes that one request owns in an
engine's pool after so many tokens, no time. `exact` row: the exact mode against the usual one. Contenders take turns,
in another order at each repeat of `decode`; a figure is the fastest of the repeats; `cpu_ratio` is of processor time,
which a busy machine changes less (with several threads it counts those that spin). Floor of a decode step: parameters
read once, KDA states read and written, latents read, at the rate of a copy timed here. k3-30m is defined here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.engine import (
    Completion,
    Engine,
    FixedState,
    Hit,
    MemoryPlan,
    PagedCache,
    PrefixCache,
    SamplingParams,
    StatePool,
)
from k3rl.model import K3Config, K3ForCausalLM, LinearAttnConfig, QuantizationConfig

PROMPT_TOKENS = 128
PARTS = ["decode", "prefix", "turns", "memory", "exact"]


def seconds(call: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    start = time.perf_counter()
    call(*arguments, **options)
    return time.perf_counter() - start


def row(
    name: str, shape: str, peer: str, ours_s: float, peer_s: float | None, floor_s: float | None, **more: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "shape": shape,
        "regime": f"cpu, {torch.get_num_threads()} threads",
        "peer": peer,
        "ours_ms": round(1e3 * ours_s, 4),
        "peer_ms": None if peer_s is None else round(1e3 * peer_s, 4),
        "ratio": None if peer_s is None else round(peer_s / ours_s, 3),
        "floor_ms": None if floor_s is None else round(1e3 * floor_s, 4),
        "share_of_floor": None if floor_s is None else round(floor_s / ours_s, 3),
        **more,
    }


def configured(name: str) -> K3Config:
    """A named model, or k3-30m: k3-nano's shape with more of everything, 30 M parameters."""
    if name != "k3-30m":
        return K3Config.named(name)
    linear = LinearAttnConfig(num_heads=4, head_dim=64, kda_layers=(1, 2, 3, 5, 6, 7), full_attn_layers=(4, 8, 9))
    return K3Config.named("k3-nano").replace(
        hidden_size=256,
        num_hidden_layers=9,
        num_attention_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        intermediate_size=512,
        moe_intermediate_size=192,
        num_experts=40,
        num_experts_per_token=4,
        routed_expert_hidden_size=128,
        attn_res_block_size=3,
        linear_attn_config=linear,
    )


def build(name: str, activations: str, context: int | None = None) -> K3ForCausalLM:
    config = configured(name).replace(quantization=QuantizationConfig(weights="mxfp4", activations=activations))
    if context is not None:
        config = config.replace(max_position_embeddings=context)
    model = K3ForCausalLM(config)
    model.init_weights(0)
    return model


def prompts(model: K3ForCausalLM, count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, model.config.vocab_size, (count, length)).tolist()


# ---------------------------------------------------------------------------------------------------- decode


def copy_rate() -> float:
    """Bytes per second that a large copy moves, both ways counted."""
    block, target = torch.zeros(1 << 24), torch.zeros(1 << 24)  # written before: fresh pages cost more than the copy
    return 2 * block.nbytes / min(seconds(target.copy_, block) for _ in range(5))


def state_bytes(model: K3ForCausalLM) -> tuple[int, int]:
    """(bytes of KDA and conv states of a row, bytes of latents of one token of it)."""
    cache = model.new_cache(1)
    cache.reserve(32)
    fixed = sum(cache.recurrent(layer).nbytes + cache.conv(layer).nbytes for layer in model.config.kda_layers)
    per_token = sum(
        cache.latent(layer, 1).numel() * cache.latent(layer, 1).element_size() for layer in model.config.mla_layers
    )
    return fixed, per_token


def decode_floor(model: K3ForCausalLM, rows: int, sampled: int, rate: float) -> float:
    parameters = sum(parameter.nbytes for _, parameter in model.official_parameters())
    fixed, per_token = state_bytes(model)
    return (parameters + rows * (2 * fixed + (PROMPT_TOKENS + sampled / 2) * per_token)) / rate


def active_parameters(model: K3ForCausalLM) -> int:
    """Parameters that one token uses: of the routed experts only the chosen ones."""
    config = model.config
    routed = sum(p.numel() for name, p in model.official_parameters() if ".experts." in name)
    whole = sum(p.numel() for _, p in model.official_parameters())
    return whole - routed + routed * config.num_experts_per_token // config.num_experts


def dense_peer(active: int, vocabulary: int) -> Any | None:
    """A Llama of about `active` parameters, or None without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, best = 6, None
    for hidden in range(32, 4096, 32):  # 16 h^2 a layer: attention 4 h^2, MLP 3 * 4 h * h
        if 2 * vocabulary * hidden + layers * 16 * hidden**2 <= active:
            best = hidden
    hidden = best or 32
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 32, 1),
        num_key_value_heads=max(hidden // 32, 1),
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def peer_run(peer: Any, given: list[list[int]], sampled: int) -> None:
    """So many tokens for each prompt, sampled from everything."""
    options = {"max_new_tokens": sampled, "min_new_tokens": sampled, "do_sample": True, "pad_token_id": 0, "top_k": 0}
    peer.generate(torch.tensor(given), **options)


def decode_rows(name: str, batches: list[int], sampled: int, repeats: int) -> list[dict[str, Any]]:
    rows, rate = [], copy_rate()
    models = {kind: build(name, kind) for kind in ("none", "mxfp8")}
    peer = dense_peer(active_parameters(models["none"]), models["none"].config.vocab_size)
    peer_name = (
        "absent: transformers is not installed"
        if peer is None
        else f"transformers {version('transformers')} Llama, same active parameters"
    )
    for batch in batches:
        given = prompts(models["none"], batch, PROMPT_TOKENS)
        own = SamplingParams(max_tokens=sampled)
        whole: dict[str, list[float]] = {kind: [] for kind in (*models, "peer")}
        busy: dict[str, list[float]] = {kind: [] for kind in whole}
        step: dict[str, list[float]] = {kind: [] for kind in models}
        contenders = [*models, *([] if peer is None else ["peer"])]
        for turn in range(repeats):  # in another order each time: what ran before leaves its traces in the caches
            at = turn % len(contenders)
            for kind in contenders[at:] + contenders[:at]:
                began = time.process_time()
                if kind == "peer":
                    whole[kind].append(seconds(peer_run, peer, given, sampled))
                else:
                    engine = Engine(models[kind], max_running=batch)
                    whole[kind].append(seconds(engine.generate, given, own))
                    step[kind].append(engine.counters.decode_s / max(engine.counters.steps - 1, 1))
                busy[kind].append(time.process_time() - began)
        for kind, model in models.items():
            took, theirs = min(whole[kind]), min(whole["peer"], default=None)
            entry = row(
                f"decode, activations {kind}",
                f"{name}, {batch} requests, {PROMPT_TOKENS} in, {sampled} out",
                peer_name,
                min(step[kind]),
                None,
                decode_floor(model, batch, sampled, rate),
            )
            entry["tokens_per_s"] = round(batch * sampled / took, 1)
            entry["peer_tokens_per_s"] = None if theirs is None else round(batch * sampled / theirs, 1)
            if theirs is not None:
                entry["peer_ms"], entry["ratio"] = round(1e3 * theirs / sampled, 4), round(theirs / took, 3)
                entry["cpu_ratio"] = round(min(busy["peer"]) / min(busy[kind]), 3)
            rows.append(entry)
    return rows


# ---------------------------------------------------------------------------------------------------- prefixes


def first_token_rows(name: str, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for length in lengths:
        model = build(name, "mxfp8", context=max(lengths) + 1024)
        one, fresh = SamplingParams(max_tokens=1, seed=0), 16
        (prefix,) = prompts(model, 1, length)
        new_s = min(seconds(Engine(model, max_running=1).generate, prompts(model, 1, fresh), one) for _ in range(3))
        warm = Engine(model, max_running=1, prefill_tokens=1024, prefix_cache=PrefixCache.of_bytes(1 << 30))
        warm.generate([prefix], one)
        cold_s, warm_s = [], []
        for repeat in range(repeats):
            (new,) = prompts(model, 1, fresh, seed=1 + repeat)
            engine = Engine(model, max_running=1, prefill_tokens=1024)
            cold_s.append(seconds(engine.generate, [prefix + new], one))
            warm_s.append(seconds(warm.generate, [prefix + new], one))
        counters = warm.prefix_cache.counters if warm.prefix_cache is not None else None
        if counters is None or counters.hits != repeats:
            raise SystemExit("a prompt with a cached prefix was no hit; the comparison would time something else")
        rows.append(
            row(
                "first_token",
                f"{name}, {length} cached tokens, {fresh} new",
                "the same prompt without the prefix cache",
                min(warm_s),
                min(cold_s),
                None,
                share_of_cold=round(min(warm_s) / min(cold_s), 4),
                **token_costs(min(warm_s) - new_s, length, min(cold_s), length + fresh),
            )
        )
    return rows


def token_costs(cached_s: float, cached: int, fresh_s: float, fresh: int) -> dict[str, float]:
    """Microseconds of a cached and of a fresh input token, and their ratio."""
    one, other = 1e6 * max(cached_s, 0.0) / cached, 1e6 * fresh_s / fresh
    return {"cached_token_us": round(one, 3), "fresh_token_us": round(other, 3), "cached_share": round(one / other, 4)}


def single_turn_row(name: str, repeats: int) -> dict[str, Any]:
    """Groups of 8 that never come back: what keeping their states costs."""
    model = build(name, "mxfp8")
    given = [prompt for prompt in prompts(model, 16, PROMPT_TOKENS) for _ in range(8)]
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for on in took:
            cache = PrefixCache.of_bytes(64 << 20) if on else None
            engine = Engine(model, max_running=64, prefix_cache=cache)
            took[on].append(seconds(engine.generate, given, SamplingParams(max_tokens=64)))
    return row(
        "prefix_cache", f"{name}, 16 groups of 8, 64 out", "prefix cache off", min(took[True]), min(took[False]), None
    )


# ---------------------------------------------------------------------------------------------------- memory


def turns_row(name: str, repeats: int, turns: int = 20, fresh: int = 64, sampled: int = 32) -> dict[str, Any]:
    """One conversation: 1,024 tokens, then `fresh` new ones and `sampled` sampled ones every turn."""
    model = build(name, "mxfp8", context=1 << 13).to(torch.float64)
    engines: dict[bool, Engine] = {}
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        for on in took:
            cache = PrefixCache.of_bytes(1 << 28) if on else None
            engines[on] = Engine(model, max_running=1, prefill_tokens=1024, prefix_cache=cache)
            took[on].append(0.0)
        (history,) = prompts(model, 1, 1024)
        said: list[dict[bool, Completion]] = []
        for turn in range(turns):
            history = history + prompts(model, 1, fresh, seed=turn)[0]
            params, answers = SamplingParams(max_tokens=sampled, seed=turn), dict[bool, Completion]()
            for on, engine in engines.items():
                began = time.perf_counter()
                (answers[on],) = engine.generate([history], params)
                took[on][-1] += time.perf_counter() - began
            history = history + list(answers[True].token_ids)
            said.append(answers)
    same = [answers for answers in said if answers[True].token_ids == answers[False].token_ids]
    gaps = [
        abs(a - b) for answers in same for a, b in zip(answers[True].logprobs, answers[False].logprobs, strict=True)
    ]
    return row(
        "turns",
        f"{name}, {turns} turns of {fresh} new and {sampled} sampled tokens after 1024",
        "prefix cache off",
        min(took[True]),
        min(took[False]),
        None,
        prefilled_per_new=round(engines[True].counters.prefilled_tokens / (1024 + turns * fresh), 4),
        equal_turns=len(same),
        logprob_gap=max(gaps),
    )


def memory_rows(lengths: tuple[int, ...] = (1_000, 10_000, 100_000), page: int = 64) -> list[dict[str, Any]]:
    """What one request owns in a pool, counted from its tensors; a nano model with K3's latent of 512 + 64 values."""
    config = K3Config.named("k3-nano").replace(kv_lora_rank=512, qk_rope_head_dim=64, max_position_embeddings=1 << 17)
    model = K3ForCausalLM(config)
    kda, mla = sorted(config.kda_layers), sorted(config.mla_layers)
    fixed, per_token = state_bytes(model)
    plan = MemoryPlan.of(model, 3 * fixed + 2 * max(lengths) * per_token, 1, max(lengths), page)
    rows = []
    for length in lengths:
        pool = StatePool(model, 1, False, plan)
        if pool.paged is None:
            raise SystemExit("a pool with a memory plan has no pages; the bytes would be of something else")
        held = held_bytes(pool.paged)
        view = pool.view([0])
        states = [torch.cat([read(layer) for layer in kda]) for read in (view.recurrent, view.conv)]
        latent = torch.zeros(len(mla), length, 512 + 64)
        pool.restore(0, Hit(length, FixedState(*states, None), latent, None))
        table = pool.paged.table
        owned = sum(storage[0].nbytes * int(table.held[0]) for storage in pool.paged.latent.values())
        entry = row("memory", f"{length} tokens, {len(kda)} KDA and {len(mla)} MLA layers", "none", 0.0, None, None)
        entry |= {
            "kda_bytes": sum(state.nbytes for state in states),
            "mla_bytes": owned,
            "mla_values_per_token_and_layer": round(owned / 4 / len(mla) / length, 2),
            "page_table_bytes": table.table[0, : table.held[0]].nbytes,
            "other_growth_bytes": held_bytes(pool.paged) - held - table.table.nbytes + 8 * table.table.itemsize * 2,
        }
        rows.append(entry)
    return rows


def held_bytes(cache: PagedCache) -> int:
    """All that a paged cache holds, used or free."""
    held = {}
    for value in vars(cache).values():
        tensors = value.values() if isinstance(value, dict) else [value]
        storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        held |= {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(held.values()) + cache.table.table.nbytes


def exact_row(name: str, batch: int, sampled: int, repeats: int) -> dict[str, Any]:
    model = build(name, "mxfp8")
    given, own = prompts(model, batch, PROMPT_TOKENS), SamplingParams(max_tokens=sampled)
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for exact in took:
            took[exact].append(seconds(Engine(model, max_running=batch, exact=exact).generate, given, own))
    shape = f"{name}, {batch} requests, {PROMPT_TOKENS} in, {sampled} out"
    return row("exact", shape, "the usual mode", min(took[True]), min(took[False]), None)


# ---------------------------------------------------------------------------------------------------- report


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {"cpu": cpu or platform.processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=["k3-nano", "k3-30m"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sampled", type=int, default=256, help="tokens per request of the decode rows")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    first, rows = arguments.models[0], list[dict[str, Any]]()
    fixed, per_token = state_bytes(build(first, "none"))
    if "decode" in arguments.parts:
        for model in arguments.models:
            rows += decode_rows(model, arguments.batches, arguments.sampled, arguments.repeats)
    if "prefix" in arguments.parts:
        rows += first_token_rows(first, arguments.prefixes, arguments.repeats)
        rows.append(single_turn_row(first, arguments.repeats))
    if "turns" in arguments.parts:
        rows.append(turns_row(first, arguments.repeats))
    if "memory" in arguments.parts:
        rows += memory_rows()
    if "exact" in arguments.parts:
        rows.append(exact_row(first, 64, 32, arguments.repeats))
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "numpy")} | {"python": platform.python_version()},
        "memory": {"bytes_per_request": fixed, "bytes_per_token": per_token},
        "results": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
        return
    for entry in report["results"]:
        peer = "-" if entry["peer_ms"] is None else f"{entry['peer_ms']:.3f} ms ({entry['ratio']:.2f}x)"
        speed = f"{entry['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in entry else ""
        sampling_mask = (
            "cpu_ratio",
            "prefilled_per_new",
            "equal_turns",
            "logprob_gap",
            "share_of_cold",
            "cached_share",
            "kda_bytes",
            "mla_bytes",
            "page_table_bytes",
            "other_growth_bytes",
        )
        speed += "  ".join(f"{key} {entry[key]}" for key in sampling_mask if key in entry)
        print(f"{entry['name']:26} {entry['shape']:46} {entry['ours_ms']:9.3f} ms  peer {peer} {speed}")


if __name__ == "__main__":
    main()
