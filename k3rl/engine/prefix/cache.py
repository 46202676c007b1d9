"""Prefix cache: states of token prefixes, so that a conversation that grows computes only its new tokens.

A cached state is that of a sequence after all of its `length` tokens: the KDA states, and the MLA latents and routes of
every token. Latents are kept in blocks of fixed size that cached states share; the rest behind the last whole block is
the state's own. A hit is a cached state that a prompt begins with, KDA states and latents of one boundary together, or
it is no hit. States are copied in and copied out and never written to in between.

Identity is a hash chain over blocks of token ids, rooted in the weight version and the request's salt: equal digests
mean equal tokens from the first one on. The least recently used state leaves first, to the next tier if there is one. A
tier is anything that keeps states whole; `MemoryTier` is one in memory of this process, `DiskTier` of
`disk_tier.py` one in files.

Letters: L layers of one kind, n tokens, M MoE layers, k experts per token.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenStates:
    """What n tokens leave in the MLA layers: latent [L, n, width]; routes int16 [n, M, k], or None if not recorded."""

    latent: Tensor
    routes: np.ndarray | None

    @cached_property
    def bytes(self) -> int:
        return _bytes(self.latent) + (0 if self.routes is None else self.routes.nbytes)


class RoutePieces:
    """Routes int16 [n, M, k] of a sequence's tokens, in pieces that nobody writes to; made one only when asked for."""

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self.pieces = list(pieces)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(piece) for piece in self.pieces])

    def between(self, start: int, stop: int) -> np.ndarray:
        """A copy of those of tokens start..stop."""
        if start == stop:
            return self.pieces[0][:0].copy()
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        offset = start - (int(self._ends[first - 1]) if first else 0)
        if first == last:
            return self.pieces[first][offset : offset + stop - start].copy()
        joined = np.concatenate(self.pieces[first : last + 1])
        return joined[offset : offset + stop - start]


@dataclass(frozen=True)
class FixedState:
    """The part whose size does not depend on the length: recurrent [L, H, K, V], conv [L, 3, channels].

    hidden [1, H]: the last token's row after the final norm, or None where no prompt ended.
    """

    recurrent: Tensor
    conv: Tensor
    hidden: Tensor | None

    @cached_property
    def bytes(self) -> int:
        return _bytes(self.recurrent) + _bytes(self.conv) + (0 if self.hidden is None else _bytes(self.hidden))


class Source(Protocol):
    """Where a state is copied from: a row of the engine, or another tier."""

    @property
    def has_routes(self) -> bool: ...

    @property
    def has_hidden(self) -> bool: ...

    def fixed(self) -> FixedState:
        """Tensors that nobody will write to."""
        ...

    def tokens(self, start: int, stop: int) -> TokenStates:
        """Tokens start..stop, in tensors that nobody will write to."""
        ...


@dataclass(frozen=True, slots=True)
class Chain:
    """A token sequence by name. digests[i] names its first i blocks, root included; ids int64 [length]."""

    digests: tuple[bytes, ...]
    ids: np.ndarray
    block: int

    @classmethod
    def of(cls, ids: np.ndarray, root: bytes, block: int, known: Chain | None = None) -> Chain:
        """The chain of ids int64 [T] in blocks of `block` tokens.

        known: a chain whose ids begin with these or are what these begin with; its blocks are not hashed again. It is
        of no use, and no harm, where its root is another one.
        """
        if known is None or known.digests[0] != root or known.block != block:
            known = None
        shared = 0 if known is None else min(len(ids), len(known.ids)) // block
        digests = [root] if known is None else list(known.digests[: shared + 1])
        data, size = ids[shared * block :].tobytes(), block * ids.itemsize
        for start in range(0, len(data) - size + 1, size):
            digests.append(_digest(digests[-1] + data[start : start + size]))
        return cls(tuple(digests), ids, block)

    @property
    def root(self) -> bytes:
        """The name of no tokens: the weights and the salt."""
        return self.digests[0]

    def key(self, length: int) -> tuple[bytes, bytes]:
        """The name of the state after the first `length` tokens: (digest of its whole blocks, the ids behind)."""
        blocks = length // self.block
        return self.digests[blocks], self.ids[blocks * self.block : length].tobytes()

    def tail(self, blocks: int) -> bytes:
        """The ids behind the first `blocks` blocks."""
        return self.ids[blocks * self.block :].tobytes()


def longest_tail(
    chain: Chain, tails: Mapping[bytes, Sequence[bytes]], usable: Callable[[tuple[bytes, bytes]], bool]
) -> int:
    """Tokens of the longest usable state that the chain begins with. tails: digest -> the rests behind it."""
    for blocks in range(len(chain.digests) - 1, -1, -1):
        found = tails.get(chain.digests[blocks])
        if not found:
            continue
        wanted = chain.tail(blocks)
        for tail in sorted(found, key=len, reverse=True):
            if wanted.startswith(tail) and usable((chain.digests[blocks], tail)):
                return blocks * chain.block + len(tail) // chain.ids.itemsize
    return 0


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached state that a prompt begins with: its first `length` tokens need no computing."""

    length: int
    fixed: FixedState
    latent: Tensor  # [L, length, width]
    routes: RoutePieces | None  # of all of them


class _HitSource:
    """A hit as what another tier copies from."""

    def __init__(self, hit: Hit) -> None:
        self._hit = hit
        self.has_routes, self.has_hidden = hit.routes is not None, hit.fixed.hidden is not None

    def fixed(self) -> FixedState:
        return self._hit.fixed

    def tokens(self, start: int, stop: int) -> TokenStates:
        routes = None if self._hit.routes is None else self._hit.routes.between(start, stop)
        return TokenStates(self._hit.latent[:, start:stop].clone(), routes)


class Tier(Protocol):
    """A place that keeps states whole: what `read` gives is all of one, or None."""

    def longest(self, chain: Chain, need_routes: bool) -> int:
        """Tokens of the longest usable state that the chain begins with; 0 without one.

        One of the whole chain is usable when it has the last token's hidden row; with `need_routes` one is
        usable when the routes of all its tokens are there.
        """
        ...

    def read(self, chain: Chain, length: int) -> Hit | None:
        """The state after the chain's first `length` tokens, now the most recently used; None if it is gone."""
        ...

    def put(self, chain: Chain, source: Source) -> None:
        """Keeps the state after all tokens of the chain, if it fits."""
        ...

    def clear(self) -> None:
        """Forgets everything."""
        ...


@dataclass(slots=True)
class Block:
    """Whole blocks are shared: what the tokens of one left in the MLA layers."""

    tokens: TokenStates
    parent: bytes
    users: int = 0  # states that end in this block, and blocks that follow it


@dataclass(slots=True)
class CachedState:
    """The state after all tokens of `chain`; `rest` is of those behind its last whole block."""

    chain: Chain
    fixed: FixedState
    rest: TokenStates
    has_routes: bool

    @property
    def bytes(self) -> int:
        return self.fixed.bytes + self.rest.bytes + self.chain.ids.nbytes


class _EvictedSource:
    """A state on its way to the tier below: its blocks as they are, which nobody writes to."""

    def __init__(self, held: CachedState, blocks: list[Block]) -> None:
        self._held, self._pieces = held, [*(block.tokens for block in blocks), held.rest]
        self.has_routes, self.has_hidden = held.has_routes, held.fixed.hidden is not None

    def fixed(self) -> FixedState:
        return self._held.fixed

    def tokens(self, start: int, stop: int) -> TokenStates:
        return self._pieces[start // self._held.chain.block]


class MemoryTier:
    """States in memory of `device` (None: wherever they are), at most `budget_bytes`, least recently used first
    out, to `below` when there is one."""

    def __init__(
        self, budget_bytes: int, *, device: torch.device | str | None = None, below: Tier | None = None
    ) -> None:
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes is {budget_bytes}; a tier needs room for something")
        self.budget_bytes, self.bytes = budget_bytes, 0
        self._device, self._below = device, below
        self.states: OrderedDict[tuple[bytes, bytes], CachedState] = OrderedDict()
        self._tails: dict[bytes, list[bytes]] = {}  # digest of whole blocks -> rests that states have behind them
        self.blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self.states)

    def longest(self, chain: Chain, need_routes: bool) -> int:
        def usable(key: tuple[bytes, bytes]) -> bool:
            held = self.states[key]
            whole = len(held.chain.ids) == len(chain.ids)
            return (not whole or held.fixed.hidden is not None) and (held.has_routes or not need_routes)

        return longest_tail(chain, self._tails, usable)

    def read(self, chain: Chain, length: int) -> Hit | None:
        key = chain.key(length)
        held = self.states.get(key)
        if held is None:
            return None
        self.states.move_to_end(key)
        return self._hit(held)

    def put(self, chain: Chain, source: Source) -> None:
        key = chain.key(len(chain.ids))
        digest = key[0]
        held = self.states.get(key)
        if held is not None:
            self.states.move_to_end(key)
            if held.has_routes >= source.has_routes and (held.fixed.hidden is not None) >= source.has_hidden:
                return
        self._put_blocks(chain, source)
        if digest in self.blocks:
            self.blocks[digest].users += 1
        if held is not None:
            self._drop(key)
        rest = self._placed(source.tokens((len(chain.digests) - 1) * chain.block, len(chain.ids)))
        blocks = self._walk(digest)
        routes = rest.routes is not None and all(block.tokens.routes is not None for block in blocks)
        self.states[key] = held = CachedState(chain, self._fixed(source.fixed()), rest, routes)
        self._tails.setdefault(digest, []).append(key[1])
        self.bytes += held.bytes
        if held.bytes + sum(block.tokens.bytes for block in blocks) > self.budget_bytes:
            self._evict(key)  # too large for this tier: the others stay
        while self.bytes > self.budget_bytes:
            self._evict(next(iter(self.states)))

    def clear(self) -> None:
        self.states.clear()
        self._tails.clear()
        self.blocks.clear()
        self.bytes = 0
        if self._below is not None:
            self._below.clear()

    # ---- blocks

    def _put_blocks(self, chain: Chain, source: Source) -> None:
        """Adds the blocks that are missing, and the routes of those that lack them."""
        for index in range(len(chain.digests) - 1, 0, -1):
            digest, parent = chain.digests[index], chain.digests[index - 1]
            block = self.blocks.get(digest)
            if block is not None and (block.tokens.routes is not None or not source.has_routes):
                break
            part = self._placed(source.tokens((index - 1) * chain.block, index * chain.block))
            self.bytes += part.bytes
            if block is not None:
                self.bytes -= block.tokens.bytes
                block.tokens = part
                continue
            self.blocks[digest] = Block(part, parent, users=int(index + 1 < len(chain.digests)))
            if parent in self.blocks:
                self.blocks[parent].users += 1

    def _walk(self, digest: bytes) -> list[Block]:
        """The blocks up to `digest`, last one first."""
        walked = []
        while digest in self.blocks:
            walked.append(self.blocks[digest])
            digest = walked[-1].parent
        return walked

    def _release(self, digest: bytes) -> None:
        """One user less of a block; without users it goes, and so may those before it."""
        while digest in self.blocks:
            block = self.blocks[digest]
            block.users -= 1
            if block.users:
                return
            del self.blocks[digest]
            self.bytes -= block.tokens.bytes
            digest = block.parent

    # ---- states

    def _hit(self, held: CachedState) -> Hit:
        parts = [block.tokens for block in reversed(self._walk(held.chain.digests[-1]))] + [held.rest]
        routes = [part.routes for part in parts if part.routes is not None]
        return Hit(
            len(held.chain.ids),
            held.fixed,
            torch.cat([part.latent for part in parts], 1),
            RoutePieces(routes) if len(routes) == len(parts) else None,
        )

    def _evict(self, key: tuple[bytes, bytes]) -> None:
        held = self.states[key]
        if self._below is not None:
            self._below.put(held.chain, _EvictedSource(held, self._walk(key[0])[::-1]))
        self._drop(key)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        held = self.states.pop(key)
        self._tails[key[0]].remove(key[1])
        if not self._tails[key[0]]:
            del self._tails[key[0]]
        self.bytes -= held.bytes
        self._release(key[0])

    def _placed(self, part: TokenStates) -> TokenStates:
        return part if self._device is None else TokenStates(part.latent.to(self._device), part.routes)

    def _fixed(self, fixed: FixedState) -> FixedState:
        if self._device is None:
            return fixed
        hidden = None if fixed.hidden is None else fixed.hidden.to(self._device)
        return FixedState(fixed.recurrent.to(self._device), fixed.conv.to(self._device), hidden)


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

    def chain(self, ids: np.ndarray, version: int, salt: str, known: Chain | None = None) -> Chain:
        """The name of ids int64 [T] under these weights and this salt; known: see `Chain.of`. Nothing may write to the
        array afterwards."""
        return Chain.of(ids, _digest(f"{version} {salt}".encode()), self.block, known)

    def find(self, chain: Chain, need_routes: bool) -> Hit | None:
        """The longest cached state that the chain begins with, or None."""
        self.counters.lookups += 1
        lengths = [tier.longest(chain, need_routes) for tier in self.tiers]
        longest = max(lengths, default=0)
        if not longest:
            return None
        place = lengths.index(longest)
        hit = self.tiers[place].read(chain, longest)
        if hit is None:
            return None
        if place:
            self.tiers[0].put(Chain.of(chain.ids[:longest], chain.root, chain.block, chain), _HitSource(hit))
        self.counters.hits += 1
        self.counters.tokens += longest
        return hit

    def put(self, chain: Chain, source: Source) -> None:
        """Keeps the state after all tokens of the chain."""
        self.tiers[0].put(chain, source)
        self.counters.stored += 1

    def clear(self) -> None:
        """Forgets everything: other weights are served."""
        for tier in self.tiers:
            tier.clear()


def _digest(data: bytes) -> bytes:
    """16 bytes; processors have instructions for this hash."""
    return hashlib.sha256(data).digest()[:16]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
