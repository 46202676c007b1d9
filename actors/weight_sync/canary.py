"""The canary: after a switch of weights, learner and engines must agree about a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from k3rl.config import K3Error
from k3rl.data import TrainBatch, TrainSequence
from k3rl.types import SamplingParams

_TOKENS = 4
# In bf16 one rounding of activations moves others: on equal experts random weights differ by 0.17 nats in the median
# (one H200), trained ones by less than 0.001. That the bytes are the right ones is known by their digests.
_HALF_TOLERANCE = 10


class CanaryMismatch(K3Error):
    """After a switch, an engine and the learner disagree about the same tokens."""


@dataclass(frozen=True)
class Canary:
    """A prompt that every engine completes, at temperature 1, and the learner scores. tolerance: nats, see `check`."""

    prompt: list[int]
    tolerance: float = 0.05

    def check(
        self,
        engines: Sequence[Any],
        score: Callable[[TrainBatch], np.ndarray],
        version: int,
        *,
        adapter: str = "",
        replay_routes: bool = False,
        timeout_s: float,
    ) -> float:
        """The median difference in nats between learner and engine over the sampled tokens, of the worst engine.

        The largest difference would also show single MXFP8 roundings that fall differently for another batch shape.
        engines: rollout actors. score: the learner's logprobs, float32 [N]. version: that all serve. replay_routes: the
        learner takes the experts that the engine recorded, as in training, because sums of another batch shape may
        choose others; the tolerance is then wider. Raises CanaryMismatch.
        """
        params = SamplingParams(
            max_tokens=_TOKENS, seed=0, adapter=adapter, return_routes=replay_routes, priority=1
        )  # thousands of requests may wait
        calls = [actor.generate.remote([(self.prompt, params)]) for actor in engines]
        scored: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}
        worst = 0.0
        for number, (completion,) in enumerate(ray.get(calls, timeout=timeout_s)):
            if isinstance(completion, Exception):
                raise completion
            if completion.weight_version != version:
                served = completion.weight_version
                raise CanaryMismatch(
                    f"rollout actor {number} answered with version {served} after a switch to {version}"
                )
            ids, routes = completion.token_ids, completion.routes
            known = ids, b"" if routes is None else routes.tobytes()
            if known not in scored:
                scored[known] = score(scoring_batch(self.prompt, ids, routes))[len(self.prompt) :]
            differences = np.abs(scored[known] - np.asarray(completion.logprobs, np.float32))
            worst = max(worst, float(np.median(differences)))
        tolerance = _HALF_TOLERANCE * self.tolerance if replay_routes else self.tolerance
        if not worst <= tolerance:
            raise CanaryMismatch(
                f"version {version}: learner and engine differ by {worst:.3g} nats on the canary prompt, more than "
                f"{tolerance:g}; the engine does not run the weights that were published"
            )
        return worst


def scoring_batch(prompt: list[int], sampled: tuple[int, ...], routes: np.ndarray | None = None) -> TrainBatch:
    """One sequence whose sampled part is the target. routes: int16 [prompt + sampled - 1, M, k], to be taken again."""
    ids = np.asarray([*prompt, *sampled], np.int64)
    mask = np.zeros(ids.size, bool)
    mask[len(prompt) :] = True
    zeros = np.zeros(ids.size, np.float32)
    if routes is not None:  # the last token was not computed; its row takes experts 0..k-1 and counts nowhere
        last = np.broadcast_to(np.arange(routes.shape[2], dtype=np.int16), (1, *routes.shape[1:]))
        routes = np.concatenate([routes, last])
    return TrainBatch.pack([TrainSequence("canary", ids, mask, zeros, zeros, routes=routes)])
