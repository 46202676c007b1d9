"""What a cached prefix state is made of, where it is copied from, and what keeps it.

Letters: L layers of one kind, n tokens, M MoE layers, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.prefix.chain import Chain


@dataclass(frozen=True)
class TokenStates:
    """What n tokens leave in the MLA layers: latent [L, n, width]; routes int16 [n, M, k], or None if not recorded."""

    latent: Tensor
    routes: np.ndarray | None

    @cached_property
    def bytes(self) -> int:
        return tensor_bytes(self.latent) + (0 if self.routes is None else self.routes.nbytes)


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


class LastRoute(Protocol):
    """The experts of a token that a step has read whose results nobody has seen yet."""

    def get(self) -> np.ndarray:
        """int16 [1, M, k]; waits for the step."""
        ...


@dataclass(frozen=True)
class FixedState:
    """The part whose size does not depend on the length: recurrent [L, H, K, V], conv [L, 3, channels].

    hidden [1, H]: the last token's row after the final norm, or None where no prompt ended. last_route: of the last
    token, where its request was answered before the token was read.
    """

    recurrent: Tensor
    conv: Tensor
    hidden: Tensor | None
    last_route: LastRoute | None = None

    @cached_property
    def bytes(self) -> int:
        return tensor_bytes(self.recurrent) + tensor_bytes(self.conv) + tensor_bytes(self.hidden)

    def to(self, device: torch.device | str) -> FixedState:
        """The same on another device."""
        hidden = None if self.hidden is None else self.hidden.to(device)
        return FixedState(self.recurrent.to(device), self.conv.to(device), hidden, self.last_route)


@dataclass(frozen=True, slots=True)
class SourceSize:
    """Bytes of a source's fixed state and of each token, routes included."""

    fixed: int
    token: int


class Source(Protocol):
    """Where a state is copied from: a row of the engine, or another tier."""

    @property
    def has_routes(self) -> bool: ...

    @property
    def has_hidden(self) -> bool: ...

    @property
    def size(self) -> SourceSize:
        """What copies of it take; nothing is copied for the answer."""
        ...

    def fixed(self) -> FixedState:
        """Tensors that nobody will write to."""
        ...

    def tokens(self, start: int, stop: int) -> TokenStates:
        """Tokens start..stop, in tensors that nobody will write to."""
        ...


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached state that a prompt begins with: its first `length` tokens need no computing."""

    length: int
    fixed: FixedState
    latent: Tensor  # [L, length, width]
    routes: RoutePieces | None  # of all of them


class HitSource:
    """A hit as what another tier copies from."""

    def __init__(self, hit: Hit) -> None:
        self._hit = hit
        self.has_routes, self.has_hidden = hit.routes is not None, hit.fixed.hidden is not None

    @property
    def size(self) -> SourceSize:
        latent = tensor_bytes(self._hit.latent) // self._hit.length
        routes = 0 if self._hit.routes is None else self._hit.routes.pieces[0][:1].nbytes
        return SourceSize(self._hit.fixed.bytes, latent + routes)

    def fixed(self) -> FixedState:
        return self._hit.fixed

    def tokens(self, start: int, stop: int) -> TokenStates:
        routes = None if self._hit.routes is None else self._hit.routes.between(start, stop)
        return TokenStates(self._hit.latent[:, start:stop].clone(), routes)


class PiecesSource:
    """A state that a tier holds, on its way to another: pieces in their order, which nobody writes to."""

    def __init__(self, fixed: FixedState, pieces: Sequence[TokenStates]) -> None:
        self._fixed, self._pieces = fixed, pieces
        self._ends = np.cumsum([piece.latent.shape[1] for piece in pieces])
        self.has_routes = all(piece.routes is not None for piece in pieces)
        self.has_hidden = fixed.hidden is not None

    @property
    def size(self) -> SourceSize:
        tokens = max(int(self._ends[-1]), 1)
        latent = sum(tensor_bytes(piece.latent) for piece in self._pieces)
        routes = sum(piece.routes.nbytes for piece in self._pieces if piece.routes is not None)
        return SourceSize(self._fixed.bytes, (latent + (routes if self.has_routes else 0)) // tokens)

    def fixed(self) -> FixedState:
        return self._fixed

    def tokens(self, start: int, stop: int) -> TokenStates:
        latents, routes = [], []
        for piece, end in zip(self._pieces, self._ends.tolist(), strict=True):
            begin = end - piece.latent.shape[1]
            inside = slice(max(start - begin, 0), max(stop - begin, 0))
            if max(start, begin) < min(stop, end):
                latents.append(piece.latent[:, inside])
                routes.append(None if piece.routes is None else piece.routes[inside])
        if not latents:
            latents, routes = [self._pieces[-1].latent[:, :0]], [None]
        known = [one for one in routes if one is not None] if self.has_routes else []
        joined = (latents[0] if len(latents) == 1 else torch.cat(latents, 1)).clone()
        empty = self._pieces[-1].routes[:0] if self.has_routes and self._pieces[-1].routes is not None else None
        return TokenStates(joined, np.concatenate(known) if known else empty)


class Tier(Protocol):
    """A place that keeps states whole: what `read` gives is all of one, or None.

    A state may have owners, each of whom has one state in a tier at most; it leaves with the last of them.
    """

    def longest(self, chain: Chain, routes_from: int | None, below: int) -> int:
        """Tokens of the longest usable state of fewer than `below` tokens that the chain begins with; 0 without one.

        One of the whole chain is usable when it has the last token's hidden row; with `routes_from` one is usable when
        the routes of its tokens from there on are there.
        """
        ...

    def read(self, chain: Chain, length: int) -> Hit | None:
        """The state after the chain's first `length` tokens, now the most recently used; None if it is gone."""
        ...

    def put(self, chain: Chain, source: Source, owners: frozenset[str] = frozenset()) -> None:
        """Keeps the state after all tokens of the chain, if it fits, in place of earlier ones of its owners."""
        ...

    def end(self, owner: str) -> None:
        """Its owner does not need a state any more."""
        ...

    def clear(self, *, keep_owned: bool = False) -> None:
        """Forgets everything, or all that has no owner."""
        ...


def tensor_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
