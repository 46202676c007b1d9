"""What an engine asks of its prefix cache and gives to it: states at the ends of prompts and of turns.

Every live request has the chain of its tokens, hashed once: the end of its prompt, its turn and a preemption name their
cached states by it.

A session is a conversation by name. It owns the state at the end of its newest turn, until its next turn ends or it is
ended, and remembers the chain, so that the next turn hashes its new tokens only. Where requests carry their states over
a change of weights, so do sessions: their chains keep the root that they began with, which no other request has any
more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from k3rl.engine.cache import StatePool
from k3rl.engine.prefix.cache import PrefixCache
from k3rl.engine.prefix.chain import Chain
from k3rl.engine.prefix.parts import Hit, LastRoute, RoutePieces
from k3rl.engine.prefix.shared import SharedBeginnings
from k3rl.engine.rows import RowTable
from k3rl.engine.running import PromptState, Running
from k3rl.engine.weights import ServedWeights


class PrefixStates:
    """Between one engine and its prefix cache.

    carries: running requests and sessions keep their states when the weights change, so that a state may be of two
    versions. read_ahead: of a request, the route of its last token, where a step that was launched early reads it.
    """

    def __init__(
        self, prefix: PrefixCache, pool: StatePool, table: RowTable, weights: ServedWeights, *, carries: bool
    ) -> None:
        self._prefix, self._pool, self._table, self._weights = prefix, pool, table, weights
        self._carries = carries
        self._sessions: dict[str, Chain] = {}  # of the newest state of each
        self._shared = SharedBeginnings()
        self._newest: Chain | None = None  # of the prompt that came last
        self._coming: dict[bytes, Running] = {}  # shared beginnings, and whose prompt computes each
        self.read_ahead: Callable[[int], LastRoute | None] = lambda number: None

    @property
    def num_sessions(self) -> int:
        """Sessions that had a turn and were not ended."""
        return len(self._sessions)

    def saw(self, running: Running) -> None:
        """A request was queued."""
        if running.session in self._sessions:
            return
        newest = self._newest  # a group comes together, and its prompt is hashed once
        if newest is None or newest.root != self._root(running) or not np.array_equal(newest.ids, running.prompt):
            newest = self._newest = self._chain_of(running)
            self._shared.saw(newest)
        running.chain = newest

    def waits(self, leader: Running) -> bool:
        """Whether what the prompt of a group begins with is being computed in another row."""
        chain = leader.chain
        if chain is None or not (end := self._shared.end_of(chain)):
            return False
        coming = self._coming.get(chain.digests[end // chain.block])
        return coming is not None and coming is not leader and coming.checkpoint == end

    def find(self, leader: Running, others: Sequence[Running]) -> Hit | None:
        """The longest cached state that the prompt of a group begins with; sets the leader's checkpoint, where it is to
        keep a state on its way."""
        members = [leader, *others]
        wanting = [running for running in members if running.params.return_routes]
        routes_from = None if not wanting else min(_first_route(running) for running in wanting)
        chain = self._chain_of(leader)
        hit = self._prefix.find(chain, routes_from)
        if hit is None and chain.root != self._root(leader):  # its session's state is gone: begin with these weights
            chain = self._prefix.chain(chain.ids, self._root(leader))
            hit = self._prefix.find(chain, routes_from)
        for running in members:
            running.chain = chain
        end = self._shared.end_of(chain)
        leader.checkpoint = end if end > (0 if hit is None else hit.length) else None
        if leader.checkpoint is not None:
            self._coming[chain.digests[end // chain.block]] = leader
        return hit

    def keep_checkpoint(self, running: Running, row: int, prompt: PromptState) -> None:
        """Keeps the state of a beginning that others have, too: the row has computed all of it and no more."""
        self._keep(running, row, prompt.pieces(), None)
        self.leave_checkpoint(running)

    def leave_checkpoint(self, running: Running) -> None:
        """Nobody waits for what this prompt computes any more."""
        if running.checkpoint is not None and running.chain is not None:
            self._coming.pop(running.chain.digests[running.checkpoint // running.chain.block], None)
        running.checkpoint = None

    def keeps_prompt(self, running: Running) -> bool:
        """Whether the state at the end of a request's prompt is kept: others may go on from there. Of a session, whose
        siblings come together and whose next turn goes on from its own state, only where computing it is work."""
        if running.progress is not None or running.session in self._sessions:
            return False
        return not running.session or len(running.prompt) >= self._prefix.block

    def keep_prompt(self, running: Running, row: int, prompt: PromptState) -> None:
        """Keeps the state at the end of a prompt, for others that have the same one."""
        self._keep(running, row, prompt.pieces(), prompt.hidden)

    def keep_turn(self, running: Running, *, goes_on: bool = False) -> None:
        """Keeps the state of a request's row, if it has one: for its session, or for whoever goes on from there.

        goes_on: the request itself, for which a state that has read its last token is of no use: it must draw the next.
        """
        row, session = running.row, running.session
        if running.params.ends_session and not goes_on:
            return
        if row is None or (goes_on and self._pool.length(row) == len(self._read_ids(running, row))):
            return
        version = self._weights.version_for(running.params)
        if self._carries and running.first_version != version and not session:
            return  # of two versions, and nobody may find it
        last = self.read_ahead(running.number) if running.params.return_routes else None
        routes = None
        if not session and not running.params.routes_from and (known := self._table.routes_of(row)) is not None:
            routes = RoutePieces([known] if last is None else [known, last.get()])
        self._keep(running, row, routes, None, last, session)

    def end_sessions(self, names: Sequence[str]) -> None:
        """These conversations do not go on."""
        for name in names:
            self._sessions.pop(name, None)
            self._prefix.end(name)

    def clear(self) -> None:
        """Other weights are served."""
        if not self._carries:
            self.forget()
            return
        self._forget_prompts()
        self._prefix.clear(keep_owned=True)

    def forget(self) -> None:
        """Nothing is kept any more: of other weights, or half written by a step that raised."""
        self._forget_prompts()
        self._sessions.clear()
        self._prefix.clear()

    def _forget_prompts(self) -> None:
        self._shared.clear()
        self._coming.clear()
        self._newest = None

    def _keep(
        self,
        running: Running,
        row: int,
        routes: RoutePieces | None,
        hidden: Tensor | None,
        last: LastRoute | None = None,
        session: str = "",
    ) -> None:
        """The state of a row as it stands: that of all tokens that it has read, which the pool counts."""
        ids, length = self._read_ids(running, row), self._pool.length(row)
        if length < len(ids):
            ids, hidden = ids[:length], None
        if not length:
            return
        root = self._root(running) if running.chain is None else running.chain.root
        chain = self._prefix.chain(ids, root, running.chain)
        running.chain = chain
        if session:
            self._sessions[session] = chain
        self._prefix.put(chain, self._pool.source(row, routes, hidden, last), session)

    def _read_ids(self, running: Running, row: int) -> np.ndarray:
        """What a row may have read of a request: prompt and sampled tokens."""
        if running.row is None:
            return running.ids
        return np.concatenate([running.prompt, self._table.sampled(row)])

    def _chain_of(self, leader: Running) -> Chain:
        """The chain of a group's tokens; of a session that goes on, under its root."""
        ids, known = leader.ids, self._sessions.get(leader.session, leader.chain)
        if known is not None and not np.array_equal(known.ids, ids[: len(known.ids)]):
            known = leader.chain if leader.progress is not None else None
        if known is None or (known.root != self._root(leader) and not self._carries):
            return self._prefix.chain(ids, self._root(leader))
        return self._prefix.chain(ids, known.root, known)

    def _root(self, running: Running) -> bytes:
        return self._prefix.root(self._weights.version, self._weights.adapters.salt(running.params))


def _first_route(running: Running) -> int:
    """The first token whose route has to come from a cached state or be computed."""
    return running.params.routes_from if running.progress is None else len(running.ids) - 1
