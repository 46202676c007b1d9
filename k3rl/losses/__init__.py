"""Losses: from per-token streams to one scalar and its metrics. Nothing here knows a model or a batch layout.

base.py           LossInputs, LossOutput, and its metrics before the host reads them (Tallied)
cross_entropy.py  CrossEntropy
policy.py         K3Policy, GRPO
correction.py     Correction: truncated and masked importance sampling in place of their bands
distill.py        OnPolicyDistill
advantage.py      group_advantages
logprob.py        target_logprobs, without the table of all logits
"""

from k3rl.losses.advantage import group_advantages
from k3rl.losses.base import LossError, LossInputs, LossOutput, Tallied
from k3rl.losses.correction import Correction
from k3rl.losses.cross_entropy import CrossEntropy
from k3rl.losses.distill import OnPolicyDistill
from k3rl.losses.logprob import TABLE_ELEMENTS, target_logprobs, tile_elements
from k3rl.losses.policy import GRPO, K3Policy

__all__ = [
    "GRPO",
    "TABLE_ELEMENTS",
    "Correction",
    "CrossEntropy",
    "K3Policy",
    "LossError",
    "LossInputs",
    "LossOutput",
    "OnPolicyDistill",
    "Tallied",
    "group_advantages",
    "target_logprobs",
    "tile_elements",
]
