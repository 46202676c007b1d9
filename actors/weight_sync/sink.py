"""The engine's side of publication: a rollout actor takes a version by any transport and in any encoding."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch
from torch import Tensor

from k3rl.actors.weight_sync.buckets import content_of, tensors_in
from k3rl.actors.weight_sync.payload import BaseVersion, Encoding, Payload
from k3rl.actors.weight_sync.transfer import Link, Receiver, TransferBroken
from k3rl.actors.weight_sync.transport import Location, location_here
from k3rl.checkpoint import manifest_digest
from k3rl.engine import Engine, VLLMEngine, WeightUpdateError
from k3rl.model import DeviceName, place_of


def base_version(engine: Engine | VLLMEngine) -> BaseVersion:
    """The version that samples the next token.

    A server takes no deltas: it names no digest, so that the learner knows no base and sends it whole versions.
    """
    if isinstance(engine, VLLMEngine):
        return BaseVersion(engine.version, "")
    return BaseVersion(engine.version, manifest_digest(engine.manifest))


class WeightSink:
    """Takes weight versions for the engine of one process. direct: whether that is an engine of this process."""

    def __init__(self, device: DeviceName, *, direct: bool = True) -> None:
        self._device_name: DeviceName = device
        self._direct = direct
        self._receiver: Receiver | None = None

    def location(self) -> Location:
        """Where the engine's weights are."""
        if not self._direct:
            return location_here(torch.device("cpu"), direct=False)
        return location_here(place_of(self._device_name)[0])

    async def join(self, link: Link, number: int) -> None:
        """Meets the learner, as receiver `number`, to be sent weights by it. Raises TransferBroken."""
        self.close()
        self._receiver = Receiver(link, number, place_of(self._device_name)[0])
        await asyncio.to_thread(self._receiver.join)

    def close(self) -> None:
        """Ends the transfer; weights can still come through the object store."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    async def prepare(
        self, engine: Engine | VLLMEngine, version: int, manifest: Mapping[str, str], payload: Payload
    ) -> None:
        """Builds and verifies a version beside the one that the engine serves. Buckets come one at a time."""
        opened = False

        def take(bucket: bytes | Tensor) -> None:
            nonlocal opened
            if not opened:
                self.open(engine, version, manifest, payload)
            opened = True
            self.take(engine, payload.encoding, bucket)

        if payload.stream:
            if self._receiver is None:
                raise TransferBroken("this rollout actor has not met the learner; call join_transfer(...) first")
            await self._receiver.receive(payload.stream, take)
        for ref in payload.buckets:
            take(await ref)
        if not opened:  # a delta of nothing has no bucket
            self.open(engine, version, manifest, payload)
        engine.verify_weight_update()

    def open(self, engine: Engine | VLLMEngine, version: int, manifest: Mapping[str, str], payload: Payload) -> None:
        """Begins an update of the engine. Raises WeightUpdateError where it does not take this encoding."""
        if payload.encoding == "whole":
            engine.start_weight_update(version, manifest)
        elif isinstance(engine, VLLMEngine):
            what = "came as a delta" if payload.encoding == "delta" else "is of an adapter"
            raise WeightUpdateError(f"weight version {version} {what}; a vLLM server takes whole versions")
        elif payload.encoding == "delta":
            engine.start_weight_delta(payload.header)
        else:
            engine.adapters.open(version, payload.header, manifest, manifest_digest(engine.manifest))

    def take(self, engine: Engine | VLLMEngine, encoding: Encoding, bucket: bytes | Tensor) -> None:
        """Gives the engine one bucket, as it came: bytes from the object store, uint8 [n] from a transfer."""
        if encoding == "delta" and isinstance(engine, Engine):
            engine.update_weights_by_delta(bucket if isinstance(bucket, bytes) else content_of(bucket))
            return
        if isinstance(bucket, bytes):
            bucket = torch.frombuffer(bytearray(bucket), dtype=torch.uint8)
        tensors = tensors_in(bucket)
        if encoding == "adapter" and isinstance(engine, Engine):
            engine.adapters.add((name, tensor.cpu()) for name, tensor in tensors)
        else:
            engine.update_weights(tensors)
