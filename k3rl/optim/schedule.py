"""The learning-rate factor of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to 1, then constant, or down to `final_fraction` along a line or half a cosine.

    K3 uses a cosine after 1 % of warm-up (k3.md 8.1). Raises ValueError for negative steps or a fraction outside
    [0, 1].
    """

    kind: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    total_steps: int
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(f"kind is {self.kind!r}; it must be one of constant, linear, cosine")
        if self.warmup_steps < 0 or self.total_steps < 1:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and total_steps {self.total_steps}; "
                "wanted 0 or more of the first and 1 or more of the second"
            )
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction is {self.final_fraction}; it must be in [0, 1]")

    def at(self, step: int) -> float:
        """The factor on the learning rates of step `step`, counted from 0.

        The warm-up steps get 1/w, 2/w .. 1, so no step has a rate of 0. The step after them still has 1, the last
        one (and any beyond) has final_fraction.
        """
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        falling = self.total_steps - 1 - self.warmup_steps
        done = min((step - self.warmup_steps) / falling, 1.0) if falling > 0 else float(step > self.warmup_steps)
        left = 1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.final_fraction + (1 - self.final_fraction) * left
