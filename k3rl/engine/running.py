"""A live request as one object: what was asked, and all that the engine knows of it but numbers per token.

What changes for every row at every step (the last token, counts, logprobs) is in the columns of `rows.RowTable`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from k3rl.engine.images import Features, Placed
from k3rl.engine.prefix.chain import Chain
from k3rl.engine.prefix.parts import Hit, RoutePieces
from k3rl.engine.sampling.stopping import StopStrings
from k3rl.types import Alternatives, Completion, SamplingParams, StopReason


class TokenMatcher(Protocol):
    """Where a request stands in its grammar (`grammar.Matcher`)."""

    def accept(self, token: int) -> None:
        """Takes the next sampled token."""
        ...

    def allowed(self) -> np.ndarray:
        """bool [V]: what may be sampled next."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request has sampled: the tokens, and what goes with each of them."""

    tokens: np.ndarray  # int64 [S]
    logprobs: np.ndarray  # float64 [S]
    last_version: int
    routes: np.ndarray | None  # int16 [P + S - 1 - `params.routes_from`, M, k], when the request wants them
    alternatives: list[Alternatives] | None  # one for each token, when the request wants them

    def after(self, start: int) -> Progress:
        """Without the first `start` tokens, and without routes."""
        others = None if self.alternatives is None else self.alternatives[start:]
        return Progress(self.tokens[start:], self.logprobs[start:], self.last_version, None, others)

    @classmethod
    def none(cls, version: int) -> Progress:
        """That of a request which has sampled nothing while this version was served."""
        return cls(np.empty(0, np.int64), np.empty(0), version, None, None)


@dataclass(slots=True)
class PromptState:
    """What is known of a prompt apart from its state in the model; the members of a group share one.

    routes: pieces int16 [n, M, k] from token `routed` on. hidden [1, H] and logits [1, V] of the last token, once it is
    reached; cached: tokens that a cache had; features: of images that are being read.
    """

    routes: list[np.ndarray] = field(default_factory=list)
    routed: int = 0
    hidden: Tensor | None = None
    logits: Tensor | None = None
    cached: int = 0
    features: Features = field(default_factory=dict)

    @classmethod
    def of(cls, hit: Hit) -> PromptState:
        """That of a prompt whose first tokens a cache had."""
        if hit.routes is not None:
            routes, routed = [*hit.routes.pieces], 0
        elif hit.fixed.last_route is not None:
            routes, routed = [hit.fixed.last_route.get()], hit.length - 1
        else:
            routes, routed = [], hit.length
        return cls(routes, routed, hit.fixed.hidden, cached=hit.length)

    def pieces(self) -> RoutePieces | None:
        """Its routes, or None when those of its first tokens are not known."""
        return RoutePieces(self.routes) if self.routes and not self.routed else None

    def routes_from(self, start: int) -> np.ndarray | None:
        """Its routes from a token on, in one piece, joined once for the whole group; None when some are not known."""
        if start < self.routed or not self.routes:
            return None
        if len(self.routes) > 1:
            self.routes = [np.concatenate(self.routes)]
        return self.routes[0][start - self.routed :]


@dataclass(eq=False, slots=True)
class Running:
    """A validated request from its submission to its end. prompt int64 [P], in rows of the model (`images.py`); seed
    is a 64-bit word.

    It waits without a row; while its prompt is computed, or parked for it, it has a `prompt_state`; from its first
    token on it has a `row`, and after a preemption its `progress` until it has one again.
    """

    number: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int = 0
    images: Placed = ()
    stop: StopStrings | None = None
    key: bytes = b""  # what requests of equal prompts have in common
    chain: Chain | None = None  # the name of its tokens in the prefix cache
    hit: Hit | None = None  # the cached prefix state to be copied into the row where its prompt is computed
    prompt_state: PromptState | None = None
    row: int | None = None
    progress: Progress | None = None
    first_version: int | None = None  # of the weights that sampled its first token
    cached: int = 0  # prompt tokens that the prefix cache had
    prompt_routes: np.ndarray | None = None  # int16 [P - `params.routes_from`, M, k], shared by its group
    matcher: TokenMatcher | None = None  # of its constraint
    sampling_mask: list[np.ndarray] | None = None  # ids left for each token; None where nothing can be cut
    alternatives: list[Alternatives] | None = None  # for each token; None where none are wanted
    stopped_by: str | None = None  # the stop string that ended it

    bias: tuple[np.ndarray, np.ndarray] | None = None  # ids int64 [n] and float64 [n] that are added to their logits
    session: str = ""  # that of its parameters, until it ends
    checkpoint: int | None = None  # prompt tokens after which its state is kept for others

    def __post_init__(self) -> None:
        self.session = self.params.session
        if self.params.logit_bias:
            ids, values = zip(*self.params.logit_bias, strict=True)
            self.bias = np.array(ids, np.int64), np.array(values, np.float64)

    @property
    def ids(self) -> np.ndarray:
        """int64: what must be computed before the next token can be sampled, while it has no row."""
        return self.prompt if self.progress is None else np.concatenate([self.prompt, self.progress.tokens])

    def completion(self, progress: Progress, reason: StopReason) -> Completion:
        """Its result when it ends with this progress."""
        return Completion(
            token_ids=tuple(progress.tokens.tolist()),
            logprobs=tuple(progress.logprobs.tolist()),
            stop_reason=reason,
            weight_version=progress.last_version,
            first_version=progress.last_version if self.first_version is None else self.first_version,
            routes=progress.routes,
            sampling_mask=tuple(self.sampling_mask) if self.sampling_mask else None,
            stop_string=self.stopped_by,
            cached_tokens=self.cached,
            top_logprobs=tuple(self.alternatives) if self.alternatives else None,
        )
