"""Tensors of many parameters as few messages to or from their owners, which all ranks cut alike.

What is large, as a bank of experts, travels as it lies; small tensors are copied into one message and back. What a
message is follows from shapes, and from which tensors lie end to end where that is equal on all ranks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.optim.buckets import fill_buckets
from k3rl.optim.joined import joined

_MOST = 1 << 25  # elements of small tensors in one message
_LARGE = 1 << 20  # numbers of a tensor that is a message by itself


@dataclass(frozen=True)
class Message:
    """Flat tensors of one dtype that travel together; owner None: between all ranks of the group alike."""

    pieces: tuple[Tensor, ...]
    owner: int | None
    group: dist.ProcessGroup | None

    def flat(self) -> Tensor:
        """What is sent or received: the piece itself, or a copy of several."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def back(self, flat: Tensor) -> None:
        """Brings what arrived to where it belongs."""
        if len(self.pieces) > 1:
            sizes = [piece.numel() for piece in self.pieces]
            torch._foreach_copy_(list(self.pieces), list(flat.split(sizes)))

    @property
    def shape(self) -> tuple[int | None, str, int]:
        """What ranks must agree about."""
        return self.owner, str(self.pieces[0].dtype), sum(piece.numel() for piece in self.pieces)


def cut(
    tensors: Iterable[tuple[Tensor, bool]], owner: int | None, group: dist.ProcessGroup | None
) -> Iterator[Message]:
    """Messages of (flat tensor, whether it may be joined with neighbours that lie beside it: so on all ranks)."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for may_join, run in itertools.groupby(tensors, key=lambda pair: pair[1]):
        own = [tensor for tensor, _ in run]
        for whole in joined(own) if may_join else own:
            if whole.numel() >= _LARGE:
                yield Message((whole,), owner, group)
            else:
                small.setdefault(whole.dtype, []).append(whole)
    for alike in small.values():
        for start, stop in fill_buckets([tensor.numel() for tensor in alike], _MOST):
            yield Message(tuple(alike[start:stop]), owner, group)


def digest(messages: Sequence[Message]) -> int:
    """A number above 0 that is equal on ranks whose messages fit together."""
    text = repr([message.shape for message in messages])
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
