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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3rl.model import K3ForCausalLM
from k3rl.model.bank_gradients import EXPERT_LEAVES, BankGradients, clear_gradients
from k3rl.optim import NonFiniteGradient, ParamInfo, PerHeadMuon
from k3rl.optim.buckets import Banked, master_dtype, storage_kind
from k3rl.optim.newton_schulz import STEPS
from k3rl.parallel import side_stream
from k3rl.parallel.mesh import Mesh, expert_run
from k3rl.parallel.messages import Message, cut, digest
from k3rl.parallel.world import World

FLOPS_PER_BYTE = 100.0  # of a step: what an accelerator's matrix units do while a byte of memory moves
_MUON_BYTES, _ADAMW_BYTES = 20, 28  # moved per element of float32: gradient, master, momenta, read and written
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
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
    sharded False leaves all masters on every rank, which then all take the same step. overlap: `begin_reduction` sums
    the gradients of a layer's experts on a GPU while the backward is at the layers before it.
    """

    def __init__(
        self,
        model: K3ForCausalLM,
        infos: Mapping[str, ParamInfo],
        mesh: Mesh,
        *,
        sharded: bool,
        overlap: bool = False,
    ) -> None:
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
        self._others = [parameter for name, parameter in self.params.items() if name not in self.owned]
        self._of_banks: dict[tuple[int | None, str, int], list[Message]] = {}
        self._promised: list[tuple[BankGradients | None, list[Message]]] | None = None
        self._promised_for = 0  # parameters with a place
        self._begun = False  # a reduction, for this step
        self._overlaps = overlap and mesh.world.device.type == "cuda"
        for sums in self._sums if self._overlaps else ():
            sums.done = torch.cuda.Event(external=True)
        self._shared: tuple[tuple[int, ...], list[Message]] | None = None  # of parameters at these addresses
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

    @property
    def banked(self) -> Banked | None:
        """Where gradients of experts add up, and who has one, for a captured step; None where autograd keeps them."""
        if not self._sums:
            return None
        leaves = [leaf for sums in self._sums for leaf in sums.leaves]
        number = {leaf: place // EXPERT_LEAVES for place, leaf in enumerate(leaves)}
        places = {name: (view, number[self.params[name]]) for name, view in self._views.items()}
        return Banked(self._rows, places)

    def zero_grad(self, *, leaves: bool = True) -> None:
        """Forgets every gradient. Sums at fixed addresses (`BankGradients`) are zero afterwards; leaves: see there."""
        self._begun = False
        for parameter in self._by_autograd:
            parameter.grad = None
        clear_gradients(self._sums, leaves=leaves)

    def expect(self, optimizer: PerHeadMuon | None, maximum: float) -> Hashable:
        """What `collect_gradients` and `clip_grad_norm_` are about to do, as far as it goes while the device is at the
        backward: leaves of experts as after the step before, and with an optimizer its norm, for `expected` there."""
        for sums in self._sums:
            sums.attach_as_before()
        if optimizer is None or (self._world.size > 1 and not self._begun):
            return None
        return optimizer.expect_clip(maximum) if self._world.size == 1 else optimizer.expect_norm()

    def collect_gradients(self) -> None:
        """Gives the leaves of experts their `.grad` after backwards, where rows were counted on the device."""
        if self._sums:
            for sums in self._sums:
                sums.tell()
            counts = self._rows.tolist()
            for sums in self._sums:
                sums.attach(counts[: len(sums.rows)])
                del counts[: len(sums.rows)]

    def promise(self, places: Mapping[nn.Parameter, Tensor]) -> int:
        """What `begin_reduction` will send: a number that must be equal on all ranks, or none of them may call it.

        places: where the gradient of each parameter that is no routed expert adds up, at fixed addresses; others must
        have none. Nothing is sent.
        """
        if self._promised is None or self._promised_for != len(places):
            self._promised, self._promised_for = self._by_bank(places), len(places)
        return digest([message for _, messages in self._promised for message in messages])

    def _by_bank(self, places: Mapping[nn.Parameter, Tensor]) -> list[tuple[BankGradients | None, list[Message]]]:
        """(bank, its messages) in the order in which a backward comes by, and the messages of everything else."""
        of_bank = {leaf: sums for sums in self._sums for leaf in sums.leaves}
        found: dict[BankGradients | None, list[Message]] = {sums: [] for sums in reversed(self._sums)}
        found[None] = []
        for names, ranks, group in self._kinds:
            for owner, members in self._owned_by(names, ranks):
                there = [name for name in members if name in self._views or self.params[name] in places]
                by_bank: dict[BankGradients | None, list[tuple[Tensor, bool]]] = {}
                for name in there:
                    parameter = self.params[name]
                    place = self._views[name] if name in self._views else places[parameter]
                    by_bank.setdefault(of_bank.get(parameter), []).append((place.view(-1), True))
                for bank, tensors in by_bank.items():
                    found[bank] += cut(tensors, owner, group)
        return list(found.items())

    @torch.no_grad()
    def begin_reduction(self) -> None:
        """`reduce_gradients` as far as the host need not wait for the device: behind the backwards that were queued.

        All ranks have given equal numbers from `promise`. `reduce_gradients` completes it.
        """
        assert self._promised is not None
        if self._sums:
            for sums in self._sums:
                sums.tell()
            self._world.maximum(self._rows, self._mesh.replicas.group)
        if self._overlaps:
            self._sum_by_bank(self._promised)
        else:
            self._sum([message for _, messages in self._promised for message in messages])
        self._begun = True

    def _sum_by_bank(self, promised: Sequence[tuple[BankGradients | None, list[Message]]]) -> None:
        """Sums each bank's gradients on a stream of its own, once the last backward has added to it."""
        current = torch.cuda.current_stream()
        side = side_stream.stream(current.device_index)
        for bank, messages in promised:
            if bank is None:
                current.wait_stream(side)
                self._sum(messages)
                return
            assert bank.done is not None
            side.wait_event(bank.done)
            with torch.cuda.stream(side):
                self._sum(messages)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold a parameter. Owners get the sum, others are left without.

        A parameter that no rank has a gradient for keeps None. Sums are float32 or wider, where the gradients are.
        """
        self.collect_gradients()  # after `begin_reduction` those that any rank has
        if not self._begun:
            for names, ranks, group in self._kinds:
                self._sum(self._agreed(names, ranks, group))
            if self._sums and self._world.device.type == "cuda":  # whose steps are captured
                self._world.maximum(self._rows, self._mesh.replicas.group)
        self._begun = False
        for parameter in self._others:
            if parameter.grad is not None:
                parameter.grad = None

    def _agreed(self, names: Sequence[str], ranks: Sequence[int], group: dist.ProcessGroup | None) -> list[Message]:
        """The messages of one kind of parameter after a look at which of them have a gradient on any rank."""
        grads = [self.params[name].grad is not None for name in names]
        present = torch.tensor(grads, dtype=torch.int32, device=self._world.device)
        self._world.maximum(present, group)
        used = {name for name, seen in zip(names, present.tolist(), strict=True) if seen}
        for name in used:
            self._have_gradient(name)
        found: list[Message] = []
        for owner, members in self._owned_by(names, ranks):
            found += self._banked(owner, members, group)
            own = (self.params[name].grad for name in members if name in used and name not in self._views)
            found += cut(((grad.view(-1), False) for grad in own if grad is not None), owner, group)
        return found

    def _banked(
        self, owner: int | None, names: Sequence[str], group: dist.ProcessGroup | None
    ) -> list[Message]:  # fmt: skip
        """The messages of those of these that are in a bank, where their places are there without a gradient too."""
        key = owner, names[0] if names else "", len(names)
        if key not in self._of_banks:
            places = (self._views[name].view(-1) for name in names if name in self._views)
            self._of_banks[key] = list(cut(((place, True) for place in places), owner, group))
        return self._of_banks[key]

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

    def _sum(self, messages: Sequence[Message]) -> None:
        """Sums messages on their owners, where they then lie again."""

        def send(flat: Tensor, owner: int | None, group: dist.ProcessGroup | None, wait: bool) -> dist.Work | None:
            if owner is None:
                return dist.all_reduce(flat, group=group, async_op=not wait)
            return dist.reduce(flat, dst=owner, group=group, async_op=not wait)

        for message, flat in self._sent("summing gradients", messages, send):
            if message.owner in (None, self._world.rank):
                message.back(flat)

    def _sent(
        self,
        what: str,
        messages: Sequence[Message],
        send: Callable[[Tensor, int | None, dist.ProcessGroup | None, bool], dist.Work | None],
    ) -> list[tuple[Message, Tensor]]:
        """Each message and what was sent. All are under way before the first one is waited for.

        A GPU takes those of one group as one: both directions of its links are busy then, whoever the owners are.
        """
        flats = [message.flat() for message in messages]
        pairs = list(zip(messages, flats, strict=True))
        if self._world.device.type == "cuda":
            for group, run in itertools.groupby(pairs, key=lambda pair: pair[0].group):
                with self._world.during(what), self._world.at_once(group):
                    for message, flat in run:
                        send(flat, message.owner, group, True)
            return pairs
        works = []
        for message, flat in pairs:
            with self._world.during(what):
                works.append(send(flat, message.owner, message.group, False))
        with self._world.during(what):
            for work in works:
                if work is not None:
                    work.wait()
        return pairs

    @torch.no_grad()
    def share_parameters(self) -> None:
        """Gives every rank the owners' values of the parameters it holds."""
        for bank in self._banks:
            bank.matrices()  # which lie joined from here on, on every rank
        if not self._sharded or self._world.size == 1:
            return
        values = {name: parameter.data for name, parameter in self.params.items()}
        places = tuple(value.data_ptr() for value in values.values())
        if self._shared is None or self._shared[0] != places:
            found: list[Message] = []
            for names, ranks, group in self._kinds:
                for owner, members in self._owned_by(names, ranks):
                    found += cut(((values[name].view(-1), name in self._views) for name in members), owner, group)
            self._shared = places, found

        def send(flat: Tensor, owner: int | None, group: dist.ProcessGroup | None, wait: bool) -> dist.Work | None:
            return dist.broadcast(flat, src=owner, group=group, async_op=not wait)

        for message, flat in self._sent("sending updated parameters", self._shared[1], send):
            if message.owner != self._world.rank:
                message.back(flat)

    @torch.no_grad()
    def clip_grad_norm_(self, optimizer: PerHeadMuon, maximum: float, expected: Hashable = None) -> float:
        """Scales reduced gradients so that their norm over all parameters is at most `maximum`, at the latest as the
        next step reads them; the norm before. expected: what `expect` gave since these gradients were summed.

        Raises NonFiniteGradient on every rank, with the first such parameter in official order.
        """
        if self._world.size == 1:
            return optimizer.clip_grad_norm_(maximum, in_step=True, expected=expected)
        total = self._own_norm(optimizer, expected).square()
        self._world.sum(total)
        norm = math.sqrt(float(total))
        if not math.isfinite(norm):  # float32 sums overflow where every value is finite
            total = torch.tensor(optimizer.grad_norm(self.counted) ** 2, dtype=torch.float64, device=self._world.device)
            self._world.sum(total)
            norm = math.sqrt(float(total))
        if not math.isfinite(norm):
            self._refuse_non_finite(optimizer)
        optimizer.scale_gradients(norm, maximum, in_step=True)
        return norm

    def _own_norm(self, optimizer: PerHeadMuon, expected: Hashable) -> Tensor:
        """The norm of the gradients that count here, float64 on the device. Where it is a replay the host goes on."""
        if optimizer.captures and len(self.counted) == len(optimizer.params):
            return optimizer.norm_on_device(expected)
        norm = optimizer.grad_norm(self.counted)
        return torch.tensor(norm, dtype=torch.float64, device=self._world.device)

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
