"""The common ways to balance experts, which Quantile Balancing replaces: a bias moved by a fixed step, a loss.

Both need a rate that has to be tuned, and both take many steps where a quantile takes one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def fixed_step(biases: Sequence[Tensor], loads: Tensor, rate: float) -> list[Tensor]:
    """Biases [E] of each layer, loads [L, E] -> the biases of the next step, same dtypes.

    Up by `rate` where an expert has less than its share of the load, down where it has more, as in DeepSeek-V3.
    """
    load = loads.double()
    steps = torch.sign(load.mean(-1, keepdim=True) - load) * rate
    return [bias.detach() + step.to(bias.dtype) for bias, step in zip(biases, steps, strict=True)]


class AuxiliaryLoss:
    """The load-balancing loss of Switch Transformers and their heirs, summed over layers.

    weight * E / k * sum_j f_j P_j a layer, with f_j = assignments of expert j per token (no gradient) and P_j = mean
    share of expert j in a token's scores; `weight` where the load is even. f and P are those of one micro-batch, so,
    unlike every other loss here, it depends on how a batch is cut.
    """

    def __init__(self, weight: float, top_k: int) -> None:
        self._weight, self._top_k = weight, top_k
        self._terms: list[Tensor] = []

    def __call__(self, layer: int, scores: Tensor, ids: Tensor) -> None:
        """Router of one layer: scores [N, E] with gradient, ids [N, k] of the chosen experts."""
        tokens, experts = scores.shape
        loads = torch.bincount(ids.reshape(-1), minlength=experts).to(scores.dtype) / tokens
        shares = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).mean(0)
        self._terms.append(self._weight * experts / self._top_k * torch.dot(loads, shares))

    def take(self) -> Tensor:
        """The sum over the layers seen since the last call, a scalar with gradient."""
        total = torch.stack(self._terms).sum()
        self._terms.clear()
        return total

    def clear(self) -> None:
        """Forget what a failed forward has left."""
        self._terms.clear()
