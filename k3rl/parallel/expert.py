"""Expert parallelism: rows travel to the ranks that hold their experts, and their results back.

A row goes once to each rank that holds one of its experts, however many it chose there; a result comes back for every
choice, so that the sum over choices has the order that one process uses. All-to-alls have uneven splits: what a rank
sends is what its rows chose, and nothing is padded or dropped.

`plan_exchange` is pure and decides who sends what; `ExpertParallel` moves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.parallel.mesh import Mesh, expert_run
from k3rl.parallel.world import Axis

_NOTE = 8  # bytes before the weight of an assignment: which row, which expert


@dataclass(frozen=True)
class SendPlan:
    """What one rank sends; A = N * k assignments (row, choice), D distinct (row, rank) pairs.

    rows [D]: row of each pair, by destination and then by row; row_counts: pairs for each destination.
    order [A]: assignments by destination, then (row, choice); counts: assignments for each destination.
    place [A]: for each ordered assignment, which of the rows sent to its destination it reads.
    expert [A]: for each ordered assignment, its expert.
    """

    rows: Tensor
    row_counts: Tensor
    order: Tensor
    counts: Tensor
    place: Tensor
    expert: Tensor


@dataclass(frozen=True)
class Reach:
    """Where assignments go: owner [N, k] of each; hit int64 [N, ranks], 1 where a row has any assignment to a rank."""

    owner: Tensor
    hit: Tensor


def reach_of(ids: Tensor, edges: Tensor, ranks: int) -> Reach:
    """ids [N, k]; edges [ranks - 1]: the first expert of each rank but the first."""
    owner = torch.bucketize(ids.contiguous(), edges, right=True)
    hit = torch.zeros(len(ids), ranks, dtype=torch.int64, device=ids.device)
    return Reach(owner, hit.scatter_(1, owner, 1))


def plan_exchange(
    ids: Tensor, starts: Sequence[int], reach: Reach | None = None, pairs: int | None = None
) -> SendPlan:  # fmt: skip
    """ids [N, k] -> who gets what, where destination r holds the experts from starts[r] up to the next start.

    reach, pairs: of these ids, and how many (row, rank) pairs there are, where they are known; with both the host waits
    for nothing.
    """
    ranks = len(starts)
    if reach is None:
        reach = reach_of(ids, torch.tensor(list(starts[1:]), dtype=ids.dtype, device=ids.device), ranks)
    owner, hit = reach.owner, reach.hit
    by_rank = hit.t().reshape(-1)
    total = int(by_rank.sum()) if pairs is None else pairs
    number = torch.arange(len(by_rank), device=ids.device).remainder_(max(1, len(ids)))
    cell = torch.where(by_rank != 0, by_rank.cumsum(0) - 1, total)  # one more cell for what is no pair
    flat = owner.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    place = (hit.cumsum(0) - 1).gather(1, owner).reshape(-1)
    return SendPlan(
        rows=number.new_empty(total + 1).scatter_(0, cell, number)[:total],
        row_counts=hit.sum(0),
        order=order,
        counts=torch.zeros(ranks, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat)),
        place=place[order],
        expert=ids.reshape(-1)[order],
    )


class ExpertExchange:
    """One trip of a layer's rows (an `Exchange`). The host waits for the device once."""

    def __init__(self, parallel: ExpertParallel, ids: Tensor, weights: Tensor) -> None:
        self._parallel = parallel
        reach = reach_of(ids, parallel.edges_on(ids), parallel.axis.size)
        # For each rank: rows that go there, and assignments to each of its experts.
        sent = torch.cat([reach.hit.sum(0).unsqueeze(1), parallel.by_expert(ids)], dim=1)
        ones = [1] * parallel.axis.size
        coming = parallel.all_to_all(sent, ones, ones)
        sums = [torch.stack([table[:, 0], table[:, 1:].sum(1)]) for table in (sent, coming)]
        own = coming[:, 1:].sum(0)[: len(parallel.experts)]
        self.ends = own.cumsum(0).to(torch.int32)
        read = torch.cat([torch.cat(sums).reshape(-1), own]).tolist()
        size = parallel.axis.size
        out_rows, out, in_rows, in_ = (read[start : start + size] for start in range(0, 4 * size, size))
        self.counts: list[int] = read[4 * size :]
        self._row_splits, self._splits = (out_rows, in_rows), (out, in_)
        plan = plan_exchange(ids, parallel.starts, reach, sum(out_rows))
        self._sent_rows, self._order = plan.rows, plan.order
        note = torch.stack([plan.place, plan.expert], dim=1).to(torch.int32).view(torch.uint8)
        weight = weights.reshape(-1, 1).index_select(0, plan.order)
        notes = parallel.all_to_all(torch.cat([note, weight.view(torch.uint8)], dim=1), out, in_)
        orders = notes[:, :_NOTE].contiguous().view(torch.int32).long()
        before = sums[1][0].cumsum(0) - sums[1][0]
        first = torch.repeat_interleave(before, sums[1][1], output_size=sum(in_))  # of each sender's rows
        local = orders[:, 1] - parallel.experts.start
        self._sorted = torch.sort(local, stable=True).indices
        self._unsorted = torch.empty_like(self._sorted)
        self._unsorted[self._sorted] = torch.arange(len(local), device=ids.device)
        self._reads = (orders[:, 0] + first)[self._sorted]
        self.weights = notes[:, _NOTE:].contiguous().view(weights.dtype).view(-1)[self._sorted]

    def dispatch(self, rows: Tensor) -> Tensor:
        """Rows [N, C] -> [R, C], in expert order; each row travels once to each rank that reads it."""
        arrived = self._parallel.all_to_all(rows.index_select(0, self._sent_rows), *self._row_splits)
        return arrived.index_select(0, self._reads)

    def combine(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Parts [R, C] in expert order -> each [N * k, C] in (row, choice) order, where its rows came from."""
        out, in_ = self._splits
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        arrived = self._parallel.all_to_all(rows.index_select(0, self._unsorted), in_, out)
        back = torch.empty_like(arrived)
        back[self._order] = arrived
        return back.split([part.shape[1] for part in parts], dim=1)


class ExpertParallel:
    """The ranks of an expert axis (a `Communicator`); `experts` is the run that this one holds.

    sent_bytes: what left this rank for others so far.
    """

    def __init__(self, mesh: Mesh, n_experts: int) -> None:
        """Raises ConfigError when there are more ranks than experts."""
        self.axis: Axis = mesh.expert
        self._world = mesh.world
        self.experts = mesh.experts(n_experts)
        self.sent_bytes = 0
        runs = [expert_run(n_experts, rank, self.axis.size) for rank in range(self.axis.size)]
        self.starts = [run.start for run in runs]
        self._most = max(map(len, runs))
        cells = [rank * self._most + place for rank, run in enumerate(runs) for place in range(len(run))]
        self._edges, self._cells = torch.tensor(self.starts[1:]), torch.tensor(cells)

    def edges_on(self, ids: Tensor) -> Tensor:
        """The first expert of each rank but the first, where ids are."""
        if self._edges.device != ids.device:
            self._edges, self._cells = self._edges.to(ids.device), self._cells.to(ids.device)
        return self._edges

    def by_expert(self, ids: Tensor) -> Tensor:
        """Assignments to each expert [ranks, most experts of a rank], zero behind the last one of a rank."""
        self.edges_on(ids)
        cells = self._cells.index_select(0, ids.reshape(-1))
        found = torch.zeros(self.axis.size * self._most, dtype=torch.int64, device=ids.device)
        return found.scatter_add_(0, cells, torch.ones_like(cells)).view(self.axis.size, self._most)

    def exchange(self, expert_ids: Tensor, weights: Tensor) -> ExpertExchange:
        """The trip of rows with these experts [N, k] and weights [N, k]; a collective."""
        return ExpertExchange(self, expert_ids, weights)

    def all_to_all(self, tensor: Tensor, out: Sequence[int], coming: Sequence[int]) -> Tensor:
        """Rows of `tensor`, `out[r]` of them for rank r -> the `coming[r]` rows from each rank, in rank order.

        Bytes are sent, so any dtype travels on any backend.
        """
        width = tensor.shape[1:].numel()
        result = torch.empty(sum(coming), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        size = width * tensor.element_size()
        self.sent_bytes += (sum(out) - out[self.axis.rank]) * size
        with self._world.during("exchanging rows with experts"):
            dist.all_to_all_single(
                result.view(-1).view(torch.uint8),
                tensor.contiguous().view(-1).view(torch.uint8),
                [rows * size for rows in coming],
                [rows * size for rows in out],
                group=self.axis.group,
            )
        return result
