"""Conversations as they travel: a turn says which tokens the other side has, and brings the ones it lacks.

`Conversations` is of whoever asks, and knows the tokens that each of its conversations has had; `KeptTokens` is of the
engine's actor. A turn names the conversation that it goes on from, how many of its tokens hold and their hash. An actor
that does not have these, because it was restarted or has let them go, says so and gets the whole prompt: tokens are
never guessed. Neither needs torch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from k3rl.types import Completion, EncodedImage, SamplingParams

_LEAST = 64  # tokens in common from which on a new conversation goes on from another


class SessionLost(Exception):
    """The actor does not have the tokens that a turn goes on from; it is to be sent whole."""


class SessionTurn(NamedTuple):
    """A request of a conversation, as it travels.

    session: number of the conversation among those of its client. base: of the one that it goes on from, itself as a
    rule; held: tokens of it that hold, check: their hash. ids: those behind them, int32. images: those behind the ones
    that the actor has. params: None where they are those of the turn before but for `max_tokens` and `seed`.
    routes_from: tokens whose routes the client has. last: whether no other turn will come.
    """

    session: int
    base: int
    held: int
    check: bytes
    ids: bytes
    images: tuple[EncodedImage, ...]
    params: SamplingParams | None
    max_tokens: int
    seed: int | None
    routes_from: int
    last: bool


class TokenRow:
    """A row of ids that grows, with hashes of its beginnings; to ask for ever longer ones costs what is new."""

    def __init__(self) -> None:
        self._ids, self.length = np.empty(64, np.int32), 0
        self._hash, self._hashed = hashlib.blake2b(digest_size=8), 0

    @property
    def ids(self) -> np.ndarray:
        """int32 [length]; changes with the row."""
        return self._ids[: self.length]

    def cut(self, length: int) -> None:
        """Only the first so many ids are left."""
        self.length = length
        if self._hashed > length:
            self._hash, self._hashed = hashlib.blake2b(digest_size=8), 0

    def append(self, ids: np.ndarray) -> None:
        """Adds ids [n] behind the last one."""
        stop = self.length + len(ids)
        if stop > len(self._ids):
            wider = np.empty(max(stop, 2 * len(self._ids)), np.int32)
            wider[: self.length] = self.ids
            self._ids = wider
        self._ids[self.length : stop] = ids
        self.length = stop

    def digest(self, length: int) -> bytes:
        """8 bytes: of its first so many ids."""
        if length < self._hashed:
            self._hash, self._hashed = hashlib.blake2b(digest_size=8), 0
        self._hash.update(self._ids[self._hashed : length].tobytes())
        self._hashed = length
        return self._hash.digest()

    def begins(self, ids: np.ndarray) -> bool:
        """Whether ids begin with the row, and go on."""
        return self.length < len(ids) and np.array_equal(self.ids, ids[: self.length])

    def common(self, ids: np.ndarray) -> int:
        """How many ids the row and these begin with in common."""
        most = min(self.length, len(ids))
        differ = np.flatnonzero(self.ids[:most] != ids[:most])
        return int(differ[0]) if differ.size else most


# ------------------------------------------------------------------------------------------------- of who asks


@dataclass(eq=False)
class Conversation:
    """What a client knows of one: the tokens through its last answer, and their routes but the last one's.

    params: of its last turn. in_turn: waits for an answer.
    """

    number: int
    row: TokenRow = field(default_factory=TokenRow)
    images: tuple[EncodedImage, ...] = ()
    routes: list[np.ndarray] = field(default_factory=list)
    params: SamplingParams | None = None
    in_turn: bool = False

    @property
    def routed(self) -> int:
        """Tokens whose routes are here."""
        return sum(map(len, self.routes))

    def answered(self, ids: np.ndarray, images: tuple[EncodedImage, ...], params: SamplingParams,
                 completion: Completion) -> Completion:  # fmt: skip
        """Remembers a turn, of whole prompt ids [P]; the completion with the routes of all tokens."""
        self.row.cut(self.row.common(ids))
        self.row.append(ids[self.row.length :])
        self.row.append(np.array(completion.token_ids, np.int32))
        self.images, self.params = images, params
        if completion.routes is None:
            self.routes = []
            return completion
        self.routes.append(completion.routes)
        return replace(completion, routes=np.concatenate(self.routes))


class Conversations:
    """Those of a client, by the episode that they belong to."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._of: dict[str, list[Conversation]] = {}

    @contextmanager
    def turn(self, episode: str, ids: np.ndarray) -> Iterator[tuple[Conversation, Conversation]]:
        """For the time of a turn of prompt ids int32 [P]: the conversation that it belongs to, and the one that it goes
        on from: another one where a branch begins."""
        own = self._of.setdefault(episode, [])
        going_on = [one for one in own if not one.in_turn and one.row.begins(ids)]
        if going_on:
            mine = base = max(going_on, key=lambda one: one.row.length)
        else:
            mine = Conversation(next(self._numbers))
            base = max(own, key=lambda one: one.row.common(ids), default=mine)
            base = base if base.row.common(ids) >= _LEAST and not base.images else mine
            own.append(mine)
        mine.in_turn = True
        try:
            yield mine, base
        finally:
            mine.in_turn = False

    def end(self, episode: str) -> list[int]:
        """Forgets an episode -> the numbers of its conversations."""
        return [one.number for one in self._of.pop(episode, [])]


def turn_of(
    mine: Conversation,
    base: Conversation,
    ids: np.ndarray,
    images: tuple[EncodedImage, ...],
    params: SamplingParams,
    last: bool = False,
) -> SessionTurn:
    """The turn of prompt ids int32 [P] that goes on from `base`."""
    shown = len(base.images)
    if images[:shown] != base.images:
        return whole_turn(mine, ids, images, params, last)
    held = base.row.common(ids)
    before = base.params if base is mine else None
    same = before is not None and replace(before, max_tokens=params.max_tokens, seed=params.seed) == params
    routes_from = 0
    if params.return_routes:
        if mine is not base:
            mine.routes = _first(base.routes, min(held, len(ids) - 1))
        routes_from = mine.routed
    return SessionTurn(
        mine.number,
        base.number,
        held,
        base.row.digest(held),
        ids[held:].tobytes(),
        images[shown:],
        None if same else params,
        params.max_tokens,
        params.seed,
        routes_from,
        last,
    )


def whole_turn(
    mine: Conversation,
    ids: np.ndarray,
    images: tuple[EncodedImage, ...],
    params: SamplingParams,
    last: bool = False,
) -> SessionTurn:
    """The turn with all that it needs."""
    routed, most, seed = mine.routed if params.return_routes else 0, params.max_tokens, params.seed
    return SessionTurn(mine.number, mine.number, 0, b"", ids.tobytes(), images, params, most, seed, routed, last)


def _first(routes: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """The pieces of the first `count` tokens, as far as they are there."""
    return [np.concatenate(routes)[:count]] if routes and count else []


# ------------------------------------------------------------------------------------------ of the engine's actor


@dataclass(eq=False)
class _Kept:
    """What an actor knows of a conversation. turns: that began, so that a late answer is no part of a newer one."""

    row: TokenRow = field(default_factory=TokenRow)
    images: tuple[EncodedImage, ...] = ()
    params: SamplingParams | None = None
    turns: int = 0


class KeptTokens:
    """The tokens of the conversations of clients, each once."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, _Kept]] = {}

    def begin(self, client: str, turn: SessionTurn) -> tuple[np.ndarray, SamplingParams, tuple[EncodedImage, ...]]:
        """The whole request of a turn: prompt ids int32 [P], parameters, images. Raises SessionLost."""
        own = self._kept.setdefault(client, {})
        kept, base = own.get(turn.session), own.get(turn.base)
        new, row, images = np.frombuffer(turn.ids, np.int32), TokenRow(), turn.images
        if turn.held:
            if base is None or base.row.length < turn.held or base.row.digest(turn.held) != turn.check:
                raise SessionLost(f"the first {turn.held} tokens of session {turn.session} are not here")
            if base is kept:
                row = base.row
                row.cut(turn.held)
            else:
                row.append(base.row.ids[: turn.held])
            images = base.images + images
        params = turn.params
        if params is None:
            if kept is None or kept.params is None:
                raise SessionLost(f"the parameters of session {turn.session} are not here")
            params = replace(kept.params, max_tokens=turn.max_tokens, seed=turn.seed)
        kept = own.setdefault(turn.session, kept or _Kept())
        row.append(new)
        kept.row, kept.images, kept.params, kept.turns = row, images, params, kept.turns + 1
        name = name_of(client, turn.session)
        named = replace(params, session=name, ends_session=turn.last, routes_from=turn.routes_from)
        return row.ids.copy(), named, images

    def turns(self, client: str, session: int) -> int:
        """Turns that a conversation has begun."""
        kept = self._kept.get(client, {}).get(session)
        return 0 if kept is None else kept.turns

    def answered(self, client: str, session: int, turns: int, completion: Completion) -> None:
        """Adds what was sampled in the turn that was the `turns`-th, if it is the newest."""
        kept = self._kept.get(client, {}).get(session)
        if kept is not None and kept.turns == turns:
            kept.row.append(np.array(completion.token_ids, np.int32))

    def end(self, client: str, sessions: Sequence[int] | None = None) -> list[str]:
        """Forgets conversations of a client, or all of them -> their names."""
        own = self._kept.get(client, {})
        gone = list(own) if sessions is None else [number for number in sessions if number in own]
        for number in gone:
            del own[number]
        if not own:
            self._kept.pop(client, None)
        return [name_of(client, number) for number in gone]


def name_of(client: str, session: int) -> str:
    """The name of a conversation in the engine."""
    return f"{client}/{session}"
