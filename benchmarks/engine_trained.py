"""How far the sampler is from the learner on a model that has learned something, on one GPU.

    python benchmarks/engine_trained.py --out FILE      # about two minutes
    python benchmarks/engine_trained.py --dry           # the same control flow on a CPU with a tiny model

Three layers of k3-small learn a Markov chain of four successors a token; then the learner recomputes what the engine
sampled, with the engine's routes: mean KL (k3 estimator) before and after, and after on the torch path.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.engine import Engine, SamplingParams
from k3rl.losses import CrossEntropy
from k3rl.model import K3ForCausalLM
from k3rl.parallel import Trainer, TrainerConfig


def _beside(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


engine_gpu = _beside("engine_gpu")

SHARES = np.array([0.55, 0.25, 0.15, 0.05])  # of a token's four successors: 1.13 nats a token


class Chain:
    """Documents in which every token has four successors."""

    def __init__(self, vocabulary: int) -> None:
        self._next = np.random.default_rng(0).integers(4, vocabulary, (vocabulary, len(SHARES)))

    def document(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [length]."""
        choices, token = rng.choice(len(SHARES), length, p=SHARES), int(rng.integers(4, len(self._next)))
        found = [token]
        for choice in choices[1:].tolist():
            found.append(int(self._next[found[-1], choice]))
        return np.array(found, np.int64)

    def batch(self, step: int, count: int, length: int) -> TrainBatch:
        """`count` documents, all of whose tokens but the first are targets."""
        rng, nothing = np.random.default_rng(1000 + step), np.zeros(length, np.float32)
        mask = np.arange(length) > 0
        own = [TrainSequence(str(i), self.document(length, rng), mask, nothing, nothing) for i in range(count)]
        return TrainBatch.pack(own)


def check(report: Any, setting: Any, model: K3ForCausalLM, chain: Chain, name: str) -> None:
    """One row of the report: the engine goes on with documents, the learner recomputes them."""
    rng = np.random.default_rng(5)
    given = [chain.document(20, rng).tolist() for _ in range(4 if setting.dry else 16)]
    own = SamplingParams(max_tokens=8 if setting.dry else 128, seed=3, return_routes=True)
    options: dict[str, Any] = {"static_decode": True} if setting.dry else {}
    done = Engine(model, max_running=len(given), max_context=setting.context, **options).generate(given, own)
    found = engine_gpu.distance(model, given, done, trained=name != "random weights")
    report.check(f"sampler against learner, {name}", **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, at most")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    setting = engine_gpu.Setting(arguments.dry)
    report = engine_gpu.gpu.Report(setting.device, arguments.out, 500.0)
    model = setting.model(engine_gpu.checked_config(setting), seed=1)
    chain = Chain(model.config.vocab_size)
    check(report, setting, model, chain, "random weights")
    count, length = (2, 48) if setting.dry else (32, 256)
    trainer = Trainer(model, TrainerConfig(micro_batch_tokens=count * length))
    began, steps = time.perf_counter(), 0
    while steps < (3 if setting.dry else arguments.steps) and time.perf_counter() - began < arguments.seconds:
        trainer.train(chain.batch(steps, count, length), CrossEntropy())
        steps += 1
    for name, context in (("kernels", contextlib.nullcontext()), ("torch path", engine_gpu.gpu.without_kernels())):
        with context:
            check(report, setting, model, chain, f"after {steps} steps, {name}")


if __name__ == "__main__":
    main()
