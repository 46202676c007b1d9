"""What an engine asks of its prefix cache and gives to it: states at the ends of prompts and of turns.

Every live request has the chain of its tokens, hashed once: the end of its prompt, its turn and a preemption name their
cached states by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from k3rl.engine.cache import StatePool
from k3rl.engine.compute import exact
from k3rl.engine.prefix.cache import Chain, Hit, PrefixCache, RoutePieces
from k3rl.engine.rows import RowTable
from k3rl.engine.running import PromptState, Running
from k3rl.engine.weights import ServedWeights


class PrefixStates:
    """Between one engine and its prefix cache.

    whole_blocks: states stand at the ends of blocks (`exact`). carries: running requests keep their states when the
    weights change, so that a row may have states of two versions.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        pool: StatePool,
        table: RowTable,
        weights: ServedWeights,
        *,
        whole_blocks: bool,
        carries: bool,
    ) -> None:
        self._prefix, self._pool, self._table, self._weights = prefix, pool, table, weights
        self._whole_blocks, self._carries = whole_blocks, carries

    def find(self, leader: Running, others: Sequence[Running]) -> Hit | None:
        """The longest cached state that the prompt of a group begins with."""
        members = [leader, *others]
        chain = self._chain(leader, leader.ids)
        for running in members:
            running.chain = chain
        return self._prefix.find(chain, any(running.params.return_routes for running in members))

    def keep_prompt(self, running: Running, row: int, prompt: PromptState) -> None:
        """Keeps the state at the end of a prompt; a broken one is of no use to anyone."""
        if prompt.logits is not None and prompt.logits.isfinite().all():
            self._keep(running, row, running.ids, prompt.pieces(), prompt.hidden)

    def keep_turn(self, running: Running) -> None:
        """Keeps the state of a request's row, if it has one of the served version alone: that of all tokens but the
        last, which was not read."""
        row, table = running.row, self._table
        if row is None or (self._carries and running.first_version != self._weights.version_for(running.params)):
            return
        ids = np.concatenate([running.prompt, table.tokens[row, : table.count[row] - 1]])
        routes = table.routes_of(row)
        self._keep(running, row, ids, None if routes is None else RoutePieces([routes]), None)

    def clear(self) -> None:
        """Other weights are served."""
        self._prefix.clear()

    def _keep(
        self, running: Running, row: int, ids: np.ndarray, routes: RoutePieces | None, hidden: Tensor | None
    ) -> None:
        length = exact.whole_blocks(len(ids)) if self._whole_blocks else len(ids)
        if length < len(ids):
            ids, hidden = ids[:length], None
        if length:
            self._prefix.put(self._chain(running, ids), self._pool.source(row, routes, hidden))

    def _chain(self, running: Running, ids: np.ndarray) -> Chain:
        """Of ids that the request's tokens begin with."""
        known, salt = running.chain, self._weights.adapters.salt(running.params)
        chain = self._prefix.chain(ids, self._weights.version, salt, known)
        if known is None or known.root != chain.root or len(known.ids) < len(ids):
            running.chain = chain
        return chain
