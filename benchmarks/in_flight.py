"""What a weight update does to requests in flight: states carried on against states recomputed from tokens.

    python benchmarks/in_flight.py --checkpoint DIR [--lr 1e-3 1e-4] [--requests 32] [--switch 32] [--out FILE] [--json]

Requests on prompts of `coding-lists` are sampled for `--switch` tokens; then the learner takes one optimizer step at
the learning rate of the row, the engine switches, and sampling goes on. `mean_abs`, `max_abs` and `kl` compare, over
the tokens sampled after the switch, the sampler's logprobs with the learner's recomputation under the new weights (kl
is the mean of exp(d) - 1 - d, d = learner - sampler, in nats); `by_distance` gives mean_abs by tokens since the switch.
`step_abs` is how far the step itself moved those tokens' logprobs. `recomputed_tokens` is the cost, `ours_ms` the time
from the switch to the end.
Advantages are drawn at random: Muon's step has the same size whatever they are. The `no switch` row is the floor.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.checkpoint import load_checkpoint, official_tensors
from k3rl.checkpoint.manifest import manifest_of
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.engine import Completion, Engine, SamplingParams
from k3rl.envs import make
from k3rl.losses import K3Policy
from k3rl.model import K3ForCausalLM
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.tokens import Tokenizer, chat_format

DISTANCES = ((0, 8), (8, 32), (32, 10**6))


def prompts(count: int, tokenizer: Tokenizer) -> list[list[int]]:
    source = make("coding-lists").source
    tasks = [source.get("train", index, 0) for index in range(count)]
    chat = chat_format(tokenizer)
    return [tokenizer.encode_segments(chat.render(list(task.messages))) for task in tasks]


def packed(given: list[list[int]], done: list[Completion], advantages: np.ndarray) -> TrainBatch:
    sequences = []
    for number, (prompt, completion) in enumerate(zip(given, done, strict=True)):
        ids = np.array([*prompt, *completion.token_ids], np.int64)
        mask = np.arange(len(ids)) >= len(prompt)
        logprobs = np.zeros(len(ids), np.float32)
        logprobs[mask] = completion.logprobs
        own = np.where(mask, advantages[number], 0).astype(np.float32)
        sequences.append(TrainSequence(str(number), ids, mask, logprobs, own))
    return TrainBatch.pack(sequences)


def learner_logprobs(trainer: Trainer, given: list[list[int]], done: list[Completion]) -> list[np.ndarray]:
    batch = packed(given, done, np.zeros(len(done)))
    values = trainer.logprobs(batch)
    return [
        values[start:stop][len(prompt) :]
        for prompt, start, stop in zip(given, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    ]


def sampled(
    model: K3ForCausalLM, given: list[list[int]], switch: int, tokens: int, after: K3ForCausalLM | None, mode: Any
) -> tuple[list[Completion], list[int], Engine, float]:
    """(completions, tokens of each before the switch, engine, seconds after the switch)."""
    engine = Engine(model, max_running=len(given), seed=0, in_flight=mode)
    numbers = [engine.submit(prompt, SamplingParams(max_tokens=tokens)) for prompt in given]
    outcomes: dict[int, Any] = {}
    for _ in range(switch):
        outcomes.update(engine.step())
    before = [switch if number not in outcomes else 10**6 for number in numbers]
    began = time.perf_counter()
    if after is not None:
        stored = dict(official_tensors(after))
        engine.start_weight_update(1, manifest_of(stored.items()))
        engine.update_weights(stored.items())
        engine.verify_weight_update()
        began = time.perf_counter()
        engine.finish_weight_update(1)
    outcomes.update(engine.drain())
    return [outcomes[number] for number in numbers], before, engine, time.perf_counter() - began


def compared(
    trainer: Trainer, old: Trainer, given: list[list[int]], done: list[Completion], before: list[int]
) -> dict[str, Any]:
    learned, earlier = learner_logprobs(trainer, given, done), learner_logprobs(old, given, done)
    differences, distances, steps = [], [], []
    for completion, new, previous, start in zip(done, learned, earlier, before, strict=True):
        own = np.array(completion.logprobs)[start:]
        differences.append(new[start:] - own)
        steps.append(np.abs(new[start:] - previous[start:]))
        distances.append(np.arange(len(own)))
    d, distance = np.concatenate(differences), np.concatenate(distances)
    by = {
        f"{low}..{'' if high > 10**5 else high}": round(
            float(np.abs(d[(distance >= low) & (distance < high)]).mean()), 7
        )
        for low, high in DISTANCES
        if ((distance >= low) & (distance < high)).any()
    }
    return {
        "tokens_after": len(d),
        "mean_abs": float(np.abs(d).mean()),
        "max_abs": float(np.abs(d).max()),
        "kl": float((np.exp(d) - 1 - d).mean()),
        "step_abs": float(np.concatenate(steps).mean()),
        "by_distance": by,
    }


def row(name: str, shape: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "shape": shape,
        "regime": f"cpu, {torch.get_num_threads()} threads",
        "peer": "none",
        "ours_ms": round(1e3 * seconds, 1),
        "peer_ms": None,
        "ratio": None,
        "floor_ms": None,
        "share_of_floor": None,
        **more,
    }


def rows(checkpoint: Path, rates: list[float], requests: int, switch: int, tokens: int) -> list[dict[str, Any]]:
    model = load_checkpoint(checkpoint, dtype=torch.float32)
    given = prompts(requests, Tokenizer.load(checkpoint))
    shape = f"{requests} requests, switch after {switch} of {tokens} tokens"
    old = Trainer(copy.deepcopy(model), TrainerConfig())
    done, before, _, seconds = sampled(model, given, switch, tokens, None, "carry")
    found = [row("no switch", shape, seconds, recomputed_tokens=0, **compared(old, old, given, done, before))]
    advantages = np.random.default_rng(0).normal(size=requests)
    for rate in rates:
        trainer = Trainer(copy.deepcopy(model), TrainerConfig(muon_lr=rate, adamw_lr=rate, balance="batch"))
        trainer.train(packed(given, done, advantages), K3Policy(0.5, 2.0, 0.02))
        for mode in ("carry", "recompute"):
            mixed, places, engine, seconds = sampled(model, given, switch, tokens, trainer.model, mode)
            figures = compared(trainer, old, given, mixed, places)
            more = {"learning_rate": rate, "recomputed_tokens": engine.counters.recomputed_tokens}
            found.append(row(f"{mode}, learning rate {rate:g}", shape, seconds, **more, **figures))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a trained policy, such as `k3rl sft` exports")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 1e-4, 1e-5])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--switch", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    report = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "numpy")} | {"python": platform.python_version()},
        "results": rows(arguments.checkpoint, arguments.lr, arguments.requests, arguments.switch, arguments.tokens),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
        return
    for entry in report["results"]:
        print(
            f"{entry['name']:34} mean {entry['mean_abs']:.2e}  max {entry['max_abs']:.2e}  kl {entry['kl']:.2e}  "
            f"step {entry['step_abs']:.2e}  recomputed {entry['recomputed_tokens']}  {entry['by_distance']}"
        )


if __name__ == "__main__":
    main()
