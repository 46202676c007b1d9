"""Prefill of few tokens as a program of fixed shapes, so that CUDA can replay it as decode steps are replayed.

What a multi-turn agent adds to a cached prefix is some hundred tokens, for which a forward of many small launches costs
the host more than the device. N new tokens of a few rows run as the next of `TOKENS`, or in several runs; segments that
are not there are empty, and the rest of the rows are padding: one more segment, which starts from nothing and whose
states and latents are kept nowhere (`model.cache.ChunkCache`). Attention reads latents where they lie, so the length of
what came before is no part of a shape. Each shape has its own buffers and, on a GPU, is captured when it is first met;
on a CPU the same program runs uncaptured. Longer chunks, images and adapters take the ordinary path, with the same
result.

Weights: as in `decode_graph`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.compute.decode_graph import WARM_UPS, captures, recorded
from k3rl.engine.paged import PagedCache
from k3rl.kernels import limits
from k3rl.model import K3ForCausalLM
from k3rl.model.cache import ChunkCache
from k3rl.model.layout import FixedLayout

TOKENS = (16, 32, 64, 128, 256, 512, 1024)
SEGMENTS = (1, 8)
RUNS = 4  # of the program for one call, at most; beyond, an ordinary forward of all tokens is the cheaper one


class _Shape:
    """The buffers of so many tokens and segments: all inputs in one run of int64, moved by one copy.

    Token id, past and place of each row; slot, source and last row of each segment; ends [S + 2]; pages [S + 1, n].
    """

    def __init__(self, tokens: int, segments: int, blocks: int, device: torch.device) -> None:
        self.tokens, self.segments, self.blocks = tokens, segments, blocks
        sizes = [tokens] * 3 + [segments] * 3 + [segments + 2, (segments + 1) * blocks]
        on_gpu = device.type == "cuda"
        self._pinned = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._given = [piece.numpy() for piece in self._pinned.split(sizes)]
        self.inputs = self._device.split(sizes)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.compiled = False  # for an earlier model, too
        self.outputs: tuple[Tensor, Tensor] | None = None  # of the captured graph

    def fill(
        self,
        ids: np.ndarray,
        past: np.ndarray,
        place: np.ndarray,
        rows: np.ndarray,
        counts: np.ndarray,
        table: np.ndarray,
        scratch: int,
    ) -> None:
        """Sets the inputs: ids, past and place of N rows, slots and tokens of S segments and their pages [S, n].

        The host writes only after the copy of the run before has left.
        """
        if self._copied is not None:
            self._copied.synchronize()
        n, count = len(ids), len(rows)
        for given, values, padding in zip(self._given[:3], (ids, past, place), (0, 0, scratch), strict=True):
            given[:n], given[n:] = values, padding
        slot, source, last, ends, pages = self._given[3:]
        slot[:count], slot[count:] = rows, rows[0]
        source[:count], source[count:] = np.arange(count), 0
        bounds = np.cumsum(counts)
        last[:count], last[count:] = np.maximum(bounds - 1, 0), 0
        ends[0], ends[1 : count + 1], ends[count + 1 : -1], ends[-1] = 0, bounds, bounds[-1], self.tokens
        pages = pages.reshape(self.segments + 1, self.blocks)
        pages[:count, : table.shape[1]] = table
        pages[-1, 0] = 0
        self._device.copy_(self._pinned, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def clear(self, slot: int, scratch: int) -> None:
        """Makes every row padding; the states of a slot are read and written as they are."""
        none = np.zeros(0, np.int64)
        self.fill(none, none, none, np.array([slot]), np.array([0]), np.zeros((1, 0), np.int64), scratch)


def _runs(counts: Sequence[int]) -> list[slice]:
    """Rows of so many tokens each that run together: as many as a shape holds, in their order."""
    found, start, tokens = [], 0, 0
    for place, count in enumerate(counts):
        if place > start and (tokens + count > TOKENS[-1] or place - start == SEGMENTS[-1]):
            found.append(slice(start, place))
            start, tokens = place, 0
        tokens += count
    return [*found, slice(start, len(counts))]


class PrefillProgram:
    """Chunks of new tokens for rows of a paged cache, whose tables have `blocks` pages at most.

    capture: replay CUDA graphs; on a GPU only where `captures_prefill`.
    """

    def __init__(self, model: K3ForCausalLM, cache: PagedCache, blocks: int, *, capture: bool) -> None:
        self._model, self._cache, self._blocks, self.capture = model, cache, blocks, capture
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._memory = torch.cuda.graph_pool_handle() if capture else None  # which all graphs share

    @property
    def captured(self) -> int:
        """Shapes that have a graph now."""
        return sum(shape.graph is not None for shape in self._shapes.values())

    def takes(self, model: K3ForCausalLM, ids: np.ndarray, counts: Sequence[int]) -> bool:
        """Whether these tokens int64 [N], so many of each of some rows, can be computed by the program.

        Not with an adapter attached, and not where one is a row of an image.
        """
        fits = max(counts) <= TOKENS[-1] and len(_runs(counts)) <= RUNS
        return fits and model.adapter is None and int(ids.min()) >= 0

    @torch.inference_mode()
    def run(
        self, model: K3ForCausalLM, rows: Sequence[int], ids: np.ndarray, counts: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Rows read their next counts [S] of the packed tokens ids int64 [N], for which room has been claimed.

        -> each row's last token after the final norm [1, H], routes int16 [N, M, k] on the device, which the next call
        may overwrite. Raises EngineError for a row without room.
        """
        if model is not self._model:
            self._forget(model)
        index, lengths = np.asarray(rows, np.int64), np.asarray(counts, np.int64)
        last: list[Tensor] = []
        routes: list[Tensor] = []
        done, runs = 0, _runs(counts)
        for run in runs:
            count = int(lengths[run].sum())
            hidden, chosen = self._run(index[run], ids[done : done + count], lengths[run])
            last += hidden.clone().split(1)
            routes.append(chosen if len(runs) == 1 else chosen.clone())
            done += count
        return last, torch.cat(routes) if len(runs) > 1 else routes[0]

    def _run(self, index: np.ndarray, ids: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
        """One run -> [S, H] and [N, M, k], which the next one overwrites."""
        past, place, table = self._cache.chunk_places(index, lengths)
        shape = self._shape(len(ids), len(index))
        if self.capture and shape.graph is None:
            self._capture(shape, int(index[0]))
        shape.fill(ids, past, place, index, lengths, table, self._cache.scratch_place)
        if shape.graph is None:
            hidden, routes = self._compute(shape)
        else:
            shape.graph.replay()
            assert shape.outputs is not None
            hidden, routes = shape.outputs
        self._cache.chunk_done(index, lengths)
        return hidden[: len(index)], routes[: len(ids)]

    def _shape(self, tokens: int, segments: int) -> _Shape:
        """The smallest shape that holds so much."""
        key = next(n for n in TOKENS if n >= tokens), next(n for n in SEGMENTS if n >= segments)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape(*key, self._blocks, self._model.device)
        return shape

    def _forget(self, model: K3ForCausalLM) -> None:
        """Goes on with another model. Buffers stay; a graph that reads the old weights does not."""
        self._model = model
        if self.capture:
            torch.cuda.current_stream().synchronize()
        for shape in self._shapes.values():
            shape.graph, shape.outputs = None, None
        if self.capture:  # a pool whose graphs are all gone must not be used again
            self._memory = torch.cuda.graph_pool_handle()

    def _compute(self, shape: _Shape) -> tuple[Tensor, Tensor]:
        """The program itself."""
        ids, past, place, slot, source, last, ends, table = shape.inputs
        bounds = ends.to(torch.int32)
        padding = torch.arange(shape.tokens, device=ids.device) >= ends[shape.segments]
        layout = FixedLayout(bounds, shape.tokens, shape.tokens, padding)
        at = self._cache.step_cache(slot, past, place, table.view(shape.segments + 1, shape.blocks))
        hidden, routes = self._model.step(ids, ChunkCache(at, source, bounds), layout)
        return hidden.index_select(0, last), routes

    def _capture(self, shape: _Shape, slot: int) -> None:
        """Records the program of one shape. It warms up on padding alone, which changes no state."""
        shape.clear(slot, self._cache.scratch_place)
        warm_ups = 1 if shape.compiled else WARM_UPS
        shape.graph, shape.outputs = recorded(lambda: self._compute(shape), self._memory, warm_ups)
        shape.compiled = True


def captures_prefill(model: K3ForCausalLM, cache: PagedCache) -> bool:
    """Whether the program can be captured: where decode steps can, and a kernel reads latents in pages of this size."""
    rope = model.config.qk_rope_head_dim
    return captures(model) and all(limits.PAGED_LATENTS.takes(pages, rope) for pages in cache.latent_pages())


def prefill_program(model: K3ForCausalLM, cache: PagedCache, max_context: int) -> PrefillProgram | None:
    """The program for rows of `max_context` tokens at most; None on a GPU that could not capture it."""
    captured = captures_prefill(model, cache)
    if model.device.type == "cuda" and not captured:
        return None
    return PrefillProgram(model, cache, -(-max_context // cache.page) + 1, capture=captured)
