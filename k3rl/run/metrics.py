"""Metrics of a run: a metric is a sum and a count until it is printed.

metrics.jsonl holds one row per step and source:

    {"t": 1760000000.0, "step": 3, "source": "learner", "attempt": 1, "loss/mean": 0.41, "counts": {"loss/mean": 5120}}

`counts` has the weight of every mean, so that means of several rows can be averaged by tokens. The first row has the
source "run" and carries the schema and the run's id. Names are `area/name/stat`: reward/<env>/mean,
response_length/mean, policy/entropy/mean, kl/old, mismatch/kl/{mean,max}, ratio/{mean,max,ess},
policy/clip_frac_{low,high}, optim/grad_norm, optim/lr, staleness/{mean,max,dropped}, perf/tokens_per_s, time/*,
moe/max_vio/{mean,max}, group/frac_zero_std, loss/mean, val/loss.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from k3rl.config import ConfigError
from k3rl.run.files import number, open_for_append, read_lines, to_line

SCHEMA = 1
_FIXED = ("t", "step", "source", "attempt", "counts")


class Accumulator:
    """Adds up metrics of many batches, actors or ranks. Means are taken only in `values`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """`total` is the sum over `count` things (tokens, episodes). A count of 0 says that nothing was seen."""
        if not count >= 0:
            raise ValueError(f"metric {name}: count is {count}; it must be 0 or more")
        self._sums[name] = self._sums.get(name, 0.0) + float(total)
        self._counts[name] = self._counts.get(name, 0.0) + float(count)

    def maximum(self, name: str, value: float) -> None:
        """Keeps the largest value; NaN, once seen, stays."""
        old = self._maxima.get(name, -math.inf)
        self._maxima[name] = math.nan if math.isnan(value) or math.isnan(old) else max(old, float(value))

    def update(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        """Adds (sum, count) pairs by name."""
        for name, (total, count) in pairs.items():
            self.add(name, total, count)

    def merge(self, other: Accumulator) -> None:
        """Adds what another one has seen."""
        self.update(other.pairs())
        for name, value in other._maxima.items():
            self.maximum(name, value)

    def pairs(self) -> dict[str, tuple[float, float]]:
        """name -> (sum, count)."""
        return {name: (total, self._counts[name]) for name, total in self._sums.items()}

    def maxima(self) -> dict[str, float]:
        return dict(self._maxima)

    def counts(self) -> dict[str, float]:
        """name -> weight of its mean; names that saw nothing are absent."""
        return {name: count for name, count in self._counts.items() if count > 0}

    def values(self) -> dict[str, float]:
        """name -> mean or maximum. A name with count 0 is absent: missing is not zero."""
        return {name: self._sums[name] / count for name, count in self.counts().items()} | self._maxima


class Sink(Protocol):
    """A second place for metrics. It may fail; the writer then warns once and goes on without it."""

    name: str

    def write(self, step: int, source: str, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Appends rows to metrics.jsonl, and hands them to optional sinks. Use as a context manager or `close` it."""

    def __init__(
        self, path: Path, *, run_id: str = "", attempt: int = 1, sinks: Iterable[Sink] = (), warn: Any = print
    ) -> None:
        self.attempt = attempt
        self._path = path
        self._file = open_for_append(path)
        self._sinks = list(sinks)
        self._warn = warn
        if self._file.tell() == 0:
            self._append({"t": time.time(), "step": 0, "source": "run", "schema": SCHEMA, "run": run_id})

    def write(self, step: int, source: str, metrics: Accumulator | Mapping[str, float]) -> dict[str, float]:
        """Appends one row and returns the printed values. `source` names the producer, such as "learner"."""
        if isinstance(metrics, Accumulator):
            values, counts = metrics.values(), metrics.counts()
        else:
            values, counts = {name: float(value) for name, value in metrics.items()}, {}
        if taken := [name for name in values if name in _FIXED]:
            raise ValueError(f"metric names {taken} are columns of every row; use area/name/stat")
        row: dict[str, Any] = {"t": time.time(), "step": step, "source": source, "attempt": self.attempt, **values}
        if counts:
            row["counts"] = counts
        self._append(row)
        for sink in list(self._sinks):
            try:
                sink.write(step, source, values)
            except Exception as error:  # whatever a third-party sink raises, training goes on without it
                self._sinks.remove(sink)
                self._warn(
                    f"metrics no longer go to {sink.name}: {type(error).__name__}: {error}; {self._path} has all"
                )
                with suppress(Exception):  # it was said already
                    sink.close()
        return values

    def supersede(self, source: str, step: int) -> int:
        """Takes the rows of `source` from `step` on out of the file, as those steps are done again; returns how many.

        They are kept in `metrics.superseded.jsonl` beside it. Whoever follows the file by an offset begins anew.
        """
        kept: list[bytes] = []
        gone: list[bytes] = []
        for row, _ in read_lines(self._path):
            redone = row.get("source") == source and isinstance(row.get("step"), int) and row["step"] >= step
            (gone if redone and "schema" not in row else kept).append(to_line(row))
        if not gone:
            return 0
        with open_for_append(self._path.with_name("metrics.superseded.jsonl")) as aside:
            aside.write(b"".join(gone))
        part = self._path.with_name(self._path.name + ".tmp")
        with open(part, "wb") as file:
            file.write(b"".join(kept))
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        part.replace(self._path)
        self._file = open_for_append(self._path)
        return len(gone)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._warn(f"ending {sink.name} failed: {type(error).__name__}: {error}; {self._path} has all metrics")
        self._sinks.clear()

    def _append(self, row: dict[str, Any]) -> None:
        self._file.write(to_line(row))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows in order of writing, numbers as numbers, without the first row and without replaced rows.

    A resumed attempt starts at the step of its checkpoint; rows of earlier attempts from its first step on, by the
    same source, were replaced by it.
    """
    rows = [{key: number(value) if key != "source" else value for key, value in row.items()} for row in _rows(path)]
    starts: dict[tuple[str, int], int] = {}
    for row in rows:
        place = (row["source"], row["attempt"])
        starts[place] = min(starts.get(place, row["step"]), row["step"])
    return [row for row in rows if not _is_replaced(row, starts)]


def _is_replaced(row: Mapping[str, Any], starts: Mapping[tuple[str, int], int]) -> bool:
    return any(
        source == row["source"] and attempt > row["attempt"] and first <= row["step"]
        for (source, attempt), first in starts.items()
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    """Raises ConfigError for a file of lines that are something else than metrics."""
    try:
        rows = [row for row, _ in read_lines(path) if "schema" not in row]
    except ValueError as error:
        raise ConfigError(f"{error}; take that line out, and the rest can be read", key=str(path)) from error
    for row in rows:
        if not isinstance(row.get("step"), int) or not isinstance(row.get("source"), str):
            raise ConfigError(f"{path} has a row without step and source: {row!r:.80}; take it out", key=str(path))
    return [{"attempt": 1, **row} for row in rows]


def series(rows: Iterable[Mapping[str, Any]], name: str, source: str | None = None) -> list[tuple[int, float]]:
    """(step, value) of one metric, from one source or from all."""
    return [(row["step"], row[name]) for row in rows if name in row and source in (None, row["source"])]
