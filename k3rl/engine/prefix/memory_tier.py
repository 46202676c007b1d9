"""A tier of the prefix cache in memory: fixed parts by state, latents in blocks that states share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3rl.engine.prefix.chain import Chain, Key, StateIndex
from k3rl.engine.prefix.parts import FixedState, Hit, PiecesSource, RoutePieces, Source, Tier, TokenStates


@dataclass(slots=True)
class Block:
    """Whole blocks are shared: what the tokens of one left in the MLA layers."""

    tokens: TokenStates
    parent: bytes
    users: int = 0  # states that end in this block, blocks that follow it, and whoever needs it for a moment


@dataclass(slots=True)
class CachedState:
    """The state after all tokens of `chain`; `rest` is of those behind its last whole block.

    routes_from: see `chain.Indexed`. worth: tokens to compute again for each byte that is freed, and the worth of what
    left last when it was used last; what has least leaves first.
    """

    chain: Chain
    fixed: FixedState
    rest: TokenStates
    routes_from: int
    worth: float = 0.0

    @property
    def length(self) -> int:
        return len(self.chain.ids)

    @property
    def has_hidden(self) -> bool:
        return self.fixed.hidden is not None

    @property
    def bytes(self) -> int:
        return self.fixed.bytes + self.rest.bytes + self.chain.ids.nbytes


class MemoryTier:
    """States in memory of `device` (None: wherever they are), never more than `budget_bytes`.

    What costs least to compute again for the bytes that it takes leaves first, to `below` when there is one; what is
    not used becomes worth less with time (GreedyDual-Size).
    """

    def __init__(
        self, budget_bytes: int, *, device: torch.device | str | None = None, below: Tier | None = None
    ) -> None:
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes is {budget_bytes}; a tier needs room for something")
        self.budget_bytes, self.bytes, self.evicted = budget_bytes, 0, 0
        self._device, self._below = device, below
        self._index: StateIndex[CachedState] = StateIndex()
        self.states = self._index.states
        self.blocks: dict[bytes, Block] = {}
        self._least = 0.0  # worth of what left last

    def __len__(self) -> int:
        return len(self.states)

    def longest(self, chain: Chain, routes_from: int | None, below: int) -> int:
        return self._index.longest(chain, routes_from, below)

    def read(self, chain: Chain, length: int) -> Hit | None:
        key = chain.key(length)
        held = self.states.get(key)
        if held is None:
            return None
        self._used(key)
        return self._hit(held)

    def put(self, chain: Chain, source: Source, owners: frozenset[str] = frozenset()) -> None:
        key = chain.key(len(chain.ids))
        held = self.states.get(key)
        if (
            held is not None
            and held.has_hidden >= source.has_hidden
            and (not held.routes_from or not source.has_routes)
        ):
            self._used(key)
            self._drop_all(self._index.give(key, owners))
            return
        pinned = self._pin(chain)
        missing = self._missing(chain, source)
        if self._make_room(chain, source, missing, owners):
            self._copy(chain, source, missing, owners)
        elif self._below is not None:
            self._below.put(chain, source, owners)
        self._release(pinned)

    def end(self, owner: str) -> None:
        self._drop_all(self._index.release(owner))
        if self._below is not None:
            self._below.end(owner)

    def clear(self, *, keep_owned: bool = False) -> None:
        for key in self._index.without_owner() if keep_owned else list(self.states):
            self._drop(key)
        if not keep_owned:  # what a put that raised left behind, too
            self.blocks.clear()
            self.bytes = 0
        if self._below is not None:
            self._below.clear(keep_owned=keep_owned)

    # ---- room

    def _missing(self, chain: Chain, source: Source) -> list[int]:
        """Blocks of the chain, counted from 1, the last first, that are not there or lack the routes that the source
        has."""
        found = []
        for index in range(len(chain.digests) - 1, 0, -1):
            block = self.blocks.get(chain.digests[index])
            if block is not None and (block.tokens.routes is not None or not source.has_routes):
                break
            found.append(index)
        return found

    def _make_room(self, chain: Chain, source: Source, missing: Sequence[int], owners: frozenset[str]) -> bool:
        """Whether a state fits; then what must leave for it has left, and so have those in whose place it comes."""
        size, digests = source.size, chain.digests
        rest = len(chain.ids) - (len(digests) - 1) * chain.block
        new = size.fixed + rest * size.token + chain.ids.nbytes + len(missing) * chain.block * size.token
        new -= sum(self.blocks[digests[i]].tokens.bytes for i in missing if digests[i] in self.blocks)
        kept = sum(block.tokens.bytes for block in self._chain_blocks(chain))
        if new + kept > self.budget_bytes:
            return False
        for owner in owners:
            self._drop_all(self._index.release(owner))
        while self.bytes + new > self.budget_bytes:
            self._evict(min(self.states, key=lambda key: self.states[key].worth))
        return True

    def _copy(self, chain: Chain, source: Source, missing: Sequence[int], owners: frozenset[str]) -> None:
        """Copies a state for which there is room."""
        key, digests = chain.key(len(chain.ids)), chain.digests
        self._put_blocks(chain, source, missing)
        if digests[-1] in self.blocks:
            self.blocks[digests[-1]].users += 1
        if key in self.states:
            owners = owners | self._index.owners(key)
            self._drop(key)
        rest = self._placed(source.tokens((len(digests) - 1) * chain.block, len(chain.ids)))
        fixed = source.fixed()
        fixed = fixed if self._device is None else fixed.to(self._device)
        whole = rest.routes is not None and all(block.tokens.routes is not None for block in self._walk(digests[-1]))
        known = len(chain.ids) - (fixed.last_route is not None)
        held = CachedState(chain, fixed, rest, 0 if whole else known)
        self._drop_all(self._index.add(key, held, owners))
        self.bytes += held.bytes
        self._used(key)

    def _used(self, key: Key) -> None:
        held = self.states[key]
        self.states.move_to_end(key)
        alone, digest = 0, key[0]
        while digest in self.blocks and self.blocks[digest].users == 1:
            alone += self.blocks[digest].tokens.bytes
            digest = self.blocks[digest].parent
        held.worth = self._least + held.length / (held.bytes + alone)

    # ---- blocks

    def _chain_blocks(self, chain: Chain) -> list[Block]:
        """Those of a chain that are there."""
        for digest in reversed(chain.digests[1:]):
            if digest in self.blocks:
                return self._walk(digest)
        return []

    def _pin(self, chain: Chain) -> bytes:
        """Holds the blocks of a chain that are there until the last of them, whose name this gives, is released."""
        for digest in reversed(chain.digests[1:]):
            if digest in self.blocks:
                self.blocks[digest].users += 1
                return digest
        return chain.root

    def _put_blocks(self, chain: Chain, source: Source, missing: Sequence[int]) -> None:
        """Adds blocks that are missing, the last first, and the routes of those that lack them."""
        for index in missing:
            digest, parent = chain.digests[index], chain.digests[index - 1]
            block = self.blocks.get(digest)
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

    def _pieces(self, held: CachedState) -> list[TokenStates]:
        return [block.tokens for block in reversed(self._walk(held.chain.digests[-1]))] + [held.rest]

    def _hit(self, held: CachedState) -> Hit:
        parts = self._pieces(held)
        routes = [part.routes for part in parts if part.routes is not None]
        latent = torch.cat([part.latent for part in parts], 1)
        return Hit(held.length, held.fixed, latent, None if held.routes_from else RoutePieces(routes))

    def _evict(self, key: Key) -> None:
        held = self.states[key]
        self._least, self.evicted = held.worth, self.evicted + 1
        if self._below is not None:
            self._below.put(held.chain, PiecesSource(held.fixed, self._pieces(held)), self._index.owners(key))
        self._drop(key)

    def _drop_all(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        held = self._index.pop(key)
        self.bytes -= held.bytes
        self._release(key[0])

    def _placed(self, part: TokenStates) -> TokenStates:
        return part if self._device is None else TokenStates(part.latent.to(self._device), part.routes)
