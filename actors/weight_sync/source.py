"""The learner's side of publication: a rank numbers versions, encodes them, and may send them to the engines itself.

A version goes in flat buffers (`export`): each rank that holds experts, or what is beside them, writes its own shard
where its weights are, and sends it. Or rank 0 gathers all of it and sends a delta or the whole (`publish`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import ray
import torch
from torch import Tensor

from k3rl.actors.weight_sync.buckets import Bucket, BytesBucket, FlatBucket, tensor_buckets
from k3rl.actors.weight_sync.gpu_memory import share
from k3rl.actors.weight_sync.host_memory import HostBuffers
from k3rl.actors.weight_sync.payload import POLICY, BaseVersion, Encoding, Export, Payload, Publication
from k3rl.actors.weight_sync.transfer import Link, Sender
from k3rl.actors.weight_sync.transport import Location, Transport, location_here
from k3rl.checkpoint import (
    BUCKET_BYTES,
    FlatLayout,
    collected_tensors,
    empty_buffer,
    encode,
    manifest_digest,
    manifest_of,
    official_tensors,
    shard_layout,
    shard_of,
    write_flat,
)
from k3rl.engine import AdapterHeader
from k3rl.model import K3ForCausalLM
from k3rl.parallel import Trainer
from k3rl.types import WeightVersion

Buckets = Callable[[], Iterator[Bucket]]


@dataclass(frozen=True, slots=True)
class _Published:
    """What was published last, kept as the base of the next delta. tensors: as stored, on the host."""

    number: int
    manifest: dict[str, str]
    tensors: Mapping[str, Tensor]

    @property
    def base(self) -> BaseVersion:
        return BaseVersion(self.number, manifest_digest(self.manifest))


class WeightSource:
    """One rank of the learner as a source of weight versions.

    `publish` and `set_version` gather tensors from all ranks: they are collectives. Rank 0 gives the version out.
    """

    def __init__(self, device: torch.device) -> None:
        self.version = 0
        self.outgoing: tuple[str, Buckets] | None = None
        """What `send` is to send: the key of a stream, and its buckets."""
        self._device = device
        self._trainer: Trainer | None = None
        self._published: _Published | None = None
        self._adapter_base: str | None = None
        self._sender: Sender | None = None
        self._host = HostBuffers()
        self._shared_host = False  # whether buffers lie in memory that engines open
        self._flat: tuple[FlatLayout, Tensor] | None = None  # what `export` fills, again and again

    def attach(self, trainer: Trainer) -> None:
        """From now on the weights of this trainer are published. Numbers go on, until `set_version`."""
        self._trainer, self._adapter_base, self._flat = trainer, None, None

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("this learner has no model to publish; create or load one first")
        return self._trainer

    def set_version(self, number: int, keep_base: bool = True) -> None:
        """Continues the numbering, after engines were loaded afresh with the weights that are held here.

        keep_base: rank 0 keeps them on its host, so that the first version may go as a delta.
        """
        self.version, self._published = number, None
        if keep_base and self.trainer.model.adapter is None and (tensors := self._stored()) is not None:
            self._published = _Published(number, manifest_of(tensors.items()), tensors)

    # ------------------------------------------------------------------------------------------------ flat buffers

    @property
    def sends_shard(self) -> bool:
        """Whether this rank is one whose shards make a version: those of the first copy of the weights."""
        mesh = self.trainer.mesh
        return not (mesh.data.rank or mesh.context.rank)

    def export(self) -> Export:
        """Writes this rank's shard of the next version into its flat buffer, for `send`. A collective.

        The version before must have arrived everywhere. Of a learner that trains an adapter there is none, and no
        version is numbered; see `publish`.
        """
        if self.trainer.model.adapter is not None:
            return Export(0)
        self.version, self._published = self.version + 1, None  # which no delta starts from any more
        with self.trainer.whole() as model:
            if not self.sends_shard:
                return Export(self.version)
            began = time.perf_counter()
            layout, buffer = self._flat_buffer(model)
            write_flat(model, layout, buffer)
            self._wait()
            written = time.perf_counter()
            shard = shard_of(self._rank, layout, buffer)
        stays = self._sender is not None and self._sender.sends_from(buffer)
        self.outgoing = f"{self.version}", lambda: iter([FlatBucket(buffer, stays=stays)])
        half = model.dtype == torch.bfloat16
        times = written - began, time.perf_counter() - written
        sizes = layout.size, layout.stored_bytes, layout.tensors
        return Export(self.version, shard, *sizes, half, *times)

    def _flat_buffer(self, model: K3ForCausalLM) -> tuple[FlatLayout, Tensor]:
        if self._flat is None:
            layout = shard_layout(model, rest=self.trainer.mesh.expert.rank == 0)
            shared = self._shared_host and self._device.type == "cpu"
            self._flat = layout, self._host.allocate(layout.size) if shared else empty_buffer(layout, self._device)
        return self._flat

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    # ------------------------------------------------------------------------------------------------- encoding

    def publish(self, served: Sequence[BaseVersion], stream: bool = False) -> Publication | None:
        """The next weight version, as payloads for engines that serve the versions `served`; None on ranks but 0.

        A delta where an engine serves the version before this one, everything where it does not. Buckets lie in the
        object store and are of bounded size: hundreds of small tensors pickled one by one cost more than their bytes.
        Of a learner that trains an adapter only that is sent, to engines that serve the weights beside it.

        stream: buckets stay here until `send`; all engines then get one payload, a delta where all serve its base.
        """
        self.version += 1
        if self.trainer.model.adapter is not None:
            return self._publish_adapter(served, stream)
        base, tensors = self._published, self._stored()
        if tensors is None:
            return None
        new = self._published = _Published(self.version, manifest_of(tensors.items()), tensors)
        payloads: dict[BaseVersion, Payload] = {}
        if (
            base is not None
            and base.manifest.keys() == new.manifest.keys()
            and base.base in served
            and (not stream or set(served) == {base.base})
        ):
            payloads[base.base] = self._delta(base, new, stream)
        if rest := set(served) - payloads.keys():
            source = self._nearest(tensors) if stream else tensors.items()
            whole = self._payload("whole", b"", lambda: tensor_buckets(source, BUCKET_BYTES), stream)
            payloads |= dict.fromkeys(rest, whole)
        return self._publication(new.manifest, payloads, tensors)

    def _publish_adapter(self, served: Sequence[BaseVersion], stream: bool) -> Publication | None:
        if self._adapter_base is None:
            self._adapter_base = self._stored_digest()
        adapter = self.trainer.model.adapter
        tensors = {name: tensor.cpu() for name, tensor in self.trainer.adapter_tensors().items()}
        if adapter is None or self._rank:
            return None
        header = AdapterHeader(POLICY, adapter.config, self._adapter_base).to_bytes()
        payload = self._payload("adapter", header, lambda: tensor_buckets(tensors.items(), BUCKET_BYTES), stream)
        return self._publication(manifest_of(tensors.items()), dict.fromkeys(served, payload), tensors, POLICY)

    def _publication(
        self,
        manifest: dict[str, str],
        payloads: Mapping[BaseVersion, Payload],
        tensors: Mapping[str, Tensor],
        adapter: str = "",
    ) -> Publication:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        half = self.trainer.model.dtype == torch.bfloat16
        return Publication(WeightVersion(self.version, manifest), payloads, size, adapter, half)

    def _delta(self, base: _Published, new: _Published, stream: bool) -> Payload:
        manifests, numbers = (base.manifest, new.manifest), (base.number, new.number)
        header, buckets = encode(base.tensors, new.tensors, manifests, numbers)
        return self._payload("delta", header.to_bytes(base.manifest), lambda: map(BytesBucket, buckets), stream)

    def _payload(self, encoding: Encoding, header: bytes, buckets: Buckets, stream: bool) -> Payload:
        """Puts the buckets into the object store, or keeps them back for `send`."""
        if stream:
            key = f"{self.version}"
            self.outgoing = key, buckets
            return Payload(encoding, header, (), 0, key)
        size, refs = len(header), []
        for bucket in buckets():
            size += bucket.size
            refs.append(ray.put(bucket.to_bytes()))
        return Payload(encoding, header, tuple(refs), size)

    # ------------------------------------------------------------------------------------------------ gathering

    @property
    def _rank(self) -> int:
        return self.trainer.mesh.world.rank

    def _gathered(self, model: K3ForCausalLM) -> Iterator[tuple[str, Tensor]]:
        """All tensors as a checkpoint stores them, on rank 0, one after the other. A collective."""
        return collected_tensors(official_tensors(model), model, self.trainer.mesh, lambda name: 0)

    def _stored(self) -> dict[str, Tensor] | None:
        """On rank 0 all stored tensors, on the host; None on the others. A collective."""
        with self.trainer.whole() as model:
            tensors = {name: tensor.cpu() for name, tensor in self._gathered(model)}
        return None if self._rank else tensors

    def _stored_digest(self) -> str:
        """On rank 0 the digest of all stored tensors, which are never held together; empty elsewhere. A collective."""
        with self.trainer.whole() as model:
            manifest = manifest_of(self._gathered(model))
        return "" if self._rank else manifest_digest(manifest)

    def _nearest(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All stored tensors once more: from the GPU where this rank holds them all, which no host memory is as near
        to; else those that were gathered."""
        if self._device.type != "cuda" or self.trainer.mesh.world.size > 1:
            yield from tensors.items()
            return
        with self.trainer.whole() as model:
            yield from official_tensors(model)

    # -------------------------------------------------------------------------------------------------- sending

    def location(self) -> Location:
        """Where this rank's weights are."""
        return location_here(self._device)

    def open(self, transport: Transport, receivers: int, timeout_s: float, *, nccl: bool) -> Link:
        """Where engines may meet this rank; `join` then waits for them."""
        self.close()
        host = ray.util.get_node_ip_address()
        shared = transport == "shm"
        self._sender = Sender(
            transport,
            receivers,
            self._device,
            timeout_s,
            host=host,
            nccl=nccl,
            share=self._host.share if shared else share,
            allocate=self._host.allocate if shared else None,
        )
        if shared is not self._shared_host:
            self._shared_host, self._flat = shared, None
        return self._sender.link

    def join(self) -> None:
        """Meets the engines. Raises TransferBroken when one does not come."""
        self._opened().join()

    def send(self) -> int:
        """Sends what was published last to the engines that prepare it meanwhile; returns its bytes.

        Raises TransferBroken.
        """
        outgoing, self.outgoing = self.outgoing, None
        if outgoing is None:
            raise RuntimeError("nothing was published to be sent; call publish(..., stream=True) first")
        key, buckets = outgoing
        return self._opened().send(key, buckets())

    def close(self) -> None:
        """Ends the transfer; what was to be sent is dropped."""
        sender, self._sender, self.outgoing, self._flat = self._sender, None, None, None
        if sender is not None:
            sender.close()

    def _opened(self) -> Sender:
        if self._sender is None:
            raise RuntimeError("this learner sends no weights itself; open a transfer first")
        return self._sender
