"""Inference: tokens in, sampled tokens with logprobs, routes and weight version out.

`Engine` runs a model of this process; `RolloutEngine` is the protocol it keeps. `scheduler.py` decides what a step
computes, `cache.py` holds the model's states (`paged.py`: in bounded memory), `prefix.py` those of earlier prefixes,
`rows.py` what is known of each row, `sampler.py` draws, `stopping.py` finds stop strings, `weights.py` receives new
versions, `prompts.py` checks prompts, `images.py` puts images into them, `diagnose.py` finds where a NaN came from.
`server.py` serves an engine over HTTP in the dialects of `openai.py`, stepped by `driver.py`, counted by `metrics.py`;
it is imported by whoever serves, not here.
Nothing here trains, and nothing knows of actors or environments.
"""

from k3rl.engine.engine import Engine
from k3rl.engine.prefix import PrefixCache
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
    "PrefixCache",
    "RolloutEngine",
    "SamplingParams",
    "StopReason",
    "UnknownRequest",
    "WeightUpdateError",
]
