"""The weight publisher: a version reaches all engines whole, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from k3rl.actors.publication import Publication
from k3rl.config import K3Error
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.types import SamplingParams

_CANARY_TOKENS = 4


class PublishError(K3Error):
    """A weight version could not be given to every engine; all go on serving the old one."""


class DeltaRefused(PublishError):
    """A version that went out as a delta was not taken; sending it whole may help."""


class CanaryMismatch(K3Error):
    """After a switch, an engine and the learner disagree about the same tokens."""


class WeightPublisher:
    """Two-phase publication from the learner's ranks to all rollout actors, with a canary after each switch."""

    def __init__(
        self, learners: list[Any], rollouts: list[Any], canary_prompt: list[int], tolerance: float, timeout_s: float
    ) -> None:
        """learners: all ranks of one learner; they compute together, and the first one answers."""
        self._learners = learners
        self._rollouts = rollouts
        self._prompt = canary_prompt
        self._tolerance = tolerance
        self._timeout_s = timeout_s

    def publish(self) -> dict[str, float]:
        """Publishes the learner's weights to every engine, as a delta where it serves the version before.

        A version of which a delta is refused is sent again, whole and under the next number. Returns version, tensors,
        canary, bytes (received by an engine, the most of all), bytes_full (what the whole version has), deltas
        (engines that got one) and refused (1 when it had to be sent again). `canary` is the median difference in nats
        between learner and engine over the canary's sampled tokens: the largest would also show single MXFP8 roundings
        that fall differently for another batch shape. Raises PublishError, CanaryMismatch.
        """
        try:
            return {**self._publish(), "refused": 0.0}
        except DeltaRefused:
            return {**self._publish(), "refused": 1.0}  # nobody serves what the learner published last: no delta

    def _publish(self) -> dict[str, float]:
        served = ray.get([actor.served.remote() for actor in self._rollouts], timeout=self._timeout_s)
        publication: Publication = self._learn("publish", served)
        version, forms = publication.version, [publication.forms[known] for known in served]
        number = version.number
        deltas = sum(form.kind == "delta" for form in forms)
        try:
            self._all(
                "prepare",
                number,
                [(number, {} if form.kind == "delta" else version.manifest, form) for form in forms],
            )
        except PublishError as error:
            raise DeltaRefused(str(error)) if deltas else error from error
        self._all("commit", number, [(number,)] * len(forms))
        return {
            "version": float(number),
            "tensors": float(len(version.manifest)),
            "canary": self._canary(number, publication.adapter),
            "bytes": float(max(form.bytes for form in forms)),
            "bytes_full": float(publication.bytes_full),
            "deltas": float(deltas),
        }

    def _learn(self, method: str, *args: Any) -> Any:
        """The first rank's answer to what all ranks are asked."""
        return ray.get([getattr(rank, method).remote(*args) for rank in self._learners], timeout=self._timeout_s)[0]

    def _all(self, phase: str, number: int, args: list[tuple[Any, ...]]) -> None:
        """One phase on every engine, each with its own arguments."""
        calls = {
            getattr(actor, phase).remote(*own): i
            for i, (actor, own) in enumerate(zip(self._rollouts, args, strict=True))
        }
        errors = []
        for call, i in calls.items():
            try:
                ray.get(call, timeout=self._timeout_s)
            except Exception as error:  # every engine's answer is wanted before the version is taken back
                errors.append(f"rollout actor {i}: {error}")
        if errors and phase == "prepare":
            ray.wait(
                [actor.rollback.remote() for actor in self._rollouts],
                num_returns=len(self._rollouts),
                timeout=self._timeout_s,
            )
        if errors:
            raise PublishError(
                f"weight version {number} failed to {phase} on {len(errors)} of {len(calls)} engines:\n"
                + "\n".join(errors)
            )

    def _canary(self, number: int, adapter: str) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=_CANARY_TOKENS, adapter=adapter)
        calls = [actor.generate.remote([(self._prompt, params)]) for actor in self._rollouts]
        learned: dict[tuple[int, ...], np.ndarray] = {}
        worst = 0.0
        for i, (completion,) in enumerate(ray.get(calls, timeout=self._timeout_s)):
            if isinstance(completion, Exception):
                raise completion
            if completion.weight_version != number:
                served = completion.weight_version
                raise CanaryMismatch(f"rollout actor {i} answered with version {served} after a switch to {number}")
            ids = completion.token_ids
            if ids not in learned:
                learned[ids] = self._learn("logprobs", _scoring_batch(self._prompt, ids))[len(self._prompt) :]
            differences = np.abs(learned[ids] - np.asarray(completion.logprobs, np.float32))
            worst = max(worst, float(np.median(differences)))
        if not worst <= self._tolerance:
            raise CanaryMismatch(
                f"version {number}: learner and engine differ by {worst:.3g} nats on the canary prompt, more than "
                f"{self._tolerance:g}; the engine does not run the weights that were published"
            )
        return worst


def _scoring_batch(prompt: list[int], sampled: tuple[int, ...]) -> TrainBatch:
    """One sequence whose sampled part is the target."""
    ids = np.asarray([*prompt, *sampled], np.int64)
    mask = np.zeros(ids.size, bool)
    mask[len(prompt) :] = True
    zeros = np.zeros(ids.size, np.float32)
    return TrainBatch.pack([TrainSequence("canary", ids, mask, zeros, zeros)])
