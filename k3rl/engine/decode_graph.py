"""Decode as a program of fixed shapes: persistent inputs, no number that the host must know, so CUDA can replay it.

A step of n rows runs as the next of `BATCHES` and as many pages a row as the longest of them needs, rounded up to a
power of two; rows and pages that are not there are padding. Where that would be too many tokens, rows of like length
run together, one piece after the other. Each such shape has its own buffers and, on a GPU, is captured when it is first
met. On a CPU the same program runs uncaptured.

Weights that change in place are seen by the next step. Another model, which is how engines take a version, is another
program: what was captured is dropped and made again as it is needed. The states stay where they are in between, so
whatever copies, frees or restores rows does so between two steps on the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.paged import PagedCache
from k3rl.model import K3ForCausalLM
from k3rl.model.cache import StepCache
from k3rl.model.kda import KimiDeltaAttention

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = 1 << 22  # latents that a layer gathers at once: 2 to 5 GiB
_WARM_UPS = 2  # of a shape before its capture: kernels are compiled and workspaces made then
_COLUMNS = 4  # token, slot, past, place; the table comes after them


def padded_batch(rows: int) -> int:
    """The smallest of `BATCHES` that holds so many rows, which are at most the largest of them."""
    return next(batch for batch in BATCHES if batch >= rows)


def _power(blocks: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (blocks - 1).bit_length()


class _Shape:
    """The buffers of one batch and number of pages: all inputs in one run of int64, moved by one copy."""

    def __init__(self, batch: int, blocks: int, device: torch.device) -> None:
        size = batch * (_COLUMNS + blocks)
        self.batch, self.blocks = batch, blocks
        self._pinned = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._given = self._pinned.numpy()
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[Tensor, Tensor] | None = None  # of the captured graph

    def fill(
        self, tokens: np.ndarray, slots: np.ndarray, past: np.ndarray, place: np.ndarray, table: np.ndarray
    ) -> None:
        """Sets the inputs: [n] each and table [n, blocks]; the rest is padding. place [n + 1]: its last is of padding.

        The host writes only after the copy of the step before has left.
        """
        if self._copied is not None:
            self._copied.synchronize()
        n, batch = len(tokens), self.batch
        columns = self._given[: _COLUMNS * batch].reshape(_COLUMNS, batch)
        columns[:, :n] = tokens, slots, past, place[:n]
        columns[:, n:] = np.array([[0], [-1], [0], [place[n]]])
        pages = self._given[_COLUMNS * batch :].reshape(batch, self.blocks)
        pages[:n], pages[n:] = table, 0
        self._device.copy_(self._pinned, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def clear(self, scratch: int) -> None:
        """Makes every row padding."""
        empty = np.zeros(0, np.int64)
        self.fill(empty, empty, empty, np.array([scratch]), np.zeros((0, self.blocks), np.int64))

    def inputs(self, cache: PagedCache) -> tuple[Tensor, StepCache]:
        """(token ids [batch], the states to step), views of the buffers."""
        tokens, slot, past, place = self._device[: _COLUMNS * self.batch].view(_COLUMNS, self.batch).unbind()
        table = self._device[_COLUMNS * self.batch :].view(self.batch, self.blocks)
        return tokens, cache.step_cache(slot, past, place, table)


class DecodeProgram:
    """Decode steps over the rows of a paged cache.

    capture: replay CUDA graphs; by default on a GPU where every layer's kernels run.
    """

    def __init__(self, model: K3ForCausalLM, cache: PagedCache, *, capture: bool | None = None) -> None:
        self._model, self._cache = model, cache
        self.capture = captures(model) if capture is None else capture
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._memory = torch.cuda.graph_pool_handle() if self.capture else None  # which all graphs share

    @property
    def captured(self) -> int:
        """Shapes that have a graph now."""
        return sum(shape.graph is not None for shape in self._shapes.values())

    @torch.inference_mode()
    def run(self, model: K3ForCausalLM, rows: Sequence[int], tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        """Rows read their next token, tokens int64 [n], by the weights of `model`; room for it has been claimed.

        -> logits [n, V] and routes int16 [n, M, k] on the device, which the next call may overwrite.
        """
        if model is not self._model:
            self._forget(model)
        index = np.asarray(rows, np.int64)
        pieces = self._pieces(index)
        if len(pieces) == 1:
            return self._piece(index, tokens)
        found = []
        for places in pieces:
            logits, routes = self._piece(index[places], tokens[places])
            found.append((logits.clone(), routes.clone()))
        back = torch.from_numpy(np.argsort(np.concatenate(pieces))).to(self._model.device)
        logits, routes = (torch.cat(parts).index_select(0, back) for parts in zip(*found, strict=True))
        return logits, routes

    def _pieces(self, rows: np.ndarray) -> list[np.ndarray]:
        """Places in `rows` of those that run together: all of them, or, where that is too much, shorter ones first."""
        page, blocks = self._cache.page, self._cache.step_blocks(rows)
        if len(rows) <= BATCHES[-1] and padded_batch(len(rows)) * _power(int(blocks.max())) * page <= _TOKENS:
            return [np.arange(len(rows))]
        pieces: list[list[int]] = [[]]
        for place in np.argsort(blocks, kind="stable").tolist():
            count = len(pieces[-1]) + 1
            fits = count <= BATCHES[-1] and padded_batch(count) * _power(int(blocks[place])) * page <= _TOKENS
            if pieces[-1] and not fits:
                pieces.append([])
            pieces[-1].append(place)
        return [np.array(piece) for piece in pieces]

    def _forget(self, model: K3ForCausalLM) -> None:
        """Goes on with another model. Buffers stay; a graph that reads the old weights does not."""
        self._model = model
        for shape in self._shapes.values():
            shape.graph, shape.outputs = None, None
        if self.capture:  # a pool whose graphs are all gone must not be used again
            self._memory = torch.cuda.graph_pool_handle()

    def _piece(self, rows: np.ndarray, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        past, place, table = self._cache.step_places(rows)
        blocks = _power(table.shape[1])
        key = padded_batch(len(rows)), blocks
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape(*key, self._model.device)
        if self.capture and shape.graph is None:
            self._capture(shape)
        shape.fill(tokens, rows, past, place, np.pad(table, ((0, 0), (0, blocks - table.shape[1]))))
        if shape.graph is None:
            logits, routes = self._compute(shape)
        else:
            shape.graph.replay()
            assert shape.outputs is not None
            logits, routes = shape.outputs
        self._cache.step_done(rows)
        return logits[: len(rows)], routes[: len(rows)]

    def _compute(self, shape: _Shape) -> tuple[Tensor, Tensor]:
        """The program itself: logits [batch, V], routes [batch, M, k]."""
        tokens, states = shape.inputs(self._cache)
        hidden, routes = self._model.step(tokens, states)
        return self._model.logits(hidden), routes

    def _capture(self, shape: _Shape) -> None:
        """Records the program of one shape. It warms up on padding alone, which changes no state."""
        shape.clear(self._cache.scratch_place)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._compute(shape)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            shape.outputs = self._compute(shape)
        shape.graph = graph


def captures(model: K3ForCausalLM) -> bool:
    """Whether a decode step of this model can be captured: on a GPU, in bf16, where the kernels take its KDA layers.

    A model with an adapter attached, or with experts elsewhere, decodes by the ordinary path.
    """
    if model.device.type != "cuda" or model.dtype != torch.bfloat16:
        return False
    if model.adapter is not None or not all(part.bank.is_static for part in model.moe_parts()):
        return False
    probe = torch.empty(0, dtype=model.dtype, device=model.device)
    found = [module for module in model.modules() if isinstance(module, KimiDeltaAttention)]
    return all(layer.takes_kernels(probe) for layer in found)
