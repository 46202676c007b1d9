"""Softmax over a vocabulary that comes in slices of columns: running sums of each row, then the gradient of a slice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3rl.kernels import limits


@dataclass(frozen=True)
class RunningSoftmax:
    """What a row has to keep of the slices that were seen, each [P] in the logits' dtype.

    most: the largest logit. total: the sum of exp(logit - most). weighted: that of logit exp(logit - most). target: the
    logit of the row's target, once its slice was there.
    """

    most: Tensor
    total: Tensor
    weighted: Tensor
    target: Tensor

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> RunningSoftmax:
        zeros = torch.zeros(3, rows, dtype=dtype, device=device)
        return cls(torch.full((rows,), -torch.inf, dtype=dtype, device=device), *zeros)

    @property
    def normalizer(self) -> Tensor:
        """log sum exp of a row [P]."""
        return self.most + self.total.log()

    @property
    def entropy(self) -> Tensor:
        """Of a row's softmax [P], in nats."""
        return self.normalizer - self.weighted / self.total


def add_slice(running: RunningSoftmax, logits: Tensor, targets: Tensor, start: int, scale: float) -> None:
    """Takes the columns from `start` on into `running`.

    logits [P, w], times `scale`; -inf is a column that counts for nothing. targets [P] int64, of the whole vocabulary.
    """
    if limits.LOGITS_SLICE.takes(logits):
        from k3rl.kernels.sampling import logits_slice_kernels

        logits_slice_kernels.add_slice(running, logits, targets, start, scale)
    else:
        add_slice_reference(running, logits, targets, start, scale)


def slice_gradient(
    logits: Tensor, targets: Tensor, start: int, scale: float, normalizer: Tensor, grad: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient [P, w] of a slice of logits from that of the rows' logprobs [P], in `dtype`.

    d logprob / d logit = scale (1 at the target - softmax). The logits are gone afterwards: their memory may be the
    result's.
    """
    if limits.LOGITS_SLICE.takes(logits):
        from k3rl.kernels.sampling import logits_slice_kernels

        return logits_slice_kernels.slice_gradient(logits, targets, start, scale, normalizer, grad, dtype)
    return slice_gradient_reference(logits, targets, start, scale, normalizer, grad, dtype)


def add_slice_reference(running: RunningSoftmax, logits: Tensor, targets: Tensor, start: int, scale: float) -> None:
    """`add_slice` in plain torch."""
    logits = logits * scale
    most = torch.maximum(running.most, logits.amax(-1))
    base = torch.where(most == -torch.inf, 0.0, most)  # nothing counted yet
    p = (logits - base[:, None]).exp()
    shrink = (running.most - base).exp()
    running.total.mul_(shrink).add_(p.sum(-1))
    running.weighted.mul_(shrink).add_((p * torch.where(p > 0, logits, 0.0)).sum(-1))
    running.most.copy_(most)
    place = targets - start
    inside = (place >= 0) & (place < logits.shape[1])
    found = logits.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    running.target.copy_(torch.where(inside, found, running.target))


def slice_gradient_reference(
    logits: Tensor, targets: Tensor, start: int, scale: float, normalizer: Tensor, grad: Tensor, dtype: torch.dtype
) -> Tensor:
    """`slice_gradient` in plain torch."""
    each = grad.to(logits.dtype) * scale
    d = (logits * scale - normalizer[:, None]).exp_().mul_(-each[:, None])
    place = targets - start
    inside = (place >= 0) & (place < logits.shape[1])
    at = place.clamp(0, logits.shape[1] - 1)[:, None]
    return d.scatter_add_(1, at, torch.where(inside, each, 0.0)[:, None]).to(dtype)
