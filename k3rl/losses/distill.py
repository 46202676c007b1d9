"""On-policy distillation: the teacher's opinion of the student's own tokens as a reward (k3.md 12.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3rl.losses.base import LossError, LossInputs, LossOutput, weighted_sum
from k3rl.losses.correction import UNCORRECTED, Correction
from k3rl.losses.policy import check_band, k3_per_token, log_ratio, ratio_tally


@dataclass(frozen=True, slots=True)
class OnPolicyDistill:
    """K3's objective with A = clip(log p_teacher - log p_student, -reward_max, +reward_max) per token.

    A carries no gradient, and the batch's own advantages are not read. Adds the metrics distill/kl_reverse, the mean
    of log p_student - log p_teacher on sampled tokens, which estimates KL(student || teacher), and distill/clip_frac.
    """

    reward_max: float = 3.0
    ratio_low: float = 0.5
    ratio_high: float = 2.0
    tau: float = 0.02
    correction: Correction = UNCORRECTED

    def __post_init__(self) -> None:
        check_band(self.ratio_low, self.ratio_high, self.tau)
        if not self.reward_max > 0:
            raise LossError(f"reward_max is {self.reward_max}; wanted a number above 0, in nats")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        low, high = math.log(self.ratio_low), math.log(self.ratio_high)
        gap = inputs.require("teacher_logprobs", "OnPolicyDistill") - inputs.logprobs.detach()
        d = log_ratio(inputs, "OnPolicyDistill")
        per_token = k3_per_token(d, gap.clamp(-self.reward_max, self.reward_max), low, high, self.tau, self.correction)
        tally = ratio_tally(inputs, d, low, high, self.correction)
        tally.mean("loss/mean", per_token)
        tally.mean("distill/kl_reverse", -gap)
        tally.mean("distill/clip_frac", gap.abs() > self.reward_max)
        return tally.output(weighted_sum(inputs.weights, per_token))
