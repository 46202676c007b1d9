"""How far an engine's logprobs are from the learner's, in the usual and in the exact mode, and what exact mode costs.

    python benchmarks/exactness.py --checkpoint DIR [--requests 32] [--tokens 96] [--out FILE] [--json]

Prompts are those of `coding-lists`. Every row samples `--tokens` tokens for each, and a trainer computes their logprobs
again, with the recorded routes or its own. `mean_abs`, `p99_abs` and `max_abs` are differences in nats, `above` is the
share of tokens beyond 5e-4, `kl` the mean of exp(d) - 1 - d, d = learner - sampler. `ours_ms` is the time to sample,
`peer_ms` that of the usual engine on the same prompts, so `ratio` is what exact mode leaves of its speed.

The `roundings` row reads the same tokens twice through the model, as a whole and one by one through a cache, and
compares what the experts read: `flipped` is the share of MXFP8 values of w1's input that round another way, `with_flip`
the share of tokens that have one in any layer; `max_abs_clean` is the largest difference before the first flip of a
sequence, `max_abs_flipped` that from there on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.checkpoint import load_checkpoint
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.engine import Completion, Engine, SamplingParams
from k3rl.envs import make
from k3rl.model import K3ForCausalLM, QuantizationConfig
from k3rl.model.moe import ExpertBank
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.tokens import Tokenizer, chat_format

BOUND = 5e-4  # nats, of one token in float32


def prompts(count: int, tokenizer: Tokenizer) -> list[list[int]]:
    source = make("coding-lists").source
    tasks = [source.get("train", index, 0) for index in range(count)]
    chat = chat_format(tokenizer)
    return [tokenizer.encode_segments(chat.render(list(task.messages))) for task in tasks]


def packed(given: list[list[int]], done: list[Completion], routes: bool) -> TrainBatch:
    sequences = []
    for number, (prompt, completion) in enumerate(zip(given, done, strict=True)):
        ids = np.array([*prompt, *completion.token_ids], np.int64)
        mask, zeros = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
        own = None
        if routes and completion.routes is not None:
            own = np.concatenate([completion.routes, completion.routes[-1:]])  # nothing reads the last one
        sequences.append(TrainSequence(str(number), ids, mask, zeros, zeros, own))
    return TrainBatch.pack(sequences)


def learned(trainer: Trainer, batch: TrainBatch) -> np.ndarray:
    """float64, of the target tokens in their order."""
    with torch.no_grad():
        parts = [trainer.target_inputs(micro).logprobs.double() for micro in batch.split(10**9)]
    return torch.cat(parts).numpy()


def distribution(d: np.ndarray) -> dict[str, float]:
    size = np.abs(d)
    return {
        "tokens_compared": len(d),
        "mean_abs": float(size.mean()),
        "p99_abs": float(np.quantile(size, 0.99)),
        "max_abs": float(size.max()),
        "above": float((size > BOUND).mean()),
        "kl": float((np.expm1(d) - d).mean()),
    }


def row(name: str, shape: str, ours_s: float, peer_s: float | None, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "shape": shape,
        "regime": f"cpu, {torch.get_num_threads()} threads",
        "peer": "none" if peer_s is None else "the usual engine",
        "ours_ms": round(1e3 * ours_s, 1),
        "peer_ms": None if peer_s is None else round(1e3 * peer_s, 1),
        "ratio": None if peer_s is None else round(peer_s / ours_s, 4),
        "floor_ms": None,
        "share_of_floor": None,
        **more,
    }


def loaded(checkpoint: Path, kind: torch.dtype, activations: str) -> K3ForCausalLM:
    """The checkpoint's model in `kind`, its experts' inputs rounded or not."""
    stored = load_checkpoint(checkpoint, dtype=kind)
    quantization = QuantizationConfig(weights="mxfp4", activations=activations)
    model = K3ForCausalLM(stored.config.replace(quantization=quantization), dtype=kind)
    values = dict(stored.official_parameters())
    with torch.no_grad():
        for name, parameter in model.official_parameters():
            parameter.copy_(values[name])
    return model


def compared(model: K3ForCausalLM, given: list[list[int]], tokens: int, label: str) -> list[dict[str, Any]]:
    own = SamplingParams(max_tokens=tokens, return_routes=True)
    shape, rows, usual_s = f"{len(given)} requests, {tokens} tokens", [], None
    for exact in (False, True):
        engine = Engine(model, max_running=len(given), seed=0, exact=exact)
        began = time.perf_counter()
        done = engine.generate(given, own)
        took = time.perf_counter() - began
        sampled = np.concatenate([completion.logprobs for completion in done])
        if model.dtype != torch.float64:
            sampled = sampled.astype(np.float32).astype(np.float64)  # what a batch keeps
        trainer = Trainer(model, TrainerConfig(exact=exact))
        for routes in (False, True):
            name = f"{label}, {'exact' if exact else 'usual'}, {'recorded' if routes else 'own'} routes"
            d = learned(trainer, packed(given, done, routes)) - sampled
            rows.append(row(name, shape, took, usual_s, **distribution(d)))
        usual_s = took
    return rows


class _Reads:
    """What the experts of each layer read, in the order of the calls: one [rows, Z] for every forward and layer."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __enter__(self) -> _Reads:
        self._read, self._inside = ExpertBank.read, ExpertBank.__call__
        seen, read, call = self.seen, ExpertBank.read, ExpertBank.__call__

        def whole(bank: ExpertBank, z: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(read(bank, z).clone())
            return call(bank, z, *rest)

        ExpertBank.__call__ = whole  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        ExpertBank.__call__ = self._inside  # type: ignore[method-assign]


@torch.no_grad()
def roundings(model: K3ForCausalLM, given: list[list[int]], tokens: int) -> dict[str, Any]:
    own = SamplingParams(max_tokens=tokens)
    done = Engine(model, max_running=len(given), seed=0).generate(given, own)
    layers, flips, values, clean, flipped = len(model.config.moe_layers), 0, 0, [0.0], [0.0]
    having, began = [], time.perf_counter()
    for prompt, completion in zip(given, done, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with _Reads() as once:
            together = torch.log_softmax(model(ids).logits[0].double(), -1)
        with _Reads() as singly:
            cache = model.new_cache(1)
            pieces = [model(ids[:, : len(prompt)], cache=cache).logits[0]]
            pieces += [model(ids[:, t : t + 1], cache=cache).logits[0] for t in range(len(prompt), ids.shape[1])]
            apart = torch.log_softmax(torch.cat(pieces).double(), -1)
        whole = torch.stack(once.seen)  # [layers, T, Z]
        parts = torch.stack([torch.cat(singly.seen[layer::layers]) for layer in range(layers)])
        other = whole != parts
        flips, values = flips + int(other.sum()), values + other.numel()
        of_token = other.any(-1).any(0)
        having.append(of_token)
        targets = ids[0, 1:, None]
        d = (together[:-1].gather(1, targets) - apart[:-1].gather(1, targets))[:, 0].abs()
        since = of_token.cumsum(0)[:-1] > 0
        clean += d[~since].tolist()
        flipped += d[since].tolist()
    return row(
        "roundings of w1's input, float32",
        f"{len(given)} sequences",
        time.perf_counter() - began,
        None,
        flipped=flips / values,
        with_flip=float(torch.cat(having).double().mean()),
        max_abs_clean=max(clean),
        max_abs_flipped=max(flipped),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a trained policy, such as `k3rl sft` exports")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    given = prompts(arguments.requests, Tokenizer.load(arguments.checkpoint))
    rows = []
    for label, kind, activations in (
        ("float32, mxfp8", torch.float32, "mxfp8"),
        ("float32, none", torch.float32, "none"),
        ("float64, mxfp8", torch.float64, "mxfp8"),
        ("bfloat16, mxfp8", torch.bfloat16, "mxfp8"),
    ):
        rows += compared(loaded(arguments.checkpoint, kind, activations), given, arguments.tokens, label)
    rows.append(roundings(loaded(arguments.checkpoint, torch.float32, "mxfp8"), given, arguments.tokens))
    report = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "numpy")} | {"python": platform.python_version()},
        "results": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
        return
    for entry in rows:
        figures = {key: value for key, value in entry.items() if isinstance(value, float) and key != "ours_ms"}
        print(f"{entry['name']:40} " + "  ".join(f"{key} {value:.3g}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
