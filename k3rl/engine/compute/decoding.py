"""Decode steps of an engine's rows: what computes them, and when the host waits for what they draw.

Where the captured step draws for all rows (nothing is cut, biased or constrained), the next step is launched before the
tokens of this one are read: it reads them where they were drawn, on the device. The host's work on a step then overlaps
the device's work on the next one. Nothing else changes. A row that turns out to have ended is not looked for in the
step that was launched for it, and its state goes with its row; a row that is preempted or cancelled in between has its
tokens, and the draw that was launched for it is discarded. Draws depend on seed and position alone, so tokens and
logprobs are those of an engine that waits.

A step is not launched early where something could ask for the state of a row as its tokens stand: with a prefix cache,
and where states are carried over a weight update.
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
from k3rl.engine.weights import ServedWeights
from k3rl.model import FlatStep, K3ForCausalLM


class Decoded(NamedTuple):
    """A step's rows: (rows [R], logits [R, V]) of those to sample from, (rows [R], draws) of those that have drawn."""

    parts: list[RowLogits]
    drawn: list[tuple[np.ndarray, Draws]]


class _LaunchedRows(NamedTuple):
    """Rows int64 [R] whose step was launched, and the place of each in it."""

    rows: np.ndarray
    places: np.ndarray
    step: LaunchedStep


class _NextStep(NamedTuple):
    """A step that was launched early: the requests int64 [n] that it draws for, and the step."""

    requests: np.ndarray
    step: LaunchedStep

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

    def decode(self, rows: list[int], alone: bool) -> Decoded:
        """Feeds running rows their last sampled tokens, or finds what was launched for them.

        alone: no other row samples in this step.
        """
        early, self._next = self._next, None
        if not rows:
            return Decoded([], [])
        began = time.perf_counter()
        launched: list[_LaunchedRows] = []
        rest = rows
        if early is not None:
            index = np.array(rows)
            places = early.find(self._table.request[index])
            found = places >= 0
            launched = [_LaunchedRows(index[found], places[found], early.step)] if found.any() else []
            rest = index[~found].tolist()
        parts: list[RowLogits] = []
        for adapter, own in self._weights.adapters.grouped(rest, self._adapter_in):
            self._decode_some(adapter, own, launched, parts)
        if alone and not parts and len(launched) == 1:
            self._launch_next(launched[0])
        drawn = [(one.rows, self._read(one)) for one in launched]
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
            launched.append(_LaunchedRows(index, np.arange(len(index)), step))
        else:
            parts.append((index, self._logits(captured, adapter, rows)))

    def _logits(self, captured: CapturedDecode | None, adapter: str, rows: list[int]) -> Tensor:
        """[R, V] of rows that are sampled elsewhere."""
        model, index = self._weights.model, np.array(rows)
        tokens = self._table.token[index]
        if captured is not None:
            logits, routes = captured.run(model, rows, tokens)
        elif (flat := self._flat_step(adapter)) is not None:
            hidden, routes = flat.hidden(torch.from_numpy(tokens), self._pool.view(rows))
            logits = model.logits(hidden)
        else:
            with self._weights.adapters.serving(model, adapter):
                out = model.hidden(torch.from_numpy(tokens).to(model.device)[:, None], cache=self._pool.view(rows))
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
        self._next = _NextStep(table.request[rows].copy(), step)

    def _read(self, launched: _LaunchedRows) -> Draws:
        """Waits for a step; its draws in the order of the rows, whose routes are recorded."""
        draws, routes = launched.step.read()
        places = launched.places
        if routes is not None:
            self._table.add_routes(launched.rows, routes[places])
        return Draws(
            draws.ids[places], draws.logprobs[places], draws.finite[places], draws.cut_rows, draws.sampling_mask
        )
