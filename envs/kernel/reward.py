"""What a right kernel is worth: its cost against an expert's and against the least that is possible (`k3.md` 12.5).

    cost >= expert:          0.5 expert / cost
    floor <= cost < expert:  0.5 + 0.5 (expert - cost) / (expert - floor)

0.5 at the expert's cost and 1 at the floor; between them the share of what can be saved that was saved. Continuous,
falls strictly with the cost, and is above 0 for any right kernel. A cost below the floor is not a better kernel but a
broken measurement, and one below a tenth of the expert's is set aside for a person to look at.
"""

from __future__ import annotations

UNTIMED = 0.25  # right, where nothing stable can be measured: Triton in the interpreter, numba
QUARANTINE = 10.0  # times cheaper than the expert


def reward(cost: float, expert: float, floor: float) -> float:
    """The reward of one shape. Costs in one unit, instructions or seconds; raises ValueError unless floor < expert."""
    if not 0 < floor < expert:
        raise ValueError(f"the floor must be above 0 and below the expert's cost; got {floor:g} and {expert:g}")
    if cost >= expert:
        return 0.5 * expert / cost
    return min(1.0, 0.5 + 0.5 * (expert - cost) / (expert - floor))


def implausible(cost: float, expert: float, floor: float) -> tuple[str, str] | None:
    """(hack, evidence) of a cost that no honest kernel has, else None."""
    if not cost >= floor:
        return "below_floor", f"a cost of {cost:.6g} where {floor:.6g} is the least possible"
    if cost * QUARANTINE < expert:
        return "quarantined", f"{expert / cost:.1f} times cheaper than the expert; above {QUARANTINE:g} a person looks"
    return None
