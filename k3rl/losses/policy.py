"""Policy-gradient losses on sampled tokens: K3's objective and GRPO.

Both compare the learner with the policy that sampled the token: d = log p_learner - log p_sampler, ratio = exp(d).
There is no second forward for "old" logprobs: the sampler's are recorded when the token is drawn.

Metrics of both, over tokens: loss/mean; ratio/mean, ratio/square_mean (effective sample share = mean^2 / square_mean)
and ratio/max; policy/clip_frac_low and _high, the shares below and above the band; kl/old = mean of -d, the plain
estimate of KL(sampler || learner), negative by chance; mismatch/kl/mean and /max = exp(d) - 1 - d, the same KL without
sign changes, which on the first step after a weight update is the mismatch of engine and learner; policy/entropy/mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from k3rl.losses.base import LossError, LossInputs, LossOutput, Tally, weighted_sum
from k3rl.losses.correction import MAX_LOG_RATIO, UNCORRECTED, Correction


def log_ratio(inputs: LossInputs, loss: str) -> Tensor:
    """d = log p_learner - log p_sampler [P], with gradient; 0 where the weight is 0."""
    sampler = inputs.require("sampler_logprobs", loss)
    return torch.where(inputs.weights != 0, inputs.logprobs - sampler, 0.0)


def ratio_tally(inputs: LossInputs, d: Tensor, low: float, high: float, correction: Correction) -> Tally:
    """The metrics that every policy loss has; low and high are the band's ends as log-ratios."""
    tally = Tally(inputs.weights)
    exact = d.detach().double()
    ratio = exact.exp()
    tally.mean("ratio/mean", ratio)
    tally.mean("ratio/square_mean", ratio * ratio)
    tally.peak("ratio/max", ratio)
    tally.mean("policy/clip_frac_low", exact < low)
    tally.mean("policy/clip_frac_high", exact > high)
    tally.mean("kl/old", -exact)
    divergence = torch.expm1(exact) - exact
    tally.mean("mismatch/kl/mean", divergence)
    tally.peak("mismatch/kl/max", divergence)
    tally.mean("policy/entropy/mean", inputs.entropy)
    if correction.type != "none":
        correction.tally(tally, d)
    return tally


def k3_per_token(d: Tensor, advantages: Tensor, low: float, high: float, tau: float, correction: Correction) -> Tensor:
    """-(clip(ratio) * A - tau d^2) [P]; low and high are log-ratios, in whose place a correction may stand.

    Clipping d before the exponential gives the value clip(ratio, low, high) and no gradient outside, and cannot
    overflow.
    """
    if correction.type != "none":
        return tau * d.square() - correction.surrogate(d, advantages)
    return tau * d.square() - d.clamp(low, high).exp() * advantages


@dataclass(frozen=True, slots=True)
class K3Policy:
    """K3's objective (k3.md 12.2, Kimi K2.5 eq. 1): maximize clip(ratio; low, high) * A - tau * (log ratio)^2.

    Outside [ratio_low, ratio_high] a token's policy gradient is zero whatever the sign of its advantage, so the clip
    is a mask and not PPO's minimum. The squared log-ratio acts on every token, masked ones too, and pulls those back.
    correction: what weighs a token in place of the band.
    """

    ratio_low: float = 0.5
    ratio_high: float = 2.0
    tau: float = 0.02
    correction: Correction = UNCORRECTED

    def __post_init__(self) -> None:
        check_band(self.ratio_low, self.ratio_high, self.tau)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        low, high = math.log(self.ratio_low), math.log(self.ratio_high)
        d = log_ratio(inputs, "K3Policy")
        advantages = inputs.require("advantages", "K3Policy")
        per_token = k3_per_token(d, advantages, low, high, self.tau, self.correction)
        tally = ratio_tally(inputs, d, low, high, self.correction)
        tally.mean("loss/mean", per_token)
        return tally.output(weighted_sum(inputs.weights, per_token))


@dataclass(frozen=True, slots=True)
class GRPO:
    """Clipped surrogate min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), without KL term.

    Advantages divided by the group's deviation and weights by sequence are made before (`group_advantages`,
    `data.batch`). A negative advantage is not clipped from above, as in PPO; the ratio itself stops at e^20.
    correction: what weighs a token in place of the clip.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: Correction = UNCORRECTED

    def __post_init__(self) -> None:
        if not (0 < self.clip_low < 1 and self.clip_high > 0):
            raise LossError(
                f"clip_low is {self.clip_low}, clip_high {self.clip_high}; wanted 0 < clip_low < 1 and clip_high > 0"
            )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        advantages = inputs.require("advantages", "GRPO")
        d = log_ratio(inputs, "GRPO")
        if self.correction.type != "none":
            per_token = -self.correction.surrogate(d, advantages)
        else:
            ratio = d.clamp(max=MAX_LOG_RATIO).exp()
            clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
            per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        tally = ratio_tally(inputs, d, math.log(1 - self.clip_low), math.log(1 + self.clip_high), self.correction)
        tally.mean("loss/mean", per_token)
        return tally.output(weighted_sum(inputs.weights, per_token))


def check_band(low: float, high: float, tau: float) -> None:
    """Raises LossError unless 0 < low < 1 < high and tau >= 0."""
    if not (0 < low < 1 < high and tau >= 0):
        raise LossError(f"ratio band is [{low}, {high}], tau {tau}; wanted 0 < ratio_low < 1 < ratio_high and tau >= 0")
