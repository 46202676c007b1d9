"""What falls to the device that has most: a run of experts, rows of a micro-batch, bytes of an exchange.

Neither experts nor rows need divide evenly (`k3rl.parallel.mesh.expert_run`, `k3rl.parallel.context.balanced_cuts`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np

from k3rl.model import K3Config
from k3rl.numerics import mx
from k3rl.parallel.context import balanced_cuts, pair_cost
from k3rl.planner import costs
from k3rl.planner.costs import Mix

UNITS = 1 << 14  # that a micro-batch is cut in here: a share is known to one part in a thousand


def expert_load(config: K3Config, ranks: int) -> float:
    """Experts of the rank that has most of them, over the mean."""
    return math.ceil(config.num_experts / ranks) * ranks / config.num_experts


def expert_bytes(config: K3Config, ranks: int, bytes_each: int) -> tuple[float, float]:
    """Bytes that leave a rank for each of its tokens and MoE layers, (forward, backward), when routes are even.

    What `k3rl.parallel.expert` sends: a row once to each rank that holds one of its experts, in MXFP8 where experts
    read that; a result, with a note of 8 bytes and the routing weight, for each choice. Counts, a number
    for each expert, are left out. Where runs of experts are not equal, of the rank with the shortest, which sends most.
    """
    k, latent, wide = config.num_experts_per_token, config.expert_hidden_size, max(costs.WIDE, bytes_each)
    shorter, longer = config.num_experts // ranks, config.num_experts % ranks  # experts of a run, runs with one more

    def chosen(held: int) -> float:
        """The probability that a row goes to a rank with `held` experts."""
        elsewhere = config.num_experts - held
        return 1 - math.prod(max(0, elsewhere - n) / (config.num_experts - n) for n in range(k))

    rows = (ranks - longer - 1) * chosen(shorter) + longer * chosen(shorter + 1)
    choices = k * (1 - shorter / config.num_experts)
    rounded = config.quantization.computed_activations == "mxfp8"
    row = latent * (1 + 1 / mx.BLOCK) if rounded else latent * bytes_each
    forward = rows * row + choices * (8 + wide + latent * bytes_each)
    return forward, rows * latent * bytes_each + choices * (latent + 1) * bytes_each


@cache
def _cost_of_pairs(config: K3Config) -> float:
    return pair_cost(config)


@cache
def context_shares(config: K3Config, tokens: int, length: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """(rows, rows of their first document on the ranks before) of each of `ranks`, which share `ranks` * tokens rows.

    Documents have `length` rows. Cuts balance cost, so ranks early in a long document have more rows than later ones.
    """
    total = tokens * ranks
    unit = math.ceil(total / UNITS)
    each = min(max(1, length // unit), max(1, total // unit))
    whole, rest = divmod(max(ranks, total // unit), each)
    ends = np.cumsum([0, *[each] * whole, *[rest] * (rest > 0)])
    cuts = balanced_cuts(np.full(ends[-1], unit), ends, ranks, _cost_of_pairs(config))
    begins = ends[np.searchsorted(ends, cuts[:-1], side="right") - 1]
    return tuple(zip((np.diff(cuts) * unit).tolist(), ((cuts[:-1] - begins) * unit).tolist(), strict=True))


def mixes(config: K3Config, mix: Mix, *, experts: int, context: int, lora: bool) -> list[Mix]:
    """The rows of a mix on the ranks that may hold most of a pass: those of most rows, and of most rows before them."""
    mix = replace(mix, grouped=experts == 1 and not lora, load=expert_load(config, experts))
    if context == 1:
        return [mix]
    shares = context_shares(config, mix.tokens, mix.length, context)
    fullest = {max(shares), max(shares, key=lambda share: share[::-1])}
    return [
        replace(mix, tokens=rows, targets=math.ceil(mix.targets * rows / mix.tokens), before=before, ranks=context)
        for rows, before in sorted(fullest)
    ]
