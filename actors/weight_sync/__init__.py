"""How a weight version gets from the learner to the engines, whole or not at all, while they serve the one before.

`publisher.py` is the driver's side: two phases over all engines, then the canary (`canary.py`). `source.py` is the
learner's side and `sink.py` the engine's. What travels is a payload (`payload.py`: flat, whole, delta, or adapter) of
buckets (`buckets.py`), by a transport (`transport.py`): Ray's object store, or straight between the processes
(`transfer.py`, over `gpu_memory.py` on one GPU and `host_memory.py` on one host). What an engine does with a version is
in `k3rl.engine`, how a delta is encoded in `k3rl.checkpoint`.
"""

from k3rl.actors.weight_sync.buckets import (
    Bucket,
    BucketDamaged,
    BytesBucket,
    checksum,
    content_of,
    tensor_buckets,
    tensors_in,
)
from k3rl.actors.weight_sync.canary import Canary, CanaryMismatch
from k3rl.actors.weight_sync.payload import POLICY, BaseVersion, Export, Payload, Publication
from k3rl.actors.weight_sync.publisher import DeltaRefused, PublishError, WeightPublisher
from k3rl.actors.weight_sync.sink import WeightSink, base_version
from k3rl.actors.weight_sync.source import WeightSource
from k3rl.actors.weight_sync.transfer import Link, Receiver, Sender, TransferBroken
from k3rl.actors.weight_sync.transport import Location, Transport, TransportSetting, choose_transport

__all__ = [
    "POLICY",
    "BaseVersion",
    "Bucket",
    "BucketDamaged",
    "BytesBucket",
    "Canary",
    "CanaryMismatch",
    "DeltaRefused",
    "Export",
    "Link",
    "Location",
    "Payload",
    "Publication",
    "PublishError",
    "Receiver",
    "Sender",
    "TransferBroken",
    "Transport",
    "TransportSetting",
    "WeightPublisher",
    "WeightSink",
    "WeightSource",
    "base_version",
    "checksum",
    "choose_transport",
    "content_of",
    "tensor_buckets",
    "tensors_in",
]
