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

from k3rl.parallel.mesh import Axis, Mesh, expert_run

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


def plan_exchange(ids: Tensor, starts: Sequence[int]) -> SendPlan:
    """ids [N, k] -> who gets what, where destination r holds the experts from starts[r] up to the next start."""
    edges = torch.tensor(list(starts[1:]), dtype=ids.dtype, device=ids.device)
    owner = torch.bucketize(ids.contiguous(), edges, right=True)
    hit = torch.zeros(len(ids), len(starts), dtype=torch.int64, device=ids.device)
    hit.scatter_(1, owner, 1)
    pairs = hit.t().nonzero()
    flat = owner.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    place = (hit.cumsum(0) - 1).gather(1, owner).reshape(-1)
    return SendPlan(
        rows=pairs[:, 1],
        row_counts=hit.sum(0),
        order=order,
        counts=torch.bincount(flat, minlength=len(starts)),
        place=place[order],
        expert=ids.reshape(-1)[order],
    )


class ExpertExchange:
    """One trip of a layer's rows (an `Exchange`)."""

    def __init__(self, parallel: ExpertParallel, ids: Tensor, weights: Tensor) -> None:
        self._parallel = parallel
        sent = plan_exchange(ids, parallel.starts)
        self._sent_rows, self._order = sent.rows, sent.order
        numbers = torch.stack([sent.row_counts, sent.counts], dim=1)
        ones = [1] * parallel.axis.size
        coming = parallel.all_to_all(numbers, ones, ones)
        (out_rows, out), (in_rows, in_) = numbers.t().tolist(), coming.t().tolist()
        self._row_splits, self._splits = (out_rows, in_rows), (out, in_)
        note = torch.stack([sent.place, sent.expert], dim=1).to(torch.int32).view(torch.uint8)
        weight = weights.reshape(-1, 1).index_select(0, sent.order)
        notes = parallel.all_to_all(torch.cat([note, weight.view(torch.uint8)], dim=1), out, in_)
        orders = notes[:, :_NOTE].contiguous().view(torch.int32).long()
        first = torch.repeat_interleave(
            coming[:, 0].cumsum(0) - coming[:, 0], coming[:, 1], output_size=sum(in_)
        )  # of each sender's rows
        local = orders[:, 1] - parallel.experts.start
        self._sorted = torch.sort(local, stable=True).indices
        self._unsorted = torch.empty_like(self._sorted)
        self._unsorted[self._sorted] = torch.arange(len(local), device=ids.device)
        self._reads = (orders[:, 0] + first)[self._sorted]
        self.weights = notes[:, _NOTE:].contiguous().view(weights.dtype).view(-1)[self._sorted]
        self.counts: list[int] = torch.bincount(local, minlength=len(parallel.experts)).tolist()

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
        self.starts = [expert_run(n_experts, rank, self.axis.size).start for rank in range(self.axis.size)]

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
