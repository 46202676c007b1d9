"""Where each second of a run went, and the same as a file for Perfetto (the Trace Event format, JSON)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3rl.dashboard.run_reader import RunReader, finite

PARTS = ("wait_for_batch", "wait_for_policy", "teacher", "publish", "wait_for_evaluation")
"""Clocks of the driver, one after the other within a step; what they leave of `time/step` is `other`."""
NESTED = ("train_step", "engine_paused")
"""Times inside those, of other processes."""


def step_seconds(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by part, `other` for the rest of it; empty where the step's time is not known."""
    total = finite(row.get("time/step"))
    if total is None:
        return {}
    parts = {name: seconds for name in PARTS if (seconds := finite(row.get(f"time/{name}"))) is not None}
    return parts | {"other": max(0.0, total - sum(parts.values()))}


def times(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """stage -> {"steps", "parts": {name: [seconds or null]}, "nested": {...}} of metrics rows that have `time/step`."""
    stages: dict[str, dict[str, Any]] = {}
    for row in rows:
        if not (seconds := step_seconds(row)):
            continue
        stage = stages.setdefault(row["source"], {"steps": [], "rows": []})
        stage["steps"].append(row["step"])
        stage["rows"].append((seconds, {n: finite(row.get(f"time/{n}")) for n in NESTED}))
    for stage in stages.values():
        rows_of = stage.pop("rows")
        stage["parts"] = {name: [parts.get(name) for parts, _ in rows_of] for name in (*PARTS, "other")}
        stage["parts"] = {name: column for name, column in stage["parts"].items() if any(column)}
        stage["nested"] = {name: [nested[name] for _, nested in rows_of] for name in NESTED}
    return stages


def trace_events(run: RunReader) -> dict[str, Any]:
    """The steps of a run as Trace Events. A step ends when its metrics were written; its parts lie in the order of
    the loop, whose own order in time within a step is not recorded. Episodes are instants, when they were recorded."""
    events: list[dict[str, Any]] = []
    rows = run.metric_rows()
    begin = min((row["t"] - (finite(row.get("time/step")) or 0.0) for row in rows), default=0.0)
    threads: dict[str, int] = {}
    for row in rows:
        thread = threads.setdefault(row["source"], len(threads) + 1)
        total = finite(row.get("time/step"))
        if total is None:
            continue
        start = row["t"] - total - begin
        about = {
            name: row[name] for name in ("perf/goodput", "loss/mean", "kl/old") if finite(row.get(name)) is not None
        }
        events.append(_span(f"step {row['step']}", start, total, thread, about | {"attempt": row["attempt"]}))
        for name, seconds in step_seconds(row).items():
            seconds = min(seconds, max(0.0, row["t"] - begin - start))
            events.append(_span(name, start, seconds, thread, {}))
            start += seconds
    for entry in run.episodes():
        thread = threads.setdefault(f"{entry.stage} episodes", len(threads) + 1)
        about = {"reward": entry.reward, "task": entry.task, "tokens": entry.sampled_tokens}
        place = {"name": entry.id, "ph": "i", "s": "t", "ts": round((entry.t - begin) * 1e6), "pid": 1, "tid": thread}
        events.append(place | {"args": about})
    names = [_name("process_name", run.name, 0)] + [_name("thread_name", n, t) for n, t in threads.items()]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _span(name: str, start: float, seconds: float, thread: int, about: Mapping[str, Any]) -> dict[str, Any]:
    times_us = {"ts": round(start * 1e6), "dur": round(seconds * 1e6)}
    return {"name": name, "ph": "X", "cat": "step", **times_us, "pid": 1, "tid": thread, "args": dict(about)}


def _name(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
