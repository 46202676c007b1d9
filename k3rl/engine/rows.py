"""What the engine knows of each running row in numbers, as columns: parameters, sampled tokens, logprobs, routes.

One NumPy array per property and one row per slot, so that a step over hundreds of rows is a few array operations;
Python touches a row alone only when it starts or ends, and once in `_WINDOW` tokens. What is no number is in the row's
`Running`.

Of what there is for each token, columns hold the newest `_WINDOW`; whole windows move to lists of the row's own, which
end with it. So memory follows the tokens that there are, not rows times the longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import DTypeLike
from torch import Tensor

from k3rl.engine.running import Progress, PromptState, Running
from k3rl.engine.sampling.sampler import Biases, Draws
from k3rl.types import Completion, StopReason

_WINDOW = 64  # sampled tokens of a row that are in the columns


class RowTable:
    """Columns over `rows` slots. `moe_shape` is (MoE layers, experts per token), the shape of one token's routes."""

    def __init__(self, rows: int, moe_shape: tuple[int, int]) -> None:
        self.running = np.full(rows, None, object)  # the `Running` in each row, None in rows that nobody decodes
        self.request = np.full(rows, -1, np.int64)  # its number
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
        self.is_constrained = np.zeros(rows, bool)
        self.seed = np.zeros(rows, np.uint64)
        self.last_version = np.zeros(rows, np.int64)
        self.wants_routes = np.zeros(rows, bool)
        self.stop_ids = np.full((rows, 1), -1, np.int64)
        self.tokens = TokenColumn(rows, (), np.int64)
        self.logprobs = TokenColumn(rows, (), np.float64)
        self.routes = TokenColumn(rows, moe_shape, np.int16)  # of decoded tokens
        self.top_logprobs = np.zeros(rows, np.int64)  # alternatives wanted for each token

    def start(self, row: int, running: Running, prompt: PromptState, version: int) -> None:
        """Puts a request whose prompt is computed into a row, where `version` samples its next token; one that was
        preempted goes on where it was. Its matcher is there, and stands behind the tokens that it has sampled."""
        params = running.params
        stops = len(params.stop_ids)
        if stops > self.stop_ids.shape[1]:
            self.stop_ids = _widen(self.stop_ids, stops, -1)
        self.stop_ids[row] = -1
        self.stop_ids[row, :stops] = params.stop_ids
        self.request[row], self.count[row], self.limit[row] = running.number, 0, params.max_tokens
        self.temperature[row], self.top_p[row], self.top_k[row] = params.temperature, params.top_p, params.top_k
        self.min_p[row], self.seed[row] = params.min_p, running.seed
        bias, constrained = params.logit_bias, params.constraint is not None
        self.is_biased[row], self.watches_text[row] = bool(bias), running.stop is not None
        self.is_constrained[row], self.wants_routes[row] = constrained, params.return_routes
        trims = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
        cuts = trims and params.temperature > 0
        self.is_plain[row] = not cuts and not bias and not constrained and not params.top_logprobs
        self.top_logprobs[row] = params.top_logprobs
        self.running[row], running.row, running.prompt_state = running, row, None
        for column in (self.tokens, self.logprobs, self.routes):
            column.clear(row)
        routes = prompt.routes_from(_first_route(running)) if params.return_routes else None
        if running.progress is not None:
            self._resume(row, running, running.progress, routes)
            return
        running.prompt_routes, running.cached, running.first_version = routes, prompt.cached, version
        if trims or constrained or any(value == -np.inf for _, value in bias):
            running.sampling_mask = []
        if params.top_logprobs:
            running.alternatives = []

    def _resume(self, row: int, running: Running, progress: Progress, routes: np.ndarray | None) -> None:
        """Goes on where a request was preempted; routes: of the token that had not been read yet, from the new pass.

        Those that were recorded stay.
        """
        count, own = len(progress.tokens), len(running.prompt) - running.params.routes_from
        self.tokens.set(row, progress.tokens)
        self.logprobs.set(row, progress.logprobs)
        self.token[row], self.count[row], self.last_version[row] = progress.tokens[-1], count, progress.last_version
        if progress.routes is not None and routes is not None:
            self.routes.set(row, np.concatenate([progress.routes[own:], routes[-1:]]))
        running.progress = None

    def progress(self, row: int) -> Progress:
        """What a row that is about to be preempted must not lose."""
        return replace(self.held(row), routes=self.routes_of(row))

    def sampled(self, row: int) -> np.ndarray:
        """int64 [S]: the tokens that a row has sampled."""
        return self.tokens.read(row, 0, int(self.count[row]))

    def held(self, row: int, start: int = 0) -> Progress:
        """What a row has from its `start`-th token on, without its routes."""
        count, alternatives = int(self.count[row]), self.running[row].alternatives
        return Progress(
            self.tokens.read(row, start, count),
            self.logprobs.read(row, start, count),
            int(self.last_version[row]),
            None,
            None if alternatives is None else alternatives[start:],
        )

    def biases(self, rows: np.ndarray) -> Biases | None:
        """The logit biases of these rows, numbered by their place in `rows`; None when they have none."""
        having = np.flatnonzero(self.is_biased[rows])
        if not having.size:
            return None
        ids, values = zip(*(running.bias for running in self.running[rows[having]]), strict=True)
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
        rows = rows[wanted]
        self.routes.append(rows, self.count[rows] - 1, routes[wanted])

    def append(self, rows: np.ndarray, draws: Draws, versions: np.ndarray) -> np.ndarray:
        """Appends one draw per row (those with finite logits), sampled by weight versions [R].

        Returns the rows that are complete now.
        """
        good = draws.finite
        alive, ids = rows[good], draws.ids[good]
        at = self.count[alive]
        self.tokens.append(alive, at, ids)
        self.logprobs.append(alive, at, draws.logprobs[good])
        self.token[alive], self.count[alive], self.last_version[alive] = ids, at + 1, versions[good]
        self._append_sampling_masks(rows, draws)
        stopped = (self.stop_ids[alive] == ids[:, None]).any(1)
        for place in np.flatnonzero(self.watches_text[alive]).tolist():
            running = self.running[alive[place]]
            running.stopped_by = running.stop.feed(int(ids[place]))
            stopped[place] |= running.stopped_by is not None
        for place in np.flatnonzero(self.is_constrained[alive]).tolist():
            self.running[alive[place]].matcher.accept(int(ids[place]))
        return alive[stopped | (at + 1 >= self.limit[alive])]

    def completion(self, row: int, aborted: bool = False) -> Completion:
        """The row's result; it ended by itself unless `aborted`."""
        running, held = self.running[row], self.held(row)
        if aborted:
            reason = StopReason.ABORTED
        else:
            stopped = running.stopped_by is not None or (self.stop_ids[row] == held.tokens[-1]).any()
            reason = StopReason.STOP if stopped else StopReason.LENGTH
        return running.completion(replace(held, routes=self.routes_of(row)), reason)

    def routes_of(self, row: int, start: int = 0) -> np.ndarray | None:
        """int16 [prompt + sampled - 1 - routes_from - start, M, k], or None when the request did not ask for them."""
        if not self.wants_routes[row]:
            return None
        prompt, count = self.running[row].prompt_routes, max(int(self.count[row]) - 1, 0)
        own = max(start - len(prompt), 0)
        return np.concatenate([prompt[start:], self.routes.read(row, own, max(count, own))])

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copies rows, (source, target); no row is both. The source rows are to be freed."""
        if pairs:
            source, target = (list(rows) for rows in zip(*pairs, strict=True))
            for column in vars(self).values():
                if isinstance(column, TokenColumn):
                    column.move(source, target)
                else:
                    column[target] = column[source]
            for row in target:
                if (running := self.running[row]) is not None:  # not in a row where a prompt is being computed
                    running.row = row

    def free(self, rows: Iterable[int]) -> None:
        """Nobody decodes in these rows any more."""
        listed = list(rows)
        self.running[listed] = None
        for column in (self.tokens, self.logprobs, self.routes):
            for row in listed:
                column.clear(row)

    def _append_sampling_masks(self, rows: np.ndarray, draws: Draws) -> None:
        """Records the ids left (int32, ascending) of the rows where something is cut; a set like the last one is it."""
        for index, own in zip(draws.cut_rows.tolist(), draws.kept.rows, strict=True):
            sets = self.running[rows[index]].sampling_mask
            sets.append(sets[-1] if sets and np.array_equal(sets[-1], own) else own.copy())


class TokenColumn:
    """A value of this shape for each sampled token of `rows` rows, of any number of tokens each."""

    def __init__(self, rows: int, shape: tuple[int, ...], kind: DTypeLike) -> None:
        self._shape = shape
        self._newest = np.zeros((rows, 0, *shape), kind)  # allocated on first demand
        self._earlier: list[list[np.ndarray]] = [[] for _ in range(rows)]  # whole windows

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._newest.nbytes + sum(window.nbytes for row in self._earlier for window in row)

    def append(self, rows: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        """Values [R, ...] of the token `at` [R] of these rows, which is the next one of each."""
        self._allocate()
        place = at % _WINDOW
        self._newest[rows, place] = values
        for row in rows[place == _WINDOW - 1].tolist():
            self._earlier[row].append(self._newest[row].copy())

    def set(self, row: int, values: np.ndarray) -> None:
        """Those of all tokens of a row so far."""
        self._allocate()
        whole = len(values) // _WINDOW * _WINDOW
        self._earlier[row] = [values[start : start + _WINDOW] for start in range(0, whole, _WINDOW)]
        self._newest[row, : len(values) - whole] = values[whole:]

    def read(self, row: int, start: int, stop: int) -> np.ndarray:
        """A copy of the values [stop - start, ...] of tokens start..stop, which are there."""
        first, whole = start // _WINDOW, len(self._earlier[row])
        parts = [*self._earlier[row][first:], self._newest[row, : max(stop - whole * _WINDOW, 0)]]
        skipped = start - min(first, whole) * _WINDOW
        return np.concatenate(parts)[skipped : skipped + stop - start]

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Rows change hands."""
        self._newest[target] = self._newest[source]
        for here, there in zip(source, target, strict=True):
            self._earlier[there], self._earlier[here] = self._earlier[here], []

    def clear(self, row: int) -> None:
        """A row has no tokens."""
        self._earlier[row] = []

    def _allocate(self) -> None:
        if not self._newest.shape[1]:
            self._newest = np.zeros((len(self._newest), _WINDOW, *self._shape), self._newest.dtype)


def _first_route(running: Running) -> int:
    """The first token whose route is to come from the pass that a request waits for."""
    return running.params.routes_from if running.progress is None else len(running.ids) - 1


def _widen(column: np.ndarray, capacity: int, fill: int) -> np.ndarray:
    """The column with its second axis grown to `capacity`."""
    wider = np.full((column.shape[0], capacity, *column.shape[2:]), fill, column.dtype)
    wider[:, : column.shape[1]] = column
    return wider
