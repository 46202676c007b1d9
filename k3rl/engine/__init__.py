"""Inference: tokens in, sampled tokens with logprobs, routes and weight version out.

`Engine` runs a model of this process; `RolloutEngine` is the protocol it keeps. `scheduler.py` decides what a step
computes, `cache.py` holds the model's states, `rows.py` what is known of each row, `sampler.py` draws, `weights.py`
receives new versions, `diagnose.py` finds where a NaN came from.
Nothing here trains, and nothing knows of actors or environments.
"""

from k3rl.engine.engine import Engine
from k3rl.engine.protocol import (
    EngineError,
    InvalidRequest,
    NonFiniteLogits,
    Outcome,
    PauseMode,
    RolloutEngine,
    UnknownRequest,
    WeightUpdateError,
)
from k3rl.types import Completion, SamplingParams, StopReason

__all__ = [
    "Completion",
    "Engine",
    "EngineError",
    "InvalidRequest",
    "NonFiniteLogits",
    "Outcome",
    "PauseMode",
    "RolloutEngine",
    "SamplingParams",
    "StopReason",
    "UnknownRequest",
    "WeightUpdateError",
]
