"""What travels from the learner to the engines when a weight version is published: payloads, and how they are encoded.

A version is encoded in one way or several: everything, or the difference from the base version that an engine serves.
An engine takes any of them and ends with the same bytes. Where the learner trains an adapter, only that is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from k3rl.checkpoint import FlatShard
from k3rl.types import WeightVersion

POLICY = "policy"
"""Name under which engines serve the adapter that the learner trains."""

Encoding = Literal["whole", "delta", "adapter", "flat"]


class BaseVersion(NamedTuple):
    """The version that an engine serves while the next one is prepared. digest: of its manifest, empty if unknown."""

    number: int
    digest: str


@dataclass(frozen=True, slots=True)
class Payload:
    """One encoding of a version.

    encoding: "whole" (safetensors buckets), "delta" (`checkpoint.delta`), "adapter" (A and B of an adapter, in
    safetensors buckets; the weights beside it stay), or "flat" (a bucket for each of `shards`, from a rank each).
    header: of a delta or an adapter, empty otherwise. buckets: references in the object store. bytes: of all of it.
    stream: where the learner sends the buckets itself (`transfer.py`), under which key; `buckets` is then empty and
    `bytes` 0.
    """

    encoding: Encoding
    header: bytes
    buckets: tuple[Any, ...]
    bytes: int
    stream: str = ""
    shards: tuple[FlatShard, ...] = ()


@dataclass(frozen=True, slots=True)
class Export:
    """What a learner rank has ready to be sent: its shard of a version in a flat buffer.

    version: the number of the version, 0 where an adapter is trained, which goes another way. shard: None of a rank
    whose weights others send. bytes: of its buffer; stored_bytes: of the tensors in
    it. half: as in `Publication`. gather_seconds: packing and copying; digest_seconds after that.
    """

    version: int
    shard: FlatShard | None = None
    bytes: int = 0
    stored_bytes: int = 0
    tensors: int = 0
    half: bool = False
    gather_seconds: float = 0.0
    digest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Publication:
    """A version, the payload for engines of each base version, and the bytes of all the version's tensors.

    adapter: the name of the adapter that it is a version of; empty for the weights themselves. half: whether the
    learner computes in bf16, whose sums no engine has to the bit.
    """

    version: WeightVersion
    payloads: Mapping[BaseVersion, Payload]
    bytes_full: int
    adapter: str = ""
    half: bool = False
