"""What Quantile Balancing counts of one layer's tokens: required biases by bin, and tokens above their cutoff.

`QuantileBalancer.observe` in plain torch is the definition; here it is one launch for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sums(NamedTuple):
    """What is added to: counts int32 [E, bins], loads int64 [E], bias float32 [E] that is counted under, and
    whether it is there (seen), whether another one came (changed), whether a score was NaN (nan): bool [1] each."""

    counts: torch.Tensor
    loads: torch.Tensor
    bias: torch.Tensor
    seen: torch.Tensor
    changed: torch.Tensor
    nan: torch.Tensor


def count(
    scores: torch.Tensor, cutoff: torch.Tensor, bias: torch.Tensor, valid: torch.Tensor | None, sums: Sums
) -> None:
    """scores [N, E], cutoff [N], bias [E] and valid bool [N] as in `QuantileBalancer.observe`; adds to the sums."""
    from k3rl.kernels.moe import load_counts_kernels

    load_counts_kernels.count(scores, cutoff, bias, valid, sums)
