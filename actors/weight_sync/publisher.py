"""The weight publisher: a version reaches all engines whole, or none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from k3rl.actors.weight_sync.publication import Publication
from k3rl.actors.weight_sync.transfer import Link, Place, Route, Setting, TransferBroken, call_off, choose
from k3rl.config import K3Error
from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.types import SamplingParams

_CANARY_TOKENS = 4
# In bf16 one rounding of activations moves others: on equal experts random weights differ by 0.17 nats in the median
# (one H200), trained ones by less than 0.001. That the bytes are the right ones is known by their digests.
_HALF_TOLERANCE = 10


class PublishError(K3Error):
    """A weight version could not be given to every engine; all go on serving the old one."""


class DeltaRefused(PublishError):
    """A version that went out as a delta was not taken; sending it whole may help."""


class CanaryMismatch(K3Error):
    """After a switch, an engine and the learner disagree about the same tokens."""


class WeightPublisher:
    """Two-phase publication from the learner's ranks to all rollout actors, with a canary after each switch."""

    def __init__(
        self,
        learners: list[Any],
        rollouts: list[Any],
        canary_prompt: list[int],
        tolerance: float,
        timeout_s: float,
        way: Setting = "object_store",
        transfer_timeout_s: float = 60.0,
    ) -> None:
        """learners: all ranks of one learner; they compute together, and the first one answers.

        way: how messages travel (`transfer.choose`); transfer_timeout_s: how long one of them may take.
        """
        self._learners = learners
        self._rollouts = rollouts
        self._prompt = canary_prompt
        self._tolerance = tolerance
        self._timeout_s = timeout_s
        self._way: Setting = way
        self._transfer_timeout_s = transfer_timeout_s
        self._route: Route | None = None  # not chosen yet
        self._replays = False  # whether the learner's canary takes the experts that the engine chose, on a GPU
        self._direct = False  # whether all engines are k3rl's own, which record them
        self._link: Link | None = None  # of a way other than the object store
        self._notes: list[str] = []

    def publish(self) -> dict[str, float]:
        """Publishes the learner's weights to every engine, as a delta where it serves the version before.

        A version of which a delta is refused is sent again, whole and under the next number; so is one whose transfer
        breaks, and from then on all go through the object store (`notes` says why). Returns version, tensors,
        canary, bytes (received by an engine, the most of all), bytes_full (what the whole version has), deltas
        (engines that got one), refused and fell_back (1 when it had to be sent again for either reason), and seconds,
        of which transfer_seconds until every engine had proved it. `canary` is the median difference in nats
        between learner and engine over the canary's sampled tokens: the largest would also show single MXFP8 roundings
        that fall differently for another batch shape. On a GPU, or with a learner that computes in bf16, where sums of
        another batch shape may even choose other experts, the learner takes those that the engine recorded, as it does
        in training. Raises PublishError, CanaryMismatch, and ConfigError for a way that cannot work here.
        """
        began = time.monotonic()
        outcome = {"refused": 0.0, "fell_back": 0.0}
        while True:
            try:
                done = self._publish()
            except DeltaRefused:
                outcome["refused"] += 1.0  # nobody serves what the learner published last: the next is no delta
                if outcome["refused"] > 1:
                    raise
            except TransferBroken as error:
                if self._route == "object_store":
                    raise PublishError(str(error)) from error
                outcome["fell_back"] = 1.0
                self._leave_route(error)
            else:
                return {**done, **outcome, "seconds": time.monotonic() - began}

    def notes(self) -> list[str]:
        """What a person should read about the last publications; each is given once."""
        notes, self._notes = self._notes, []
        return notes

    def _publish(self) -> dict[str, float]:
        streams = self._chosen() != "object_store"
        served = ray.get([actor.served.remote() for actor in self._rollouts], timeout=self._timeout_s)
        publication: Publication = self._learn("publish", served, *([True] if streams else []))
        version, forms = publication.version, [publication.forms[known] for known in served]
        number = version.number
        deltas = sum(form.kind == "delta" for form in forms)
        began = time.monotonic()
        sending = self._learners[0].send.remote() if streams else None
        try:
            self._all(
                "prepare",
                number,
                [(number, {} if form.kind == "delta" else version.manifest, form) for form in forms],
                sending,
            )
        except PublishError as error:
            raise DeltaRefused(str(error)) if deltas else error from error
        took = time.monotonic() - began
        size = max(form.bytes for form in forms)
        if sending is not None:
            size = len(forms[0].header) + ray.get(sending, timeout=self._timeout_s)
        self._all("commit", number, [(number,)] * len(forms))
        return {
            "version": float(number),
            "tensors": float(len(version.manifest)),
            "canary": self._canary(number, publication.adapter, self._replays or (publication.half and self._direct)),
            "bytes": float(size),
            "bytes_full": float(publication.bytes_full),
            "deltas": float(deltas),
            "transfer_seconds": took,
        }

    # -- the way ------------------------------------------------------------------------------------------------

    def _chosen(self) -> Route:
        """The way of all versions, made ready at the first one. Raises TransferBroken, ConfigError."""
        if self._route is not None:
            return self._route
        asked = [actor.place.remote() for actor in (self._learners[0], *self._rollouts)]
        learner, *engines = ray.get(asked, timeout=self._timeout_s)
        self._route = choose(self._way, learner, engines)
        self._direct = all(place.direct for place in engines)
        self._replays = any(place.gpu for place in (learner, *engines)) and self._direct
        if self._route != "object_store":
            self._meet(self._route, learner, engines)
        return self._route

    def _meet(self, route: Route, learner: Place, engines: Sequence[Place]) -> None:
        nccl = all(place.gpu for place in (learner, *engines))
        opened = self._learners[0].open_transfer.remote(
            route, len(self._rollouts), self._transfer_timeout_s, nccl=route == "broadcast" and nccl
        )
        self._link = link = ray.get(opened, timeout=self._timeout_s)
        calls = [self._learners[0].join_transfer.remote()]
        calls += [actor.join_transfer.remote(link, number) for number, actor in enumerate(self._rollouts)]
        try:
            ray.get(calls, timeout=self._timeout_s)
        except RayError as error:  # of a member that died too: what is left of them is served as before
            raise TransferBroken(f"learner and engines did not meet for {route}:\n{error}") from error

    def _leave_route(self, error: TransferBroken) -> None:
        note = f"weights go through the object store from now on: {str(error).strip().splitlines()[-1]}"
        self._notes.append(note)
        self._route = "object_store"
        members = [*self._learners[:1], *self._rollouts]
        ray.wait(
            [actor.close_transfer.remote() for actor in members], num_returns=len(members), timeout=self._timeout_s
        )

    def _learn(self, method: str, *args: Any) -> Any:
        """The first rank's answer to what all ranks are asked."""
        return ray.get([getattr(rank, method).remote(*args) for rank in self._learners], timeout=self._timeout_s)[0]

    def _all(self, phase: str, number: int, args: list[tuple[Any, ...]], sending: Any = None) -> None:
        """One phase on every engine, each with its own arguments. sending: what the learner does meanwhile."""
        calls = {
            getattr(actor, phase).remote(*own): i
            for i, (actor, own) in enumerate(zip(self._rollouts, args, strict=True))
        }
        errors = []
        broken: TransferBroken | None = None
        lost: RayActorError | GetTimeoutError | None = None
        while calls:  # as they end: who is gone is known before those who wait for it
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=self._timeout_s)
            call = ready[0] if ready else next(iter(calls))
            i = calls.pop(call)
            try:
                ray.get(call, timeout=self._timeout_s if ready else 0.001)
            except Exception as error:  # every engine's answer is wanted before the version is taken back
                errors.append(f"rollout actor {i}: {error}")
                broken = broken or (error if isinstance(error, TransferBroken) else None)
                lost = lost or (error if isinstance(error, RayActorError | GetTimeoutError) else None)
                gone = isinstance(error, TransferBroken | RayActorError | GetTimeoutError)
                if sending is not None and gone and self._link is not None:
                    call_off(self._link, f"rollout actor {i} is gone")
        if sending is not None:
            try:
                ray.get(sending, timeout=self._timeout_s)
            except Exception as error:  # as above
                errors.append(f"the learner: {error}")
                broken = error if isinstance(error, TransferBroken) else broken
        if errors and phase == "prepare":
            ray.wait(
                [actor.rollback.remote() for actor in self._rollouts],
                num_returns=len(self._rollouts),
                timeout=self._timeout_s,
            )
        if broken is not None:
            raise broken
        if lost is not None:  # with fresh actors it may work, which no other form of the version would bring
            raise lost
        if errors:
            raise PublishError(
                f"weight version {number} failed to {phase} on {len(errors)} of {len(args)} engines:\n"
                + "\n".join(sorted(errors))
            )

    def _canary(self, number: int, adapter: str, replays: bool) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=_CANARY_TOKENS, adapter=adapter, return_routes=replays)
        calls = [actor.generate.remote([(self._prompt, params)]) for actor in self._rollouts]
        learned: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}
        worst = 0.0
        for i, (completion,) in enumerate(ray.get(calls, timeout=self._timeout_s)):
            if isinstance(completion, Exception):
                raise completion
            if completion.weight_version != number:
                served = completion.weight_version
                raise CanaryMismatch(f"rollout actor {i} answered with version {served} after a switch to {number}")
            ids, routes = completion.token_ids, completion.routes
            known = ids, b"" if routes is None else routes.tobytes()
            if known not in learned:
                batch = scoring_batch(self._prompt, ids, routes)
                learned[known] = self._learn("logprobs", batch)[len(self._prompt) :]
            differences = np.abs(learned[known] - np.asarray(completion.logprobs, np.float32))
            worst = max(worst, float(np.median(differences)))
        tolerance = _HALF_TOLERANCE * self._tolerance if replays else self._tolerance
        if not worst <= tolerance:
            raise CanaryMismatch(
                f"version {number}: learner and engine differ by {worst:.3g} nats on the canary prompt, more than "
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
