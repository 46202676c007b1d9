"""Records rollouts turn by turn, without ever holding up or stopping training.

traces/stream.jsonl: for each episode its turns, then the episode itself, in one piece:

    {"kind": "turn", "episode": ..., "branch": ..., "parent": ..., "turn": 0, "step": 3,
     "prompt": {"token_ids": [...], "pieces": [...]},                       what is new before the sampled tokens
     "sampled": {"token_ids": [...], "pieces": [...], "logprobs": [...]},   exactly what the engine sampled
     "stop_reason": "stop", "versions": [3, 3], "model_s": 0.1, "env_s": 0.0}
    {"kind": "episode", "episode": ..., "task": ..., "score": {"status": "scored", "reward": 1.0, "parts": {}}, ...}

traces/stream.index.jsonl: one row per episode with the byte offset and length of that piece, so that a list needs no
bodies. The first row of both has the kind "header" with schema, run and configuration hash. Where pieces cannot be had,
`unavailable` says why.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from k3rl.run.files import open_for_append, to_line
from k3rl.types import Branch, EncodedImage, Episode, Failed, Invalid, Score, Scored, Turn

SCHEMA = 1
Pieces = Callable[[Sequence[int]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """Episodes written, dropped because the queue was full, and lost because writing failed."""

    written: int
    dropped: int
    failed: int


class Recorder:
    """A bounded queue and one thread that writes it. No method blocks or raises once training runs.

    When the queue is full an episode is dropped and counted; when writing fails it is counted, and the first failure
    is said once on standard error.
    """

    def __init__(
        self, folder: Path, *, run_id: str = "", config_hash: str = "", capacity: int = 1024, attempt: int = 1
    ) -> None:
        self._folder = folder
        self._header = {"kind": "header", "schema": SCHEMA, "run": run_id, "config_hash": config_hash}
        self.attempt = attempt
        self._queue: queue.Queue[tuple[Episode, int, Pieces | None, str]] = queue.Queue(maxsize=capacity)
        self._stream: _Stream | None = None  # opened with the first episode, so that a failure is one of writing
        self._written = self._dropped = self._failed = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def episode(self, episode: Episode, step: int, pieces: Pieces | None = None, *, group: str = "") -> None:
        """Queue one episode of the batch of `step`, of the group with this id ("" for none).

        `pieces` turns token ids into shown texts (`Tokenizer.pieces`).
        """
        if self._stopping.is_set():
            self._dropped += 1
            return
        try:
            self._queue.put_nowait((episode, step, pieces, group))
        except queue.Full:
            self._dropped += 1

    def stats(self) -> RecorderStats:
        return RecorderStats(self._written, self._dropped, self._failed)

    def close(self, timeout_s: float = 30.0) -> RecorderStats:
        """Write what is queued, for at most `timeout_s`, and end the thread. What is left then counts as dropped."""
        self._stopping.set()
        self._thread.join(timeout_s)
        self._dropped += self._queue.qsize()
        return self.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            try:
                episode, step, pieces, group = self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._stopping.is_set():
                    break
                continue
            try:
                self._write(episode, step, pieces, group)
                self._written += 1
            except Exception as error:  # a full disk or a strange value must not reach training
                self._failed += 1
                if self._failed == 1:
                    print(f"recording failed, training goes on: {type(error).__name__}: {error}", file=sys.stderr)
        if self._stream is not None:
            self._stream.close()

    def _write(self, episode: Episode, step: int, pieces: Pieces | None, group: str) -> None:
        rows = [row for branch in episode.branches for row in _turn_rows(episode.id, branch, step, pieces)]
        last = _episode_row(episode, step) | {"attempt": self.attempt, "dropped_before": self._dropped, "group": group}
        if self._stream is None:
            self._stream = _Stream(self._folder, "stream", self._header)
        self._stream.append([*rows, last], _index_row(episode, last))


class _Stream:
    """One file of rows and its index. The piece of one episode is contiguous."""

    def __init__(self, folder: Path, name: str, header: Mapping[str, Any]) -> None:
        self._file = open_for_append(folder / f"{name}.jsonl")
        self._index = open_for_append(folder / f"{name}.index.jsonl")
        for file in (self._file, self._index):
            if file.tell() == 0:
                file.write(to_line(header))
                file.flush()

    def append(self, rows: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]) -> None:
        body = b"".join(to_line(row) for row in rows)
        offset = self._file.tell()
        self._file.write(body)
        self._file.flush()
        # The index follows the body, so that an entry never points behind the end of the file.
        self._index.write(to_line({**entry, "offset": offset, "bytes": len(body)}))
        self._index.flush()

    def close(self) -> None:
        self._file.close()
        self._index.close()


def score_row(score: Score) -> dict[str, Any]:
    """A score as plain values: status scored, invalid or failed; a reward only where one exists."""
    match score:
        case Scored(reward, parts):
            return {"status": "scored", "reward": reward, "parts": dict(parts)}
        case Invalid(hack, evidence):
            return {"status": "invalid", "hack": hack, "evidence": evidence}
        case Failed(reason, kind):
            return {"status": "failed", "reason": reason, "kind": str(kind)}


def _turn_rows(episode_id: str, branch: Branch, step: int, pieces: Pieces | None) -> list[dict[str, Any]]:
    rows, known = [], 0
    for number, turn in enumerate(branch.turns):
        fresh = turn.prompt_ids[known:]
        known = len(turn.prompt_ids) + len(turn.sampled_ids)
        place = {"kind": "turn", "episode": episode_id, "branch": branch.id, "parent": branch.parent}
        shown = turn.images[len(branch.turns[number - 1].images) if number else 0 :]
        rows.append(place | {"turn": number, "step": step} | _turn_row(turn, fresh, pieces) | _images(shown))
    return rows


def _turn_row(turn: Turn, fresh: Sequence[int], pieces: Pieces | None) -> dict[str, Any]:
    return {
        "prompt": _tokens(fresh, pieces),
        "sampled": _tokens(turn.sampled_ids, pieces) | {"logprobs": rounded(list(turn.logprobs))},
        "stop_reason": str(turn.stop_reason),
        "versions": [turn.first_version, turn.last_version],
        "model_s": rounded(turn.model_s),
        "env_s": rounded(turn.env_s),
    }


def _images(images: Sequence[EncodedImage]) -> dict[str, Any]:
    """The images that a turn's prompt adds, by name and size; their bytes are in the trajectory files."""
    rows = [{"sha256": image.sha256, "width": image.width, "height": image.height} for image in images]
    return {"images": rows} if rows else {}


def _tokens(ids: Sequence[int], pieces: Pieces | None) -> dict[str, Any]:
    row: dict[str, Any] = {"token_ids": [int(token) for token in ids]}
    if pieces is None:
        return row | {"unavailable": "no tokenizer was given"}
    try:
        return row | {"pieces": list(pieces(row["token_ids"]))}
    except Exception as error:  # the ids are the truth; their texts are a convenience
        return row | {"unavailable": f"{type(error).__name__}: {error}"}


def _episode_row(episode: Episode, step: int) -> dict[str, Any]:
    turns = [turn for branch in episode.branches for turn in branch.turns]
    return {
        "kind": "episode",
        "episode": episode.id,
        "t": time.time(),
        "step": step,
        "task": episode.task_id,
        "env": episode.env,
        "family": episode.family,
        "level": episode.level,
        "score": score_row(episode.score),
        "stop_reason": str(episode.stop_reason),
        "turns": len(turns),
        "sampled_tokens": sum(len(turn.sampled_ids) for turn in turns),
        "budgets_used": rounded(dict(episode.budgets_used)),
        "metrics": rounded(dict(episode.metrics)),
        "answer": episode.answer,
    }


def _index_row(episode: Episode, row: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("t", "step", "task", "env", "family", "level", "stop_reason", "turns", "sampled_tokens", "attempt", "group")
    score = {key: value for key, value in row["score"].items() if key in ("status", "reward")}
    return {"kind": "episode", "episode": episode.id, **{key: row[key] for key in kept}, **score}


def rounded(value: Any) -> Any:
    """Floats at 6 significant digits, inside lists and mappings too; NumPy numbers and arrays become plain ones."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
