"""Group advantages: a reward against the other rewards of the same task. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

EQUAL = 1e-9  # rewards closer than this, relative to their size, are the same reward


def group_advantages(
    rewards: Sequence[float | None], *, normalise: Literal["none", "std"] = "none"
) -> list[float | None]:
    """Reward minus the mean of the group's rewards, one per episode, in order.

    None marks an episode without a reward: it gets None and stays out of the mean. With normalise="std" the result is
    divided by the standard deviation of the rewards present. When all of them are equal (also up to rounding), or only
    one is there, every advantage is exactly 0, so that rounding is never divided by itself.

    Raises ValueError for a reward that is not finite or an unknown `normalise`.
    """
    if normalise not in ("none", "std"):
        raise ValueError(f"normalise is {normalise!r}; it must be 'none' or 'std'")
    present = [float(reward) for reward in rewards if reward is not None]
    for reward in present:
        if not math.isfinite(reward):
            raise ValueError(f"a reward is {reward}; an episode without a usable reward is None, never a number")
    if not present or max(present) - min(present) <= EQUAL * max(abs(max(present)), abs(min(present))):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(present) / len(present)
    scale = 1.0
    if normalise == "std":
        scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in present) / len(present))
    return [None if reward is None else (float(reward) - mean) / scale for reward in rewards]
