"""Context parallelism: the ranks of one axis share a packed micro-batch, each with a range of its rows.

Documents may span any number of ranks. What is per token needs nothing; what mixes tokens is continued from rank to
rank by the communicator that `ContextParallel.split` gives for the model (`k3rl.types.ContextCommunicator`): the short
convolution by its last three rows, KDA by the state at the boundary, MLA by the latents of the rows before. A target
belongs to the rank that has the row before it, so each is predicted once, and sums over all ranks are those of one
process.

Every rank of the axis is given the whole micro-batch on the host; only its own rows go through its model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.config import K3Error
from k3rl.data import ImagePatches, TrainBatch
from k3rl.model import K3Config
from k3rl.model.costs import MicroBatch, flops
from k3rl.parallel.world import Axis, World

SNAP = 1 / 32  # of a rank's share of the cost, given up to cut between documents instead of inside one


class ContextError(K3Error, ValueError):
    """Cuts that do not divide a micro-batch among the ranks; the message says what was got and wanted."""


@dataclass(frozen=True)
class ContextShare:
    """What one rank does of a packed micro-batch.

    tokens: its tokens of the micro-batch; rows: its rows of the model, n of them, among those of the whole micro-batch;
    rows_per_token int64 [tokens]. cu_seqlens int64 [s + 1]: its sequences in its own rows, cut ends included. targets
    int64 [P]: tokens of the micro-batch that this rank predicts; before int64 [P]: own row that predicts each. images:
    those among its tokens, in order; places int64: own rows that they fill. counted: False for a rank that has no token
    of its own and runs a copy of the first one beside the others, because every rank runs the model; that copy is no
    target and must not count in statistics. communicator: for the model; None for a rank that has everything.
    """

    tokens: slice
    rows: slice
    rows_per_token: np.ndarray
    cu_seqlens: np.ndarray
    targets: np.ndarray
    before: np.ndarray
    images: tuple[ImagePatches, ...]
    places: np.ndarray
    counted: bool = True
    communicator: _Communicator | None = None

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        placeholder: int,
        tokens: slice,
        communicator: _Communicator | None = None,
        *,
        counted: bool = True,
    ) -> ContextShare:
        """The share of these tokens; placeholder: the id that stands for an image."""
        ends = np.concatenate([[0], batch.rows_per_token(placeholder).cumsum()])
        rows = slice(int(ends[tokens.start]), int(ends[tokens.stop]))
        borders = batch.cu_seqlens[(batch.cu_seqlens > tokens.start) & (batch.cu_seqlens < tokens.stop)]
        targets = np.flatnonzero(batch.loss_mask)
        targets = targets[(targets > tokens.start) & (targets <= tokens.stop)] if counted else targets[:0]
        shown = (batch.input_ids == placeholder) & ~batch.loss_mask  # what is sampled is never an image
        every = [image for own in batch.images or () for image in own]
        first = int(shown[: tokens.start].sum())
        counts = np.diff(ends)[tokens]
        return cls(
            tokens,
            rows,
            counts,
            np.concatenate([[rows.start], ends[borders], [rows.stop]]) - rows.start,
            targets,
            ends[targets] - 1 - rows.start,
            tuple(every[first : first + int(shown[tokens].sum())]),
            np.flatnonzero(np.repeat(shown[tokens], counts)),
            counted,
            communicator,
        )


def pair_cost(config: K3Config) -> float:
    """Work of one (query, key) pair in all MLA layers, over that of one row in everything else, the head included."""
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    pair = 2.0 * config.num_attention_heads * (key + config.v_head_dim) * len(config.mla_layers)
    long = 1 << 20  # tokens, beside which what a sequence costs at its start is nothing
    once, twice = (sum(flops(config, MicroBatch(1, length, targets=1)).values()) for length in (long, 2 * long))
    return pair / (2 * once - twice)  # what does not grow with the sequence


def balanced_cuts(rows: np.ndarray, cu_seqlens: np.ndarray, ranks: int, pair: float = 0.0) -> np.ndarray:
    """Token boundaries int64 [ranks + 1] from 0 to N that give every rank about the same cost.

    rows int64 [N]: rows of each token; a row at position p of its sequence costs 1 + pair * (p + 1). A cut goes between
    two sequences where that costs at most 1/32 of a share. Every rank gets a token; with fewer tokens than ranks the
    last ranks get none. The same arguments give the same cuts.
    """
    n = len(rows)
    if n <= ranks:
        return np.minimum(np.arange(ranks + 1, dtype=np.int64), n)
    ends = rows.cumsum()
    starts = np.repeat((ends - rows)[cu_seqlens[:-1]], np.diff(cu_seqlens))
    position = ends - starts  # of a token's last row, from 1
    total = (rows * (1 + pair * (position - (rows - 1) / 2))).cumsum()
    share = total[-1] / ranks
    costs = np.concatenate([[0.0], total])  # at each boundary
    cuts = np.zeros(ranks + 1, np.int64)
    cuts[-1] = n
    for rank in range(1, ranks):
        wanted = rank * share
        cut = _nearest(costs, wanted)
        border = int(cu_seqlens[_nearest(costs[cu_seqlens], wanted)])
        if abs(costs[border] - wanted) <= SNAP * share:
            cut = border
        cuts[rank] = min(max(cut, int(cuts[rank - 1]) + 1), n - (ranks - rank))
    return cuts


def _nearest(values: np.ndarray, wanted: float) -> int:
    """Index of the value of a rising array that is nearest to `wanted`."""
    place = int(np.searchsorted(values, wanted))
    if place == len(values) or (place and wanted - values[place - 1] <= values[place] - wanted):
        return place - 1
    return place


@dataclass(frozen=True)
class _Ranges:
    """Rows of all ranks. first, last [ranks]: a rank's rows are first .. last - 1; begins: the first row of the
    sequence that a rank's first row belongs to; follows: whether its last sequence goes on after it.
    """

    first: list[int]
    last: list[int]
    begins: list[int]
    follows: list[bool]

    @classmethod
    def of(cls, cuts: np.ndarray, rows: np.ndarray, cu_seqlens: np.ndarray) -> _Ranges:
        ends = np.concatenate([[0], rows.cumsum()])
        edges, borders = ends[cuts], ends[cu_seqlens]
        within = np.searchsorted(borders, edges[:-1], side="right") - 1
        begins = np.where(edges[:-1] < edges[1:], borders[np.minimum(within, len(borders) - 1)], edges[:-1])
        follows = (edges[:-1] < edges[1:]) & ~np.isin(edges[1:], borders)
        return cls(edges[:-1].tolist(), edges[1:].tolist(), begins.tolist(), follows.tolist())

    def before(self, rank: int) -> int:
        return self.first[rank] - self.begins[rank]

    def wanted(self, source: int, rank: int, reach: int | None) -> tuple[int, int]:
        """(first, last) of the rows of `source` that `rank` needs when it looks `reach` rows back; maybe none."""
        count = self.before(rank) if reach is None else min(reach, self.before(rank))
        first = max(self.first[rank] - count, self.first[source])
        return first, max(first, min(self.first[rank], self.last[source]))


class _Links:
    """Messages to other ranks of the axis. A send is waited for when the next message is due.

    Each method ends in RankFailed when a rank is gone or does not answer in time.
    """

    def __init__(self, axis: Axis, world: World) -> None:
        self._axis, self._world = axis, world
        self._sent: tuple[list[Any], Tensor] | None = None  # with the tensor, which must stay until it has left

    def send(self, tensor: Tensor, peer: int) -> None:
        self.settle()
        tensor = tensor.contiguous()
        with self._during():
            self._sent = self._start([(dist.isend, tensor, peer)]), tensor

    def receive(self, like: Tensor, peer: int) -> Tensor:
        buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.exchange([], [(buffer, peer)])
        return buffer

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Sends and receives (tensor, peer), all at once, and waits for them. Receives fill contiguous tensors."""
        self.settle()
        messages = [(dist.isend, tensor.contiguous(), peer) for tensor, peer in sends]
        with self._during():
            for work in self._start([*messages, *((dist.irecv, buffer, peer) for buffer, peer in receives)]):
                work.wait()

    def settle(self) -> None:
        """Waits until what was sent has left."""
        if self._sent is not None:
            with self._during():
                for work in self._sent[0]:
                    work.wait()
            self._sent = None

    def _start(self, messages: list[tuple[Any, Tensor, int]]) -> list[Any]:
        """Starts messages of contiguous tensors; a backend may join them into one work."""
        group = self._axis.group
        operations = [dist.P2POp(kind, tensor, group=group, group_peer=peer) for kind, tensor, peer in messages]
        return dist.batch_isend_irecv(operations) if operations else []

    def _during(self) -> AbstractContextManager[None]:
        return self._world.during("exchanging rows or states with context neighbours")


class _RowsBefore(torch.autograd.Function):
    """Own rows [n, ...] -> the rows before them on other ranks [m, ...]; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, communicator: _Communicator, reach: int | None) -> Tensor:
        ctx.communicator, ctx.reach, ctx.n = communicator, reach, rows.shape[0]
        count = communicator.before if reach is None else min(reach, communicator.before)
        out = rows.new_empty(count, *rows.shape[1:])
        sends = [(rows[part], peer) for part, peer in communicator.gives(reach)]
        communicator.links.exchange(sends, [(out[part], peer) for part, peer in communicator.gets(reach)])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        communicator: _Communicator = ctx.communicator
        out = grad.new_zeros(ctx.n, *grad.shape[1:])
        parts = [
            (part, grad.new_empty(part.stop - part.start, *grad.shape[1:]), peer)
            for part, peer in communicator.gives(ctx.reach)
        ]
        sends = [(grad[part], peer) for part, peer in communicator.gets(ctx.reach)]
        communicator.links.exchange(sends, [(buffer, peer) for _, buffer, peer in parts])
        for part, buffer, _ in parts:
            out[part] += buffer
        return out, None, None


@dataclass(frozen=True)
class _Communicator:
    """A `ContextCommunicator` for one micro-batch."""

    ranges: _Ranges
    rank: int
    links: _Links

    @property
    def before(self) -> int:
        return self.ranges.before(self.rank)

    @property
    def continues(self) -> bool:
        return self.ranges.follows[self.rank]

    def rows_before(self, rows: Tensor, reach: int | None = None) -> Tensor:
        return _RowsBefore.apply(rows, self, reach)

    def receive(self, like: Tensor, *, right: bool = False) -> Tensor:
        return self.links.receive(like, self.rank + (1 if right else -1))

    def send(self, tensor: Tensor, *, right: bool = False) -> None:
        self.links.send(tensor, self.rank + (1 if right else -1))

    def gives(self, reach: int | None) -> list[tuple[slice, int]]:
        """(own rows, rank that needs them) when every rank looks `reach` rows back."""
        found = []
        for peer in range(self.rank + 1, len(self.ranges.first)):
            first, last = self.ranges.wanted(self.rank, peer, reach)
            if first < last:
                found.append((slice(first - self.ranges.first[self.rank], last - self.ranges.first[self.rank]), peer))
        return found

    def gets(self, reach: int | None) -> list[tuple[slice, int]]:
        """(place among the rows before this rank's, rank that has them) when it looks `reach` rows back."""
        found, place = [], 0
        for peer in range(self.rank):
            first, last = self.ranges.wanted(peer, self.rank, reach)
            if first < last:
                found.append((slice(place, place + last - first), peer))
                place += last - first
        return found


class ContextParallel:
    """The ranks of a learner that share every micro-batch, each with its own copy of the model."""

    def __init__(self, axis: Axis, world: World, *, pair: float = 0.0) -> None:
        """All ranks of the axis, which is one of `world`, make theirs together.

        pair: what a (query, key) pair of MLA costs, in rows of everything else (`pair_cost` of the model).
        """
        self.rank, self.size, self.pair = axis.rank, axis.size, pair
        self._axis, self._world = axis, world
        self._links = _Links(axis, world)
        # NCCL wants every rank in a group's first call, and later messages have two; a barrier would guess a device.
        world.sum(torch.zeros(1, device=world.device), axis)

    def split(self, batch: TrainBatch, placeholder: int, cuts: np.ndarray | None = None) -> ContextShare:
        """This rank's share of a packed micro-batch, which all ranks give alike. Sends nothing.

        placeholder: the id that stands for an image; all rows of an image stay on one rank.
        cuts int64 [size + 1]: token boundaries of the ranks; by default those of `balanced_cuts`. Raises ContextError.
        """
        if self.size == 1:
            return ContextShare.of(batch, placeholder, slice(0, batch.tokens))
        rows = batch.rows_per_token(placeholder)
        cu = batch.cu_seqlens.astype(np.int64)
        cuts = balanced_cuts(rows, cu, self.size, self.pair) if cuts is None else np.asarray(cuts, np.int64)
        _check(cuts, self.size, batch.tokens)
        communicator = _Communicator(_Ranges.of(cuts, rows, cu), self.rank, self._links)
        first, last = int(cuts[self.rank]), int(cuts[self.rank + 1])
        tokens = slice(first, last) if first < last else slice(0, 1)
        return ContextShare.of(batch, placeholder, tokens, communicator, counted=first < last)

    def sum(self, tensor: Tensor) -> None:
        """Sums a tensor over the ranks in place; a collective."""
        if self.size > 1:
            self._links.settle()
            self._world.sum(tensor, self._axis)


def _check(cuts: np.ndarray, ranks: int, tokens: int) -> None:
    """Raise ContextError unless the cuts rise from 0 to all tokens, ranks without any coming last."""
    sizes = np.diff(cuts)
    if cuts.shape != (ranks + 1,) or cuts[0] != 0 or cuts[-1] != tokens or (sizes < 0).any():
        raise ContextError(
            f"cuts {cuts.tolist()[:9]} must be {ranks + 1} boundaries that rise from 0 to {tokens} tokens"
        )
    if (np.diff((sizes > 0).astype(int)) > 0).any():
        raise ContextError(
            f"cuts {cuts.tolist()[:9]} leave out a rank before others that have tokens; leave out the last"
        )
