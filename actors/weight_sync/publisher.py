"""The weight publisher, on the driver's side: a version reaches all engines whole, or none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from k3rl.actors.cluster import ClusterConfig
from k3rl.actors.weight_sync.canary import Canary
from k3rl.actors.weight_sync.payload import BaseVersion, Export, Payload, Publication
from k3rl.actors.weight_sync.transfer import Link, TransferBroken, abort_transfer
from k3rl.actors.weight_sync.transport import Transport, choose_transport
from k3rl.config import K3Error

_DELTA_PAYS = 1e8
"""Bytes a second between hosts below which a delta, made and taken by a core each, arrives before the whole version."""


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
        self._setting, self._delta = config.weight_transfer, config.weight_delta
        self._timeout_s, self._transfer_timeout_s = config.call_timeout_s, config.transfer_timeout_s
        self._transport: Transport | None = None  # not chosen yet
        self._on_gpu = False  # whether the learner or any engine is on one
        self._direct = False  # whether all engines are k3rl's own, which record routes
        self._links: list[Link] = []  # of a transport other than the object store, one for each rank that sends
        self._one_host = False  # whether all are on one
        self._slow = False  # whether whole versions were slow between hosts
        self._notes: list[str] = []

    def publish(self) -> dict[str, float]:
        """Publishes the learner's weights to every engine: whole in flat buffers from each rank, or through rank 0,
        there as a delta where an engine serves the version before (`cluster.weight_delta`).

        A version of which a delta is refused is sent again, whole and under the next number; so is one whose transfer
        breaks, and from then on all go through the object store (`notes` says why). Returns version, tensors, canary
        (`Canary.check`; with recorded routes on a GPU, or where the learner computes in bf16), bytes (received by an
        engine, the most of all), bytes_full (what the whole version has), deltas (engines that got one), refused and
        fell_back (1 when it had to be sent again for either reason), engine_paused (seconds in which an engine could
        not step because of it, the most of all), and seconds, of which transfer_seconds until every engine had proved
        it. Of flat buffers also gather_seconds and digest_seconds of a rank, receive_seconds and verify_seconds of an
        engine, the most of all. Raises PublishError, CanaryMismatch, and ConfigError for a transport that cannot work
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

    def commit(self, number: int) -> float:
        """Second phase: every engine switches to version `number`, which all have prepared; -> seconds of the longest
        pause."""
        return max(self._on_engines("commit", number, [(number,)] * len(self._rollouts)))

    def notes(self) -> list[str]:
        """What a person should read about the last publications; each is given once."""
        notes, self._notes = self._notes, []
        return notes

    def _publish(self) -> dict[str, float]:
        streams = self._chosen() != "object_store"
        if streams and self._delta != "on" and not self._slow:
            exports = self._on_ranks("export")
            if exports[0].version:
                return self._publish_flat(exports)
        served = ray.get([actor.served.remote() for actor in self._rollouts], timeout=self._timeout_s)
        if self._delta == "off":
            served = [BaseVersion(number, "") for number, _ in served]
        publication: Publication = self._on_ranks("publish", served, *([True] if streams else []))[0]
        version, payloads = publication.version, [publication.payloads[base] for base in served]
        deltas = sum(payload.encoding == "delta" for payload in payloads)
        orders = [(version.number, {} if each.encoding == "delta" else version.manifest, each) for each in payloads]
        began = time.monotonic()
        sending = [self._learners[0].send.remote()] if streams else []
        try:
            self._on_engines("prepare", version.number, orders, sending)
        except PublishError as error:
            raise DeltaRefused(str(error)) if deltas else error from error
        took = time.monotonic() - began
        size = max(payload.bytes for payload in payloads)
        if sending:
            size = len(payloads[0].header) + ray.get(sending[0], timeout=self._timeout_s)
        paused = self.commit(version.number)
        return {
            "version": float(version.number),
            "tensors": float(len(version.manifest)),
            "canary": self._agree(version.number, publication.half, publication.adapter),
            "bytes": float(size),
            "bytes_full": float(publication.bytes_full),
            "deltas": float(deltas),
            "transfer_seconds": took,
            "engine_paused": paused,
        }

    def _publish_flat(self, exports: Sequence[Export]) -> dict[str, float]:
        """Both phases of a version whose shards lie at the ranks."""
        number, began = exports[0].version, time.monotonic()
        senders = [rank for rank, export in zip(self._learners, exports, strict=True) if export.shard is not None]
        payload = Payload("flat", b"", (), 0, f"{number}", tuple(e.shard for e in exports if e.shard is not None))
        sending = [rank.send.remote() for rank in senders]
        parts = self._on_engines("prepare", number, [(number, {}, payload)] * len(self._rollouts), sending)
        took = time.monotonic() - began
        paused = self.commit(number)
        size = float(sum(export.bytes for export in exports))
        self._slow = self._delta == "auto" and not self._one_host and size / took < _DELTA_PAYS
        return {
            "version": float(number),
            "tensors": float(sum(export.tensors for export in exports)),
            "canary": self._agree(number, exports[0].half),
            "bytes": size,
            "bytes_full": float(sum(export.stored_bytes for export in exports)),
            "deltas": 0.0,
            "gather_seconds": max(export.gather_seconds for export in exports),
            "digest_seconds": max(export.digest_seconds for export in exports),
            "transfer_seconds": took,
            **{name: max(part[name] for part in parts) for name in parts[0]},
            "engine_paused": paused,
        }

    def _agree(self, number: int, half: bool, adapter: str = "") -> float:
        """The canary after a switch."""
        return self._canary.check(
            self._rollouts,
            lambda batch: self._on_ranks("logprobs", batch)[0],
            number,
            adapter=adapter,
            replay_routes=self._direct and (self._on_gpu or half),
            timeout_s=self._timeout_s,
        )

    # ------------------------------------------------------------------------------------------------- transport

    def _chosen(self) -> Transport:
        """The transport of all versions, made ready at the first one. Raises TransferBroken, ConfigError."""
        if self._transport is not None:
            return self._transport
        asked = [actor.location.remote() for actor in (*self._learners, *self._rollouts)]
        found = ray.get(asked, timeout=self._timeout_s)
        ranks, engines = found[: len(self._learners)], found[len(self._learners) :]
        senders = {rank: place for rank, place in zip(self._learners, ranks, strict=True) if place is not None}
        places = [*senders.values(), *engines]
        chosen = {choose_transport(self._setting, place, engines) for place in senders.values()}
        self._transport = chosen.pop() if len(chosen) == 1 else "object_store"
        self._direct = all(location.direct for location in engines)
        self._on_gpu = any(location.gpu for location in places)
        self._one_host = len({location.host for location in places}) == 1
        if self._transport != "object_store":
            self._meet(self._transport, list(senders), all(location.gpu for location in places))
        return self._transport

    def _meet(self, transport: Transport, senders: Sequence[Any], on_gpus: bool) -> None:
        """Each rank that sends and all engines make the transport ready."""
        nccl, timeout_s = transport == "broadcast" and on_gpus, self._transfer_timeout_s
        opened = [rank.open_transfer.remote(transport, len(self._rollouts), timeout_s, nccl=nccl) for rank in senders]
        self._links = links = ray.get(opened, timeout=self._timeout_s)
        calls = [rank.join_transfer.remote() for rank in senders]
        calls += [actor.join_transfer.remote(links, number) for number, actor in enumerate(self._rollouts)]
        try:
            ray.get(calls, timeout=self._timeout_s)
        except RayError as error:  # of a member that died too: what is left of them is served as before
            raise TransferBroken(f"learner and engines did not meet for {transport}:\n{error}") from error

    def _fall_back(self, error: TransferBroken) -> None:
        """All later versions go through the object store."""
        note = f"weights go through the object store from now on: {str(error).strip().splitlines()[-1]}"
        self._notes.append(note)
        self._transport = "object_store"
        members = [*self._learners, *self._rollouts]
        ray.wait(
            [actor.close_transfer.remote() for actor in members], num_returns=len(members), timeout=self._timeout_s
        )

    # ----------------------------------------------------------------------------------------------------- calls

    def _on_ranks(self, method: str, *args: Any) -> list[Any]:
        """The answers of all ranks."""
        return ray.get([getattr(rank, method).remote(*args) for rank in self._learners], timeout=self._timeout_s)

    def _on_engines(
        self, phase: str, number: int, args: list[tuple[Any, ...]], sending: Sequence[Any] = ()
    ) -> list[Any]:
        """One phase on every engine, each with its own arguments; -> the answers. sending: what learner ranks do
        meanwhile."""
        calls = {
            getattr(actor, phase).remote(*own): i
            for i, (actor, own) in enumerate(zip(self._rollouts, args, strict=True))
        }
        errors: list[str] = []
        answers: dict[int, Any] = {}
        broken: TransferBroken | None = None
        lost: RayActorError | GetTimeoutError | None = None
        while calls:  # as they end: who is gone is known before those who wait for it
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=self._timeout_s)
            call = ready[0] if ready else next(iter(calls))
            i = calls.pop(call)
            try:
                answers[i] = ray.get(call, timeout=self._timeout_s if ready else 0.001)
            except Exception as error:  # every engine's answer is wanted before the version is taken back
                errors.append(f"rollout actor {i}: {error}")
                broken = broken or (error if isinstance(error, TransferBroken) else None)
                lost = lost or (error if isinstance(error, RayActorError | GetTimeoutError) else None)
                gone = isinstance(error, TransferBroken | RayActorError | GetTimeoutError)
                for link in self._links if sending and gone else ():
                    abort_transfer(link, f"rollout actor {i} is gone")
        for sender, call in enumerate(sending):
            try:
                ray.get(call, timeout=self._timeout_s)
            except Exception as error:  # as above
                errors.append(f"rank {sender} of the learner's that send: {error}")
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
        return [answers[i] for i in range(len(args))]
