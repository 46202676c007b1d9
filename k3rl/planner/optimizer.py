"""What one optimizer step costs on the whole model, from its configuration."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from k3rl.model import K3Config, tensor_table
from k3rl.model.costs import ROUTED, WIDE
from k3rl.optim import BUCKET_ELEMENTS, STEPS, classify


@dataclass(frozen=True, slots=True)
class OptimizerCosts:
    """Of one step on the whole model; the keys are True for routed experts and False for all else.

    muon and adamw: numbers in each group; flops: of Newton-Schulz; workspace: bytes of temporaries of the bucket that
    needs most, and bucket: its numbers, when one process has everything.
    """

    muon: dict[bool, int]
    adamw: dict[bool, int]
    flops: dict[bool, float]
    workspace: float
    bucket: float


@cache
def optimizer_costs(config: K3Config, variant: str = "per_head_muon", products: int = WIDE) -> OptimizerCosts:
    """Costs with a `TrainerConfig.optimizer`. products: bytes of a number in Newton-Schulz, 2 on a GPU."""
    muon, adamw, flops = ({True: 0, False: 0}, {True: 0, False: 0}, {True: 0.0, False: 0.0})
    stacked: Counter[tuple[int, int]] = Counter()  # numbers in blocks of one shape, which are stepped together
    longest: dict[tuple[int, int] | str, int] = {}  # of one matrix; a bucket has at least that
    for entry in tensor_table(config):
        routed = entry.part == ROUTED
        info = classify(entry.name, entry.shape, config)
        if info.group == "balanced":
            continue
        size = math.prod(entry.shape)
        if info.group == "adamw" or variant == "adamw":
            adamw[routed] += entry.parameters
            longest["adamw"] = max(longest.get("adamw", 0), size)
            continue
        muon[routed] += entry.parameters
        columns = entry.shape[1]
        for rows in info.row_blocks if variant == "per_head_muon" else (entry.shape[0],):
            flops[routed] += entry.copies * newton_schulz_flops(rows, columns)
            shape = (min(rows, columns), max(rows, columns))
            stacked[shape] += entry.copies * rows * columns
            longest[shape] = max(longest.get(shape, 0), size)
    # Newton-Schulz holds the gradient, two copies of the blocks and three of their Gram matrices; AdamW one row.
    spaces = []
    for shape, total in stacked.items():
        size = min(total, max(BUCKET_ELEMENTS, longest[shape]))
        spaces.append((WIDE * size + products * size * (2 + 3 * shape[0] / shape[1]), float(size)))
    size = min(sum(adamw.values()), max(BUCKET_ELEMENTS, longest.get("adamw", 0)))
    spaces.append((float(WIDE * size), float(size)))
    return OptimizerCosts(muon, adamw, flops, *max(spaces))


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Operations for one matrix: five steps of X X', a product of two of those, and their product with X, worked on
    with the fewer rows."""
    r, c = min(rows, columns), max(rows, columns)
    return STEPS * 2.0 * (2 * r * r * c + r**3)
