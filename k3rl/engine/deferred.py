"""Tokens that recurrent states have not taken in, at most 15 of a row (`kernels.kda.decode.PendingRows`).

Decode steps of fixed shapes may write a recurrent state once in 16 tokens. A row defers from its first such step on,
until its states are brought up to date; whoever reads or copies recurrent states settles their rows before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.uploads import upload
from k3rl.kernels.kda import CHUNK, PendingRows, flush_pending

_LAUNCH = 1 << 15  # slots of one launch


class DeferredTokens:
    """Those of recurrent states [L, slots, heads, K, V] of L layers. `defers` bool [slots]: rows whose states may lack
    some."""

    def __init__(self, layers: Sequence[int], recurrent: Tensor) -> None:
        count, slots, heads, width, _ = recurrent.shape
        keys, updates = (recurrent.new_zeros(count, slots, heads, CHUNK, width) for _ in range(2))
        decay = recurrent.new_zeros(count, slots, heads, width)
        self._span = torch.zeros(count, slots, heads, 2, dtype=torch.int32, device=recurrent.device)
        parts = keys, updates, decay, self._span
        self.pending = {layer: PendingRows(*(part[place] for part in parts)) for place, layer in enumerate(layers)}
        # Of all layers, as if each slot of each layer were one of a single layer.
        self._recurrent, self._all = recurrent.flatten(0, 1), PendingRows(*(part.flatten(0, 1) for part in parts))
        self._first = np.arange(count)[:, None] * slots  # of each layer, there
        self.defers = np.zeros(slots, bool)

    def begin(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Rows int64 [n] of so many tokens are stepped; chunks of those that were whole end as in training."""
        fresh = ~self.defers[rows]
        if fresh.any():
            device = self._span.device
            phases = upload((lengths[fresh] % CHUNK).astype(np.int32), device).view(1, -1, 1, 1)
            self._span[:, upload(rows[fresh], device)] = phases.expand(len(self._span), -1, *self._span.shape[2:])
            self.defers[rows[fresh]] = True

    @torch.inference_mode()
    def settle(self, rows: np.ndarray) -> None:
        """Brings the states of rows int64 [n] up to date."""
        behind = rows[self.defers[rows]]
        if behind.size:
            index = (self._first + behind).reshape(-1).astype(np.int32)
            for start in range(0, len(index), _LAUNCH):
                part = upload(index[start : start + _LAUNCH], self._span.device)
                flush_pending(self._recurrent, self._all, part)
            self.defers[behind] = False

    def fill(self, rows: np.ndarray, value: float) -> None:
        """What waits beside the states of rows int64 [n], which are of no use, becomes `value`, unless that is 0."""
        if value == 0.0 or not rows.size:  # zeros, nobody would see
            return
        index = upload((self._first + rows).reshape(-1), self._span.device)
        for storage in (self._all.keys, self._all.updates, self._all.decay):
            storage.index_fill_(0, index, value)
