"""The weight publisher, on the driver's side: a version reaches all engines whole, or none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from k3rl.actors.cluster import ClusterConfig
from k3rl.actors.weight_sync.canary import Canary
from k3rl.actors.weight_sync.payload import Publication
from k3rl.actors.weight_sync.transfer import Link, TransferBroken, abort_transfer
from k3rl.actors.weight_sync.transport import Location, Transport, choose_transport
from k3rl.config import K3Error


class PublishError(K3Error):
    """A weight version could not be given to every engine; all go on serving the old one."""


class DeltaRefused(PublishError):
    """A version that went out as a delta was not taken; sending it whole may help."""


class WeightPublisher:
    """Two-phase publication from the learner's ranks to all rollout actors, with a canary after each switch."""

    def __init__(self, learners: list[Any], rollouts: list[Any], canary: Canary, config: ClusterConfig) -> None:
        """learners: all ranks of one learner; they compute together, and the first one answers."""
        self._learners = learners
        self._rollouts = rollouts
        self._canary = canary
        self._setting = config.weight_transfer
        self._timeout_s, self._transfer_timeout_s = config.call_timeout_s, config.transfer_timeout_s
        self._transport: Transport | None = None  # not chosen yet
        self._on_gpu = False  # whether the learner or any engine is on one
        self._direct = False  # whether all engines are k3rl's own, which record routes
        self._link: Link | None = None  # of a transport other than the object store
        self._notes: list[str] = []

    def publish(self) -> dict[str, float]:
        """Publishes the learner's weights to every engine, as a delta where it serves the version before.

        A version of which a delta is refused is sent again, whole and under the next number; so is one whose transfer
        breaks, and from then on all go through the object store (`notes` says why). Returns version, tensors, canary
        (`Canary.check`; with recorded routes on a GPU, or where the learner computes in bf16), bytes (received by an
        engine, the most of all), bytes_full (what the whole version has), deltas (engines that got one), refused and
        fell_back (1 when it had to be sent again for either reason), and seconds, of which transfer_seconds until every
        engine had proved it. Raises PublishError, CanaryMismatch, and ConfigError for a transport that cannot work
        here.
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
                if self._transport == "object_store":
                    raise PublishError(str(error)) from error
                outcome["fell_back"] = 1.0
                self._fall_back(error)
            else:
                return {**done, **outcome, "seconds": time.monotonic() - began}

    def commit(self, number: int) -> None:
        """Second phase: every engine switches to version `number`, which all have prepared."""
        self._on_engines("commit", number, [(number,)] * len(self._rollouts))

    def notes(self) -> list[str]:
        """What a person should read about the last publications; each is given once."""
        notes, self._notes = self._notes, []
        return notes

    def _publish(self) -> dict[str, float]:
        streams = self._chosen() != "object_store"
        served = ray.get([actor.served.remote() for actor in self._rollouts], timeout=self._timeout_s)
        publication: Publication = self._on_learner("publish", served, *([True] if streams else []))
        version, payloads = publication.version, [publication.payloads[base] for base in served]
        number = version.number
        deltas = sum(payload.encoding == "delta" for payload in payloads)
        began = time.monotonic()
        sending = self._learners[0].send.remote() if streams else None
        orders = [(number, {} if each.encoding == "delta" else version.manifest, each) for each in payloads]
        try:
            self._on_engines("prepare", number, orders, sending)
        except PublishError as error:
            raise DeltaRefused(str(error)) if deltas else error from error
        took = time.monotonic() - began
        size = max(payload.bytes for payload in payloads)
        if sending is not None:
            size = len(payloads[0].header) + ray.get(sending, timeout=self._timeout_s)
        self.commit(number)
        canary = self._canary.check(
            self._rollouts,
            lambda batch: self._on_learner("logprobs", batch),
            number,
            adapter=publication.adapter,
            replay_routes=self._direct and (self._on_gpu or publication.half),
            timeout_s=self._timeout_s,
        )
        return {
            "version": float(number),
            "tensors": float(len(version.manifest)),
            "canary": canary,
            "bytes": float(size),
            "bytes_full": float(publication.bytes_full),
            "deltas": float(deltas),
            "transfer_seconds": took,
        }

    # ------------------------------------------------------------------------------------------------- transport

    def _chosen(self) -> Transport:
        """The transport of all versions, made ready at the first one. Raises TransferBroken, ConfigError."""
        if self._transport is not None:
            return self._transport
        asked = [actor.location.remote() for actor in (self._learners[0], *self._rollouts)]
        learner, *engines = ray.get(asked, timeout=self._timeout_s)
        self._transport = choose_transport(self._setting, learner, engines)
        self._direct = all(location.direct for location in engines)
        self._on_gpu = any(location.gpu for location in (learner, *engines))
        if self._transport != "object_store":
            self._meet(self._transport, learner, engines)
        return self._transport

    def _meet(self, transport: Transport, learner: Location, engines: Sequence[Location]) -> None:
        nccl = transport == "broadcast" and all(location.gpu for location in (learner, *engines))
        opened = self._learners[0].open_transfer.remote(
            transport, len(self._rollouts), self._transfer_timeout_s, nccl=nccl
        )
        self._link = link = ray.get(opened, timeout=self._timeout_s)
        calls = [self._learners[0].join_transfer.remote()]
        calls += [actor.join_transfer.remote(link, number) for number, actor in enumerate(self._rollouts)]
        try:
            ray.get(calls, timeout=self._timeout_s)
        except RayError as error:  # of a member that died too: what is left of them is served as before
            raise TransferBroken(f"learner and engines did not meet for {transport}:\n{error}") from error

    def _fall_back(self, error: TransferBroken) -> None:
        """All later versions go through the object store."""
        note = f"weights go through the object store from now on: {str(error).strip().splitlines()[-1]}"
        self._notes.append(note)
        self._transport = "object_store"
        members = [*self._learners[:1], *self._rollouts]
        ray.wait(
            [actor.close_transfer.remote() for actor in members], num_returns=len(members), timeout=self._timeout_s
        )

    # ----------------------------------------------------------------------------------------------------- calls

    def _on_learner(self, method: str, *args: Any) -> Any:
        """The first rank's answer to what all ranks are asked."""
        return ray.get([getattr(rank, method).remote(*args) for rank in self._learners], timeout=self._timeout_s)[0]

    def _on_engines(self, phase: str, number: int, args: list[tuple[Any, ...]], sending: Any = None) -> None:
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
                    abort_transfer(self._link, f"rollout actor {i} is gone")
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
        if lost is not None:  # with fresh actors it may work, which no other encoding of the version would bring
            raise lost
        if errors:
            raise PublishError(
                f"weight version {number} failed to {phase} on {len(errors)} of {len(args)} engines:\n"
                + "\n".join(sorted(errors))
            )
