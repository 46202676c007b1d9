"""Tokens that recurrent states have not taken in, at most 15 of a row (`kernels.kda.decode.PendingRows`).

Decode steps of fixed shapes may write a recurrent state once in 16 tokens. A row defers from its first such step on,
until its states are brought up to date; whoever reads or copies recurrent states settles their rows before.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3rl.kernels.kda import CHUNK, PendingRows, flush_pending


class DeferredTokens:
    """Those of recurrent states by layer, [slots, heads, K, V] each. `defers` bool [slots]: rows whose states may lack
    some."""

    def __init__(self, recurrent: dict[int, Tensor]) -> None:
        like = next(iter(recurrent.values()))
        slots, heads, width, _ = like.shape
        self._recurrent = recurrent
        self._span = torch.zeros(len(recurrent), slots, heads, 2, dtype=torch.int32, device=like.device)
        self.pending = {}
        for place, layer in enumerate(recurrent):
            keys, updates = (like.new_zeros(slots, heads, CHUNK, width) for _ in range(2))
            self.pending[layer] = PendingRows(keys, updates, like.new_zeros(slots, heads, width), self._span[place])
        self.defers = np.zeros(slots, bool)

    def begin(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Rows int64 [n] of so many tokens are stepped; chunks of those that were whole end as in training."""
        fresh = ~self.defers[rows]
        if fresh.any():
            index, phase = torch.from_numpy(rows[fresh]), torch.from_numpy(lengths[fresh] % CHUNK).to(torch.int32)
            phases = phase.view(1, -1, 1, 1).expand(len(self._span), -1, *self._span.shape[2:])
            self._span[:, index.to(self._span.device)] = phases.to(self._span.device)
            self.defers[rows[fresh]] = True

    @torch.inference_mode()
    def settle(self, rows: np.ndarray) -> None:
        """Brings the states of rows int64 [n] up to date."""
        behind = rows[self.defers[rows]]
        if behind.size:
            index = torch.from_numpy(behind).to(self._span.device, torch.int32)
            for layer, pending in self.pending.items():
                flush_pending(self._recurrent[layer], pending, index)
            self.defers[behind] = False

    def forget(self, rows: list[int], value: float) -> None:
        """The states of these rows are of no use; what waits beside them becomes `value`, unless that is 0."""
        self.defers[rows] = False
        if value == 0.0:  # which nobody would see
            return
        index = torch.tensor(rows, dtype=torch.int64, device=self._span.device)
        for pending in self.pending.values():
            for storage in (pending.keys, pending.updates, pending.decay):
                storage.index_fill_(0, index, value)
