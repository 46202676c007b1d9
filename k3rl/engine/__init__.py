"""Inference: tokens in, sampled tokens with logprobs, routes and weight version out.

`engine.py` runs a model of this process under the protocol of `protocol.py`. A live request is one object
(`running.py`); `batch.py` keeps all of them and the rows that they have: who is next is decided in `scheduler.py` (and
`throttle.py`), the model's states lie in `cache.py` (in bounded memory `paged.py`, `page_table.py`, `deferred.py`;
`memory.py`: how much of it), sampled tokens in the columns of `rows.py`. `prompts.py` admits requests, `images.py` puts
images into them, `outcomes.py` keeps what ended, `weights.py` and `adapters.py` receive new versions, `diagnose.py`
finds where a NaN came from, `counters.py` counts. `driver.py` steps any engine on a thread of its own.
Folders: `compute/` (forwards), `sampling/` (tokens from logits), `prefix/` (the prefix cache), `vllm/` (the same
protocol over a vLLM server). Nothing here trains, speaks HTTP to clients (`k3rl.serve`) or knows of actors.
"""

from k3rl.engine.adapters import AdapterHeader
from k3rl.engine.cache import MemoryPlan, StatePool, rows_within
from k3rl.engine.compute import padded_batch
from k3rl.engine.driver import EngineThread, News, Submission
from k3rl.engine.engine import Engine, totals_of
from k3rl.engine.memory import device_bytes
from k3rl.engine.paged import PagedCache
from k3rl.engine.prefix import DiskTier, FixedState, Hit, PrefixCache
from k3rl.engine.protocol import (
    ContextExceeded,
    EngineError,
    EngineStopped,
    InvalidRequest,
    NonFiniteLogits,
    Outcome,
    PauseMode,
    Prompt,
    RolloutEngine,
    Tokens,
    UnknownRequest,
    WeightUpdateError,
)
from k3rl.engine.sampling import end_compilers, request_samples, sample_uncut
from k3rl.engine.vllm import EngineLost, IncompatibleServer, VLLMEngine
from k3rl.types import Completion, Constraint, SamplingParams, StopReason

__all__ = [
    "AdapterHeader",
    "Completion",
    "Constraint",
    "ContextExceeded",
    "DiskTier",
    "Engine",
    "EngineError",
    "EngineLost",
    "EngineStopped",
    "EngineThread",
    "FixedState",
    "Hit",
    "IncompatibleServer",
    "InvalidRequest",
    "MemoryPlan",
    "News",
    "NonFiniteLogits",
    "Outcome",
    "PagedCache",
    "PauseMode",
    "PrefixCache",
    "Prompt",
    "RolloutEngine",
    "SamplingParams",
    "StatePool",
    "StopReason",
    "Submission",
    "Tokens",
    "UnknownRequest",
    "VLLMEngine",
    "WeightUpdateError",
    "device_bytes",
    "end_compilers",
    "padded_batch",
    "request_samples",
    "rows_within",
    "sample_uncut",
    "totals_of",
]
