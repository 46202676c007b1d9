"""Clipping by the norm over the gradients of all ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from k3rl.optim import NonFiniteGradient, PerHeadMuon
from k3rl.parallel.zero import Shards


class GradientClipping:
    """Scales reduced gradients so that their norm over all parameters is at most `maximum`."""

    def __init__(self, shards: Shards, optimizer: PerHeadMuon, maximum: float) -> None:
        self._shards, self._optimizer, self._maximum = shards, optimizer, maximum
        self._world, self._gradients = shards.mesh.world, optimizer.gradients
        self._launched: Hashable = None

    def forget(self) -> None:
        """Other gradients will come than those of the last `launch`."""
        self._launched = None

    def launch(self, *, reduced: bool) -> None:
        """Starts the norm where it is a replay; the host does not wait. `clip` of the same gradients completes it.

        reduced: whether the reduction over ranks was launched before.
        """
        if self._world.size == 1:
            self._launched = self._gradients.launch(self._maximum)
        elif reduced:
            self._launched = self._gradients.launch(math.inf)

    @torch.no_grad()
    def clip(self) -> float:
        """Clips, at the latest as the next step reads the gradients; returns the norm before. A collective.

        Raises NonFiniteGradient on every rank, with the first such parameter in official order.
        """
        if self._world.size == 1:
            return self._gradients.clip_in_step(self._maximum, self._launched)
        total = self._own_norm().square()
        self._world.sum(total)
        norm = math.sqrt(float(total))
        if not math.isfinite(norm):  # float32 sums overflow where every value is finite
            own = self._gradients.total_norm(self._shards.counted)
            total = torch.tensor(own**2, dtype=torch.float64, device=self._world.device)
            self._world.sum(total)
            norm = math.sqrt(float(total))
        if not math.isfinite(norm):
            self._refuse_non_finite()
        self._gradients.scale_in_step(norm, self._maximum)
        return norm

    def _own_norm(self) -> Tensor:
        """The norm of the gradients that count here, float64 on the device. Where it is a replay the host goes on."""
        if self._optimizer.captures and len(self._shards.counted) == len(self._optimizer.params):
            return self._gradients.captured_norm(self._launched)
        norm = self._gradients.total_norm(self._shards.counted)
        return torch.tensor(norm, dtype=torch.float64, device=self._world.device)

    def _refuse_non_finite(self) -> None:
        found, names, device = self._gradients.first_non_finite(), self._shards.names, self._world.device
        index = len(names) if found is None else names.index(found[0])
        first = torch.tensor([-index], device=device)
        self._world.maximum(first)
        facts = torch.zeros(2, dtype=torch.int64, device=device)
        if found is not None and -int(first) == index:
            facts += torch.tensor(found[1:], device=device)
        self._world.maximum(facts)
        if -int(first) < len(names):
            raise NonFiniteGradient(names[-int(first)], int(facts[0]), int(facts[1]))
