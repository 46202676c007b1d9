"""Tensors of many parameters in few flat buckets that travel to or from their owners, which all ranks cut alike.

What is large, as a bank of experts, travels as it lies; small tensors are copied into one bucket and back. What is in a
bucket follows from shapes, and from which tensors lie end to end where that is equal on all ranks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.optim import fill_buckets, joined
from k3rl.parallel.world import World

_MOST = 1 << 25  # elements of small tensors in one bucket
_LARGE = 1 << 20  # numbers of a tensor that is a bucket by itself

_Collective = Callable[[Tensor, int | None, dist.ProcessGroup, bool], dist.Work | None]


@dataclass(frozen=True)
class FlatBucket:
    """Flat tensors of one dtype that travel together; owner None: between all ranks of the group alike."""

    pieces: tuple[Tensor, ...]
    owner: int | None
    group: dist.ProcessGroup

    def pack(self) -> Tensor:
        """What is sent or received: the piece itself, or a copy of several."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def unpack(self, flat: Tensor) -> None:
        """Copies what arrived to where it belongs."""
        if len(self.pieces) > 1:
            sizes = [piece.numel() for piece in self.pieces]
            torch._foreach_copy_(list(self.pieces), list(flat.split(sizes)))

    @property
    def layout(self) -> tuple[int | None, str, int]:
        """What ranks must agree about."""
        return self.owner, str(self.pieces[0].dtype), sum(piece.numel() for piece in self.pieces)


def flat_buckets(
    tensors: Iterable[tuple[Tensor, bool]], owner: int | None, group: dist.ProcessGroup
) -> Iterator[FlatBucket]:
    """Buckets of (flat tensor, whether it may be joined with neighbours that lie beside it: so on all ranks)."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for may_join, run in itertools.groupby(tensors, key=lambda pair: pair[1]):
        own = [tensor for tensor, _ in run]
        for whole in joined(own) if may_join else own:
            if whole.numel() >= _LARGE:
                yield FlatBucket((whole,), owner, group)
            else:
                small.setdefault(whole.dtype, []).append(whole)
    for alike in small.values():
        for start, stop in fill_buckets([tensor.numel() for tensor in alike], _MOST):
            yield FlatBucket(tuple(alike[start:stop]), owner, group)


def layout_digest(buckets: Sequence[FlatBucket]) -> int:
    """A number above 0 that is equal on ranks whose buckets fit together."""
    text = repr([bucket.layout for bucket in buckets])
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def reduce_to_owners(world: World, buckets: Sequence[FlatBucket]) -> None:
    """Sums buckets on their owners, where they then lie again; on every rank where there is no owner."""

    def reduce(flat: Tensor, owner: int | None, group: dist.ProcessGroup, wait: bool) -> dist.Work | None:
        if owner is None:
            return dist.all_reduce(flat, group=group, async_op=not wait)
        return dist.reduce(flat, dst=owner, group=group, async_op=not wait)

    for bucket, flat in _run(world, "summing gradients", buckets, reduce):
        if bucket.owner in (None, world.rank):
            bucket.unpack(flat)


def broadcast_from_owners(world: World, buckets: Sequence[FlatBucket]) -> None:
    """Gives every rank the values of the owners."""

    def broadcast(flat: Tensor, owner: int | None, group: dist.ProcessGroup, wait: bool) -> dist.Work | None:
        return dist.broadcast(flat, src=owner, group=group, async_op=not wait)

    for bucket, flat in _run(world, "sending updated parameters", buckets, broadcast):
        if bucket.owner != world.rank:
            bucket.unpack(flat)


def _run(
    world: World, what: str, buckets: Sequence[FlatBucket], collective: _Collective
) -> list[tuple[FlatBucket, Tensor]]:
    """Each bucket and what was sent. All are under way before the first one is waited for.

    A GPU takes those of one group as one: both directions of its links are busy then, whoever the owners are.
    """
    pairs = [(bucket, bucket.pack()) for bucket in buckets]
    if world.device.type == "cuda":
        for group, run in itertools.groupby(pairs, key=lambda pair: pair[0].group):
            with world.during(what), world.at_once(group):
                for bucket, flat in run:
                    collective(flat, bucket.owner, group, True)
        return pairs
    works = []
    for bucket, flat in pairs:
        with world.during(what):
            works.append(collective(flat, bucket.owner, bucket.group, False))
    with world.during(what):
        for work in works:
            if work is not None:
                work.wait()
    return pairs
