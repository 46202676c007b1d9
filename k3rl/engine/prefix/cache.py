"""Prefix cache: states of token prefixes, so that a conversation that grows computes only its new tokens.

A cached state is that of a sequence after all of its `length` tokens: the KDA states, and the MLA latents and routes of
every token. Latents are kept in blocks of fixed size that cached states share; the rest behind the last whole block is
the state's own. A hit is a cached state that a prompt begins with, KDA states and latents of one boundary together, or
it is no hit. States are copied in and copied out and never written to in between.

States are found by the hash chain of their tokens (`chain.py`). A conversation owns the newest of its states, which is
let go when a newer one comes or the conversation ends. What leaves a tier for want of room goes to the next one, if
there is one. A tier is anything that keeps states whole: `MemoryTier` in memory of this process, `DiskTier` in files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from k3rl.engine.prefix.chain import Chain, digest_of
from k3rl.engine.prefix.memory_tier import MemoryTier
from k3rl.engine.prefix.parts import Hit, HitSource, Source, Tier


@dataclass(slots=True)
class PrefixCounters:
    """Sums since the engine started."""

    lookups: int = 0
    hits: int = 0
    tokens: int = 0  # prompt tokens that hits spared
    stored: int = 0


@dataclass(slots=True)
class PrefixCache:
    """The tiers, fastest first. block: tokens per shared block. Belongs to one engine: other weights need another."""

    tiers: Sequence[Tier]
    block: int = 128
    counters: PrefixCounters = field(default_factory=PrefixCounters)

    @classmethod
    def of_bytes(
        cls,
        device_bytes: int,
        host_bytes: int = 0,
        block: int = 128,
        *,
        disk_bytes: int = 0,
        directory: Path | None = None,
    ) -> PrefixCache:
        """A tier beside the model and, as asked for, one in host memory that takes what leaves the first, and one in
        files below `directory` that takes what leaves memory."""
        tiers: list[Tier] = []
        if disk_bytes:
            from k3rl.engine.prefix.disk_tier import DiskTier

            if directory is None:
                raise ValueError(f"disk_bytes is {disk_bytes} and no directory is given; name one for the files")
            tiers.append(DiskTier(directory, disk_bytes))
        if host_bytes:
            tiers.insert(0, MemoryTier(host_bytes, device="cpu", below=tiers[0] if tiers else None))
        return cls([MemoryTier(device_bytes, below=tiers[0] if tiers else None), *tiers], block)

    def memory_bytes(self, *, on_cpu: bool) -> int:
        """What its tiers may take of the memory that the states of running requests are in, too: with the model on the
        CPU that is host memory."""
        memory = [tier for tier in self.tiers if isinstance(tier, MemoryTier)]
        return sum(tier.budget_bytes for tier in (memory if on_cpu else memory[:1]))

    @property
    def evicted(self) -> int:
        """States that left a tier in memory for want of room."""
        return sum(tier.evicted for tier in self.tiers if isinstance(tier, MemoryTier))

    def root(self, version: int, salt: str) -> bytes:
        """The name of no tokens under these weights and this salt."""
        return digest_of(f"{version} {salt}".encode())

    def chain(self, ids: np.ndarray, root: bytes, known: Chain | None = None) -> Chain:
        """The name of ids int64 [T] under a root; known: see `Chain.of`. Nothing may write to the array afterwards."""
        return Chain.of(ids, root, self.block, known)

    def find(self, chain: Chain, routes_from: int | None) -> Hit | None:
        """The longest cached state that the chain begins with, or None. routes_from: see `Tier.longest`."""
        self.counters.lookups += 1
        below = len(chain.ids) + 1
        while True:
            lengths = [tier.longest(chain, routes_from, below) for tier in self.tiers]
            below = max(lengths, default=0)
            if not below:
                return None
            for place, length in enumerate(lengths):
                if length == below and (hit := self._read(place, chain, length)) is not None:
                    return hit

    def _read(self, place: int, chain: Chain, length: int) -> Hit | None:
        """A state of a tier; one of a lower tier comes back to the first."""
        hit = self.tiers[place].read(chain, length)
        if hit is None:
            return None
        if place:
            self.tiers[0].put(Chain.of(chain.ids[:length], chain.root, chain.block, chain), HitSource(hit))
        self.counters.hits += 1
        self.counters.tokens += length
        return hit

    def put(self, chain: Chain, source: Source, owner: str = "") -> None:
        """Keeps the state after all tokens of the chain; for an owner, in place of its earlier one."""
        self.tiers[0].put(chain, source, frozenset([owner]) if owner else frozenset())
        self.counters.stored += 1

    def end(self, owner: str) -> None:
        """Lets the state of an owner go, wherever it is."""
        for tier in self.tiers:
            tier.end(owner)

    def clear(self, *, keep_owned: bool = False) -> None:
        """Forgets everything, or all that nobody owns: other weights are served."""
        for tier in self.tiers:
            tier.clear(keep_owned=keep_owned)
