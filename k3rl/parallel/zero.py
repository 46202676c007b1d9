"""Who owns which master: optimizer state sharded over ranks by whole matrices, as Newton-Schulz needs them whole.

A rank holds the values of every parameter that it computes with, but masters and optimizer state only of those it
owns. A step reduces each gradient to its owner (gradient_reduction.py), the owner updates, and sends the stored value
back. Experts have owners among the ranks that hold them, everything else among all ranks; each parameter has one owner.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.model import K3ForCausalLM
from k3rl.optim import STEPS, ParamInfo, master_dtype, storage_kind
from k3rl.parallel.expert_gradients import EXPERT, ExpertGradients
from k3rl.parallel.flat_bucket import FlatBucket, broadcast_from_owners, flat_buckets
from k3rl.parallel.mesh import Mesh, expert_run
from k3rl.parallel.world import Axis, World

FLOPS_PER_BYTE = 100.0  # of a step: what an accelerator's matrix units do while a byte of memory moves
_MUON_BYTES, _ADAMW_BYTES = 20, 28  # moved per element of float32: gradient, master, momenta, read and written
_NUMBERS = re.compile(r"(\d+)")


def step_cost(info: ParamInfo, shape: Sequence[int]) -> float:
    """Bytes that a step moves for one parameter, plus Newton-Schulz FLOPs as the bytes that take as long.

    A block [r, c], r <= c, takes 4 r^2 c + 2 r^3 FLOPs in each of the five iterations.
    """
    elements = math.prod(shape)
    if info.group != "muon":
        return float(_ADAMW_BYTES * elements)
    flops = 0.0
    for rows in info.row_blocks:
        r, c = sorted((rows, shape[1]))
        flops += STEPS * (4.0 * r * r * c + 2.0 * r**3)
    return _MUON_BYTES * elements + flops / FLOPS_PER_BYTE


@dataclass(frozen=True)
class Candidate:
    """One parameter to be owned: its cost and the ranks that may own it."""

    name: str
    cost: float
    ranks: tuple[int, ...]


def assign_owners(candidates: Iterable[Candidate], size: int) -> dict[str, int]:
    """name -> owner among `size` ranks, balanced by cost; the same on every rank.

    Those with the fewest possible owners first, then the costliest first, each to the least loaded rank that may
    have it. Then parameters of one cost change owners among each other, so that each has a run of neighbours.
    """
    load = [0.0] * size
    heaps: dict[tuple[int, ...], list[tuple[float, int]]] = {}  # (load, rank) of those ranks, or an earlier load
    alike: dict[tuple[tuple[int, ...], float], list[tuple[list[str | int], str, int]]] = {}
    for one in sorted(candidates, key=lambda s: (len(s.ranks), -s.cost, s.name)):
        if (heap := heaps.get(one.ranks)) is None:
            heap = heaps[one.ranks] = [(load[rank], rank) for rank in one.ranks]
            heapq.heapify(heap)
        while load[owner := heap[0][1]] > heap[0][0]:  # another set of ranks has given it something since
            heapq.heapreplace(heap, (load[owner], owner))
        load[owner] += one.cost
        heapq.heapreplace(heap, (load[owner], owner))
        alike.setdefault((one.ranks, one.cost), []).append((_sort_key(one.name), one.name, owner))
    owners: dict[str, int] = {}
    for members in alike.values():  # neighbours among equals, as the experts of a layer, go to one rank
        names = [name for _, name, _ in sorted(members)]
        owners |= zip(names, sorted(owner for _, _, owner in members), strict=True)
    return owners


def _sort_key(name: str) -> list[str | int]:
    """A name as it sorts in official order: numbers by their value."""
    return [int(word) if word.isdigit() else word for word in _NUMBERS.split(name)]


def candidates_of(model: K3ForCausalLM, infos: Mapping[str, ParamInfo], mesh: Mesh) -> list[Candidate]:
    """Every trained parameter of the whole model, those of other ranks' experts too, in official order."""
    named = ((name, parameter.shape) for name, parameter in model.trained_parameters() if name in infos)
    return candidates(named, infos, model.config.num_experts, mesh.shape, held=model.experts.start)


def candidates(
    named: Iterable[tuple[str, Sequence[int]]],
    infos: Mapping[str, ParamInfo],
    num_experts: int,
    shape: tuple[int, int, int],
    *,
    held: int = 0,
) -> list[Candidate]:
    """`candidates_of` parameters by name and shape, on a mesh of (data, expert, context) ranks. held: the expert that
    stands for all of its layer; others may be missing. Costs are whole numbers, so that sums of them are exact."""
    data, expert, context = shape
    everyone = tuple(range(math.prod(shape)))
    found: list[Candidate] = []
    for name, size in named:
        cost = float(round(step_cost(infos[name], size)))
        match = EXPERT.search(name)
        if match is None:
            found.append(Candidate(name, cost, everyone))
        elif int(match[1]) == held:  # stands for the same matrix of every expert
            for place in range(expert):
                ranks = tuple((d * expert + place) * context + c for d in range(data) for c in range(context))
                numbers = expert_run(num_experts, place, expert)
                found += [Candidate(EXPERT.sub(f".experts.{n}.", name), cost, ranks) for n in numbers]
    return found


@dataclass(frozen=True)
class Replicas:
    """Parameters that the same ranks hold: their names, and those ranks, of which there are several."""

    names: list[str]
    axis: Axis


class Shards:
    """The owners of a model's parameters on a mesh.

    params: what is trained here, by name. names: of the whole model, those of other ranks' experts too, in official
    order. owners: by name. owned: names whose masters are here; counted: names whose owner this rank is, so that over
    all ranks each name comes once. replicas: what is reduced and sent together; what one rank alone holds is in none.
    sharded False leaves all masters on every rank, which then all take the same step.
    """

    def __init__(
        self, model: K3ForCausalLM, infos: Mapping[str, ParamInfo], mesh: Mesh, *, sharded: bool
    ) -> None:  # fmt: skip
        self.mesh, self._sharded = mesh, sharded
        self.params = {name: p for name, p in model.trained_parameters() if name in infos}
        for parameter in self.params.values():
            # What micro-batches add up to is kept wider than bf16, in which small ones would be lost beside the sum.
            parameter.grad_dtype = master_dtype(parameter.dtype)
        self.experts = ExpertGradients(model, self.params)
        candidates = candidates_of(model, infos, mesh)
        self.names = [candidate.name for candidate in candidates]
        self.owners = assign_owners(candidates, mesh.world.size)
        self.counted = {name for name in self.params if self.owners[name] == mesh.world.rank}
        self.owned = self.counted if sharded else set(self.params)
        experts = [name for name in self.params if EXPERT.search(name)]
        rest = [name for name in self.params if not EXPERT.search(name)]
        self.replicas = [
            Replicas(names, axis)
            for names, axis in ((experts, mesh.replicas), (rest, mesh.world.everyone))
            if axis.size > 1 and names
        ]
        self._ordered: dict[str, list[tuple[int | None, list[str]]]] = {}
        self._sent: tuple[tuple[int, ...], list[FlatBucket]] | None = None  # of parameters at these addresses

    def by_owner(self, replicas: Replicas) -> list[tuple[int | None, list[str]]]:
        """(owner, its names, those stored alike together); owner None when every rank keeps the masters."""
        key = replicas.names[0]
        if key not in self._ordered:
            found: dict[int | None, list[str]] = {
                owner: [] for owner in (replicas.axis.ranks if self._sharded else [None])
            }
            for name in sorted(replicas.names, key=storage_kind):
                found[self.owners[name] if self._sharded else None].append(name)
            self._ordered[key] = list(found.items())
        return self._ordered[key]

    @torch.no_grad()
    def share_parameters(self) -> None:
        """Gives every rank the owners' values of the parameters it holds; a collective."""
        for bank in self.experts.banks:
            bank.matrices()  # which lie joined from here on, on every rank
        if not self._sharded or self.mesh.world.size == 1:
            return
        values = {name: parameter.data for name, parameter in self.params.items()}
        addresses = tuple(value.data_ptr() for value in values.values())
        if self._sent is None or self._sent[0] != addresses:
            found: list[FlatBucket] = []
            for replicas in self.replicas:
                for owner, members in self.by_owner(replicas):
                    tensors = ((values[name].view(-1), name in self.experts.views) for name in members)
                    found += flat_buckets(tensors, owner, replicas.axis.group)
            self._sent = addresses, found
        broadcast_from_owners(self.mesh.world, self._sent[1])


@torch.no_grad()
def gather_tensors(world: World, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks, whose names differ, on each of them. A collective, for what fits one process."""
    if world.size == 1:
        return dict(own)
    about = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.items()]
    every: dict[str, Tensor] = {}
    for rank, text in enumerate(world.exchange_once(json.dumps(about))):
        parts = [(name, getattr(torch, kind), torch.Size(shape)) for name, kind, shape in json.loads(text)]
        sizes = [shape.numel() * kind.itemsize for _, kind, shape in parts]
        if not parts:  # it owns nothing, and all ranks know
            continue
        if rank == world.rank:
            flat = torch.cat([t.contiguous().view(-1).view(torch.uint8).to(world.device) for t in own.values()])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=world.device)
        with world.during("gathering state"):
            dist.broadcast(flat, src=rank)
        for (name, kind, shape), piece in zip(parts, flat.split(sizes), strict=True):
            every[name] = piece.clone().view(kind).view(shape)
    return every
