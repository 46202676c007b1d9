"""Importance correction for the difference between the policy that sampled and the one that learns, token by token.

With d = log p_learner - log p_sampler and ratio = exp(d), a token's policy gradient is w * A * grad log p_learner:

    none        the objective's own band or clip decides (K3: w = ratio inside the band, 0 outside)
    truncated   w = min(ratio, high): truncated importance sampling (TIS)
    masked      w = ratio where low <= ratio <= high, else 0: masked importance sampling (MIS, IcePop)

w carries no gradient. Every token is trained on once, by the step that computes d, so d holds both the distance of
engine and learner at equal weights and what was learned since the token was sampled; a second forward pass for a
proximal policy would find the learner itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3rl.losses.base import LossError, Tally

MAX_LOG_RATIO = 20.0  # ratios stop growing here, so that one stale token cannot overflow the batch


@dataclass(frozen=True, slots=True)
class Correction:
    """How tokens whose importance ratio is far from 1 are weighed. Raises LossError for bounds that hold no 1."""

    type: Literal["none", "truncated", "masked"] = "none"
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        if self.type not in ("none", "truncated", "masked"):
            raise LossError(f"correction is {self.type!r}; wanted none, truncated or masked")
        if not 0 <= self.low < 1 < self.high:
            raise LossError(f"correction keeps ratios in [{self.low}, {self.high}]; wanted 0 <= low < 1 < high")

    def surrogate(self, d: Tensor, advantages: Tensor) -> Tensor:
        """What a token adds to the objective [P]: value w * A, gradient w * A * grad d."""
        return self._weights(d) * advantages * (d - d.detach()).exp()

    def tally(self, tally: Tally, d: Tensor) -> None:
        """Adds correction/weight/mean and correction/cut_frac, the share of tokens that are truncated or masked."""
        weights = self._weights(d)
        tally.mean("correction/weight/mean", weights)
        tally.mean("correction/cut_frac", weights != _ratio(d))

    def _weights(self, d: Tensor) -> Tensor:
        """w [P], without gradient."""
        ratio = _ratio(d)
        if self.type == "truncated":
            return ratio.clamp(max=self.high)
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)


UNCORRECTED = Correction()


def _ratio(d: Tensor) -> Tensor:
    return d.detach().clamp(max=MAX_LOG_RATIO).exp()
