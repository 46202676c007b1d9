"""What changes in the runs, told as it happens, at the cost of looking at file sizes while somebody watches.

A stream carries notices alone: which run's files grew. A page that hears one fetches what is new to it from where it
was, so a slow or lost viewer holds nothing here, and nothing is lost or repeated when it comes back. The watcher
belongs to all viewers together and sleeps while there is none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from k3rl.dashboard.catalogue import Catalogue
from k3rl.dashboard.run_reader import RunReader

WATCHED = ("run.json", "metrics.jsonl", "traces/stream.jsonl", "traces/annotations/steps.jsonl")
POLL_S = 0.15
MOST_VIEWERS = 64
_BEAT_S = 10.0  # a comment, so that a viewer that is gone is noticed
_TURN_TEXT = 4_000


class Watcher:
    """Tells viewers which runs changed. Belongs to one event loop."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._viewers: set[asyncio.Event] = set()
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._serial = 0
        self._changed: dict[str, int] = {}  # run -> serial of its last change
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    async def notices(self) -> AsyncIterator[str]:
        """Server-sent events: `changed` with {"runs": [ids]}, and comments as a heartbeat.

        Ends with `close`. A viewer that takes nothing for a while gets one notice for all that happened.
        """
        wake = asyncio.Event()
        self._viewers.add(wake)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        seen = self._serial
        try:
            yield "retry: 1000\nevent: hello\ndata: {}\n\n"
            while not self._closed:
                try:
                    await asyncio.wait_for(wake.wait(), _BEAT_S)
                except TimeoutError:
                    yield ": beat\n\n"
                    continue
                wake.clear()
                runs = [name for name, serial in self._changed.items() if serial > seen]
                seen = self._serial
                if runs:
                    yield f"id: {seen}\nevent: changed\ndata: {json.dumps({'runs': runs})}\n\n"
        finally:
            self._viewers.discard(wake)

    def close(self) -> None:
        """Ends all streams, so that the server can stop."""
        self._closed = True
        for wake in self._viewers:
            wake.set()

    async def _watch(self) -> None:
        while self._viewers and not self._closed:
            changed = await asyncio.to_thread(self._look)
            if changed:
                self._serial += 1
                self._changed |= dict.fromkeys(changed, self._serial)
                for wake in self._viewers:
                    wake.set()
            await asyncio.sleep(POLL_S)

    def _look(self) -> list[str]:
        """Runs whose files have other sizes, or another time, than at the look before."""
        sizes = {name: _marks(reader) for name, reader in self._catalogue.runs().items()}
        changed = [name for name, mark in sizes.items() if self._sizes.get(name) != mark]
        changed += [name for name in self._sizes if name not in sizes]
        first, self._sizes = not self._sizes, sizes
        return [] if first else changed


def _marks(reader: RunReader) -> tuple[int, ...]:
    marks = []
    for name in WATCHED:
        try:
            status = (reader.root / name).stat()
            marks += [status.st_size, status.st_mtime_ns if name == "run.json" else 0]
        except OSError:
            marks += [-1, 0]
    return tuple(marks)


def new_turns(run: RunReader, after: int | None, limit: int = 100) -> dict[str, Any]:
    """Turns that were recorded behind the byte `after` of the stream, as text: {"rows", "next", "skipped"}.

    after None: the last few episodes. A viewer that is more than 200 episodes behind is brought to the last of them;
    `skipped` says how many it did not see. An offset that begins no episode's piece is taken to be the next that does.
    """
    entries = run.recorded()
    last = entries[-200:]
    begin = len(entries) - min(len(entries), 5) if after is None else _first_behind(entries, after)
    skipped = max(0, len(entries) - len(last) - begin) if after is not None else 0
    rows: list[dict[str, Any]] = []
    reached = after or 0
    for entry in entries[begin + skipped :]:
        rows += [_turn(row) for row in run.piece(entry)]
        reached = entry.offset + entry.bytes
        if len(rows) >= limit:
            break
    else:
        reached = entries[-1].offset + entries[-1].bytes if entries else 0
    return {"rows": rows, "next": reached, "skipped": skipped}


def _first_behind(entries: list[Any], offset: int) -> int:
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high) // 2
        if entries[middle].offset < offset:
            low = middle + 1
        else:
            high = middle
    return low


def _turn(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the stream without its ids, long texts cut in their middle."""
    if row["kind"] != "turn":
        return {key: value for key, value in row.items() if key not in ("messages",)}
    texts = {side: _shortened("".join(row[side].get("pieces") or ())) for side in ("prompt", "sampled")}
    kept = ("kind", "episode", "branch", "parent", "turn", "step", "stop_reason", "versions", "model_s", "env_s")
    tokens = len(row["sampled"]["token_ids"])
    return {key: row.get(key) for key in kept} | texts | {"sampled_tokens": tokens}


def _shortened(text: str) -> str:
    if len(text) <= _TURN_TEXT:
        return text
    half = _TURN_TEXT // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
