"""Decode steps of an engine's rows: what computes them, and when the host waits for what they draw.

Where the captured step draws for all rows (nothing is cut, biased or constrained), the next step is launched before the
tokens of this one are read: it reads them where they were drawn, on the device. The host's work on a step then overlaps
the device's work on the next one. Nothing else changes. A row that turns out to have ended is not looked for in the
step that was launched for it, and its state goes with its row; a row that is preempted or cancelled in between has its
tokens, and the draw that was launched for it is discarded. Draws depend on seed and position alone, so tokens and
logprobs are those of an engine that waits.

A step that was launched early has read a token which the host did not know yet. Where its request then ends, the state
that is kept has taken in all of the answer, as the pool counts, and where it was not, all but the last token. The route
of such a token comes with the step (`RouteAhead`). The step is of the weights that launched it: where states are
carried over a weight update, the token that it draws is the last one of the old version.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.batch import Batch
from k3rl.engine.compute import exact
from k3rl.engine.compute.decode_graph import CapturedDecode, LaunchedStep
from k3rl.engine.compute.prefill import RowLogits
from k3rl.engine.counters import EngineCounters
from k3rl.engine.memory import keeps_copies
from k3rl.engine.sampling import sampler
from k3rl.engine.sampling.sampler import Draws
from k3rl.engine.uploads import upload
from k3rl.engine.weights import ServedWeights
from k3rl.model import FlatStep, K3ForCausalLM


class DrawnRows(NamedTuple):
    """Rows int64 [R] that have drawn their next tokens, and the weight version that drew."""

    rows: np.ndarray
    draws: Draws
    version: int


class Decoded(NamedTuple):
    """A step's rows: (rows [R], logits [R, V]) of those to sample from, and those that have drawn."""

    parts: list[RowLogits]
    drawn: list[DrawnRows]


class _LaunchedRows(NamedTuple):
    """Rows int64 [R] whose step was launched, and the place of each in it."""

    rows: np.ndarray
    places: np.ndarray
    step: LaunchedStep
    version: int


class RouteAhead:
    """The route of a token that a step launched early reads (`prefix.parts.LastRoute`)."""

    def __init__(self, step: LaunchedStep, place: int) -> None:
        self._step: LaunchedStep | None = step
        self._place, self._route = place, np.empty(0, np.int16)

    def get(self) -> np.ndarray:
        """int16 [1, M, k]; waits for the step."""
        if self._step is not None:
            routes = self._step.read()[1]
            assert routes is not None
            self._route, self._step = routes[self._place : self._place + 1].copy(), None
        return self._route


class _NextStep(NamedTuple):
    """A step that was launched early: the requests int64 [n] that it draws for, the step, and the weights' version."""

    requests: np.ndarray
    step: LaunchedStep
    version: int

    def find(self, requests: np.ndarray) -> np.ndarray:
        """The place of each of these requests, -1 for those that it does not draw for."""
        order = np.argsort(self.requests)
        at = np.searchsorted(self.requests, requests, sorter=order).clip(max=len(order) - 1)
        places = order[at]
        return np.where(self.requests[places] == requests, places, -1)


class Decoder:
    """Decodes rows of a batch.

    exact: every row by itself (`k3rl.engine.compute.exact`). overlaps: steps may be launched early.
    """

    def __init__(
        self,
        batch: Batch,
        weights: ServedWeights,
        counters: EngineCounters,
        captured: CapturedDecode | None,
        *,
        exact: bool,
        overlaps: bool,
    ) -> None:
        self._scheduler, self._pool, self._table = batch.scheduler, batch.pool, batch.table
        self._weights, self._counters, self._captured, self._exact = weights, counters, captured, exact
        self._flat: tuple[K3ForCausalLM, FlatStep | None] | None = None  # of the model that decoded last
        self._overlaps = overlaps and captured is not None
        self._next: _NextStep | None = None
        self._ahead: list[RouteAhead] = []  # of the step launched early

    def route_ahead(self, request: int) -> RouteAhead | None:
        """The route of a request's last token, where the step that was launched early reads it; None where none does,
        or none were wanted."""
        if self._next is None or not self._next.step.has_routes:
            return None
        place = int(self._next.find(np.array([request]))[0])
        if place < 0:
            return None
        self._ahead.append(RouteAhead(self._next.step, place))
        return self._ahead[-1]

    def _settle_ahead(self) -> None:
        """Reads what others wait for: the buffers of a step are those of the second next one."""
        ahead, self._ahead = self._ahead, []
        for route in ahead:
            route.get()

    def decode(self, rows: list[int], alone: bool) -> Decoded:
        """Feeds running rows their last sampled tokens, or finds what was launched for them.

        alone: no other row samples in this step.
        """
        early, self._next = self._next, None
        if not rows:
            self._settle_ahead()
            return Decoded([], [])
        began = time.perf_counter()
        self._counters.decode_steps += 1
        launched: list[_LaunchedRows] = []
        rest = rows
        if early is not None:
            index = np.array(rows)
            places = early.find(self._table.request[index])
            found = places >= 0
            if found.any():
                self._counters.ahead_steps += 1
                launched = [_LaunchedRows(index[found], places[found], early.step, early.version)]
            else:
                self._settle_ahead()
            rest = index[~found].tolist()
        parts: list[RowLogits] = []
        for adapter, own in self._weights.adapters.grouped(rest, self._adapter_in):
            self._decode_some(adapter, own, launched, parts)
        if alone and not parts and len(launched) == 1:
            self._launch_next(launched[0])
        self._counters.uncaptured_steps += bool(parts)
        drawn = [DrawnRows(one.rows, self._read(one), one.version) for one in launched]
        self._settle_ahead()
        self._counters.decode_s += time.perf_counter() - began
        return Decoded(parts, drawn)

    def _adapter_in(self, row: int) -> str:
        """The adapter of the request in a row; empty for the model alone."""
        return self._table.running[row].params.adapter

    def _decode_some(
        self, adapter: str, rows: list[int], launched: list[_LaunchedRows], parts: list[RowLogits]
    ) -> None:
        """Rows of one adapter, in the way that fits them: launched, or with logits to sample from."""
        index = np.array(rows)
        if self._exact:
            logits, routes = exact.decode(self._weights.model, self._pool, self._table, rows)
            self._table.add_routes(index, routes)
            parts.append((index, logits))
            return
        self._pool.claim(rows, [1] * len(rows))
        captured = None if adapter else self._captured
        if captured is not None and self._table.is_plain[index].all() and captured.fits(index):
            step = self._launch(captured, index, self._table.token[index], 0)
            launched.append(_LaunchedRows(index, np.arange(len(index)), step, self._weights.version))
        else:
            parts.append((index, self._logits(captured, adapter, rows)))

    def _logits(self, captured: CapturedDecode | None, adapter: str, rows: list[int]) -> Tensor:
        """[R, V] of rows that are sampled elsewhere."""
        model, index = self._weights.model, np.array(rows)
        tokens = self._table.token[index]
        if captured is not None:
            self._counters.split_steps += not captured.fits(index)
            logits, routes = captured.run(model, rows, tokens)
        elif (flat := self._flat_step(adapter)) is not None:
            hidden, routes = flat.hidden(torch.from_numpy(tokens), self._pool.view(rows))
            logits = model.logits(hidden)
        else:
            with self._weights.adapters.serving(model, adapter):
                out = model.hidden(upload(tokens, model.device)[:, None], cache=self._pool.view(rows))
            logits, routes = model.logits(out.hidden[:, 0]), out.routes[:, 0]
        self._table.add_routes(index, routes)
        return logits

    def _flat_step(self, adapter: str) -> FlatStep | None:
        """What decodes rows of the model alone, where it is made for such a model."""
        model = self._weights.model
        if adapter or model.adapter is not None:
            return None
        if self._flat is None or self._flat[0] is not model:
            self._flat = model, FlatStep(model, keeps_copies(model)) if FlatStep.takes(model) else None
        return self._flat[1]

    def _launch(self, captured: CapturedDecode, rows: np.ndarray, tokens: np.ndarray, later: int) -> LaunchedStep:
        """Launches the step that draws each row's next token but `later`."""
        table = self._table
        uniform = sampler.uniforms(table.seed[rows], table.count[rows] + later)
        with_routes = bool(table.wants_routes[rows].any())
        return captured.launch(self._weights.model, rows, tokens, table.temperature[rows], uniform, with_routes)

    def _launch_next(self, last: _LaunchedRows) -> None:
        """Launches the step after `last`, which is the last one that was launched, if it can be."""
        table, rows, captured = self._table, last.rows, self._captured
        if not self._overlaps or captured is None or not table.is_plain[rows].all():
            return
        if self._weights.adapters.names and any(self._adapter_in(row) for row in rows.tolist()):
            return
        if (table.count[rows] + 1 >= table.limit[rows]).all() or not captured.fits(rows) or not self._scheduler.fits():
            return
        self._pool.claim(rows.tolist(), [1] * len(rows))
        step = self._launch(captured, rows, -1 - last.places, 1)
        self._next = _NextStep(table.request[rows].copy(), step, self._weights.version)

    def _read(self, launched: _LaunchedRows) -> Draws:
        """Waits for a step; its draws in the order of the rows, whose routes are recorded."""
        draws, routes = launched.step.read()
        places = launched.places
        if routes is not None:
            self._table.add_routes(launched.rows, routes[places])
        return Draws(draws.ids[places], draws.logprobs[places], draws.finite[places], draws.cut_rows, draws.kept)
