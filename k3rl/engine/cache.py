"""The model's states of every row: KDA recurrent and conv states, MLA latents, lengths; and one spare row.

Rows are fixed slots of one `model.new_cache`. The spare keeps the state of a prompt whose group did not find
enough rows. A row that nobody owns holds garbage (NaN when `poison` is on) and is reset before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3rl.model import Cache, K3ForCausalLM


class StatePool:
    """Model states of `rows` rows and the spare (index `rows`); inference tensors, which autograd never sees."""

    @torch.inference_mode()
    def __init__(self, model: K3ForCausalLM, rows: int, poison: bool) -> None:
        self.cache = model.new_cache(rows + 1)
        self.spare, self.poison = rows, poison

    def view(self, rows: Sequence[int]) -> Cache:
        """The cache of these rows; what a forward writes to it lands in the pool."""
        return self.cache.select(_index(rows))

    @torch.inference_mode()
    def reset(self, rows: Sequence[int]) -> None:
        """Makes rows as new: no tokens seen."""
        if len(rows):
            self.cache.reset(_index(rows))

    @torch.inference_mode()
    def free(self, rows: Sequence[int]) -> None:
        """Nobody owns these rows any more."""
        self.reset(rows)
        if self.poison and len(rows):
            self.cache.poison(_index(rows))

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole states, (source row, target row); no row is both a source and a target."""
        if pairs:
            source, target = zip(*pairs, strict=True)
            self.cache.copy_rows(_index(source), _index(target))


def _index(rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long)
