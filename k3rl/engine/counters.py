"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """Sums since the engine started."""

    steps: int = 0
    prefilled_tokens: int = 0  # prompt tokens computed; a prompt shared by a group counts once
    cached_tokens: int = 0  # prompt tokens whose states were kept; of a shared prompt once
    sampled_tokens: int = 0
    decode_steps: int = 0  # steps that decoded rows
    ahead_steps: int = 0  # of those: launched before the tokens of the one before were read
    split_steps: int = 0  # of those: in several pieces, because the rows were too many or too long for one
    uncaptured_steps: int = 0  # of those: with rows outside the captured step, or drawn for from their logits
    preempted: int = 0  # requests that gave up their row for want of memory
    recomputed_tokens: int = 0  # of running requests, computed again because the weights changed
    prefill_s: float = 0.0  # inside the model
    decode_s: float = 0.0  # inside the model
    step_s: float = 0.0  # whole steps
