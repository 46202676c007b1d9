"""Cross entropy of the target tokens: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from k3rl.losses.base import LossInputs, LossOutput, Tally, weighted_sum


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Per token -log p(target). Metrics: loss/mean (nats a token), policy/entropy/mean."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        per_token = -inputs.logprobs
        tally = Tally(inputs.weights)
        tally.mean("loss/mean", per_token)
        tally.mean("policy/entropy/mean", inputs.entropy)
        return tally.output(weighted_sum(inputs.weights, per_token))
