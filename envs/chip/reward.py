"""What a right design is worth: area, worst slack and throughput against the reference, in log ratios.

Each ratio r (greater is better) gives clip(1/2 + log2(r) / 4, 0, 1): 0.5 at the reference, 1 at four times better,
0 at four times worse. The reward of a design that passes every gate is their weighted mean, and at least FLOOR,
so that a right design is always worth more than a wrong one; a design that fails a gate is worth 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WEIGHTS = {"area": 0.4, "speed": 0.2, "throughput": 0.4}
FLOOR = 0.1
ORACLE = 0.5  # what the reference itself gets


@dataclass(frozen=True, slots=True)
class Measures:
    """What the tools found. area in library units, slack in ns at the target period, cycles per counted item."""

    area: float
    slack_ns: float
    cycles_per_item: float


def ratio_score(ratio: float) -> float:
    """clip(1/2 + log2(ratio) / 4, 0, 1)."""
    return min(1.0, max(0.0, 0.5 + math.log2(ratio) / 4))


def score_parts(own: Measures, reference: Measures, period_ns: float) -> dict[str, float]:
    """Score of each part.

    area: reference / own. speed: shortest period that the reference could run at / shortest of this design, and 0
    when the target is missed. throughput: items per second at the target period, or at the longer period that a
    design needs which misses it.
    """
    return {
        "area": ratio_score(reference.area / own.area),
        "speed": 0.0
        if own.slack_ns < 0
        else ratio_score((period_ns - reference.slack_ns) / (period_ns - own.slack_ns)),
        "throughput": ratio_score(_seconds(reference, period_ns) / _seconds(own, period_ns)),
    }


def _seconds(measures: Measures, period_ns: float) -> float:
    return measures.cycles_per_item * max(period_ns, period_ns - measures.slack_ns)


def reward(parts: dict[str, float]) -> float:
    """Weighted mean of the parts, at least FLOOR."""
    return max(FLOOR, sum(WEIGHTS[name] * parts[name] for name in WEIGHTS))
