"""What an engine asks of its prefix cache and gives to it: states at the ends of prompts and of turns.

Every live request has the chain of its tokens, hashed once: the end of its prompt, its turn and a preemption name their
checkpoints by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from k3rl.engine.adapters import AdapterStore
from k3rl.engine.cache import StatePool
from k3rl.engine.compute import exact
from k3rl.engine.prefix.cache import Chain, Hit, Pieces, PrefixCache
from k3rl.engine.rows import PromptState, Request, RowTable


class Checkpoints:
    """Between one engine and its prefix cache. whole_blocks: states stand at the ends of blocks (`exact`)."""

    def __init__(
        self,
        prefix: PrefixCache,
        pool: StatePool,
        table: RowTable,
        adapters: AdapterStore,
        requests: Mapping[int, Request],
        *,
        whole_blocks: bool,
    ) -> None:
        self._prefix, self._pool, self._table, self._adapters = prefix, pool, table, adapters
        self._requests, self._whole_blocks = requests, whole_blocks
        self._chains: dict[int, Chain] = {}

    def find(self, members: Sequence[int], version: int) -> Hit | None:
        """The longest state that the prompt of these requests begins with."""
        requests = [self._requests[number] for number in members]
        chain = self._chain(requests[0], requests[0].ids, version)
        for number in members:
            self._chains[number] = chain
        return self._prefix.find(chain, any(request.params.return_routes for request in requests))

    def keep_prompt(self, number: int, row: int, prompt: PromptState, version: int) -> None:
        """Keeps the state at the end of a prompt; a broken one is of no use to anyone."""
        request = self._requests[number]
        if prompt.logits is not None and prompt.logits.isfinite().all():
            self._keep(request, row, request.ids, version, prompt.pieces(), prompt.hidden)

    def keep_turn(self, number: int, row: int, version: int) -> None:
        """Keeps the state of a row: all tokens but the last, which was not read."""
        request = self._requests[number]
        ids = np.concatenate([request.prompt, self._table.tokens[row, : self._table.count[row] - 1]])
        routes = self._table.routes_of(row)
        self._keep(request, row, ids, version, None if routes is None else Pieces([routes]), None)

    def forget(self, number: int) -> None:
        """The request has ended."""
        self._chains.pop(number, None)

    def clear(self) -> None:
        """Other weights are served."""
        self._prefix.clear()

    def _keep(
        self, request: Request, row: int, ids: np.ndarray, version: int, routes: Pieces | None, hidden: Tensor | None
    ) -> None:
        length = exact.whole_blocks(len(ids)) if self._whole_blocks else len(ids)
        if length < len(ids):
            ids, hidden = ids[:length], None
        if length:
            self._prefix.put(self._chain(request, ids, version), self._pool.source(row, routes, hidden))

    def _chain(self, request: Request, ids: np.ndarray, version: int) -> Chain:
        """Of ids that the request's tokens begin with."""
        known = self._chains.get(request.number)
        chain = self._prefix.chain(ids, version, self._adapters.salt(request.params), known)
        if known is None or known.root != chain.root or len(known.ids) < len(ids):
            self._chains[request.number] = chain
        return chain
