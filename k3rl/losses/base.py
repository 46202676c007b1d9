"""What a loss reads and gives. Every loss is a sum of weight * per-token value over target tokens.

All normalization sits in the weights, which are made for the whole global batch; so a loss and its gradient do not
depend on how the batch was cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


class LossError(ValueError):
    """Inputs that do not fit a loss; the message names the stream and the fix."""


@dataclass(frozen=True)
class LossInputs:
    """Streams over the P target tokens of a packed micro-batch, each [P].

    logprobs: of the learner, with gradient. sampler_logprobs: under the distribution that sampled the tokens.
    advantages, weights: per token; a token of weight 0 takes no part. teacher_logprobs: for distillation.
    entropy: of the learner's distribution, in nats, for metrics only. What a loss does not read may be None.
    checked: whoever made the streams has seen that they are finite where the weight is not 0.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor | None
    advantages: Tensor | None
    weights: Tensor
    teacher_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    checked: bool = False

    def __post_init__(self) -> None:
        for entry in fields(self):
            stream = getattr(self, entry.name)
            if isinstance(stream, Tensor) and stream.shape != self.logprobs.shape:
                raise LossError(
                    f"{entry.name} has shape {tuple(stream.shape)}, logprobs {tuple(self.logprobs.shape)}; "
                    "every stream has one value per target token"
                )

    def require(self, name: str, loss: str) -> Tensor:
        """The stream `name`, without gradient. Raises LossError when it is None or not finite where it counts."""
        stream: Tensor | None = getattr(self, name)
        if stream is None:
            raise LossError(f"{loss} reads {name}, which this batch does not have; record it when sampling")
        stream = stream.detach()
        if self.checked:
            return stream
        bad = (~stream.isfinite() & (self.weights != 0)).nonzero()
        if len(bad):
            raise LossError(
                f"{loss}: {len(bad)} of {stream.numel()} values of {name} are not finite, the first at target "
                f"{int(bad[0])}; drop the sequence or give its tokens weight 0"
            )
        return stream


@dataclass(frozen=True)
class Tallied:
    """Numbers of a loss that are still on the device: float64 [1 + means + peaks], the count of live tokens first."""

    means: tuple[str, ...]
    peaks: tuple[str, ...]
    numbers: Tensor

    def read(self, numbers: Sequence[float]) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """`metrics` and `maxima` of a `LossOutput` from these numbers on the host."""
        count, values = numbers[0], numbers[1:]
        metrics = {name: (total if count else 0.0, count) for name, total in zip(self.means, values, strict=False)}
        return metrics, dict(zip(self.peaks, values[len(self.means) :], strict=False)) if count else {}


class LossOutput:
    """loss: scalar, sum of weights * per-token loss, to be minimized.

    metrics: name -> (sum, count) over the tokens whose weight is not 0, to be added over micro-batches and ranks.
    maxima: name -> largest value over those tokens, to be merged by max; empty when there is no such token.
    tallied: both before anybody has read them, which makes the host wait; None where they were given as numbers.
    """

    def __init__(
        self,
        loss: Tensor,
        metrics: dict[str, tuple[float, float]] | None = None,
        maxima: dict[str, float] | None = None,
        *,
        tallied: Tallied | None = None,
    ) -> None:
        self.loss, self.tallied = loss, tallied
        self._read = None if tallied is not None else (metrics or {}, maxima or {})

    def _numbers(self) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        if self._read is None:
            assert self.tallied is not None
            self._read = self.tallied.read(self.tallied.numbers.tolist())
        return self._read

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        return self._numbers()[0]

    @property
    def maxima(self) -> dict[str, float]:
        return self._numbers()[1]


class Tally:
    """Sums of per-token values over the tokens that count, in float64."""

    def __init__(self, weights: Tensor) -> None:
        self._live = weights != 0
        self._sums: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}

    def mean(self, name: str, values: Tensor | None) -> None:
        """Adds values [P] to the mean `name`; None adds nothing."""
        if values is not None:
            self._sums[name] = torch.where(self._live, values.detach().double(), 0.0).sum()

    def peak(self, name: str, values: Tensor) -> None:
        """Keeps the largest of values [P] under `name`."""
        if len(values):
            self._peaks[name] = torch.where(self._live, values.detach().double(), -torch.inf).amax()

    def output(self, loss: Tensor) -> LossOutput:
        """The loss with everything tallied, which stays on the device until it is read."""
        numbers = torch.stack([self._live.sum().double(), *self._sums.values(), *self._peaks.values()])
        return LossOutput(loss, tallied=Tallied(tuple(self._sums), tuple(self._peaks), numbers))


def weighted_sum(weights: Tensor, per_token: Tensor) -> Tensor:
    """sum(weights * per_token) as a scalar; a token of weight 0 adds exactly 0, whatever its value."""
    return (weights.detach() * torch.where(weights != 0, per_token, 0.0)).sum()
