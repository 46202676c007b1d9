"""Sums of gradients over the ranks that hold a parameter, each on the rank that owns it.

Where every rank replays captured steps, what will be sent is known before the backward: the reduction is then launched
behind it, while the host has seen nothing of it yet, and may overlap it. Elsewhere ranks first compare who has which
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from k3rl.model import BankGradients
from k3rl.optim import master_dtype
from k3rl.parallel.flat_bucket import FlatBucket, flat_buckets, layout_digest, reduce_to_owners
from k3rl.parallel.side_stream import side_stream
from k3rl.parallel.zero import Replicas, Shards


class GradientReduction:
    """The gradients of the parameters of `shards`, on one rank. `launch` and `finish` are collectives of all ranks.

    overlap: on a GPU, `launch` sums the gradients of a layer's experts while the backward is at the layers before it.
    """

    def __init__(self, shards: Shards, *, overlap: bool = False) -> None:
        self._shards, self._experts, self._world = shards, shards.experts, shards.mesh.world
        self._others = [parameter for name, parameter in shards.params.items() if name not in shards.owned]
        self._of_experts: dict[tuple[int | None, str, int], list[FlatBucket]] = {}
        self._planned: list[tuple[BankGradients | None, list[FlatBucket]]] | None = None
        self._planned_for = 0  # parameters with a place
        self.launched = False  # for this step
        self._cleared: torch.cuda.Event | None = None  # since when sums hold nothing of the step before
        self._overlaps = overlap and self._world.device.type == "cuda"
        for sums in self._experts.sums if self._overlaps else ():
            sums.done = torch.cuda.Event(external=True)

    def zero_grad(self, *, leaves: bool = True) -> None:
        """Forgets every gradient. Sums of experts at fixed addresses are zero afterwards; leaves: see `clear_all`."""
        self.launched = False
        for parameter in self._experts.by_autograd:
            parameter.grad = None
        self._experts.clear(leaves=leaves)
        if self._overlaps:
            self._cleared = torch.cuda.current_stream().record_event()

    def collect(self) -> None:
        """Gives experts their `.grad` after backwards, where rows were counted on the device."""
        self._experts.attach()

    # -- behind the backward --------------------------------------------------------------------------------------

    def plan(self, places: Mapping[nn.Parameter, Tensor]) -> int:
        """What `launch` will send: a number that must be equal on all ranks, or none of them may call it.

        places: where the gradient of each parameter that is no routed expert adds up, at fixed addresses; others must
        have none. Nothing is sent.
        """
        if self._planned is None or self._planned_for != len(places):
            self._planned, self._planned_for = self._by_bank(places), len(places)
        return layout_digest([bucket for _, buckets in self._planned for bucket in buckets])

    def _by_bank(self, places: Mapping[nn.Parameter, Tensor]) -> list[tuple[BankGradients | None, list[FlatBucket]]]:
        """(bank, its buckets) in the order in which a backward comes by, and the buckets of everything else."""
        params, views = self._shards.params, self._experts.views
        of_bank = {leaf: sums for sums in self._experts.sums for leaf in sums.leaves}
        found: dict[BankGradients | None, list[FlatBucket]] = {sums: [] for sums in reversed(self._experts.sums)}
        found[None] = []
        for replicas in self._shards.replicas:
            for owner, members in self._shards.by_owner(replicas):
                there = [name for name in members if name in views or params[name] in places]
                by_bank: dict[BankGradients | None, list[tuple[Tensor, bool]]] = {}
                for name in there:
                    place = views[name] if name in views else places[params[name]]
                    by_bank.setdefault(of_bank.get(params[name]), []).append((place.view(-1), True))
                for bank, tensors in by_bank.items():
                    found[bank] += flat_buckets(tensors, owner, replicas.axis.group)
        return list(found.items())

    @torch.no_grad()
    def launch(self) -> None:
        """`finish` as far as the host need not wait for the device: behind the backwards that were queued.

        All ranks have given equal numbers from `plan`. `finish` completes it.
        """
        assert self._planned is not None
        if self._experts.sums:
            self._experts.count_rows()
            self._world.maximum(self._experts.rows, self._shards.mesh.replicas)
        if self._overlaps:
            self._reduce_by_bank(self._planned)
        else:
            reduce_to_owners(self._world, [bucket for _, buckets in self._planned for bucket in buckets])
        self.launched = True

    def _reduce_by_bank(self, planned: Sequence[tuple[BankGradients | None, list[FlatBucket]]]) -> None:
        """Sums each bank's gradients on the side stream, once the last backward has added to it."""
        current = torch.cuda.current_stream()
        side = side_stream(current.device_index)
        if self._cleared is not None:  # of a rank without micro-batches no backward of this step records `done`
            side.wait_event(self._cleared)
        for bank, buckets in planned:
            if bank is None:
                current.wait_stream(side)
                reduce_to_owners(self._world, buckets)
                return
            assert bank.done is not None
            side.wait_event(bank.done)
            with torch.cuda.stream(side):
                reduce_to_owners(self._world, buckets)

    # -- after the backward ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Sums gradients over the ranks that hold a parameter. Owners get the sum, others are left without.

        A parameter that no rank has a gradient for keeps None. Sums are float32 or wider, where the gradients are.
        """
        self.collect()  # after `launch` those that any rank has
        if not self.launched:
            for replicas in self._shards.replicas:
                reduce_to_owners(self._world, self._agreed(replicas))
            if self._experts.sums:  # a captured step of the optimizer reads them
                self._world.maximum(self._experts.rows, self._shards.mesh.replicas)
        self.launched = False
        for parameter in self._others:
            if parameter.grad is not None:
                parameter.grad = None

    def _agreed(self, replicas: Replicas) -> list[FlatBucket]:
        """The buckets of these parameters after a look at which of them have a gradient on any rank."""
        params, views = self._shards.params, self._experts.views
        grads = [params[name].grad is not None for name in replicas.names]
        present = torch.tensor(grads, dtype=torch.int32, device=self._world.device)
        self._world.maximum(present, replicas.axis)
        used = {name for name, seen in zip(replicas.names, present.tolist(), strict=True) if seen}
        for name in used:
            self._have_gradient(name)
        found: list[FlatBucket] = []
        for owner, members in self._shards.by_owner(replicas):
            found += self._buckets_of_experts(owner, members, replicas)
            own = (params[name].grad for name in members if name in used and name not in views)
            found += flat_buckets(
                ((grad.view(-1), False) for grad in own if grad is not None), owner, replicas.axis.group
            )
        return found

    def _buckets_of_experts(self, owner: int | None, names: Sequence[str], replicas: Replicas) -> list[FlatBucket]:
        """The buckets of those of these that are in a bank, whose sums are there without a gradient too."""
        key = owner, names[0] if names else "", len(names)
        if key not in self._of_experts:
            views = (self._experts.views[name].view(-1) for name in names if name in self._experts.views)
            self._of_experts[key] = list(flat_buckets(((view, True) for view in views), owner, replicas.axis.group))
        return self._of_experts[key]

    def _have_gradient(self, name: str) -> None:
        """Gives a parameter that another rank has a gradient for zeros of its own."""
        parameter = self._shards.params[name]
        if parameter.grad is None:
            view = self._experts.views.get(name)
            parameter.grad = torch.zeros_like(parameter, dtype=master_dtype(parameter.dtype)) if view is None else view
        elif not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()
