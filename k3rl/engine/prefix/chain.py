"""Names of token sequences, and an index of the states that a tier has of them.

Identity is a hash chain over blocks of token ids, rooted in the weight version and the request's salt: equal digests
mean equal tokens from the first one on.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np

Key: TypeAlias = tuple[bytes, bytes]


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
            digests.append(digest_of(digests[-1] + data[start : start + size]))
        return cls(tuple(digests), ids, block)

    @property
    def root(self) -> bytes:
        """The name of no tokens: the weights and the salt."""
        return self.digests[0]

    def key(self, length: int) -> Key:
        """The name of the state after the first `length` tokens: (digest of its whole blocks, the ids behind)."""
        blocks = length // self.block
        return self.digests[blocks], self.ids[blocks * self.block : length].tobytes()

    def tail(self, blocks: int) -> bytes:
        """The ids behind the first `blocks` blocks."""
        return self.ids[blocks * self.block :].tobytes()


class Indexed(Protocol):
    """What an index must know of a state. length: tokens; routes_from: the first of those whose routes are all known
    from there on (the length, where none is)."""

    @property
    def length(self) -> int: ...

    @property
    def has_hidden(self) -> bool: ...

    @property
    def routes_from(self) -> int: ...


S = TypeVar("S", bound=Indexed)


class StateIndex(Generic[S]):
    """States by name, the least recently used first, and who owns them."""

    def __init__(self) -> None:
        self.states: OrderedDict[Key, S] = OrderedDict()
        self._tails: dict[bytes, list[bytes]] = {}  # digest of whole blocks -> rests that states have behind them
        self._owned: dict[str, Key] = {}
        self._owners: dict[Key, set[str]] = {}

    def longest(self, chain: Chain, routes_from: int | None, below: int) -> int:
        """See `Tier`."""
        for blocks in range(len(chain.digests) - 1, -1, -1):
            found = self._tails.get(chain.digests[blocks])
            if not found:
                continue
            wanted = chain.tail(blocks)
            for tail in sorted(found, key=len, reverse=True):
                state = self.states[chain.digests[blocks], tail]
                if state.length < below and wanted.startswith(tail) and _usable(state, len(chain.ids), routes_from):
                    return state.length
        return 0

    def add(self, key: Key, state: S, owners: Iterable[str]) -> list[Key]:
        """Has a state, in place of one of its name -> names of states that have lost their last owner by it."""
        if key not in self.states:
            self._tails.setdefault(key[0], []).append(key[1])
        self.states[key] = state
        self.states.move_to_end(key)
        return self.give(key, owners)

    def give(self, key: Key, owners: Iterable[str]) -> list[Key]:
        """These own the state instead of any other -> names of states that have lost their last owner by it."""
        lost = []
        for owner in owners:
            if self._owned.get(owner) != key:
                lost += self.release(owner)
                self._owned[owner] = key
                self._owners.setdefault(key, set()).add(owner)
        return lost

    def release(self, owner: str) -> list[Key]:
        """The owner has no state any more -> the name of its state, if nobody else owns that."""
        key = self._owned.pop(owner, None)
        if key is None:
            return []
        owners = self._owners[key]
        owners.discard(owner)
        if owners:
            return []
        del self._owners[key]
        return [key]

    def owners(self, key: Key) -> frozenset[str]:
        """Those of a state."""
        return frozenset(self._owners.get(key, ()))

    def pop(self, key: Key) -> S:
        """Forgets a state and who owned it."""
        state = self.states.pop(key)
        self._tails[key[0]].remove(key[1])
        if not self._tails[key[0]]:
            del self._tails[key[0]]
        for owner in self._owners.pop(key, ()):
            del self._owned[owner]
        return state

    def without_owner(self) -> Iterator[Key]:
        """Names of the states that nobody owns; may be popped meanwhile."""
        return iter([key for key in self.states if key not in self._owners])


def _usable(state: Indexed, whole: int, routes_from: int | None) -> bool:
    if state.length == whole and not state.has_hidden:
        return False
    return routes_from is None or state.routes_from <= routes_from


def digest_of(data: bytes) -> bytes:
    """16 bytes; processors have instructions for this hash."""
    return hashlib.sha256(data).digest()[:16]
