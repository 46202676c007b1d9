"""One run, read from its files as they grow: what it is, its curves, its episodes. It writes nothing."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from k3rl.config import K3Error
from k3rl.dashboard.rows import Attempts, EpisodeEntry, GrowingFile
from k3rl.run import RunDirectory
from k3rl.tokens import Tokenizer, TokenizerError


class UnknownRun(K3Error):
    """A request names a run, an episode or a step that is not there, or whose record was cut off."""


_COLUMNS = ("t", "step", "source", "attempt", "counts")
_LOG_BYTES = 64 << 10
_POINTS = 2_000  # of a curve, at most


class RunReader:
    """The state of one run as far as its files have been read. Methods may be called from several threads."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.traces = root / "traces"
        self.lock = threading.RLock()
        self._run: RunDirectory | None = None
        self._tokenizer: Tokenizer | None = None
        self._asked_alive, self._was_alive = -1.0, False
        self._metrics_file = GrowingFile(root / "metrics.jsonl", self._forget_metrics)
        self._index_file = GrowingFile(self.traces / "stream.index.jsonl", self._forget_episodes)
        self._steps_file = GrowingFile(self.traces / "annotations" / "steps.jsonl", self._forget_annotations)
        self._forget_metrics()
        self._forget_episodes()
        self._forget_annotations()

    def _forget_metrics(self) -> None:
        self._metric_rows: list[dict[str, Any]] = []
        self._metric_attempts = Attempts()
        self.metrics_version = getattr(self, "metrics_version", 0) + 1

    def _forget_episodes(self) -> None:
        self._entries: list[EpisodeEntry] = []
        self._by_key: dict[tuple[str, int], EpisodeEntry] = {}
        self._attempts = Attempts()
        self._current: list[EpisodeEntry] | None = None

    def _forget_annotations(self) -> None:
        self._annotations: dict[tuple[Any, Any, Any], dict[str, Any]] = {}

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def started(self) -> float:
        """Unix seconds of the last attempt; 0 where run.json cannot be read."""
        run = self._directory()
        return run.info.started if run is not None else 0.0

    def _directory(self) -> RunDirectory | None:
        """The run as run.json says it now; None while it cannot be read, which `summary` explains."""
        try:
            if self._run is None:
                self._run = RunDirectory.open(self.root)
            else:
                self._run.refresh()
        except (K3Error, OSError, TypeError):
            return None
        return self._run

    def summary(self) -> dict[str, Any]:
        """What a list of runs shows. `status` is how the run stands: a run whose process is gone has crashed."""
        run = self._directory()
        if run is None:
            return {"id": self.name, "name": self.name, "status": "unreadable", "error": self._why_unreadable()}
        info, alive = run.info, run.info.status == "running" and self._alive(run)
        status = info.status if alive or info.status != "running" else "crashed"
        with self.lock:
            self._read_metrics()
            self._read_index()
            last = self._metric_rows[-1] if self._metric_rows else None
            return {
                "id": self.name,
                "name": info.name,
                "pipeline": info.pipeline,
                "status": status,
                "attempt": info.attempt,
                "started": info.started,
                "ended": info.ended,
                "error": info.error,
                "notes": list(info.notes),
                "config_hash": info.config_hash,
                "episodes": len(self._entries),
                "metrics_version": self.metrics_version,
                "stages": self._stages(),
                "last": None if last is None else {"stage": last["source"], "step": last["step"], "t": last["t"]},
                "damaged_lines": self._metrics_file.damaged + self._index_file.damaged,
            }

    def _alive(self, run: RunDirectory) -> bool:
        """Asked once a second at most: the answer takes the run's lock for an instant."""
        with self.lock:
            if (now := time.monotonic()) - self._asked_alive >= 1.0:
                self._asked_alive, self._was_alive = now, run.is_alive()
            return self._was_alive

    def _why_unreadable(self) -> str:
        try:
            RunDirectory.open(self.root)
        except (K3Error, OSError, TypeError) as error:
            return str(error)
        return "run.json changed while it was read"

    def _stages(self) -> list[str]:
        names = dict.fromkeys(row["source"] for row in self._metric_rows)
        return list(names | dict.fromkeys(entry.stage for entry in self._entries))

    def about(self) -> dict[str, Any]:
        """`summary` with the command, versions, commit, and the resolved configuration of the last attempt."""
        run, found = self._directory(), self.summary()
        if run is None:
            return found
        command = run.attempt_dir() / "command.txt"
        found |= {"versions": dict(run.info.versions), "git": run.info.git}
        found["command"] = command.read_text(encoding="utf-8").strip() if command.is_file() else None
        try:
            found["config"] = run.resolved()
        except (OSError, ValueError):
            found["config"] = None
        return found

    def log(self) -> str:
        """The end of the driver's log of the last attempt, at most 64 KiB; "" without one."""
        run = self._directory()
        path = None if run is None else run.logs_dir / "driver.log"
        if path is None or not path.is_file():
            return ""
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return file.read().decode("utf-8", "replace")

    def tokenizer(self) -> Tokenizer | None:
        """That of the checkpoint that the run started from; None where the run has none that can be read."""
        with self.lock:
            if self._tokenizer is None and (self.root / "tokenizer").is_dir():
                with suppress(TokenizerError, OSError, ValueError):
                    self._tokenizer = Tokenizer.load(self.root / "tokenizer")
            return self._tokenizer

    # ----------------------------------------------------------------------------------------------------- curves

    def _read_metrics(self) -> None:
        for row in self._metrics_file.more():
            if "schema" in row:
                continue
            row.setdefault("attempt", 1)
            if not _is_metrics_row(row):
                self._metrics_file.damaged += 1
                continue
            self._metric_attempts.saw(row["source"], row["attempt"], row["step"])
            self._metric_rows.append(row)
            self.metrics_version += 1

    def metrics(self) -> dict[str, Any]:
        """{"version", "stages": {stage: {"steps", "t", "attempts", "every", "values": {name: [value or null, ...]}}}}.

        Without replaced rows. A number that is not finite is the text that the file has. Of a stage of more than 2,000
        steps only one in `every` is there, and the last.
        """
        with self.lock:
            self._read_metrics()
            return {"version": self.metrics_version, "stages": _columns(self.metric_rows())}

    def step_metrics(self, stage: str, step: int) -> dict[str, Any]:
        """The values of one step by name; empty while they are not written."""
        found = [row for row in self.metric_rows() if row["source"] == stage and row["step"] == step]
        return {name: value for name, value in found[-1].items() if name not in _COLUMNS} if found else {}

    def metric_rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl in order of writing, without those that a later attempt went over again."""
        with self.lock:
            self._read_metrics()
            replaced = self._metric_attempts.is_replaced
            return [r for r in self._metric_rows if not replaced(r["source"], r["attempt"], r["step"])]

    # --------------------------------------------------------------------------------------------------- episodes

    def _read_index(self) -> None:
        for row in self._index_file.more():
            if row.get("kind") != "episode":
                continue
            try:
                entry = EpisodeEntry.of(row)
            except (KeyError, TypeError, ValueError, OverflowError):
                self._index_file.damaged += 1
                continue
            self._attempts.saw(entry.stage, entry.attempt, entry.step)
            self._entries.append(entry)
            self._by_key[entry.id, entry.attempt] = entry
            self._current = None

    def episodes(self) -> list[EpisodeEntry]:
        """Those of steps that were not gone over again, in order of recording."""
        with self.lock:
            self._read_index()
            if self._current is None:
                replaced = self._attempts.is_replaced
                self._current = [e for e in self._entries if not replaced(e.stage, e.attempt, e.step)]
            return self._current

    def episode(self, name: str, attempt: int | None = None) -> EpisodeEntry | None:
        """The episode of this id, of the last attempt that has one where none is given."""
        with self.lock:
            self._read_index()
            if attempt is not None:
                return self._by_key.get((name, attempt))
            found = [entry for (own, _), entry in self._by_key.items() if own == name]
            return max(found, key=lambda entry: entry.attempt, default=None)

    def recorded(self) -> list[EpisodeEntry]:
        """All episodes of the stream in order of recording, replaced ones too."""
        with self.lock:
            self._read_index()
            return list(self._entries)

    def piece(self, entry: EpisodeEntry) -> list[dict[str, Any]]:
        """The rows of an episode in the stream: its turns, then itself. Raises UnknownRun where they are not there."""
        path = self.traces / "stream.jsonl"
        try:
            with open(path, "rb") as file:
                file.seek(entry.offset)
                data = file.read(entry.bytes)
            rows = [json.loads(line) for line in data.splitlines()]
        except (OSError, ValueError) as error:
            raise UnknownRun(f"{path} has no readable record of episode {entry.id}: {error}") from None
        if len(data) < entry.bytes or not rows or not all(_is_of(row, entry) for row in rows):
            raise UnknownRun(f"{path} has no whole record of episode {entry.id} at byte {entry.offset}")
        return rows

    # ------------------------------------------------------------------------------------------------ annotations

    def _read_annotations(self) -> None:
        for row in self._steps_file.more():
            place = row.get("stage"), row.get("attempt"), row.get("step")
            if isinstance(row.get("advantages"), dict) and [type(part) for part in place] == [str, int, int]:
                self._annotations[place] = row
            else:
                self._steps_file.damaged += 1

    def annotation(self, entry: EpisodeEntry) -> Mapping[str, Any] | None:
        """What the learner added to the step of this episode; None while it has not, or where it never did."""
        with self.lock:
            self._read_annotations()
            return self._annotations.get((entry.stage, entry.attempt, entry.step))

    def advantage(self, entry: EpisodeEntry) -> float | None:
        found = self.annotation(entry)
        return None if found is None else found["advantages"].get(entry.id)

    def expert_load(self, stage: str) -> dict[str, Any]:
        """{"steps": [...], "load": [steps][MoE layers][experts]} of a stage: shares of the tokens of a layer."""
        with self.lock:
            self._read_annotations()
            self._read_index()
            rows = [
                row
                for (own, attempt, step), row in sorted(self._annotations.items())
                if own == stage and "expert_load" in row and not self._attempts.is_replaced(own, attempt, step)
            ]
        return {"steps": [row["step"] for row in rows], "load": [row["expert_load"] for row in rows]}


def _is_of(row: Any, entry: EpisodeEntry) -> bool:
    return isinstance(row, dict) and row.get("episode") == entry.id and row.get("kind") in ("turn", "episode")


def _is_metrics_row(row: Mapping[str, Any]) -> bool:
    kinds = {"step": int, "attempt": int, "source": str, "t": int | float}
    return all(isinstance(row.get(name), kind) for name, kind in kinds.items())


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_stage.setdefault(row["source"], []).append(row)
    every = {name: -(-len(own) // _POINTS) for name, own in by_stage.items()}
    kept = [
        row
        for name, own in by_stage.items()
        for place, row in enumerate(own, start=1)
        if place % every[name] == 0 or place == len(own)
    ]
    stages: dict[str, dict[str, Any]] = {}
    for row in kept:
        stage = stages.setdefault(
            row["source"], {"steps": [], "t": [], "attempts": [], "every": every[row["source"]], "values": {}}
        )
        count = len(stage["steps"])
        for name in ("t", "attempts"):
            stage[name].append(row[{"attempts": "attempt"}.get(name, name)])
        stage["steps"].append(row["step"])
        for name, value in row.items():
            if name in _COLUMNS or not isinstance(value, int | float | str):
                continue
            column = stage["values"].setdefault(name, [])
            column += [None] * (count - len(column))
            column.append(value)
    for stage in stages.values():
        for column in stage["values"].values():
            column += [None] * (len(stage["steps"]) - len(column))
    return stages


def finite(value: Any) -> float | None:
    """The number, or None for what is none or not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def read_json(path: Path) -> Any:
    """What a small JSON file holds; None where it is not there or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
