"""Decode steps of an engine's rows: which program computes them, and when the host waits for what they draw.

Where the program of fixed shapes draws for all rows (nothing is cut, biased or constrained), the next step is started
before the tokens of this one are read: it reads them where they were drawn, on the device. The host's work on a step
then runs beside the device's work on the next one. Nothing else changes. A row that turns out to have ended is not
looked for in the step that was begun for it, and its state goes with its row; a row that is preempted or cancelled in
between has its tokens, and the draw that was begun for it is left behind. Draws depend on seed and position alone, so
tokens and logprobs are those of an engine that waits.

A step is not started early where something could ask for the state of a row as its tokens stand: with a prefix cache,
and where states are carried over a weight update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.adapters import AdapterStore
from k3rl.engine.cache import StatePool
from k3rl.engine.compute import exact
from k3rl.engine.compute.decode_graph import DecodeProgram, Started
from k3rl.engine.counters import EngineCounters
from k3rl.engine.memory import keeps_copies
from k3rl.engine.rows import Request, RowTable
from k3rl.engine.sampling import sampler
from k3rl.engine.sampling.sampler import Draws
from k3rl.model import K3ForCausalLM
from k3rl.model.flat_step import FlatStep


class Decoded(NamedTuple):
    """A step's rows: (rows [R], logits [R, V]) of those to sample from, (rows [R], draws) of those that have drawn."""

    parts: list[tuple[np.ndarray, Tensor]]
    drawn: list[tuple[np.ndarray, Draws]]


class _Run(NamedTuple):
    """Rows int64 [R] whose step has started, and the place of each in it."""

    rows: np.ndarray
    places: np.ndarray
    started: Started


class _Ahead(NamedTuple):
    """A step that was started early: the requests int64 [n] that it draws for, and the step."""

    requests: np.ndarray
    started: Started

    def find(self, requests: np.ndarray) -> np.ndarray:
        """The place of each of these requests, -1 for those that it does not draw for."""
        order = np.argsort(self.requests)
        at = np.searchsorted(self.requests, requests, sorter=order).clip(max=len(order) - 1)
        places = order[at]
        return np.where(self.requests[places] == requests, places, -1)


class Decoder:
    """Decodes rows of an engine's pool.

    exact: every row by itself (`k3rl.engine.compute.exact`). overlaps: steps may be started early.
    """

    def __init__(
        self,
        pool: StatePool,
        table: RowTable,
        adapters: AdapterStore,
        requests: Mapping[int, Request],
        counters: EngineCounters,
        program: DecodeProgram | None,
        *,
        exact: bool,
        overlaps: bool,
    ) -> None:
        self._pool, self._table, self._adapters, self._requests = pool, table, adapters, requests
        self._counters, self._program, self._exact = counters, program, exact
        self._flat: tuple[K3ForCausalLM, FlatStep | None] | None = None  # of the model that decoded last
        self._overlaps = overlaps and program is not None
        self._ahead: _Ahead | None = None

    def adapter_in(self, row: int) -> str:
        """The adapter of the request in a row; empty for the model alone."""
        return self._requests[int(self._table.request[row])].params.adapter

    def decode(self, model: K3ForCausalLM, rows: list[int], alone: bool, room: Callable[[], bool]) -> Decoded:
        """Feeds running rows their last sampled tokens, or finds what was started for them.

        alone: no other row samples in this step. room: whether every running row may have one more token after this
        step; asked before the next step is started.
        """
        ahead, self._ahead = self._ahead, None
        if not rows:
            return Decoded([], [])
        began = time.perf_counter()
        runs: list[_Run] = []
        rest = rows
        if ahead is not None:
            index = np.array(rows)
            places = ahead.find(self._table.request[index])
            runs = [_Run(index[places >= 0], places[places >= 0], ahead.started)] if (places >= 0).any() else []
            rest = index[places < 0].tolist()
        parts = []
        for adapter, own in self._adapters.grouped(rest, self.adapter_in):
            index = np.array(own)
            if self._exact:
                logits, routes = exact.decode(model, self._pool, self._table, self._requests, own)
                self._table.add_routes(index, routes)
                parts.append((index, logits))
                continue
            self._pool.claim(own, [1] * len(own))
            program = None if adapter else self._program
            if program is not None and self._table.is_plain[index].all() and program.starts(index):
                started = self._start(program, model, index, self._table.token[index], 0)
                runs.append(_Run(index, np.arange(len(index)), started))
            else:
                parts.append((index, self._logits(program, model, adapter, own)))
        if alone and not parts and len(runs) == 1:
            self._start_next(model, runs[0], room)
        drawn = [(run.rows, self._read(run)) for run in runs]
        self._counters.decode_s += time.perf_counter() - began
        return Decoded(parts, drawn)

    def _logits(self, program: DecodeProgram | None, model: K3ForCausalLM, adapter: str, rows: list[int]) -> Tensor:
        """[R, V] of rows that are sampled elsewhere."""
        index = np.array(rows)
        tokens = self._table.token[index]
        if program is not None:
            logits, routes = program.run(model, rows, tokens)
        elif (flat := self._flat_step(model, adapter)) is not None:
            hidden, routes = flat.hidden(torch.from_numpy(tokens), self._pool.view(rows))
            logits = model.logits(hidden)
        else:
            with self._adapters.serving(model, adapter):
                out = model.hidden(torch.from_numpy(tokens).to(model.device)[:, None], cache=self._pool.view(rows))
            logits, routes = model.logits(out.hidden[:, 0]), out.routes[:, 0]
        self._table.add_routes(index, routes)
        return logits

    def _flat_step(self, model: K3ForCausalLM, adapter: str) -> FlatStep | None:
        """What decodes rows of the model alone, where it is made for such a model."""
        if adapter or model.adapter is not None:
            return None
        if self._flat is None or self._flat[0] is not model:
            self._flat = model, FlatStep(model, keeps_copies(model)) if FlatStep.takes(model) else None
        return self._flat[1]

    def _start(
        self, program: DecodeProgram, model: K3ForCausalLM, rows: np.ndarray, tokens: np.ndarray, later: int
    ) -> Started:
        """Starts the step that draws each row's next token but `later`."""
        table = self._table
        uniform = sampler.uniforms(table.seed[rows], table.count[rows] + later)
        return program.start(
            model, rows, tokens, table.temperature[rows], uniform, bool(table.wants_routes[rows].any())
        )

    def _start_next(self, model: K3ForCausalLM, run: _Run, room: Callable[[], bool]) -> None:
        """Starts the step after `run`, which is the last one that was started, if it can be."""
        table, rows, program = self._table, run.rows, self._program
        if not self._overlaps or program is None or not table.is_plain[rows].all():
            return
        if self._adapters.names and any(self.adapter_in(row) for row in rows.tolist()):
            return
        if (table.count[rows] + 1 >= table.limit[rows]).all() or not program.starts(rows) or not room():
            return
        self._pool.claim(rows.tolist(), [1] * len(rows))
        started = self._start(program, model, rows, -1 - run.places, 1)
        self._ahead = _Ahead(table.request[rows].copy(), started)

    def _read(self, run: _Run) -> Draws:
        """Waits for a step; its draws in the order of the run's rows, whose routes are recorded."""
        draws, routes = run.started.read()
        if routes is not None:
            self._table.add_routes(run.rows, routes[run.places])
        return Draws(
            draws.ids[run.places],
            draws.logprobs[run.places],
            draws.finite[run.places],
            draws.cut_rows,
            draws.sampling_mask,
        )
