"""The runs below a folder, found by their run.json, each with a reader that stays open between requests."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from k3rl.config import MissingResource
from k3rl.dashboard.run_reader import RunReader, UnknownRun

DEPTH = 3
"""Levels below the folder that are looked into; a run's own folders are not."""
_RESCAN_S = 2.0
_MOST_FOLDERS = 20_000  # a home folder given by mistake must not hang the page


class Catalogue:
    """The runs in `root`, which may itself be one. Safe to use from several threads.

    A run's id is its path below `root`, "." for `root` itself. Only ids that a scan has found are ever opened, and a
    symbolic link that leads out of `root` is no run. Raises MissingResource when `root` is no folder.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise MissingResource(f"{root} is no folder; name a run directory, or the folder that runs are in")
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._scanned = -_RESCAN_S
        self._readers: dict[str, RunReader] = {}

    def runs(self) -> dict[str, RunReader]:
        """Reader by id, the run that started last first. Looks for new runs every two seconds."""
        with self._lock:
            now = time.monotonic()
            if now - self._scanned >= _RESCAN_S:
                found = dict(self._scan())
                kept = {name: self._readers.get(name) or RunReader(name, path) for name, path in found.items()}
                self._readers = kept
                self._scanned = time.monotonic()
            readers = dict(self._readers)
        return dict(sorted(readers.items(), key=lambda item: -item[1].started))

    def run(self, name: str) -> RunReader:
        """The reader of one run. Raises UnknownRun."""
        try:
            return self.runs()[name]
        except KeyError:
            raise UnknownRun(f"there is no run {name!r} here; it was moved or deleted") from None

    def summaries(self) -> list[dict[str, Any]]:
        return [reader.summary() for reader in self.runs().values()]

    def _scan(self) -> list[tuple[str, Path]]:
        found, waiting, looked = [], [(self.root, 0)], 0
        while waiting and looked < _MOST_FOLDERS:
            folder, depth = waiting.pop()
            looked += 1
            if (folder / "run.json").is_file():
                found.append((str(folder.relative_to(self.root)), folder))
                continue
            if depth == DEPTH:
                continue
            try:
                entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
            except OSError:  # not ours to read, or gone meanwhile
                continue
            waiting += [(Path(entry.path), depth + 1) for entry in entries if entry.is_dir(follow_symlinks=False)]
        return found
