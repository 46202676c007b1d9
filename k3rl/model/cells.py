"""Few rows of many experts on a grid, so that a CPU does one batched product instead of one for each expert."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Inference batches whose experts get few rows, evenly, take it.
GRID_ROOM = 64  # rows of the busiest expert, at most
GRID_WASTE = 4  # cells for each row that is there, at most


class Cells(NamedTuple):
    """Assignments on a grid of `room` cells for each expert: cell of each one [N * k]; token of each cell [E * room],
    token 0 where nothing is."""

    place: Tensor
    token: Tensor
    room: int

    @classmethod
    def of(cls, ids: Tensor, experts: int) -> Cells:
        """On the CPU, through NumPy: over so few numbers a call of torch costs more than its work."""
        flat = ids.numpy().reshape(-1)
        counts = np.bincount(flat, minlength=experts)
        room = int(counts.max())
        order = flat.argsort(kind="stable")
        number = np.arange(len(flat))
        first = counts.cumsum() - counts
        place, token = np.empty(len(flat), np.int64), np.zeros(experts * room, np.int64)
        place[order] = number + (np.arange(experts) * room - first)[flat[order]]
        token[place] = number // ids.shape[1]
        return cls(torch.from_numpy(place), torch.from_numpy(token), room)
