"""What ranks of several layouts train, and what they leave of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.parallel import Mesh, Trainer, TrainerConfig, balanced_shares

NANO = K3Config.named("k3-nano")
# A layer of each kind: KDA over a dense MLP, KDA and MLA over experts.
LAYERS = replace(NANO.linear_attn_config, kda_layers=(1, 2), full_attn_layers=(3,))
TINY = NANO.replace(num_experts=4, num_hidden_layers=3, linear_attn_config=LAYERS)
SIX = K3Config.named("kimi-linear-nano").replace(num_experts=6)
ROUTED = len(TINY.moe_layers)
STEPS = 3
FLOAT64, FLOAT32 = torch.float64, torch.float32


def batch(step: int, lengths: tuple[int, ...] = (7, 19, 33, 12, 26), routes: bool = False) -> TrainBatch:
    """Five sequences; one only in the last step, so that other ranks have none."""
    lengths = lengths if step < STEPS - 1 else lengths[:1]
    rng = np.random.default_rng(step)
    sequences = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= length // 2
        nothing = np.zeros(length, np.float32)
        chosen = rng.permuted(np.tile(np.arange(4), (length, 4, 1)), axis=2)[:, :ROUTED, :2].astype(np.int16)
        ids = rng.integers(0, 400, length)
        sequences.append(
            TrainSequence(f"s{number}", ids, mask, nothing, mask.astype("f4"), routes=chosen if routes else None)
        )
    return TrainBatch.pack(sequences)


def trainer(
    mesh: Mesh, dtype: torch.dtype = FLOAT64, *, seed: int = 3, model: K3Config = TINY, **config: Any
) -> Trainer:
    made = K3ForCausalLM(model, dtype=dtype, experts=mesh.experts(model.num_experts))
    made.init_weights(seed)
    # Small enough that clipping scales every gradient and QK-clip touches heads.
    degrees = {"expert_parallel": mesh.expert.size, "context_parallel": mesh.context.size}
    return Trainer(made, TrainerConfig(**({"qk_clip": 0.02, "grad_clip": 0.5} | degrees | config)), mesh)


def share(whole: TrainBatch, mesh: Mesh) -> TrainBatch | None:
    members = balanced_shares(whole.lengths.tolist(), mesh.batch_size)[mesh.batch_rank]
    return whole.select(members) if members else None


def gradients(of: Trainer, whole: TrainBatch) -> dict[str, torch.Tensor]:
    """Those this rank is the one to give, by official name; and the loss, on rank 0 that of all."""
    metrics, _ = of.gradients(share(whole, of.mesh), CrossEntropy())
    of.balancer.clear()
    total = torch.tensor([metrics.pairs().get("loss/mean", (0.0, 0.0))[0]], dtype=torch.float64)
    of.mesh.world.sum(total)
    own = {
        n: p.grad.clone()
        for n, p in of.native.shards.params.items()
        if p.grad is not None and n in of.native.shards.counted
    }
    return own | ({"loss": total} if of.mesh.world.rank == 0 else {})


def outcome(job: Callable[[], Any]) -> dict[str, Any]:
    """How a job ended, as JSON."""
    begun = time.monotonic()
    try:
        job()
        return {"error": None}
    except Exception as error:
        about = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - begun}
        return about | {key: getattr(error, key) for key in ("rank", "what", "name") if hasattr(error, key)}


def scoring_jobs(mesh: Mesh) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Forward passes (of a row that is too long on the last rank, of rows that fit), by name."""
    made, mine = trainer(mesh, micro_batch_tokens=40), share(batch(0), mesh)
    last = mesh.world.rank == mesh.world.size - 1
    given = batch(0, (41,)) if last else mine
    return {
        "evaluate": (lambda: made.evaluate(given, CrossEntropy()), lambda: made.evaluate(mine, CrossEntropy())),
        "logprobs": (lambda: made.logprobs(given), lambda: made.logprobs(mine)),
    }


def starving_run(mesh: Mesh) -> dict[str, torch.Tensor]:
    """The state after steps in which some of five experts have rows, then others, then the first again.

    Two ranks hold two and three of them. The optimizer's step is that of a GPU: it reads from counts, not from `.grad`,
    who has a gradient.
    """
    made = trainer(mesh, model=TINY.replace(num_experts=5))
    made.native.optimizer.capture_with(lambda run: run)
    for step, chosen in enumerate(([0, 3, 4], [0, 1, 2], [0, 3, 2], [1, 4, 3])):
        whole = batch(0, routes=True)
        assert whole.routes is not None
        first = np.random.default_rng(step).integers(0, 3, whole.routes.shape[:2])
        whole.routes[...] = np.array(chosen, np.int16)[np.stack([first, (first + 1) % 3], axis=2)]
        made.train(share(whole, mesh), CrossEntropy())
    return made.owned_state()
