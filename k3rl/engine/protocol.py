"""What an engine promises: the protocol, its outcomes and its errors.

`k3rl.engine.Engine` implements `RolloutEngine`; whoever drives an engine needs to know only this page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from torch import Tensor

from k3rl.config import K3Error
from k3rl.data import ImagePatches
from k3rl.types import Alternatives, Completion, SamplingParams

PauseMode: TypeAlias = Literal["keep", "abort", "wait"]
InFlight: TypeAlias = Literal["recompute", "carry"]


class EngineError(K3Error):
    """Base of what an engine raises or reports."""


class InvalidRequest(EngineError, ValueError):
    """A request that can never be served: nothing of it was queued."""


class ContextExceeded(InvalidRequest):
    """Prompt and tokens to sample do not fit the context."""


class EngineStopped(EngineError):
    """A step that raised, or the end of its engine, ended the request; or there is no engine any more."""


class UnknownRequest(EngineError):
    """No request of this id is waiting or running."""


class WeightUpdateError(EngineError):
    """A weight update was refused and dropped; the version before it is still served."""


class NonFiniteLogits(EngineError):
    """The model gave NaN or infinite logits for one request; nothing was sampled from them.

    `request` is its id, `position` the index in prompt + sampled of the token that was read (rows, where there are
    images), `layer` the first
    module whose output is not finite, or None when a pass from the tokens alone is finite (then the cached
    state was bad, and the message says in which layer).
    """

    def __init__(self, request: int, position: int, layer: str | None, detail: str) -> None:
        super().__init__(request, position, layer, detail)  # all of them, so that it survives pickling
        self.request, self.position, self.layer, self.detail = request, position, layer, detail

    def __str__(self) -> str:
        return f"request {self.request}: logits after token {self.position} are not finite; {self.detail}"


Outcome: TypeAlias = Completion | EngineError


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A prompt that was checked, for any number of requests: rows int64 [P] of the model, what is in place of them
    (`k3rl.engine.images`), and the bytes that requests of equal prompts have in common."""

    rows: np.ndarray
    images: tuple[Any, ...]
    key: bytes


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a request sampled since the last event: ids and logprobs of equal length, alternatives too when wanted.

    routes, when wanted: int16 [n, M, k], those of the prompt with the first event; all events together have those of
    prompt and sampled tokens but the last one.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[Alternatives, ...] = ()
    routes: np.ndarray | None = field(default=None, compare=False)


@runtime_checkable
class RolloutEngine(Protocol):
    """Tokens in, sampled tokens with logprobs out, under one numbered version of the weights.

    Every submitted id comes out of `step` exactly once: as a Completion (an aborted one too, with the tokens
    it had), or as the EngineError that ended this request alone.
    """

    @property
    def version(self) -> int:
        """The weight version that samples the next token."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether a step computes nothing until `resume`."""
        ...

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches] = ()) -> Prompt:
        """Raises InvalidRequest as `submit` would, and queues nothing -> the prompt, which any number of requests may
        be submitted with: it is checked and copied once. Any thread may ask."""
        ...

    def submit(
        self, prompt_ids: Sequence[int] | Prompt, params: SamplingParams, images: Sequence[ImagePatches] = ()
    ) -> int:
        """Queues one prompt and returns its id. Raises InvalidRequest; then nothing was queued.

        images: one for each placeholder id of the prompt, in order (`k3rl.data.images.preprocess`). An image counts as
        all its rows wherever tokens are counted: in the context, in `Completion.routes`, in `cached_tokens`.
        """
        ...

    def step(self) -> list[tuple[int, Outcome]]:
        """Samples at most one token for every running request; returns the requests that ended."""
        ...

    def new_tokens(self, request: int, seen: int, routed: int = 0) -> Tokens | None:
        """What a live request has sampled beyond `seen` tokens, if anything, with its routes beyond those of `routed`
        tokens of prompt and answer where it wants them."""
        ...

    def abort(self, *requests: int) -> None:
        """Takes requests back and frees their slots at once. Raises UnknownRequest for those that are not live, once
        the others are taken back."""
        ...

    def clear(self) -> None:
        """Forgets every request without an outcome, in whatever state a step that raised has left them."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """keep: freeze everything; abort: end everything now; wait: finish what runs, admit nothing."""
        ...

    def resume(self) -> None:
        """Ends a pause."""
        ...

    def init_weight_transfer(self, names: Iterable[str]) -> None:
        """Handshake at start: the learner will send these tensors. Raises WeightUpdateError when they differ."""
        ...

    def start_weight_update(self, version: int, manifest: Mapping[str, str]) -> None:
        """Opens an update. manifest: official name -> `k3rl.checkpoint.digest` of the stored tensor."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Hands over some stored tensors, in any order and any number of calls."""
        ...

    def verify_weight_update(self) -> None:
        """First phase: proves the update whole and builds it beside the served version, or raises and drops it."""
        ...

    def finish_weight_update(self, version: int) -> None:
        """Second phase: serves the new version from the next token on, verifying it first when that is not done."""
        ...

    def abort_weight_update(self) -> None:
        """Drops an open update; the current version stays."""
        ...
