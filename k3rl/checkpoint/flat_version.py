"""What tells a weight version in flat buffers: which shards it has, how each lies, and the digest of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3rl.checkpoint.flat_digest import LANES
from k3rl.checkpoint.flat_layout import FlatLayout
from k3rl.config import K3Error
from k3rl.model import K3Config


class FlatError(K3Error, ValueError):
    """A version in flat buffers that is not whole, not unaltered, or of another model; the message says what."""


@dataclass(frozen=True, slots=True)
class FlatShard:
    """One rank's part of a version, without its bytes.

    rank: of the learner. start, stop: its run of experts; rest: whether it has everything else. layout: the digest of
    its table. digests: of its tensors in the table's order, 32 bytes each (`flat_digest`).
    """

    rank: int
    start: int
    stop: int
    rest: bool
    layout: str
    digests: bytes

    def __str__(self) -> str:
        else_ = " and everything else" if self.rest else ""
        return f"the shard of learner rank {self.rank} (experts {self.start} to {self.stop - 1}{else_})"


def shard_of(rank: int, layout: FlatLayout, buffer: Tensor) -> FlatShard:
    """Describes a filled buffer; the host waits for its digests."""
    digests = layout.digests(buffer).cpu().numpy().tobytes()
    return FlatShard(rank, layout.experts.start, layout.experts.stop, layout.rest, layout.digest, digests)


def layouts_of(config: K3Config, shards: Sequence[FlatShard]) -> list[FlatLayout]:
    """The layout of each shard, derived here. Raises FlatError unless together they are a whole version of this model.

    config: of the model that is to take them.
    """
    place = 0
    for shard in sorted(shards, key=lambda one: one.start):
        if shard.start != place:
            raise FlatError(f"experts {place} to {shard.start - 1} are in no shard, or in two")
        place = shard.stop
    if place != config.num_experts or sum(shard.rest for shard in shards) != 1:
        raise FlatError(
            f"{len(shards)} shards have {place} of {config.num_experts} experts, and {sum(s.rest for s in shards)} of "
            "them have everything else; a version has all experts once, and one shard with the rest"
        )
    layouts = [FlatLayout(config, range(shard.start, shard.stop), shard.rest) for shard in shards]
    for shard, layout in zip(shards, layouts, strict=True):
        if layout.digest != shard.layout:
            raise FlatError(f"{shard} does not fit this model: its table is another; start both from one config.json")
    return layouts


def prove(shard: FlatShard, layout: FlatLayout, buffer: Tensor) -> None:
    """Raises FlatError unless `buffer`, uint8 [n], is what `shard` says, naming the first tensor that is not."""
    if buffer.numel() != layout.size:
        raise FlatError(f"{shard} came with {buffer.numel()} bytes; it has {layout.size}")
    found = layout.digests(buffer).cpu().numpy()
    wanted = np.frombuffer(shard.digests, np.int64)
    if wanted.size != found.size:
        raise FlatError(f"{shard} came with {wanted.size // LANES} digests for {layout.tensors} tensors")
    wrong = (found != wanted.reshape(found.shape)).any(1)
    if wrong.any():
        first = int(wrong.argmax())
        raise FlatError(
            f"{layout.name(first)} has digest {found[first].tobytes().hex()[:16]}, and {shard} says "
            f"{wanted.reshape(found.shape)[first].tobytes().hex()[:16]} ({int(wrong.sum())} tensors differ)"
        )


def empty_buffer(layout: FlatLayout, device: torch.device) -> Tensor:
    """uint8 [size] of zeros, which is what padding holds."""
    return torch.zeros(layout.size, dtype=torch.uint8, device=device)
