"""What Quantile Balancing counts of one layer's tokens: required biases by bin, and tokens above their cutoff.

`QuantileBalancer.observe` in plain torch is the definition; here it is one launch for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3rl.kernels import dispatch
from k3rl.kernels.moe.decode_routing import MOST_EXPERTS


class Sums(NamedTuple):
    """What is added to: counts int32 [E, bins], loads int64 [E], kept float32 [E], the bias that is counted under, and
    whether it is there (seen), whether another one came (changed), whether a score was NaN (nan): bool [1] each."""

    counts: torch.Tensor
    loads: torch.Tensor
    kept: torch.Tensor
    seen: torch.Tensor
    changed: torch.Tensor
    nan: torch.Tensor


def takes(scores: torch.Tensor, cutoff: torch.Tensor, bias: torch.Tensor, sums: Sums) -> bool:
    """Whether the kernel counts these: float32 on one GPU."""
    alike = all(t.dtype == torch.float32 and t.device == scores.device for t in (scores, cutoff, bias, sums.kept))
    fits = alike and len(scores) > 0 and len(bias) <= MOST_EXPERTS and sums.counts.device == scores.device
    return fits and dispatch.use_kernel("load_counts", scores)


def count(
    scores: torch.Tensor, cutoff: torch.Tensor, bias: torch.Tensor, valid: torch.Tensor | None, sums: Sums
) -> None:
    """scores [N, E], cutoff [N], bias [E] and valid bool [N] as in `QuantileBalancer.observe`; adds to the sums."""
    from k3rl.kernels.moe import load_counts_kernels

    load_counts_kernels.count(scores, cutoff, bias, valid, sums)
