"""Adapters that an engine serves beside its model: which there are, how a version of one arrives, who computes with it.

The weights stay; only A and B of an adapter travel. Like weights, a version of an adapter is whole or absent: it is
collected, every digest and the weights it was trained beside are proved, it is built beside the one that serves, and
only then do they change places. Versions are counted for each adapter by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError
from torch import Tensor

from k3rl.checkpoint import digest
from k3rl.engine.protocol import InvalidRequest, WeightUpdateError
from k3rl.model import Adapter, AdapterError, K3ForCausalLM, LoraConfig, adapted
from k3rl.types import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class AdapterHeader:
    """What goes before the tensors of an adapter's version.

    base: `manifest_digest` of the weights that it was trained beside.
    """

    name: str
    config: LoraConfig
    base: str

    def to_bytes(self) -> bytes:
        content = {"name": self.name, "config": self.config.model_dump(mode="json"), "base": self.base}
        return json.dumps(content).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> AdapterHeader:
        """Raises WeightUpdateError."""
        try:
            content = json.loads(data)
            config = LoraConfig.model_validate_json(json.dumps(content["config"]))
            header = cls(str(content["name"]), config, str(content["base"]))
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise WeightUpdateError(f"the header of an adapter's version cannot be read: {error}") from error
        if not header.name:
            raise WeightUpdateError("an adapter needs a name; the empty one means the weights alone")
        return header


@dataclass
class _AdapterUpdate:
    version: int
    header: AdapterHeader
    manifest: dict[str, str]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            if name not in self.manifest:
                raise self.refused(f"{name} is not in the manifest")
            if name in self.tensors:
                raise self.refused(f"{name} was sent twice")
            self.tensors[name] = tensor

    def build(self, model: K3ForCausalLM) -> Adapter:
        missing = self.manifest.keys() - self.tensors.keys()
        if missing:
            raise self.refused(f"{len(missing)} of {len(self.manifest)} tensors are missing, {min(missing)} among them")
        for name, tensor in self.tensors.items():
            if digest(tensor) != self.manifest[name]:
                raise self.refused(f"{name} has digest {digest(tensor)}, the manifest says {self.manifest[name]}")
        try:
            adapter = Adapter(model, self.header.config)
            adapter.assign(self.tensors)
        except AdapterError as error:
            raise self.refused(f"it does not fit this model: {error}") from error
        return adapter

    def refused(self, reason: str) -> WeightUpdateError:
        return WeightUpdateError(
            f"version {self.version} of adapter {self.header.name!r} refused: {reason}; send all of it again"
        )


class AdapterStore:
    """The adapters of one engine by name, and at most one version being received, open or prepared."""

    def __init__(self) -> None:
        self._served: dict[str, tuple[int, Adapter]] = {}
        self._update: _AdapterUpdate | None = None
        self._next: tuple[_AdapterUpdate, Adapter] | None = None

    @property
    def names(self) -> list[str]:
        """Adapters that requests may name."""
        return sorted(self._served)

    def check(self, name: str) -> None:
        """Raises InvalidRequest for a name that is not served; the empty one means the model as it is."""
        if name and name not in self._served:
            raise InvalidRequest(f"adapter {name!r} is not served; there are {', '.join(self.names) or 'none'}")

    def version(self, name: str, base: int) -> int:
        """The version that a request with this adapter samples from; base: that of the weights alone."""
        return self._served[name][0] if name else base

    def salt(self, params: SamplingParams) -> str:
        """What keeps the prefix-cache entries of requests apart: their salt, adapter and its version.

        The salt is a caller's own text, so it goes last: nothing in it can read as an adapter.
        """
        return f"{params.adapter!r} {self.version(params.adapter, 0)} {params.cache_salt}"

    def grouped(self, items: Sequence[T], name_of: Callable[[T], str]) -> Iterator[tuple[str, list[T]]]:
        """(adapter, its items in order), adapters in order of their first item: what one forward can compute."""
        if not self._served:
            return iter([("", list(items))] if items else [])
        groups: dict[str, list[T]] = {}
        for item in items:
            groups.setdefault(name_of(item), []).append(item)
        return iter(groups.items())

    def serving(self, model: K3ForCausalLM, name: str) -> AbstractContextManager[None]:
        """The model with this adapter for the length of the block; with the empty name as it is."""
        return adapted(model, self._served[name][1]) if name else nullcontext()

    # ---- versions

    def open(self, version: int, header: bytes, manifest: Mapping[str, str], base: str) -> None:
        """Begins a version. base: `manifest_digest` of the weights that are served. Raises WeightUpdateError."""
        if self._update is not None or self._next is not None:
            raise WeightUpdateError("another version of an adapter is open; finish or abort it first")
        update = _AdapterUpdate(version, AdapterHeader.from_bytes(header), dict(manifest))
        served = self._served.get(update.header.name)
        if served is not None and version <= served[0]:
            raise update.refused(f"{served[0]} is served now, and it is not later")
        if update.header.base != base:
            raise update.refused("it was trained beside other weights than this engine serves")
        self._update = update

    def add(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes A and B of some modules in. An error drops the version."""
        update = self._take()
        update.add(named_tensors)
        self._update = update

    def verify(self, model: K3ForCausalLM) -> bool:
        """First phase: proves the open version whole and builds it; False when none is open. An error drops it."""
        if self._update is None:
            return False
        update = self._take()
        self._next = update, update.build(model)
        return True

    def finish(self, version: int, model: K3ForCausalLM) -> str | None:
        """Second phase: the name whose version is served from now on, verified first when that is not done.

        None when no version of an adapter is open.
        """
        self.verify(model)
        prepared, self._next = self._next, None
        if prepared is None:
            return None
        update, adapter = prepared
        if update.version != version:
            raise update.refused(f"version {version} was asked for")
        self._served[update.header.name] = version, adapter
        return update.header.name

    def abort(self) -> None:
        """Drops what is open or prepared."""
        self._update = self._next = None

    def refuse_new_weights(self, drop: Callable[[], None] = lambda: None) -> None:
        """Raises WeightUpdateError, after `drop`, where adapters are served, which belong to the weights that are
        there."""
        if self._served:
            drop()
            raise WeightUpdateError(
                f"this engine serves {', '.join(self.names)}, trained beside its weights; load other weights afresh"
            )

    def _take(self) -> _AdapterUpdate:
        update, self._update = self._update, None
        if update is None:
            raise WeightUpdateError("no version of an adapter is open (a refused one is dropped); open one first")
        return update
