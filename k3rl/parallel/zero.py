"""Who owns which master: optimizer state cut over ranks by whole matrices, as Newton-Schulz needs them whole.

A rank holds the values of every parameter that it computes with, but masters and optimizer state only of those it
owns. A step reduces each gradient to its owner, the owner updates, and sends the shipped value back. Experts have
owners among the ranks that hold them, everything else among all ranks; each parameter has one owner.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.model import K3ForCausalLM
from k3rl.model.bank_gradients import clear_all
from k3rl.optim import NonFiniteGradient, ParamInfo, PerHeadMuon
from k3rl.optim.buckets import fill_buckets, master_dtype, storage_kind
from k3rl.optim.joined import joined
from k3rl.optim.newton_schulz import STEPS
from k3rl.parallel.mesh import Mesh, expert_run
from k3rl.parallel.world import World

FLOPS_PER_BYTE = 100.0  # of a step: what an accelerator's matrix units do while a byte of memory moves
_MUON_BYTES, _ADAMW_BYTES = 20, 28  # moved per element of float32: gradient, master, momenta, read and written
_MESSAGE_ELEMENTS = 1 << 25  # of one reduction or broadcast
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_NUMBERS = re.compile(r"(\d+)")
_LARGE = 1 << 20  # numbers of a tensor that is a message by itself


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
class Share:
    """One parameter to be owned: its cost and the ranks that may own it."""

    name: str
    cost: float
    ranks: tuple[int, ...]


def assign_owners(shares: Iterable[Share], size: int) -> dict[str, int]:
    """name -> owner among `size` ranks, balanced by cost; the same on every rank.

    Those with the fewest possible owners first, then the costliest first, each to the least loaded rank that may
    have it. Then parameters of one cost change owners among each other, so that each has a run of neighbours.
    """
    load = [0.0] * size
    alike: dict[tuple[tuple[int, ...], float], list[tuple[list[str | int], str, int]]] = {}
    for share in sorted(shares, key=lambda s: (len(s.ranks), -s.cost, s.name)):
        owner = min(share.ranks, key=lambda rank: (load[rank], rank))
        load[owner] += share.cost
        alike.setdefault((share.ranks, share.cost), []).append((_places(share.name), share.name, owner))
    owners: dict[str, int] = {}
    for members in alike.values():  # neighbours among equals, as the experts of a layer, go to one rank
        names = [name for _, name, _ in sorted(members)]
        owners |= zip(names, sorted(owner for _, _, owner in members), strict=True)
    return owners


def _places(name: str) -> list[str | int]:
    """A name as it sorts in official order: numbers by their value."""
    return [int(word) if word.isdigit() else word for word in _NUMBERS.split(name)]


def shares_of(model: K3ForCausalLM, infos: Mapping[str, ParamInfo], mesh: Mesh) -> list[Share]:
    """Every trained parameter of the whole model, those of other ranks' experts too, in official order."""
    data, expert, context = mesh.shape
    everyone = tuple(range(mesh.world.size))
    found: list[Share] = []
    held = model.experts.start
    for name, parameter in model.trained_parameters():
        if name not in infos:
            continue
        cost = step_cost(infos[name], parameter.shape)
        match = _EXPERT.search(name)
        if match is None:
            found.append(Share(name, cost, everyone))
        elif int(match[1]) == held:  # stands for the same matrix of every expert
            for place in range(expert):
                ranks = tuple((d * expert + place) * context + c for d in range(data) for c in range(context))
                numbers = expert_run(model.config.num_experts, place, expert)
                found += [Share(_EXPERT.sub(f".experts.{n}.", name), cost, ranks) for n in numbers]
    return found


class Shards:
    """The owners of a model's parameters on a mesh. Its methods are collectives of all ranks.

    owned: names whose masters are here. counted: names whose owner this rank is; over all ranks each name once.
    sharded False leaves all masters on every rank, which then all take the same step.
    """

    def __init__(self, model: K3ForCausalLM, infos: Mapping[str, ParamInfo], mesh: Mesh, *, sharded: bool) -> None:
        self._mesh, self._world, self._sharded = mesh, mesh.world, sharded
        self.params = {name: p for name, p in model.trained_parameters() if name in infos}
        for parameter in self.params.values():
            # What micro-batches add up to is kept wider than bf16, in which small ones would be lost beside the sum.
            parameter.grad_dtype = master_dtype(parameter.dtype)
        self._keep_sums(model)
        shares = shares_of(model, infos, mesh)
        self.names = [share.name for share in shares]
        self.owners = assign_owners(shares, mesh.world.size)
        self.counted = {name for name in self.params if self.owners[name] == mesh.world.rank}
        self.owned = self.counted if sharded else set(self.params)
        experts = [name for name in self.params if _EXPERT.search(name)]
        rest = [name for name in self.params if not _EXPERT.search(name)]
        self._kinds = [
            (names, ranks, group)
            for names, ranks, group in (
                (experts, mesh.replicas.ranks, mesh.replicas.group),
                (rest, tuple(range(mesh.world.size)), mesh.world.group),
            )
            if group is not None and names
        ]

    def _keep_sums(self, model: K3ForCausalLM) -> None:
        """Lets each bank of experts that trains add up its own gradients."""
        banks = [part.bank for part in model.moe_parts()]
        trains = any(_EXPERT.search(name) for name in self.params)
        counts = [bank.experts for bank in banks]
        # One tensor for all banks, so that the host reads once.
        self._rows = torch.zeros(sum(counts) if trains else 0, dtype=torch.int32, device=model.device)
        for bank, rows in zip(banks, self._rows.split(counts) if trains else [None] * len(banks), strict=True):
            bank.keep_sums(rows)
        self._sums = [bank.sums for bank in banks if bank.sums is not None]
        self._banks = [bank for bank in banks if bank.sums is not None]
        by_leaf = {leaf: view for sums in self._sums for leaf, view in sums.places()}
        self._views = {name: by_leaf[p] for name, p in self.params.items() if p in by_leaf}
        self._ordered: dict[tuple[str, int], list[tuple[int | None, list[str]]]] = {}
        summed = {leaf for sums in self._sums for leaf in sums.leaves}
        self._by_autograd = [parameter for parameter in self.params.values() if parameter not in summed]

    def zero_grad(self, *, leaves: bool = True) -> None:
        """Forgets every gradient. Sums at fixed addresses (`BankGradients`) are zero afterwards; leaves: see there."""
        for parameter in self._by_autograd:
            parameter.grad = None
        clear_all(self._sums, leaves=leaves)

    def expect(self, optimizer: PerHeadMuon | None, maximum: float) -> Hashable:
        """What `collect_gradients` and `clip_grad_norm_` are about to do, as far as it goes while the device is at the
        backward: leaves of experts as after the step before, and with an optimizer its norm, for `expected` there."""
        for sums in self._sums:
            sums.expect()
        return None if optimizer is None or self._world.size > 1 else optimizer.expect_clip(maximum)

    def collect_gradients(self) -> None:
        """Gives the leaves of experts their `.grad` after backwards, where rows were counted on the device."""
        if self._sums:
            counts = self._rows.tolist()
            for sums in self._sums:
                sums.attach(counts[: len(sums.rows)])
                del counts[: len(sums.rows)]

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold a parameter. Owners get the sum, others are left without.

        A parameter that no rank has a gradient for keeps None. Sums are float32 or wider, where the gradients are: what
        is large, as a bank of experts, is a message as it lies, and small ones are copied into one and back. Messages
        are all under way before the first one is waited for.
        """
        self.collect_gradients()
        for names, ranks, group in self._kinds:
            grads = [self.params[name].grad is not None for name in names]
            present = torch.tensor(grads, dtype=torch.int32, device=self._world.device)
            self._world.maximum(present, group)
            used = {name for name, seen in zip(names, present.tolist(), strict=True) if seen}
            for name in used:
                self._have_gradient(name)
            started = [
                self._start(owner, [name for name in members if name in used or name in self._views], group)
                for owner, members in self._owned_by(names, ranks)
            ]
            with self._world.during("summing gradients"):
                for work, _ in itertools.chain.from_iterable(started):
                    work.wait()
            for (owner, members), messages in zip(self._owned_by(names, ranks), started, strict=True):
                if owner in (None, self._world.rank):
                    for _, back in messages:
                        back()
                else:
                    for name in members:
                        self.params[name].grad = None

    def _owned_by(self, names: Sequence[str], ranks: Sequence[int]) -> list[tuple[int | None, list[str]]]:
        """(owner, its names, those stored alike together) of these; owner None when every rank keeps the masters."""
        key = names[0], len(names)
        if key not in self._ordered:
            found: dict[int | None, list[str]] = {owner: [] for owner in (ranks if self._sharded else [None])}
            for name in sorted(names, key=storage_kind):
                found[self.owners[name] if self._sharded else None].append(name)
            self._ordered[key] = list(found.items())
        return self._ordered[key]

    def _have_gradient(self, name: str) -> None:
        """Gives a parameter that another rank has a gradient for zeros of its own."""
        parameter = self.params[name]
        if parameter.grad is None:
            view = self._views.get(name)
            parameter.grad = torch.zeros_like(parameter, dtype=master_dtype(parameter.dtype)) if view is None else view
        elif not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()

    def _sum_of(self, name: str) -> Tensor:
        """What is to be summed for a parameter. An expert's place in its bank is there without a gradient too."""
        grad = self.params[name].grad
        if grad is None:
            return self._views[name].view(-1)
        return grad.view(-1)

    def _start(
        self, owner: int | None, names: Sequence[str], group: dist.ProcessGroup | None
    ) -> list[tuple[dist.Work, Callable[[], None]]]:
        """Begins to sum gradients on their owner: messages, and what brings each one's sum to where it belongs."""
        found: list[tuple[dist.Work, Callable[[], None]]] = []
        for message, back in self._packed(names, [self._sum_of(name) for name in names]):
            with self._world.during("summing gradients"):
                if owner is None:
                    work = dist.all_reduce(message, group=group, async_op=True)
                else:
                    work = dist.reduce(message, dst=owner, group=group, async_op=True)
            found.append((work, back))
        return found

    def _packed(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Callable[[], None]]]:
        """Messages of flat tensors, and what brings an arrived one back. The same on every rank: what a message is
        follows from shapes, and from where experts lie in their banks."""
        small: dict[torch.dtype, list[Tensor]] = {}
        pairs = zip(names, tensors, strict=True)
        for in_bank, run in itertools.groupby(pairs, key=lambda pair: pair[0] in self._views):
            own = [tensor for _, tensor in run]
            for whole in joined(own) if in_bank else own:  # others as they are, however they happen to lie
                if whole.numel() >= _LARGE:
                    yield whole, _nothing
                else:
                    small.setdefault(whole.dtype, []).append(whole)
        for alike in small.values():
            for start, stop in fill_buckets([tensor.numel() for tensor in alike], _MESSAGE_ELEMENTS):
                pieces = alike[start:stop]
                flat = torch.cat(pieces)

                def back(flat: Tensor = flat, pieces: list[Tensor] = pieces) -> None:
                    torch._foreach_copy_(pieces, list(flat.split([piece.numel() for piece in pieces])))

                yield flat, back

    @torch.no_grad()
    def share_parameters(self) -> None:
        """Gives every rank the owners' values of the parameters it holds."""
        for bank in self._banks:
            bank.matrices()  # which lie joined from here on, on every rank
        for names, ranks, group in self._kinds if self._sharded else ():
            started: list[tuple[dist.Work, Callable[[], None], bool]] = []
            for owner, members in self._owned_by(names, ranks):
                for message, back in self._packed(members, [self.params[name].detach().view(-1) for name in members]):
                    with self._world.during("sending updated parameters"):
                        work = dist.broadcast(message, src=owner, group=group, async_op=True)
                    started.append((work, back, owner != self._world.rank))
            with self._world.during("sending updated parameters"):
                for work, _, _ in started:
                    work.wait()
            for _, back, comes in started:
                if comes:
                    back()

    @torch.no_grad()
    def clip_grad_norm_(self, optimizer: PerHeadMuon, maximum: float, expected: Hashable = None) -> float:
        """Scales reduced gradients so that their norm over all parameters is at most `maximum`, at the latest as the
        next step reads them; the norm before. expected: what `expect` gave since these gradients were summed.

        Raises NonFiniteGradient on every rank, with the first such parameter in official order.
        """
        if self._world.size == 1:
            return optimizer.clip_grad_norm_(maximum, in_step=True, expected=expected)
        square = optimizer.grad_norm(self.counted) ** 2
        total = torch.tensor([square], dtype=torch.float64, device=self._world.device)
        self._world.sum(total)
        norm = math.sqrt(float(total)) if float(total) >= 0 else math.nan
        if not math.isfinite(norm):
            self._refuse_non_finite(optimizer)
        optimizer.scale_gradients(norm, maximum, in_step=True)
        return norm

    def _refuse_non_finite(self, optimizer: PerHeadMuon) -> None:
        found = optimizer.first_non_finite()
        index = len(self.names) if found is None else self.names.index(found[0])
        first = torch.tensor([-index], device=self._world.device)
        self._world.maximum(first)
        facts = torch.zeros(2, dtype=torch.int64, device=self._world.device)
        if found is not None and -int(first) == index:
            facts += torch.tensor(found[1:], device=self._world.device)
        self._world.maximum(facts)
        if -int(first) < len(self.names):
            raise NonFiniteGradient(self.names[-int(first)], int(facts[0]), int(facts[1]))


def _nothing() -> None:
    pass


@torch.no_grad()
def gather_tensors(world: World, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks, whose names differ, on each of them. A collective, for what fits one process."""
    if world.size == 1:
        return dict(own)
    about = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.items()]
    every: dict[str, Tensor] = {}
    for rank, text in enumerate(world.exchange(json.dumps(about))):
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
