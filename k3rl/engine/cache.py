"""The model's states of every row: KDA recurrent and conv states, MLA latents, lengths; and one parked state.

Whole states leave for the prefix cache by `source` and come back by `restore`, as copies both ways.

Rows are fixed slots of one `model.new_cache`. One more keeps the parked state: that of a prompt whose group did not
find enough rows. A row that nobody owns holds garbage (NaN when `poison` is on) and is reset before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.memory import SHARE, states_budget
from k3rl.engine.paged import PagedCache
from k3rl.engine.prefix.parts import FixedState, Hit, LastRoute, RoutePieces, SourceSize, TokenStates, tensor_bytes
from k3rl.kernels.kda import CHUNK
from k3rl.model import Cache, K3ForCausalLM

# Rows times heads of a pool from which on the decode kernel that defers writes is the faster one.
DEFERRED_FROM = 1536


def defers(model: K3ForCausalLM, rows: int) -> bool:
    """Whether decode steps of fixed shapes over so many rows keep the last tokens beside the states (`deferred.py`)."""
    return model.device.type == "cuda" and rows * model.config.linear_attn_config.num_heads >= DEFERRED_FROM


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How bytes become rows and pages: `rows` requests at once (and the parked state), `pages` of `page` tokens.

    deferred: each row has room for the tokens that its states have not taken in, a quarter of them.
    """

    rows: int
    pages: int
    page: int
    deferred: bool = False

    @classmethod
    def when_needed(
        cls,
        model: K3ForCausalLM,
        memory: int | Literal["auto"] | None,
        max_rows: int,
        max_context: int,
        page: int,
        fixed: bool = False,
        device_share: float = 1.0,
        beside: int = 0,
    ) -> MemoryPlan | None:
        """`of`, with "auto" a share of what is free; None when nothing is bounded or "auto" leaves room for all.

        fixed: storage must not move, so that room for all is a plan, too; without a bound there is none. device_share:
        of the device, with which "auto" takes so much less. beside: bytes that cached prefixes may take of that, half
        of it at most.
        """
        if memory is None:
            return None
        deferred = fixed and defers(model, max_rows)
        if memory != "auto":
            return cls.of(model, memory, max_rows, max_context, page, deferred)
        budget = states_budget(model, SHARE * device_share)
        budget -= min(beside, budget // 2)
        slot, token = state_bytes(model, deferred)
        whole = (max_rows + 1) * (slot + -(-max_context // page) * page * token)
        if whole <= budget or (max_rows + 1) * (slot + max_context * token) <= budget:
            return cls.of(model, whole, max_rows, max_context, page, deferred) if fixed else None
        return cls.of(model, budget, max_rows, max_context, page, deferred)

    @classmethod
    def of(
        cls,
        model: K3ForCausalLM,
        memory_bytes: int,
        max_rows: int,
        max_context: int,
        page: int,
        deferred: bool = False,
    ) -> MemoryPlan:
        """As many rows as leave pages for one request of `max_context` tokens, `max_rows` at most.

        Raises ValueError when the memory cannot hold one such request.
        """
        slot, token = state_bytes(model, deferred)
        page_bytes = page * token
        least = -(-max_context // page)
        rows = max_rows if not slot else min(max_rows, (memory_bytes - least * page_bytes) // slot - 1)
        if rows < 1:
            raise ValueError(
                f"memory_bytes is {memory_bytes}; one request of {max_context} tokens needs "
                f"{2 * slot + least * page_bytes}: give more, or a smaller max_context"
            )
        pages = (memory_bytes - (rows + 1) * slot) // page_bytes if page_bytes else (rows + 1) * least
        return cls(rows, pages, page, deferred)


def state_bytes(model: K3ForCausalLM, deferred: bool = False) -> tuple[int, int]:
    """(bytes of a row's KDA states, and of the tokens that wait beside them, bytes of a token's latents)."""
    cache = model.new_cache(1)
    cache.reserve(1)
    slot = sum(tensor_bytes(cache.recurrent(n)) + tensor_bytes(cache.conv(n)) for n in model.config.kda_layers)
    if deferred:
        states = [cache.recurrent(n) for n in model.config.kda_layers]
        slot += sum(pending_bytes(state) for state in states)
    return slot, sum(tensor_bytes(cache.latent(n, 1)) for n in model.config.mla_layers)


def rows_within(model: K3ForCausalLM, least: int, most: int, memory: int | None, device_share: float) -> int:
    """Rows for an engine of this model when nobody says how many: `most` while their states take a quarter of its
    memory (None: of what "auto" gives) and the rest is left to latents, or else fewer, but `least`."""
    if most <= least:
        return least
    budget = states_budget(model, SHARE * device_share) if memory is None else memory
    slot, _ = state_bytes(model, defers(model, most))
    return max(least, min(most, budget // 4 // max(1, slot)))


class StatePool:
    """Model states of `rows` rows and the parked one (index `rows`); inference tensors, which autograd never sees.

    With a memory plan the latents are paged and bounded; without one they grow with the longest row.
    """

    @torch.inference_mode()
    def __init__(self, model: K3ForCausalLM, rows: int, poison: bool, plan: MemoryPlan | None = None) -> None:
        self.paged: PagedCache | None = None
        if plan is not None:
            kind = model.language_model.lm_head.weight.dtype
            self.paged = PagedCache(
                model.config, rows + 1, plan.pages, plan.page, kind, model.device, deferred=plan.deferred
            )
        # The model uses the part of a Cache that a PagedCache has.
        self.cache: Cache = model.new_cache(rows + 1) if self.paged is None else cast(Cache, self.paged)
        self.parked_row, self.poison = rows, poison
        self._is_parked = False
        self.row_bytes = state_bytes(model)  # of a row's KDA states and of a token's latents, as copies take them
        self.kda_layers, self.mla_layers = sorted(model.config.kda_layers), sorted(model.config.mla_layers)

    @torch.inference_mode()
    def claim(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Makes room for so many more tokens in each of these rows."""
        if self.paged is not None:
            self.paged.claim(rows, self.paged.lengths.numpy()[np.asarray(rows, np.int64)] + np.asarray(tokens))

    @torch.inference_mode()
    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`copy` of rows that are given up; a paged row takes its pages along."""
        if pairs and self.paged is not None:
            source, target = zip(*pairs, strict=True)
            self.paged.move_rows(_index(source), _index(target))
        else:
            self.copy(pairs)

    def view(self, rows: Sequence[int]) -> Cache:
        """The cache of these rows; what a forward writes to it lands in the pool."""
        return self.cache.select(_index(rows))

    @torch.inference_mode()
    def reset(self, rows: Sequence[int]) -> None:
        """Makes rows as new: no tokens seen."""
        if len(rows):
            self.cache.reset(_index(rows))

    @torch.inference_mode()
    def free(self, rows: Sequence[int]) -> None:
        """Nobody owns these rows any more."""
        if not len(rows):
            return
        if self.poison:
            self.cache.poison(_index(rows))
        elif self.paged is not None:
            self.paged.release(_index(rows))
        else:
            self.reset(rows)

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole states, (source row, target row); no row is both a source and a target."""
        if pairs:
            source, target = zip(*pairs, strict=True)
            self._is_parked |= self.parked_row in target
            self.cache.copy_rows(_index(source), _index(target))

    def drop_parked(self) -> None:
        """Nobody needs the parked state any more, if there is one."""
        if self._is_parked:
            self.free([self.parked_row])
            self._is_parked = False

    def length(self, row: int) -> int:
        """Tokens that the state of a row has taken in."""
        return int(self.cache.lengths[row])

    def source(
        self, row: int, routes: RoutePieces | None, hidden: Tensor | None, last_route: LastRoute | None = None
    ) -> RowSource:
        """What a prefix cache copies from: a row, the routes of its tokens, the last hidden row [1, H]; last_route: see
        `FixedState`."""
        return RowSource(self, row, routes, hidden, last_route)

    @torch.inference_mode()
    def restore(self, row: int, hit: Hit) -> None:
        """Makes `row` what it was when the hit's state was copied."""
        self.reset([row])
        self.claim([row], [hit.length])
        if self.paged is not None:
            self.paged.restore(row, hit.fixed.recurrent, hit.fixed.conv, hit.latent)
            return
        view = self.view([row])
        for index, layer in enumerate(self.kda_layers):
            view.store_recurrent(layer, hit.fixed.recurrent[index : index + 1])
            view.store_conv(layer, hit.fixed.conv[index : index + 1])
        view.reserve(hit.length)
        for index, layer in enumerate(self.mla_layers):
            view.store_latent(layer, hit.latent[index : index + 1])
        view.advance(torch.tensor([hit.length]))


class RowSource:
    """A row of the pool as a `prefix.Source`."""

    def __init__(
        self,
        pool: StatePool,
        row: int,
        routes: RoutePieces | None,
        hidden: Tensor | None,
        last_route: LastRoute | None,
    ) -> None:
        self._pool, self._row, self._routes, self._hidden = pool, row, routes, hidden
        self._last_route = last_route
        self._view = pool.view([row])
        self.has_routes, self.has_hidden = routes is not None, hidden is not None

    @property
    def size(self) -> SourceSize:
        """See `prefix.parts.Source`."""
        slot, token = self._pool.row_bytes
        routes = 0 if self._routes is None else self._routes.pieces[0][:1].nbytes
        return SourceSize(slot + tensor_bytes(self._hidden), token + routes)

    def fixed(self) -> FixedState:
        """Copies of the KDA states; see `prefix.FixedState`."""
        layers, view = self._pool.kda_layers, self._view
        hidden = None if self._hidden is None else self._hidden.clone()
        if self._pool.paged is not None:
            return FixedState(*self._pool.paged.fixed(self._row), hidden, self._last_route)
        if not layers:
            return FixedState(torch.empty(0), torch.empty(0), hidden, self._last_route)
        recurrent, conv = zip(*((view.recurrent(layer), view.conv(layer)) for layer in layers), strict=True)
        return FixedState(torch.cat(recurrent), torch.cat(conv), hidden, self._last_route)

    def tokens(self, start: int, stop: int) -> TokenStates:
        """Copies of the latents and routes of tokens start..stop."""
        routes = None if self._routes is None else self._routes.between(start, stop)
        if self._pool.paged is not None:
            return TokenStates(self._pool.paged.latents(self._row, start, stop), routes)
        slices = [self._view.latent(layer, stop)[:, start:] for layer in self._pool.mla_layers]
        return TokenStates(torch.cat(slices) if slices else torch.empty(0, stop - start, 0), routes)


def pending_bytes(recurrent: Tensor) -> int:
    """Bytes of the tokens that wait beside states [B, heads, K, V]: keys, updates, running decay, bounds."""
    rows = recurrent.shape[0] * recurrent.shape[1]
    return rows * ((2 * CHUNK + 1) * recurrent.shape[2] * recurrent.element_size() + 8)


def _index(rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long)
