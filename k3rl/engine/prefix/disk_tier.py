"""The disk tier of the prefix cache: fixed parts of states and segments of tokens, one safetensors file each.

What leaves memory is written here and read back when a prompt begins with it, KDA states and MLA latents together. A
state that begins with another one on disk has its segments in common with it, so that a conversation appends what is
new. A disk that is full or fails costs a state, which is counted, and never an error: whoever asks for it computes it
again. Files belong to the process that wrote them, lie in a folder of their own, and go with it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from k3rl.engine.prefix.chain import Chain, Key, StateIndex
from k3rl.engine.prefix.parts import FixedState, Hit, LastRoute, RoutePieces, Source

_HEADER_BYTES = 1024  # of a file beside its tensors, at most


@dataclass(eq=False, slots=True)
class _File:
    """users: states that need it, and whoever is making one. tokens: of a segment."""

    path: Path
    size: int  # bytes
    digest: bytes  # of the whole file
    tokens: int = 0
    has_routes: bool = False
    users: int = 1


@dataclass(frozen=True, slots=True)
class _KeptRoute:
    """The route of a state's last token, as it was read back."""

    route: np.ndarray

    def get(self) -> np.ndarray:
        return self.route


@dataclass(slots=True)
class _State:
    """A state in files; see `chain.Indexed`."""

    fixed: _File
    segments: tuple[_File, ...]
    length: int
    routes_from: int
    has_hidden: bool


@dataclass(slots=True)
class DiskCounters:
    """States since the start; dropped: the disk refused them; damaged: read back, and not as they were written.
    written: bytes."""

    kept: int = 0
    read: int = 0
    dropped: int = 0
    damaged: int = 0
    written: int = 0


class DiskTier:
    """States in files of at most `budget_bytes` together, least recently used first out.

    directory: made when it is not there; the tier writes into a fresh folder in it. open_file: how a file is opened
    for writing.
    """

    def __init__(
        self, directory: Path, budget_bytes: int, *, open_file: Callable[[Path], BinaryIO] | None = None
    ) -> None:
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes is {budget_bytes}; a tier needs room for something")
        directory.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="k3rl-prefix-", dir=directory))
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)  # also when it is dropped
        self._open = open_file or (lambda path: path.open("wb"))
        self.budget_bytes, self.bytes = budget_bytes, 0
        self.counters = DiskCounters()
        self._index: StateIndex[_State] = StateIndex()
        self.states = self._index.states
        self._written = 0

    def __len__(self) -> int:
        return len(self.states)

    def longest(self, chain: Chain, routes_from: int | None, below: int) -> int:
        return self._index.longest(chain, routes_from, below)

    def read(self, chain: Chain, length: int) -> Hit | None:
        key = chain.key(length)
        state = self.states.get(key)
        if state is None:
            return None
        parts = [_loaded(file) for file in (state.fixed, *state.segments)]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts) or sum(part["latent"].shape[1] for part in whole[1:]) != length:
            self.counters.damaged += 1
            self._drop(key)
            return None
        self.states.move_to_end(key)
        self.counters.read += 1
        fixed, segments = whole[0], whole[1:]
        last = _KeptRoute(fixed["last_route"].numpy()) if "last_route" in fixed else None
        return Hit(
            length,
            FixedState(fixed["recurrent"], fixed["conv"], fixed.get("hidden"), last),
            torch.cat([part["latent"] for part in segments], 1),
            None if state.routes_from else RoutePieces([part["routes"].numpy() for part in segments]),
        )

    def put(self, chain: Chain, source: Source, owners: frozenset[str] = frozenset()) -> None:
        key = chain.key(len(chain.ids))
        held = self.states.get(key)
        if (
            held is not None
            and held.has_hidden >= source.has_hidden
            and (not held.routes_from or not source.has_routes)
        ):
            self.states.move_to_end(key)
            self._drop_all(self._index.give(key, owners))
            return
        shared = self._shared(chain, source.has_routes)
        for file in shared:
            file.users += 1
        state = self._write(chain, source, shared, owners)
        if state is None:
            self.counters.dropped += 1
            self._release(shared)
            return
        if held is not None and key in self.states:
            owners = owners | self._index.owners(key)
            self._drop(key)
        self._drop_all(self._index.add(key, state, owners))
        self.counters.kept += 1

    def end(self, owner: str) -> None:
        self._drop_all(self._index.release(owner))

    def clear(self, *, keep_owned: bool = False) -> None:
        for key in self._index.without_owner() if keep_owned else list(self.states):
            self._drop(key)

    # ---- files

    def _shared(self, chain: Chain, with_routes: bool) -> tuple[_File, ...]:
        """Segments of the longest state that the chain goes on from; none without routes where these are wanted."""
        length = self._index.longest(chain, None, len(chain.ids))
        found = self.states[chain.key(length)].segments if length else ()
        return () if with_routes and not all(file.has_routes for file in found) else found

    def _write(self, chain: Chain, source: Source, shared: tuple[_File, ...], owners: frozenset[str]) -> _State | None:
        """Writes what is not shared of a state, for which room is made; None where it does not fit, or the disk
        refuses it."""
        size, known = source.size, sum(file.tokens for file in shared)
        new = size.fixed + (len(chain.ids) - known) * size.token + 2 * _HEADER_BYTES
        if new + sum(file.size for file in shared) > self.budget_bytes:
            return None
        for owner in owners:
            self._drop_all(self._index.release(owner))
        fixed, part = source.fixed(), source.tokens(known, len(chain.ids))
        last = fixed.last_route
        tensors = {"recurrent": fixed.recurrent, "conv": fixed.conv, "hidden": fixed.hidden, "last_route": _route(last)}
        segment = {"latent": part.latent, "routes": None if part.routes is None else torch.from_numpy(part.routes)}
        files: list[_File] = []
        for named, tokens in ((tensors, 0), (segment, len(chain.ids) - known)):
            file = self._write_file(_packed(named), tokens, named.get("routes") is not None)
            if file is None:
                self._release(files)
                return None
            files.append(file)
        segments = (*shared, files[1])
        whole = all(file.has_routes for file in segments)
        return _State(files[0], segments, len(chain.ids), 0 if whole else len(chain.ids) - (last is not None),
                      fixed.hidden is not None)  # fmt: skip

    def _write_file(self, data: bytes, tokens: int, has_routes: bool) -> _File | None:
        while self.states and self.bytes + len(data) > self.budget_bytes:
            self._drop(next(iter(self.states)))
        path = self.folder / f"{self._written}.safetensors"
        self._written += 1
        try:
            if self.bytes + len(data) > self.budget_bytes:
                return None
            with self._open(path) as file:
                file.write(data)
        except OSError:
            path.unlink(missing_ok=True)
            return None
        self.bytes += len(data)
        self.counters.written += len(data)
        return _File(path, len(data), _digest(data), tokens, has_routes)

    def _release(self, files: Sequence[_File]) -> None:
        for file in files:
            file.users -= 1
            if not file.users:
                self.bytes -= file.size
                file.path.unlink(missing_ok=True)

    def _drop_all(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        state = self._index.pop(key)
        self._release((state.fixed, *state.segments))


def _loaded(file: _File) -> dict[str, torch.Tensor] | None:
    """The tensors of a file, or None for one that is not as it was written."""
    try:
        data = file.path.read_bytes()
        return load(data) if _digest(data) == file.digest else None
    except (OSError, SafetensorError):
        return None


def _packed(named: dict[str, torch.Tensor | None]) -> bytes:
    return save({name: tensor.cpu().contiguous() for name, tensor in named.items() if tensor is not None})


def _route(last: LastRoute | None) -> torch.Tensor | None:
    return None if last is None else torch.from_numpy(last.get())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
