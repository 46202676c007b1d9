"""The disk tier of the prefix cache: whole states, one safetensors file each.

What leaves memory is written here and read back when a prompt begins with it, KDA states and MLA latents together. A
disk that is full or fails costs a state, which is counted, and never an error: whoever asks for it computes it
again. Files belong to the process that wrote them, lie in a folder of their own, and go with it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from k3rl.engine.prefix.cache import Chain, FixedState, Hit, RoutePieces, Source, longest_tail


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    size: int  # bytes
    length: int  # tokens
    digest: bytes  # of the whole file
    has_routes: bool
    has_hidden: bool


@dataclass(slots=True)
class DiskCounters:
    """States since the start; dropped: the disk refused them; damaged: read back, and not as they were written."""

    kept: int = 0
    read: int = 0
    dropped: int = 0
    damaged: int = 0


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
        self.files: OrderedDict[tuple[bytes, bytes], _File] = OrderedDict()
        self._tails: dict[bytes, list[bytes]] = {}
        self._written = 0

    def __len__(self) -> int:
        return len(self.files)

    def longest(self, chain: Chain, need_routes: bool) -> int:
        def usable(key: tuple[bytes, bytes]) -> bool:
            file = self.files[key]
            whole = file.length == len(chain.ids)
            return (not whole or file.has_hidden) and (file.has_routes or not need_routes)

        return longest_tail(chain, self._tails, usable)

    def read(self, chain: Chain, length: int) -> Hit | None:
        key = chain.key(length)
        file = self.files.get(key)
        if file is None:
            return None
        try:
            data = file.path.read_bytes()
            tensors = load(data) if _digest(data) == file.digest else None
        except (OSError, SafetensorError):
            tensors = None
        if tensors is None or tensors["latent"].shape[1] != length:
            self.counters.damaged += 1
            self._drop(key)
            return None
        self.files.move_to_end(key)
        self.counters.read += 1
        routes = RoutePieces([tensors["routes"].numpy()]) if "routes" in tensors else None
        fixed = FixedState(tensors["recurrent"], tensors["conv"], tensors.get("hidden"))
        return Hit(length, fixed, tensors["latent"], routes)

    def put(self, chain: Chain, source: Source) -> None:
        key = chain.key(len(chain.ids))
        held = self.files.get(key)
        if held is not None and held.has_routes >= source.has_routes and held.has_hidden >= source.has_hidden:
            self.files.move_to_end(key)
            return
        tensors = _tensors(chain, source)
        data = save(tensors)
        if len(data) > self.budget_bytes:
            self.counters.dropped += 1
            return
        if held is not None:
            self._drop(key)
        while self.bytes + len(data) > self.budget_bytes:
            self._drop(next(iter(self.files)))
        path = self.folder / f"{self._written}.safetensors"
        self._written += 1
        try:
            with self._open(path) as file:
                file.write(data)
        except OSError:
            self.counters.dropped += 1
            path.unlink(missing_ok=True)
            return
        self.files[key] = _File(
            path, len(data), len(chain.ids), _digest(data), "routes" in tensors, "hidden" in tensors
        )
        self._tails.setdefault(key[0], []).append(key[1])
        self.bytes += len(data)
        self.counters.kept += 1

    def clear(self) -> None:
        for key in list(self.files):
            self._drop(key)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        file = self.files.pop(key)
        self._tails[key[0]].remove(key[1])
        if not self._tails[key[0]]:
            del self._tails[key[0]]
        self.bytes -= file.size
        file.path.unlink(missing_ok=True)


def _tensors(chain: Chain, source: Source) -> dict[str, torch.Tensor]:
    """All of a state by name: recurrent, conv, latent [L, n, width], and hidden and routes where there are."""
    fixed, block = source.fixed(), chain.block
    whole = (len(chain.digests) - 1) * block
    parts = [source.tokens(start, start + block) for start in range(0, whole, block)]
    parts.append(source.tokens(whole, len(chain.ids)))
    tensors = {
        "recurrent": fixed.recurrent,
        "conv": fixed.conv,
        "latent": torch.cat([part.latent for part in parts], 1),
    }
    if fixed.hidden is not None:
        tensors["hidden"] = fixed.hidden
    routes = [part.routes for part in parts if part.routes is not None]
    if len(routes) == len(parts):
        tensors["routes"] = torch.from_numpy(np.concatenate(routes))
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
