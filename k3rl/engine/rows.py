"""What the engine knows of each running row, as columns: parameters, sampled tokens, logprobs, routes, versions.

One NumPy array per property and one row per slot, so that a step over hundreds of rows is a few array
operations; Python touches a row alone only when it starts or ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from k3rl.engine.images import Features, Placed
from k3rl.engine.prefix.cache import Pieces
from k3rl.engine.sampling.sampler import Biases, Draws
from k3rl.engine.sampling.stopping import StopStrings
from k3rl.types import Alternatives, Completion, SamplingParams, StopReason

_FIRST_CAPACITY = 64  # sampled tokens per row; doubles when a row needs more


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
    """What a preempted request had sampled: everything that its states do not tell."""

    tokens: np.ndarray  # int64 [S]
    logprobs: np.ndarray  # float64 [S]
    sampling_mask: list[np.ndarray] | None
    first_version: int
    last_version: int
    cached: int
    routes: np.ndarray | None  # int16 [P + S - 1, M, k], when the request wants them
    alternatives: list[Alternatives] | None  # one for each token, when the request wants them

    def aborted(self) -> Completion:
        """The completion of a request that is taken back while it waits."""
        return Completion(
            tuple(self.tokens.tolist()),
            tuple(self.logprobs.tolist()),
            StopReason.ABORTED,
            self.last_version,
            self.first_version,
            self.routes,
            tuple(self.sampling_mask) if self.sampling_mask else None,
            cached_tokens=self.cached,
            top_logprobs=tuple(self.alternatives) if self.alternatives else None,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request. `prompt` int64 [P], in rows (`k3rl.engine.images`); `seed` is a 64-bit word; `progress` when
    it was preempted."""

    number: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    stop: StopStrings | None = None
    progress: Progress | None = None
    images: Placed = ()

    @property
    def ids(self) -> np.ndarray:
        """int64: what must be computed before the next token can be sampled."""
        return self.prompt if self.progress is None else np.concatenate([self.prompt, self.progress.tokens])


class RowTable:
    """Columns over `rows` slots. `moe_shape` is (MoE layers, experts per token), the shape of one token's routes."""

    def __init__(self, rows: int, moe_shape: tuple[int, int]) -> None:
        self.request = np.full(rows, -1, np.int64)
        self.token = np.zeros(rows, np.int64)  # the last sampled id: what the next decode step reads
        self.count = np.zeros(rows, np.int64)  # sampled so far
        self.limit = np.zeros(rows, np.int64)
        self.temperature = np.ones(rows)
        self.top_p = np.ones(rows)
        self.top_k = np.zeros(rows, np.int64)
        self.min_p = np.zeros(rows)
        self.is_plain = np.zeros(rows, bool)  # keeps every token: nothing is cut, biased or constrained
        self.watches_text = np.zeros(rows, bool)  # has stop strings
        self.is_biased = np.zeros(rows, bool)
        self.bias_ids = np.full(rows, None, object)  # int64 [n] and float64 [n], or None without biases
        self.bias_values = np.full(rows, None, object)
        self.stop = np.full(rows, None, object)  # the request's StopStrings, or None
        self.is_constrained = np.zeros(rows, bool)
        self.matcher = np.full(rows, None, object)  # the request's grammar.Matcher, or None
        self.stopped_by = np.full(rows, None, object)  # the stop string that ended it
        self.seed = np.zeros(rows, np.uint64)
        self.first_version = np.zeros(rows, np.int64)
        self.last_version = np.zeros(rows, np.int64)
        self.cached = np.zeros(rows, np.int64)  # prompt tokens that the prefix cache had
        self.wants_routes = np.zeros(rows, bool)
        self.stop_ids = np.full((rows, 1), -1, np.int64)
        self.tokens = np.zeros((rows, _FIRST_CAPACITY), np.int64)
        self.logprobs = np.zeros((rows, _FIRST_CAPACITY))
        self.routes = np.zeros((rows, 0, *moe_shape), np.int16)  # of decoded tokens; allocated on first demand
        self.prompt_routes = np.full(rows, None, object)  # int16 [P, M, k], shared by the rows of one group
        self.sampling_mask = np.full(rows, None, object)  # list of id arrays, or None where nothing can be cut
        self.top_logprobs = np.zeros(rows, np.int64)  # alternatives wanted for each token
        self.alternatives = np.full(rows, None, object)  # list of them, or None where none are wanted

    def start(
        self,
        row: int,
        request: Request,
        prompt_routes: np.ndarray | None,
        version: int,
        cached: int = 0,
        matcher: TokenMatcher | None = None,
    ) -> None:
        """Puts a request whose prompt is computed into a row; `cached` tokens of it came from the prefix cache.

        matcher: of its constraint, after the tokens that it has sampled.
        """
        params = request.params
        stops = len(params.stop_ids)
        if stops > self.stop_ids.shape[1]:
            self.stop_ids = _widen(self.stop_ids, stops, -1)
        self.stop_ids[row] = -1
        self.stop_ids[row, :stops] = params.stop_ids
        self.request[row], self.count[row], self.limit[row] = request.number, 0, params.max_tokens
        self.temperature[row], self.top_p[row], self.top_k[row] = params.temperature, params.top_p, params.top_k
        self.min_p[row], self.seed[row] = params.min_p, request.seed
        bias = params.logit_bias
        self.bias_ids[row] = np.array([token for token, _ in bias], np.int64) if bias else None
        self.bias_values[row] = np.array([value for _, value in bias], np.float64) if bias else None
        self.is_biased[row], self.watches_text[row] = bool(bias), request.stop is not None
        self.stop[row], self.stopped_by[row] = request.stop, None
        self.is_constrained[row], self.matcher[row] = matcher is not None, matcher
        self.first_version[row] = version
        self.wants_routes[row], self.prompt_routes[row], self.cached[row] = params.return_routes, prompt_routes, cached
        cuts = params.top_p < 1 or params.top_k > 0 or params.min_p > 0 or any(b == -np.inf for _, b in bias)
        self.sampling_mask[row] = [] if cuts or params.constraint is not None else None
        cuts = (params.top_p < 1 or params.top_k > 0 or params.min_p > 0) and params.temperature > 0
        self.is_plain[row] = not cuts and not bias and params.constraint is None and not params.top_logprobs
        self.top_logprobs[row], self.alternatives[row] = params.top_logprobs, [] if params.top_logprobs else None

    def progress(self, row: int) -> Progress:
        """What a row that is about to be preempted must not lose."""
        held = self.held(row)
        return replace(held, tokens=held.tokens.copy(), logprobs=held.logprobs.copy(), routes=self.routes_of(row))

    def held(self, row: int) -> Progress:
        """What a row has, without its routes, as views that its next token changes."""
        count = int(self.count[row])
        return Progress(
            self.tokens[row, :count],
            self.logprobs[row, :count],
            self.sampling_mask[row],
            int(self.first_version[row]),
            int(self.last_version[row]),
            int(self.cached[row]),
            None,
            self.alternatives[row],
        )

    def resume(self, row: int, request: Request, progress: Progress) -> None:
        """After `start` with the routes of prompt and sampled tokens: goes on where the request was preempted.

        Routes that were recorded stay; only the token that had not been read yet has its route from the new pass.
        """
        count, length = len(progress.tokens), len(request.prompt)
        while self.tokens.shape[1] <= count:
            self.tokens = _widen(self.tokens, 2 * self.tokens.shape[1], 0)
            self.logprobs = _widen(self.logprobs, 2 * self.logprobs.shape[1], 0)
        self.tokens[row, :count], self.logprobs[row, :count] = progress.tokens, progress.logprobs
        self.token[row], self.count[row] = progress.tokens[-1], count
        self.first_version[row], self.last_version[row] = progress.first_version, progress.last_version
        self.sampling_mask[row], self.cached[row] = progress.sampling_mask, progress.cached
        self.alternatives[row] = progress.alternatives
        if progress.routes is not None:
            fresh = self.prompt_routes[row]
            if self.routes.shape[1] < self.tokens.shape[1]:
                self.routes = _widen(self.routes, self.tokens.shape[1], 0)
            self.prompt_routes[row] = progress.routes[:length]
            self.routes[row, : count - 1], self.routes[row, count - 1] = progress.routes[length:], fresh[-1]

    def biases(self, rows: np.ndarray) -> Biases | None:
        """The logit biases of these rows, numbered by their place in `rows`; None when they have none."""
        having = np.flatnonzero(self.is_biased[rows])
        if not having.size:
            return None
        ids, values = self.bias_ids[rows[having]].tolist(), self.bias_values[rows[having]].tolist()
        forbids = np.zeros(len(rows), bool)
        forbids[having] = [bool((own == -np.inf).any()) for own in values]
        places = np.repeat(having, [len(own) for own in ids])
        return Biases(places, np.concatenate(ids), np.concatenate(values), forbids)

    def add_routes(self, rows: np.ndarray, routes: np.ndarray | Tensor) -> None:
        """Routes [B, M, k] of the token that each row's decode step read, its `count`-th sampled one.

        They leave the device only where somebody wants them.
        """
        wanted = self.wants_routes[rows]
        if not wanted.any():
            return
        if isinstance(routes, Tensor):
            routes = routes.cpu().numpy()
        if self.routes.shape[1] < self.tokens.shape[1]:
            self.routes = _widen(self.routes, self.tokens.shape[1], 0)
        rows = rows[wanted]
        self.routes[rows, self.count[rows] - 1] = routes[wanted]

    def append(self, rows: np.ndarray, draws: Draws, versions: np.ndarray) -> np.ndarray:
        """Appends one draw per row (those with finite logits), sampled by weight versions [R].

        Returns the rows that are complete now.
        """
        good = draws.finite
        alive, ids = rows[good], draws.ids[good]
        at = self.count[alive]
        if at.size and at.max() >= self.tokens.shape[1]:
            self.tokens = _widen(self.tokens, 2 * self.tokens.shape[1], 0)
            self.logprobs = _widen(self.logprobs, 2 * self.logprobs.shape[1], 0)
        self.tokens[alive, at], self.logprobs[alive, at] = ids, draws.logprobs[good]
        self.token[alive], self.count[alive], self.last_version[alive] = ids, at + 1, versions[good]
        self._append_sampling_masks(rows, draws)
        stopped = (self.stop_ids[alive] == ids[:, None]).any(1)
        for place in np.flatnonzero(self.watches_text[alive]).tolist():
            row = alive[place]
            self.stopped_by[row] = self.stop[row].feed(int(ids[place]))
            stopped[place] |= self.stopped_by[row] is not None
        for place in np.flatnonzero(self.is_constrained[alive]).tolist():
            self.matcher[alive[place]].accept(int(ids[place]))
        return alive[stopped | (at + 1 >= self.limit[alive])]

    def completion(self, row: int, aborted: bool = False) -> Completion:
        """The row's result; it ended by itself unless `aborted`."""
        count = int(self.count[row])
        tokens = self.tokens[row, :count]
        if aborted:
            reason = StopReason.ABORTED
        else:
            stopped = self.stopped_by[row] is not None or (self.stop_ids[row] == tokens[-1]).any()
            reason = StopReason.STOP if stopped else StopReason.LENGTH
        return Completion(
            token_ids=tuple(tokens.tolist()),
            logprobs=tuple(self.logprobs[row, :count].tolist()),
            stop_reason=reason,
            weight_version=int(self.last_version[row]),
            first_version=int(self.first_version[row]),
            routes=self.routes_of(row),
            sampling_mask=tuple(self.sampling_mask[row]) if self.sampling_mask[row] else None,
            stop_string=self.stopped_by[row],
            cached_tokens=int(self.cached[row]),
            top_logprobs=tuple(self.alternatives[row]) if self.alternatives[row] else None,
        )

    def routes_of(self, row: int, start: int = 0) -> np.ndarray | None:
        """int16 [prompt + sampled - 1 - start, M, k], or None when the request did not ask for them."""
        if not self.wants_routes[row]:
            return None
        prompt, count = self.prompt_routes[row], max(int(self.count[row]) - 1, 0)
        return np.concatenate([prompt[start:], self.routes[row, max(start - len(prompt), 0) : count]])

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copies rows, (source, target); no row is both."""
        if pairs:
            source, target = (list(rows) for rows in zip(*pairs, strict=True))
            for column in vars(self).values():
                column[target] = column[source]

    def _append_sampling_masks(self, rows: np.ndarray, draws: Draws) -> None:
        """Records the ids left (int32, ascending) of the rows where something is cut; a set like the last one is it."""
        if not draws.cut_rows.size:
            return
        ids = (np.flatnonzero(draws.sampling_mask) % draws.sampling_mask.shape[1]).astype(np.int32)
        ends = np.cumsum(np.count_nonzero(draws.sampling_mask, axis=1))
        start = 0
        for index, end in zip(draws.cut_rows.tolist(), ends.tolist(), strict=True):
            sets, own = self.sampling_mask[rows[index]], ids[start:end]
            sets.append(sets[-1] if sets and np.array_equal(sets[-1], own) else own)
            start = end


def _widen(column: np.ndarray, capacity: int, fill: int) -> np.ndarray:
    """The column with its second axis grown to `capacity`."""
    wider = np.full((column.shape[0], capacity, *column.shape[2:]), fill, column.dtype)
    wider[:, : column.shape[1]] = column
    return wider


@dataclass(slots=True)
class PromptState:
    """What is known of a prompt beside its state. routes: pieces int16 [n, M, k] from the first token on, None where a
    cache had none.

    hidden [1, H] and logits [1, V] of the last token, once it is reached; cached: tokens that a cache had; features: of
    images that are being read.
    """

    routes: list[np.ndarray | None] = field(default_factory=list)
    hidden: Tensor | None = None
    logits: Tensor | None = None
    cached: int = 0
    features: Features = field(default_factory=dict)

    def pieces(self) -> Pieces | None:
        """Its routes, or None when some are not known."""
        known = [piece for piece in self.routes if piece is not None]
        return Pieces(known) if known and len(known) == len(self.routes) else None

    def join_routes(self) -> None:
        """Puts the pieces together, for whoever wants all of them."""
        known = [piece for piece in self.routes if piece is not None]
        self.routes = [np.concatenate(known) if len(known) == len(self.routes) else None]
