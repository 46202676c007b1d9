"""Gradients that outlive a backward, end to end in few buffers at fixed addresses.

Autograd adds to `.grad` one parameter at a time: a cast and a sum each, hundreds of launches over small tensors. Here a
backward hands over the gradients in the dtype in which it has them, and all of one dtype are added in one pass. A
parameter's `.grad` is a view, and parameters lie in the order in which the optimizer reads them, so that a bucket of it
finds its gradients as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from k3rl.kernels.optim import Table, add_many
from k3rl.model import K3ForCausalLM
from k3rl.optim import fill_buckets, storage_kind, trained

_MOST = 1 << 30  # elements of one buffer


def in_reading_order(model: K3ForCausalLM, owners: Mapping[str, int]) -> list[nn.Parameter]:
    """The trained parameters that are no routed experts, those of one owner side by side, and among them those that
    share an optimizer bucket."""
    experts = {parameter for part in model.moe_parts() for parameter in part.experts.parameters()}
    keyed: list[tuple[tuple[object, ...], nn.Parameter]] = []
    for name, (info, parameter) in trained(model.trained_parameters(), model.config).items():
        if parameter in experts or not isinstance(parameter, nn.Parameter):
            continue
        muon = info.group == "muon"
        shape = (info.segments, parameter.shape[1]) if muon else (info.decay,)
        bucket = not muon, str(parameter.dtype), *map(str, shape), storage_kind(name)
        keyed.append(((owners.get(name, 0), *bucket), parameter))
    return [parameter for _, parameter in sorted(keyed, key=lambda pair: pair[0])]


@contextmanager
def _without_casts(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within the block autograd casts no gradient of these leaves to the dtype of their `.grad`."""
    kinds = [parameter.grad_dtype for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad_dtype = None
        yield
    finally:
        for parameter, kind in zip(parameters, kinds, strict=True):
            parameter.grad_dtype = kind


class _FlatSum:
    """Parameters whose gradients come in one dtype, and their sums [elements]."""

    def __init__(self, parameters: list[nn.Parameter], kind: torch.dtype) -> None:
        sums = parameters[0].grad_dtype or parameters[0].dtype
        device = parameters[0].device
        self.parameters, self.kind = parameters, kind
        sizes = [parameter.numel() for parameter in parameters]
        self.total = torch.zeros(sum(sizes), dtype=sums, device=device)
        self._table = Table(sizes, device)
        self.views = [
            part.view(parameter.shape) for part, parameter in zip(self.total.split(sizes), parameters, strict=True)
        ]

    def add(self, found: dict[nn.Parameter, Tensor]) -> None:
        """Adds the gradients that are there."""
        given = [found.get(parameter) for parameter in self.parameters]
        if any(gradient is not None for gradient in given):
            parts = [
                torch.zeros(parameter.numel(), dtype=self.kind, device=parameter.device)
                if gradient is None
                else gradient.to(self.kind)
                for gradient, parameter in zip(given, self.parameters, strict=True)
            ]
            add_many(self.total, parts, self._table)


class FlatGradients:
    """Sums of the gradients of a model's parameters, but those of its routed experts, whose banks keep their own.

    Which parameters a backward reaches is learned from the first one that reaches them.
    """

    def __init__(self, model: K3ForCausalLM, owners: Mapping[str, int] | None = None) -> None:
        """owners: the rank that each parameter's gradient is summed on, by name."""
        self.parameters = in_reading_order(model, owners or {})
        self._banks = [part.bank for part in model.moe_parts()]
        self._sums: list[_FlatSum] = []
        self._known: set[nn.Parameter] = set()

    @property
    def places(self) -> dict[nn.Parameter, Tensor]:
        """Where the gradient of each parameter that was reached adds up."""
        return {p: view for one in self._sums for p, view in zip(one.parameters, one.views, strict=True)}

    def of(self, loss: Tensor) -> dict[nn.Parameter, Tensor]:
        """The gradients of a loss, for `add`; those of experts are in their banks then."""
        wanted = [parameter for parameter in self.parameters if parameter.requires_grad]
        # A backward goes only where somebody wants a gradient: a leaf that gets none says that its bank trains.
        leaves = [leaf for bank in self._banks for leaf in bank.seen if leaf.requires_grad]
        with _without_casts(wanted):
            grads = torch.autograd.grad(loss, [*wanted, *leaves], allow_unused=True)
        return {p: g for p, g in zip(wanted, grads, strict=False) if g is not None}

    @torch.no_grad()
    def add(self, found: dict[nn.Parameter, Tensor]) -> None:
        """Adds gradients to the sums; nothing is read by the host."""
        self._learn([(parameter, gradient.dtype) for parameter, gradient in found.items()])
        for one in self._sums:
            one.add(found)

    def _learn(self, found: Sequence[tuple[nn.Parameter, torch.dtype]]) -> None:
        kinds: dict[tuple[torch.dtype, torch.dtype | None], list[nn.Parameter]] = {}
        for parameter, kind in found:
            if parameter not in self._known:
                kinds.setdefault((kind, parameter.grad_dtype), []).append(parameter)
                self._known.add(parameter)
        for (kind, _), parameters in kinds.items():
            for start, stop in fill_buckets([parameter.numel() for parameter in parameters], _MOST):
                self._sums.append(_FlatSum(parameters[start:stop], kind))

    @torch.no_grad()
    def hold(self) -> None:
        """Every parameter that was reached has its view as `.grad`, with what it held, or zeros."""
        for one in self._sums:
            fresh = []
            for parameter, view in zip(one.parameters, one.views, strict=True):
                grad = parameter.grad
                if grad is view:
                    continue
                if grad is None:
                    fresh.append(view)
                else:
                    view.copy_(grad)
                parameter.grad = view
            if len(fresh) == len(one.views):
                one.total.zero_()
            elif fresh:
                torch._foreach_zero_(fresh)
