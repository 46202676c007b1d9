"""Tensors that lie end to end in one storage, seen as one: a bank of experts is one tensor instead of thousands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def runs(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """(start, stop) of every run of contiguous neighbours of one dtype that lie end to end in one storage."""
    start, end, limit = 0, -1, -1
    kind: torch.dtype | None = None
    for i, tensor in enumerate(tensors):
        at, plain = tensor.data_ptr(), tensor.is_contiguous()
        if at != end or not plain or at >= limit or tensor.dtype is not kind:
            if i > start:
                yield start, i
            start, kind = i, tensor.dtype
            storage = tensor.untyped_storage()
            limit = storage.data_ptr() + storage.nbytes()
        end = at + tensor.nbytes if plain else -1
    if tensors:
        yield start, len(tensors)


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in their order, each run of `runs` as one flat view; the others as they are."""
    return [_whole(tensors[start:stop]) for start, stop in runs(tensors)]


def _whole(run: Sequence[Tensor]) -> Tensor:
    if len(run) == 1:
        return run[0]
    return run[0].as_strided((sum(tensor.numel() for tensor in run),), (1,))


def as_one(parts: Sequence[Tensor]) -> Tensor:
    """The parts along their first axis: the part itself where there is one, else a new tensor. To be read only."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
