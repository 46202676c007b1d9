"""A live request as one object: what was asked, and all that the engine knows of it but numbers per token.

What changes for every row at every step (the last token, counts, logprobs) is in the columns of `rows.RowTable`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from k3rl.engine.images import Features, Placed
from k3rl.engine.prefix.cache import Chain, Hit, RoutePieces
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
    routes: np.ndarray | None  # int16 [P + S - 1, M, k], when the request wants them
    alternatives: list[Alternatives] | None  # one for each token, when the request wants them

    @classmethod
    def none(cls, version: int) -> Progress:
        """That of a request which has sampled nothing while this version was served."""
        return cls(np.empty(0, np.int64), np.empty(0), version, None, None)


@dataclass(slots=True)
class PromptState:
    """What is known of a prompt apart from its state in the model; the members of a group share one.

    routes: pieces int16 [n, M, k] from the first token on, None where a cache had none. hidden [1, H] and logits [1, V]
    of the last token, once it is reached; cached: tokens that a cache had; features: of images that are being read.
    """

    routes: list[np.ndarray | None] = field(default_factory=list)
    hidden: Tensor | None = None
    logits: Tensor | None = None
    cached: int = 0
    features: Features = field(default_factory=dict)

    @classmethod
    def of(cls, hit: Hit) -> PromptState:
        """That of a prompt whose first tokens a cache had."""
        known: list[np.ndarray | None] = [None] if hit.routes is None else [*hit.routes.pieces]
        return cls(known, hit.fixed.hidden, cached=hit.length)

    def pieces(self) -> RoutePieces | None:
        """Its routes, or None when some are not known."""
        known = [piece for piece in self.routes if piece is not None]
        return RoutePieces(known) if known and len(known) == len(self.routes) else None

    def joined_routes(self) -> np.ndarray | None:
        """Its routes in one piece, joined once for the whole group; None when some are not known."""
        if len(self.routes) > 1:
            pieces = self.pieces()
            self.routes = [None if pieces is None else np.concatenate(pieces.pieces)]
        return self.routes[0]


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
    prompt_routes: np.ndarray | None = None  # int16 [P, M, k], shared by its group
    matcher: TokenMatcher | None = None  # of its constraint
    sampling_mask: list[np.ndarray] | None = None  # ids left for each token; None where nothing can be cut
    alternatives: list[Alternatives] | None = None  # for each token; None where none are wanted
    stopped_by: str | None = None  # the stop string that ended it

    bias: tuple[np.ndarray, np.ndarray] | None = None  # ids int64 [n] and float64 [n] that are added to their logits

    def __post_init__(self) -> None:
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
