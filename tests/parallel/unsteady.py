"""A loss that is sometimes no number."""

from __future__ import annotations

from k3rl.losses import CrossEntropy, LossInputs, LossOutput


class Unsteady:
    """Cross entropy whose value or gradient is not a number where the targets are those of one sequence."""

    def __init__(self, targets: int, *, value: bool) -> None:
        self.targets, self.value = targets, value

    def __call__(self, inputs: LossInputs) -> LossOutput:
        out = CrossEntropy()(inputs)
        if len(inputs.logprobs) != self.targets:
            return out
        zero = (inputs.logprobs - inputs.logprobs.detach()).abs().sum()
        bad = inputs.logprobs.sum() * float("nan") if self.value else zero.sqrt()  # 0, with an infinite slope
        return LossOutput(out.loss + bad, out.metrics)
