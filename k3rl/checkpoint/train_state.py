"""Training state on disk: sharded by rank, hashed, whole or not there.

    step_40/manifest.json         how many ranks, and size and hash of every rank's list
            manifest.sha256       hash of the manifest
            rank_00000.json       what rank 0 owns: file size, hash of its header, hash of every tensor; its own JSON
            rank_00000.safetensors
            ...
    latest                        the name of the newest state that is whole and on the disk

Tensors are keyed by name, never by rank, so any number of ranks reads a state, each only what it wants. All files are
written beside the final name and flushed, then renamed at once; `latest` moves after that. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3rl.checkpoint.replace import by_umask, flush, put_in_place, recover
from k3rl.config import K3Error

SCHEMA = 2
_MANIFEST, _DIGEST, _LATEST = "manifest.json", "manifest.sha256", "latest"
_ABANDONED = "abandoned"  # states of a line that a run has left
_FAILED = ".failed"
_STEP = re.compile(r"step_(\d+)")
_ROWS_KEY = "{name}@{start}"
_POLL_S = 0.02


class TrainStateError(K3Error):
    """A training state that is missing, torn, altered, of another schema, or that ranks disagree about."""

    exit_code = 3


@dataclass(frozen=True)
class Rows:
    """A part of a tensor: `values` [n, ...] are the rows [start, start + n) of one with `total` rows."""

    values: Tensor
    start: int
    total: int


Owned = Mapping[str, Tensor | Rows]


# ------------------------------------------------------------------------------------------------------- writing


def scratch_of(directory: Path, save_id: str) -> Path:
    """Where the ranks write a state before it is whole. `save_id` tells this attempt from an earlier, killed one."""
    return directory.with_name(f".{directory.name}.{save_id}.writing")


def write_shard(directory: Path, rank: int, owned: Owned, extra: Mapping[str, Any], *, save_id: str) -> None:
    """Writes what this rank owns beside `directory`; durable when it returns, and not visible before `commit`.

    owned: by official name, CPU tensors that nothing changes meanwhile. extra: this rank's own JSON values.
    """
    scratch = scratch_of(directory, save_id)
    scratch.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for name, value in owned.items():
        part = value if isinstance(value, Rows) else Rows(value, 0, value.shape[0] if value.dim() else 1)
        key = _ROWS_KEY.format(name=name, start=part.start) if isinstance(value, Rows) else name
        stored[key] = part.values.detach().contiguous()
        entries[key] = {
            "name": name,
            "dtype": str(part.values.dtype).removeprefix("torch."),
            "shape": list(part.values.shape),
            "start": part.start,
            "total": part.total,
            "sha256": _hash_tensor(stored[key]),
        }
    file = scratch / f"{_stem(rank)}.safetensors"
    save_file(stored, file)
    by_umask(file)
    flush(file)
    about = {
        "file": file.name,
        "bytes": file.stat().st_size,
        "header_sha256": _hash_header(file),
        "tensors": entries,
        "extra": dict(extra),
    }
    _write_durable(scratch / f"{_stem(rank)}.json", json.dumps(about))
    flush(scratch)


def report_failure(directory: Path, rank: int, reason: str, *, save_id: str) -> None:
    """Tells the rank that waits in `commit` that this one writes no shard, as far as the disk takes even that."""
    note = scratch_of(directory, save_id) / f"{_stem(rank)}{_FAILED}"
    with suppress(OSError):
        note.touch()
        note.write_text(reason, encoding="utf-8")


def commit(directory: Path, ranks: int, *, save_id: str, timeout_s: float) -> None:
    """Waits for the shards of all ranks, makes them the state `directory`, then points `latest` at it.

    One rank calls it, after its own `write_shard`. An existing state of that name is replaced.
    Raises TrainStateError when a rank reported a failure or wrote nothing within `timeout_s`, or ranks disagree;
    `latest` has not moved then.
    """
    scratch = scratch_of(directory, save_id)
    lists = [scratch / f"{_stem(rank)}.json" for rank in range(ranks)]
    deadline = time.monotonic() + timeout_s
    while missing := [path for path in lists if not path.is_file()]:
        for note in sorted(scratch.glob(f"*{_FAILED}")):
            reason = note.read_text(encoding="utf-8") or "its disk takes nothing any more"
            raise TrainStateError(
                f"{directory.name} is not saved: {note.stem} could not write its shard ({reason}); the state before it "
                "stays the latest"
            )
        if time.monotonic() > deadline:
            raise TrainStateError(
                f"{directory.name} is not saved: {', '.join(path.stem for path in missing)} wrote no shard within "
                f"{timeout_s:g} s; the state before it stays the latest. All ranks need one common file system"
            )
        time.sleep(_POLL_S)
    _index([json.loads(path.read_text(encoding="utf-8")) for path in lists], directory)
    manifest = {
        "schema_version": SCHEMA,
        "ranks": [{"file": p.name, "bytes": p.stat().st_size, "sha256": _hash_file(p)} for p in lists],
    }
    text = json.dumps(manifest, indent=1) + "\n"
    _write_durable(scratch / _MANIFEST, text)
    _write_durable(scratch / _DIGEST, hashlib.sha256(text.encode()).hexdigest() + "\n")
    put_in_place(scratch, directory)
    _write_durable(directory.parent / _LATEST, directory.name)
    flush(directory.parent)


def _stem(rank: int) -> str:
    return f"rank_{rank:05d}"


def _write_durable(path: Path, text: str) -> None:
    """Replaces a small file at once, on the disk when it returns (its name with the folder's next flush)."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


def _hash_tensor(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_header(path: Path) -> str:
    """Hash of what stands before the tensors: eight bytes of length, and the JSON that says where each one is."""
    with open(path, "rb") as file:
        length = file.read(8)
        size = min(int.from_bytes(length, "little"), path.stat().st_size)  # a damaged length may be any number
        return hashlib.sha256(length + file.read(size)).hexdigest()


# ------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _StoredRows:
    """One stored run of rows of a tensor."""

    rank: int
    key: str
    entry: Mapping[str, Any]

    @property
    def start(self) -> int:
        return self.entry["start"]

    @property
    def stop(self) -> int:
        shape = self.entry["shape"]
        return self.start + (shape[0] if shape else 1)


def _index(lists: Sequence[Mapping[str, Any]], directory: Path) -> dict[str, list[_StoredRows]]:
    """Name -> its pieces from the first row to the last. A tensor that several ranks own must be the same on all."""
    found: dict[str, dict[int, _StoredRows]] = {}
    for rank, about in enumerate(lists):
        for key, entry in about["tensors"].items():
            piece = _StoredRows(rank, key, entry)
            same = found.setdefault(entry["name"], {}).setdefault(piece.start, piece)
            if same.entry != entry:
                raise TrainStateError(
                    f"{directory.name}: ranks {same.rank} and {rank} hold different values of {entry['name']}; "
                    "they have drifted apart, so this state is not saved"
                )
    index: dict[str, list[_StoredRows]] = {}
    for name, pieces in found.items():
        index[name] = [pieces[start] for start in sorted(pieces)]
        covered = 0
        for piece in index[name]:
            if piece.start != covered:
                raise TrainStateError(f"{directory.name}: rows {covered} to {piece.start} of {name} are owned wrongly")
            covered = piece.stop
        if covered != index[name][0].entry["total"]:
            raise TrainStateError(f"{directory.name}: no rank owns {name} from row {covered} on")
    return index


class TrainState:
    """A state on disk, opened: every size and header is checked now, every tensor when it is read.

    extra: the JSON of rank 0. rank_extras: that of every rank that wrote. names: all tensors.
    Raises TrainStateError, naming the file, for anything that is not exactly what was written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        recover(directory)
        lists = [self._rank_list(about) for about in self._manifest()["ranks"]]
        self._files: list[Path] = []
        for about in lists:
            file = directory / about["file"]
            self._check(file, about["bytes"])
            if _hash_header(file) != about["header_sha256"]:
                raise self._damaged(file, "its header differs from what was written")
            self._files.append(file)
        self._pieces = _index(lists, directory)
        self._open: dict[int, Any] = {}
        self.names = tuple(self._pieces)
        self.rank_extras: tuple[dict[str, Any], ...] = tuple(about["extra"] for about in lists)
        self.extra = self.rank_extras[0]

    def tensor(self, name: str) -> Tensor:
        """The whole tensor of this name. Raises TrainStateError, also when its bytes are not those written."""
        pieces = self._of(name)
        if len(pieces) == 1:
            return self._read(pieces[0])
        return torch.cat([self._read(piece) for piece in pieces])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor; only the pieces that overlap them are read."""
        parts = []
        for piece in self._of(name):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                parts.append(self._read(piece)[first - piece.start : last - piece.start])
        total = self._of(name)[0].entry["total"]
        if not 0 <= start < stop <= total:
            raise TrainStateError(f"{self.directory}: {name} has {total} rows; rows {start} to {stop} were asked for")
        return torch.cat(parts)

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The tensors of these names, or all of them."""
        return {name: self.tensor(name) for name in (self.names if names is None else names)}

    def verify(self) -> None:
        """Reads every tensor once. Raises TrainStateError."""
        for name in self.names:
            self.tensor(name)

    def _of(self, name: str) -> list[_StoredRows]:
        try:
            return self._pieces[name]
        except KeyError:
            raise TrainStateError(
                f"{self.directory} holds no {name}; it was written by a run with another model or optimizer"
            ) from None

    def _read(self, piece: _StoredRows) -> Tensor:
        file = self._files[piece.rank]
        try:
            if piece.rank not in self._open:
                self._open[piece.rank] = safe_open(file, framework="pt")
            value: Tensor = self._open[piece.rank].get_tensor(piece.key)
        except (SafetensorError, OSError) as error:
            raise self._damaged(file, str(error)) from error
        if _hash_tensor(value) != piece.entry["sha256"]:
            raise self._damaged(file, f"the bytes of {piece.key} differ from what was written")
        return value

    def _manifest(self) -> dict[str, Any]:
        path, digest = self.directory / _MANIFEST, self.directory / _DIGEST
        for needed in (path, digest):
            if not needed.is_file():
                raise self._damaged(needed, "it is missing")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest().encode() != digest.read_bytes().strip():
            raise self._damaged(path, f"it does not have the hash in {_DIGEST}")
        manifest: dict[str, Any] = json.loads(data)
        if manifest["schema_version"] != SCHEMA:
            raise TrainStateError(
                f"{self.directory} has schema {manifest['schema_version']}, this k3rl reads {SCHEMA}; "
                "resume it with the k3rl that wrote it"
            )
        return manifest

    def _rank_list(self, about: Mapping[str, Any]) -> dict[str, Any]:
        path = self.directory / about["file"]
        self._check(path, about["bytes"])
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != about["sha256"]:
            raise self._damaged(path, "its hash differs from the manifest's")
        return json.loads(data)

    def _check(self, path: Path, size: int) -> None:
        if not path.is_file():
            raise self._damaged(path, "it is missing")
        if path.stat().st_size != size:
            raise self._damaged(path, f"it has {path.stat().st_size} bytes and was written with {size}")

    def _damaged(self, path: Path, why: str) -> TrainStateError:
        return TrainStateError(
            f"the training state {self.directory} is damaged: {path.name}: {why}. Nothing was loaded; restore the "
            "file, or go on from the state before it with --resume-from previous (or name one: --resume-from step_N)"
        )


# ------------------------------------------------------------------------------------------------- which and how many


def latest_train_state(parent: Path) -> Path | None:
    """The newest whole state under `parent`, or None when there is none yet. Raises TrainStateError."""
    pointer = parent / _LATEST
    newest = _newest(parent)
    if newest is None:
        return None
    directory = parent / f"step_{newest}"
    recover(directory)
    if not directory.is_dir():
        raise TrainStateError(
            f"{pointer} names {directory.name}, which is not there; restore it, or go on from the state before it "
            "with --resume-from previous"
        )
    return directory


def chosen_train_state(parent: Path, wanted: str) -> Path | None:
    """The state that `wanted` names: "latest", "previous" (the one before the latest), or a name such as "step_20".

    None when nothing was saved yet. Raises TrainStateError when the one asked for is not there.
    """
    if wanted == "latest":
        return latest_train_state(parent)
    states = _steps(parent)
    if wanted == "previous":
        newest = _newest(parent)
        if newest is None:
            return None
        older = [path for number, path in states if number < newest]
        if not older:
            raise TrainStateError(f"{parent} holds no state before step_{newest}; start again with --clean")
        return older[-1]
    for _, path in states:
        if path.name == wanted:
            return path
    raise TrainStateError(
        f"{parent} holds no state {wanted!r}; there is {', '.join(path.name for _, path in states) or 'none'}"
    )


def go_back_to(directory: Path) -> list[str]:
    """Makes a state the latest of its parent: whoever goes on from it, and is ended before the next one, is there.

    States that were saved after it belong to a line that the run has left. They are set aside in `abandoned`, with what
    lies beside them under their names (`...-step_N-...`), so that none of them counts as one of the new line. Returns
    their names.
    """
    parent = directory.parent
    pointer = parent / _LATEST
    if not pointer.is_file() or pointer.read_bytes().strip() != directory.name.encode():
        _write_durable(pointer, directory.name)
        flush(parent)
    left = [path for number, path in _steps(parent) if number > (_number(directory.name) or 0)]
    for state in left:
        aside = parent / _ABANDONED
        aside.mkdir(exist_ok=True)
        for path in (*parent.glob(f"*-{state.name}-*"), state):
            if (aside / path.name).exists():
                shutil.rmtree(aside / path.name)
            os.rename(path, aside / path.name)
    return [path.name for path in left]


def prune_train_states(parent: Path, keep: int) -> None:
    """Removes all but the `keep` newest states up to the latest one, and abandoned ones that the run has passed."""
    newest = _newest(parent)
    if newest is None:
        return
    done = [path for number, path in _steps(parent) if number <= newest]
    aside = parent / _ABANDONED
    passed = aside.is_dir() and all(number <= newest for number, _ in _steps(aside))
    for old in (*done[:-keep], *([aside] if passed else ())):
        gone = old.with_name(f".{old.name}.removed.writing")  # a kill in between must not leave half a state
        os.rename(old, gone)
        shutil.rmtree(gone)


def clear_unfinished(parent: Path) -> None:
    """Removes what killed writers left. Only while nobody writes."""
    for path in (*parent.glob(".step_*.writing"), *parent.glob(f".{_ABANDONED}.removed.writing")):
        shutil.rmtree(path)


def _steps(parent: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every state, oldest first."""
    found = [(number, path) for path in parent.glob("step_*") if (number := _number(path.name)) is not None]
    return sorted(found)


def _newest(parent: Path) -> int | None:
    """The step that `latest` names, None when nothing was saved yet.

    Raises TrainStateError where it names no state, or is gone though it has been there: whoever took that for a run
    without a state would begin again and lose what was trained.
    """
    pointer, states = parent / _LATEST, _steps(parent)
    if not pointer.is_file():
        if len(states) < 2:  # a kill may leave the first state, which is whole, before anything points at it
            return states[0][0] if states else None
        said = "is missing"
    else:
        text = pointer.read_text(encoding="utf-8", errors="replace").strip()
        number = _number(text)
        if number is not None:
            return number
        said = f"holds {text[:40]!r}, which names no state"
    there = ", ".join(path.name for _, path in states) or "none"
    raise TrainStateError(f"{pointer} {said}; there is {there}: go on from one by its name, with --resume-from step_N")


def _number(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
