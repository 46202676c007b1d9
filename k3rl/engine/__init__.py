"""Inference: tokens in, sampled tokens with logprobs, routes and weight version out.

`Engine` runs a model of this process; `RolloutEngine` is the protocol it keeps. `scheduler.py` decides what a step
computes and `throttle.py` how many are let in, `cache.py` holds the model's states (`paged.py`: in bounded memory,
`memory.py`: how much of it), `prefix.py` those of earlier prefixes (`disk_tier.py`: in files), `rows.py` what is known
of each row, `prompts.py` checks prompts, `images.py` puts images into them, `sampler.py` draws, `grammar.py` keeps text
to a schema or grammar, `stopping.py` finds stop strings, `weights.py` receives new versions, `diagnose.py` finds where
a NaN came from, `counters.py` is what an engine counts. `server.py` serves an engine over HTTP in the dialects of
`openai.py`, stepped by `driver.py`, counted by `metrics.py`; `gateway.py` serves sessions that record what agent
programs do. Both are imported by whoever serves, not here. Nothing here trains, and nothing knows of actors.
`vllm.py` is the same protocol over a vLLM server, with `vllm_client.py` (HTTP), `vllm_wire.py` (payloads),
`vllm_weights.py` (updates) and `vllm_worker.py`, which runs inside vLLM.
"""

from k3rl.engine.engine import Engine
from k3rl.engine.prefix.cache import PrefixCache
from k3rl.engine.protocol import (
    ContextExceeded,
    EngineError,
    InvalidRequest,
    NonFiniteLogits,
    Outcome,
    PauseMode,
    RolloutEngine,
    UnknownRequest,
    WeightUpdateError,
)
from k3rl.engine.vllm.client import EngineLost, IncompatibleServer
from k3rl.engine.vllm.engine import VLLMEngine
from k3rl.types import Completion, Constraint, SamplingParams, StopReason

__all__ = [
    "Completion",
    "Constraint",
    "ContextExceeded",
    "Engine",
    "EngineError",
    "EngineLost",
    "IncompatibleServer",
    "InvalidRequest",
    "NonFiniteLogits",
    "Outcome",
    "PauseMode",
    "PrefixCache",
    "RolloutEngine",
    "SamplingParams",
    "StopReason",
    "UnknownRequest",
    "VLLMEngine",
    "WeightUpdateError",
]
