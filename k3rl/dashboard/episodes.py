"""The body of one episode: its turns, and its tokens as columns that are given out in windows."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3rl.dashboard.rows import EpisodeEntry
from k3rl.dashboard.run_reader import RunReader, UnknownRun, finite
from k3rl.data import read_annotations

WINDOW = 4_000
"""Tokens that one request gets, at most."""
_KEPT_BYTES = 64 << 20  # of bodies as they are in the file; parsed they take a few times as much
_STREAMS = ("logprobs", "learner_logprobs", "entropies", "ratios", "advantages")


@dataclass
class TokenColumns:
    """All tokens of a branch, in order. A stream has null, or NaN, where nothing was recorded for a token; what the
    learner has not said is None.

    kinds: 0 prompt, 1 sampled; turns: the turn that each token belongs to. versions: the weights that may have sampled
    it, [first, last] by turn. pieces None: the texts of tokens are not known (`unavailable` says why).
    """

    ids: list[int] = field(default_factory=list)
    pieces: list[str] | None = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    learner_logprobs: np.ndarray | None = None
    entropies: np.ndarray | None = None
    ratios: np.ndarray | None = None
    advantages: np.ndarray | None = None
    trained: np.ndarray | None = None
    unavailable: str | None = None

    def extend(self, part: Mapping[str, Any], kind: int, turn: int) -> None:
        """Adds the tokens of one side of a recorded turn."""
        ids = part["token_ids"]
        self.ids += ids
        self.kinds += [kind] * len(ids)
        self.turns += [turn] * len(ids)
        pieces = part.get("pieces")
        if pieces is None or len(pieces) != len(ids):
            self.pieces, self.unavailable = None, part.get("unavailable", "their texts were not recorded")
        elif self.pieces is not None:
            self.pieces += pieces
        own = part.get("logprobs") or [None] * len(ids)
        self.logprobs += [finite(value) for value in own]

    def annotate(self, row: Mapping[str, Any]) -> None:
        """Adds what the learner recorded of this branch. Raises ValueError where it is of other tokens."""
        mask = row["loss_mask"]
        if len(mask) != len(self.ids):
            raise ValueError(f"the learner's record has {len(mask)} tokens, the recorded branch {len(self.ids)}")
        self.trained = mask
        self.advantages = np.where(mask, np.float32(row["advantage"]), np.nan)
        for name in ("learner_logprobs", "entropies", "ratios"):
            if row[name] is not None:
                setattr(self, name, row[name])

    def window(self, start: int, count: int) -> dict[str, Any]:
        """Tokens start .. start + count, `count` at most WINDOW, as columns; absent streams are null."""
        stop = min(start + min(count, WINDOW), len(self.ids))
        found: dict[str, Any] = {"start": start, "total": len(self.ids), "unavailable": self.unavailable}
        for name in ("ids", "pieces", "kinds", "turns", *_STREAMS, "trained"):
            column = getattr(self, name)
            found[name] = _plain(column[start:stop]) if _there(column) else None
        return found

    def text(self, kind: int | None = None) -> str:
        """The text of all tokens, or of one kind; ids in brackets where texts are not known."""
        if self.pieces is None:
            return str([token for token, own in zip(self.ids, self.kinds, strict=True) if kind in (None, own)])
        return "".join(p for p, own in zip(self.pieces, self.kinds, strict=True) if kind in (None, own))


def _there(column: Sequence[Any] | np.ndarray | None) -> bool:
    return column is not None and len(column) > 0


def _plain(values: Sequence[Any] | np.ndarray) -> list[Any]:
    """As JSON has it: numbers at 6 significant digits, null for what is not finite."""
    if not isinstance(values, np.ndarray):
        return list(values)
    if values.dtype == bool:
        return values.tolist()
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


@dataclass(frozen=True)
class Body:
    """An episode as it was recorded. branches: in order of recording, by id, their tokens; turns: the rows without
    tokens; row: the episode's own row. learner: why the learner's values are absent, None where they are there."""

    entry: EpisodeEntry
    row: Mapping[str, Any]
    turns: Sequence[Mapping[str, Any]]
    branches: Mapping[str, TokenColumns]
    learner: str | None

    def outline(self) -> dict[str, Any]:
        """The episode without its tokens: what its page shows first."""
        sizes = {name: len(columns.ids) for name, columns in self.branches.items()}
        streams = [name for name in _STREAMS if any(_there(getattr(c, name)) for c in self.branches.values())]
        about = {"turns": self.turns, "branches": sizes, "streams": streams, "learner": self.learner}
        return self.entry._asdict() | {"row": self.row} | about

    def text(self, kind: int | None = None) -> str:
        return "\n".join(columns.text(kind) for columns in self.branches.values())


class Bodies:
    """Reads bodies, and keeps those that were looked at last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str, int, int, bool], Body] = OrderedDict()

    def body(self, run: RunReader, name: str, attempt: int | None = None) -> Body:
        """Raises UnknownRun when there is no such episode, or its record was cut off."""
        if (entry := run.episode(name, attempt)) is None:
            raise UnknownRun(f"run {run.name} has no episode {name!r}; it may have been dropped (see the recorder)")
        annotation = run.annotation(entry)
        key = (run.name, entry.id, entry.attempt, entry.offset, annotation is not None)
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        try:
            body = read_body(run, entry, annotation)
        except (KeyError, TypeError, AttributeError) as error:
            message = (
                f"the record of episode {entry.id} is not as this version writes it ({type(error).__name__}: {error})"
            )
            raise UnknownRun(message) from error
        with self._lock:
            self._kept[key] = body
            while len(self._kept) > 1 and sum(b.entry.bytes for b in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return body


def special_tokens(run: RunReader, ids: Sequence[int]) -> list[bool] | None:
    """Which of these ids are special tokens of the run's tokenizer; None where that is not there."""
    tokenizer = run.tokenizer()
    if tokenizer is None:
        return None
    return [0 <= token < tokenizer.vocab_size and tokenizer.special_name(token) is not None for token in ids]


def read_body(run: RunReader, entry: EpisodeEntry, annotation: Mapping[str, Any] | None) -> Body:
    """The body of an entry of the index, with what the learner added where `annotation` names its file."""
    *turn_rows, row = run.piece(entry)
    branches: dict[str, TokenColumns] = {}
    turns = []
    for turn in turn_rows:
        columns = branches.setdefault(turn["branch"], TokenColumns())
        start = len(columns.ids)
        columns.extend(turn["prompt"], 0, turn["turn"])
        columns.extend(turn["sampled"], 1, turn["turn"])
        about = {key: value for key, value in turn.items() if key not in ("prompt", "sampled", "kind", "episode")}
        logprobs = [v for value in turn["sampled"].get("logprobs") or () if (v := finite(value)) is not None]
        turns.append(
            about
            | {
                "start": start,
                "prompt_tokens": len(turn["prompt"]["token_ids"]),
                "sampled_tokens": len(turn["sampled"]["token_ids"]),
                "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
            }
        )
    learner = _annotate(run, entry, annotation, branches)
    return Body(entry, row, turns, branches, learner)


def _annotate(
    run: RunReader, entry: EpisodeEntry, annotation: Mapping[str, Any] | None, branches: Mapping[str, TokenColumns]
) -> str | None:
    """Adds the learner's values; why there are none, or None where there are."""
    if annotation is None:
        return "the learner has not trained on this step yet, or its record is not kept"
    if entry.id not in annotation["advantages"]:
        return "the learner did not train on this episode"
    file = run.traces / "annotations" / str(annotation["file"]).replace("/", "_")
    try:
        for row in read_annotations(file, entry.id):
            if row["branch_id"] in branches:
                branches[row["branch_id"]].annotate(row)
    except (OSError, ValueError) as error:
        return f"the learner's record cannot be read: {error}"
    if all(columns.learner_logprobs is None for columns in branches.values()):
        return "the learner's own logprobs were not recorded: its steps were captured as CUDA graphs"
    return None
