"""Whether one pair of rates serves every size: SFT and RL at multiples of the default rates, for each named model.

    python benchmarks/rates.py [--models k3-nano k3-mini] [--scaling width rms] [--parts sft rl] [--out DIR]
    python benchmarks/rates.py --models k3-small --gpu       # in bf16 on one GPU

SFT: `--steps` steps on the demonstrations of `coding-lists` from fresh weights, then the held-out loss. RL:
`--rl-steps` steps of K3's objective from the best of these, then the mean reward of the last three steps. Writes
`rates.json` after each point and `rates.png` at the end into DIR; `--json` prints the former.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from k3rl.checkpoint import second_model
from k3rl.config import K3Error
from k3rl.data import TrainBatch, chat_sequence
from k3rl.engine import Engine
from k3rl.envs import make
from k3rl.losses import CrossEntropy, K3Policy
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.optim import Schedule
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.pipelines import PRESETS
from k3rl.run import package_versions
from k3rl.tokens import Tokenizer
from k3rl.types import Scored

ENVIRONMENT = "coding-lists"
FACTORS = {"sft": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0), "rl": (0.25, 0.5, 1.0, 2.0, 4.0)}
HELD_OUT = 128
GROUPS, GROUP_SIZE = 16, 8


def _example() -> Any:
    """The algorithm in one process."""
    path = Path(__file__).resolve().parent.parent / "examples" / "rl_loop.py"
    spec = importlib.util.spec_from_file_location("rl_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sweep:
    """The points of one model."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.given = name, given
        self.device = torch.device("cuda" if given.gpu else "cpu")
        self.dtype = torch.bfloat16 if given.gpu else torch.float32
        self.env, self.tokenizer = make(ENVIRONMENT), Tokenizer.builtin()
        self.best: tuple[float, dict[str, torch.Tensor]] | None = None

    def _batch(self, seed: int, count: int, split: str) -> TrainBatch:
        assert self.env.demonstrations is not None
        rows = self.env.demonstrations(seed, count, split=split)
        return TrainBatch.pack(
            [chat_sequence(f"{i}", row["messages"], None, self.tokenizer, False) for i, row in enumerate(rows)]
        )

    def _trainer(self, pipeline: str, factor: float, scaling: str) -> Trainer:
        """At a multiple of the rates of a pipeline's default preset."""
        default: TrainerConfig = PRESETS[pipeline]["default"]().trainer  # type: ignore[attr-defined]
        model = K3ForCausalLM(K3Config.named(self.name), dtype=self.dtype, device=self.device)
        if pipeline == "sft" or self.best is None:
            model.init_weights(0)
        else:
            model.load_state_dict(self.best[1])
        rates = {"muon_lr": factor * default.muon_lr, "adamw_lr": factor * default.adamw_lr}
        chosen = default.replace(**rates, scaling=scaling).settled(model.config.flat, samples=pipeline == "rl")
        return Trainer(model, chosen)

    def sft(self, factor: float, scaling: str) -> dict[str, float]:
        """The held-out loss after SFT, in nats a token."""
        steps, size = self.given.steps, self.given.batch_size
        trainer, schedule = self._trainer("sft", factor, scaling), Schedule("cosine", 10, steps)
        for step in range(steps):
            trainer.train(self._batch(step, size, "train"), CrossEntropy(), lr_scale=schedule.at(step))
        loss = trainer.evaluate(self._batch(0, HELD_OUT, "heldout"), CrossEntropy()).values()["loss/mean"]
        if math.isfinite(loss) and (self.best is None or loss < self.best[0]):
            self.best = loss, {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return {"loss": loss}

    def rl(self, factor: float, scaling: str) -> dict[str, float]:
        """Mean reward of the first and of the last three steps of RL, and the largest mean KL(sampler to learner)."""
        loop = _example()
        trainer, loss = self._trainer("rl", factor, scaling), K3Policy()
        engine = Engine(second_model(trainer.model, packed=False), max_running=GROUPS * GROUP_SIZE, seed=0)
        rewards, drift = [], 0.0
        for step in range(self.given.rl_steps):
            loop.publish(trainer.model, engine)
            drawn = [self.env.source.get("train", step * GROUPS + n, 0) for n in range(GROUPS)]
            tasks = {f"{step}-{n}-{k}": task for n, task in enumerate(drawn) for k in range(GROUP_SIZE)}
            played = asyncio.run(loop.play(self.env, tasks, engine, self.tokenizer, seed=step * len(tasks)))
            episodes = loop.graded(self.env, tasks, played)
            groups = [episodes[n : n + GROUP_SIZE] for n in range(0, len(episodes), GROUP_SIZE)]
            rewards.append(np.mean([e.score.reward for e in episodes if isinstance(e.score, Scored)]))
            if (batch := loop.policy_batch(groups)) is not None:
                drift = max(drift, trainer.train(batch, loss).values()["mismatch/kl/mean"])
        return {"reward_before": float(rewards[0]), "reward": float(np.mean(rewards[-3:])), "kl": float(drift)}


def result(name: str, model: str, regime: str, began: float, **found: Any) -> dict[str, Any]:
    """A row of the report; there is no peer and no floor for a rate."""
    return {
        "name": name,
        "shape": model,
        "regime": regime,
        "peer": "none",
        "ours_ms": round(1000 * (time.perf_counter() - began)),
        "peer_ms": None,
        "ratio": None,
        "floor_ms": None,
        "share_of_floor": None,
        **found,
    }


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Loss, and reward, by the multiple of the default rates: one line for each model and scaling."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [(part, key) for part, key in (("sft", "loss"), ("rl", "reward")) if any(key in row for row in results)]
    figure, axes = pyplot.subplots(1, len(parts), figsize=(6 * len(parts), 4), squeeze=False)
    for axis, (part, key) in zip(axes[0], parts, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in results:
            if key in row:
                lines.setdefault(f"{row['shape']}, {row['scaling']}", []).append((row["factor"], row[key]))
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.set(xscale="log", xlabel="multiple of the default rates", ylabel=key, title=part.upper())
        if part == "sft":
            axis.set_yscale("log")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--models", nargs="+", default=["k3-nano"])
    words.add_argument("--scaling", nargs="+", default=["width"], choices=("width", "rms"))
    words.add_argument("--parts", nargs="+", default=["sft", "rl"], choices=("sft", "rl"))
    words.add_argument("--factors", nargs="+", type=float)
    words.add_argument("--steps", type=int, default=120)
    words.add_argument("--batch-size", type=int, default=48)
    words.add_argument("--rl-steps", type=int, default=12)
    words.add_argument("--gpu", action="store_true")
    words.add_argument("--out", type=Path, default=Path("outputs/rates"))
    words.add_argument("--json", action="store_true")
    given = words.parse_args()

    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_flush_denormal(True)
    where = torch.cuda.get_device_name() if given.gpu else platform.processor()
    report: dict[str, Any] = {
        "machine": {"device": where, "cores": os.cpu_count(), "system": platform.platform()},
        "versions": package_versions(),
        "results": [],
    }
    for name in given.models:
        for scaling in given.scaling:
            sweep = Sweep(name, given)
            for part in given.parts:
                for factor in given.factors or FACTORS[part]:
                    began = time.perf_counter()
                    try:
                        found = getattr(sweep, part)(factor, scaling)
                    except (ArithmeticError, K3Error) as error:  # a rate at which losses are no numbers
                        found = {"failed": f"{type(error).__name__}: {error}"[:200]}
                    about = {"factor": factor, "scaling": scaling, **found}
                    row = result(part, name, "gpu" if given.gpu else "cpu", began, **about)
                    report["results"].append(row)
                    (given.out / "rates.json").write_text(json.dumps(report, indent=1) + "\n")
                    print({"model": name, "part": part, **about, "seconds": row["ours_ms"] / 1000}, flush=True)
    plot(report["results"], given.out / "rates.png")
    if given.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
