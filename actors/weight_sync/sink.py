"""The engine's side of publication: a rollout actor takes a version by any transport and in any encoding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from k3rl.actors.weight_sync.buckets import content_of, tensors_in
from k3rl.actors.weight_sync.payload import BaseVersion, Encoding, Payload
from k3rl.actors.weight_sync.transfer import Link, Receiver, TransferBroken
from k3rl.actors.weight_sync.transport import Location, location_here
from k3rl.checkpoint import manifest_digest
from k3rl.config import K3Error
from k3rl.engine import Engine, VLLMEngine, WeightUpdateError
from k3rl.model import DeviceName, place_of

T = TypeVar("T")


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
        self._receivers: list[Receiver] = []  # of each learner rank that sends
        self._worker: ThreadPoolExecutor | None = None  # takes versions while the engine goes on

    def location(self) -> Location:
        """Where the engine's weights are."""
        if not self._direct:
            return location_here(torch.device("cpu"), direct=False)
        return location_here(place_of(self._device_name)[0])

    async def join(self, links: Sequence[Link], number: int) -> None:
        """Meets the ranks of the learner that send weights, as receiver `number` of each. Raises TransferBroken."""
        self.close()
        self._receivers = [Receiver(link, number, place_of(self._device_name)[0]) for link in links]
        for receiver in self._receivers:
            await asyncio.to_thread(receiver.join)

    def close(self) -> None:
        """Ends the transfer; weights can still come through the object store."""
        receivers, self._receivers = self._receivers, []
        for receiver in receivers:
            receiver.close()

    async def prepare(
        self, engine: Engine | VLLMEngine, version: int, manifest: Mapping[str, str], payload: Payload
    ) -> dict[str, float]:
        """Builds and verifies a version beside the one that the engine serves; -> seconds of the parts, where they are
        known. Buckets come one at a time. All work is done in a thread of its own, for calls come meanwhile."""
        if payload.stream and not self._receivers:
            raise TransferBroken("this rollout actor has not met the learner; call join_transfer(...) first")
        loop = asyncio.get_running_loop()
        if payload.encoding == "flat":
            return await loop.run_in_executor(self._thread(), self._prepare_flat, engine, version, payload)
        opened = False

        def take(bucket: bytes | Tensor) -> None:
            nonlocal opened
            if not opened:
                self.open(engine, version, manifest, payload)
            opened = True
            self.take(engine, payload.encoding, bucket)

        def finish() -> None:
            if payload.stream:
                asyncio.run(self._receivers[0].receive(payload.stream, take))
            if not opened:  # a delta of nothing has no bucket
                self.open(engine, version, manifest, payload)
            engine.verify_weight_update()

        for ref in payload.buckets:
            await loop.run_in_executor(self._thread(), self._on_own_stream, partial(take, await ref))
        await loop.run_in_executor(self._thread(), self._on_own_stream, finish)
        return {}

    def _on_own_stream(self, work: Callable[[], T]) -> T:
        """What it gives, on a GPU beside what the engine computes, and done when this returns."""
        if self._device_name == "cpu":
            return work()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = work()
            stream.synchronize()
        return found

    def commit(self, engine: Engine | VLLMEngine, version: int) -> float:
        """Switches to the prepared version, between two steps; -> seconds that it takes, the device's copies too."""
        began = time.perf_counter()
        engine.finish_weight_update(version)
        if self._direct and self._device_name == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - began

    # ---- flat buffers, beside the steps of the engine

    def _thread(self) -> ThreadPoolExecutor:
        if self._worker is None:
            threads = torch.get_num_threads()

            def begin() -> None:  # both are a thread's own
                torch.set_num_threads(threads)
                torch.set_flush_denormal(True)

            self._worker = ThreadPoolExecutor(1, "weights", begin)
        return self._worker

    def _prepare_flat(self, engine: Engine | VLLMEngine, version: int, payload: Payload) -> dict[str, float]:
        if not isinstance(engine, Engine):
            raise WeightUpdateError(f"weight version {version} came in flat buffers; a vLLM server takes whole tensors")
        return self._on_own_stream(lambda: self._receive_flat(engine, version, payload))

    def _receive_flat(self, engine: Engine, version: int, payload: Payload) -> dict[str, float]:
        """A shard from each receiver. After an error the rest is received and dropped, so that no peer is held up."""
        refused: K3Error | None = None
        began, proof_s = time.perf_counter(), 0.0
        try:
            engine.start_flat_update(version, payload.shards)
        except WeightUpdateError as error:
            refused = error

        def take(number: int, bucket: Tensor) -> None:
            nonlocal proof_s
            if refused is None:
                start = time.perf_counter()
                self.take_shard(engine, number, bucket)
                proof_s += time.perf_counter() - start

        for number, receiver in enumerate(self._receivers):
            try:
                asyncio.run(receiver.receive(payload.stream, partial(take, number)))
            except TransferBroken:
                raise
            except K3Error as error:
                refused = refused or error
        if refused is not None:
            raise refused
        received = time.perf_counter() - began - proof_s
        engine.verify_weight_update()
        return {"receive_seconds": received, "verify_seconds": time.perf_counter() - began - received}

    def take_shard(self, engine: Engine, number: int, buffer: Tensor) -> None:
        """Gives the engine a shard, uint8 [n], as it came."""
        engine.update_weights_by_shard(number, buffer.to(engine.model.device))

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
