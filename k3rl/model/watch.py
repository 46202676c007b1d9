"""Watching what a model computes, for the time of a `with`; nothing is watched, and nothing paid, outside of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from k3rl.model.decoder import K3ForCausalLM
from k3rl.model.gated import GatedUnit, UnitParts
from k3rl.model.moe import MLP, ExpertBank, LatentMoE
from k3rl.model.moe_grouped import rounded


class LargestActivation:
    """The largest magnitude that any gated unit (dense, shared or routed) gave so far; 0 before the first."""

    def __init__(self) -> None:
        self._largest = torch.zeros(())

    def see(self, values: Tensor) -> None:
        """Takes the output of a unit."""
        if values.numel():
            self._largest = torch.maximum(self._largest.to(values.device), values.detach().abs().max().float())

    @property
    def value(self) -> float:
        return float(self._largest)


class _Watched:
    """A gated unit that shows what it gives."""

    def __init__(self, unit: GatedUnit, largest: LargestActivation) -> None:
        self._unit, self._largest = unit, largest

    def parts(self, gate_up: Tensor) -> UnitParts:
        return self._unit.parts(gate_up)

    def value(self, parts: UnitParts) -> Tensor:
        out = self._unit.value(parts)
        self._largest.see(out)
        return out

    def backward(self, grad: Tensor, parts: UnitParts) -> Tensor:
        return self._unit.backward(grad, parts)

    def activation(self, gate_up: Tensor, rule: str | None = None) -> Tensor:
        out = self._unit.activation(gate_up)
        self._largest.see(out)
        return out if rule is None else rounded(out, rule)

    def gradient(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        return self._unit.gradient(grad, gate_up)

    def routed_gradient(self, grad: Tensor, gate_up: Tensor, weight: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        return self._unit.routed_gradient(grad, gate_up, weight, active)

    def __call__(self, gate_up: Tensor) -> Tensor:
        out = self._unit(gate_up)
        self._largest.see(out)
        return out


@contextmanager
def watch_activations(model: K3ForCausalLM) -> Iterator[LargestActivation]:
    """The largest output of the model's gated units while the block runs, training and inference alike."""
    holders: list[MLP | ExpertBank] = []
    for module in model.modules():
        if isinstance(module, MLP):
            holders.append(module)
        elif isinstance(module, LatentMoE):
            holders.append(module.bank)
    units = [holder.unit for holder in holders]
    largest = LargestActivation()
    try:
        for holder, unit in zip(holders, units, strict=True):
            holder.unit = _Watched(unit, largest)
        yield largest
    finally:
        for holder, unit in zip(holders, units, strict=True):
            holder.unit = unit
