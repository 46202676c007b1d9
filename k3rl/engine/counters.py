"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """Sums since the engine started."""

    steps: int = 0
    prefilled_tokens: int = 0  # prompt tokens computed; a prompt shared by a group counts once
    sampled_tokens: int = 0
    preempted: int = 0  # requests that gave up their row for want of memory
    recomputed_tokens: int = 0  # of running requests, computed again because the weights changed
    prefill_s: float = 0.0  # inside the model
    decode_s: float = 0.0  # inside the model
    step_s: float = 0.0  # whole steps
