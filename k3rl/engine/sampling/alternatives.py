"""`SamplingParams.top_logprobs`: the likeliest tokens of the distribution that a token was drawn from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.rows import RowTable
from k3rl.engine.sampling.grammar import Constrained
from k3rl.engine.sampling.sampler import Biases, Draws
from k3rl.types import Alternatives


def record(table: RowTable, free: Constrained, biases: Biases | None, draws: Draws) -> None:
    """Keeps the alternatives of the rows that asked for some, for what was just drawn from `free`."""
    for place in np.flatnonzero((table.top_logprobs[free.rows] > 0) & draws.finite).tolist():
        row = free.rows[place]
        z = free.logits[place].to("cpu", torch.float64, copy=True)
        if biases is not None:
            mine = biases.rows == place
            z.index_add_(0, torch.from_numpy(biases.ids[mine]), torch.from_numpy(biases.values[mine]))
        cut = np.flatnonzero(draws.cut_rows == place)  # what a constraint forbids is cut, too
        sampling_mask = None
        if cut.size:
            sampling_mask = torch.zeros(len(z), dtype=torch.bool)
            sampling_mask[torch.from_numpy(draws.kept.rows[cut[0]]).long()] = True
        sampled = int(draws.ids[place]), float(draws.logprobs[place])
        found = likeliest(z, float(table.temperature[row]), sampling_mask, int(table.top_logprobs[row]))
        table.running[row].alternatives.append(tuple(sampled if one[0] == sampled[0] else one for one in found))


def likeliest(z: Tensor, temperature: float, sampling_mask: Tensor | None, count: int) -> Alternatives:
    """The `count` likeliest ids of logits z [V] (float64), with logprobs; fewer where the sampling mask (bool [V])
    has fewer.
    """
    if sampling_mask is not None:
        z = z.masked_fill(~sampling_mask, -torch.inf)
    z = z - z.max()
    values, ids = torch.log_softmax(z if temperature == 0 else z / temperature, 0).topk(min(count, len(z)))
    return tuple((i, value) for i, value in zip(ids.tolist(), values.tolist(), strict=True) if value > -np.inf)
