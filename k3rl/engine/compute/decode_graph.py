"""Decode as a program of fixed shapes: persistent inputs, no number that the host must know, so CUDA can replay it.

A step of n rows runs as the next of `BATCHES` and as many pages a row as the longest of them needs, rounded up to a
power of two; rows and pages that are not there are padding. Where that would be too many tokens, rows of like length
run together, one piece after the other. Each such shape has its own buffers and, on a GPU, is captured when it is first
met. On a CPU the same program runs uncaptured.

The program also draws a token for every row, as `device_sampler` does for rows that keep every token, and remembers
what it drew: the next step may read those tokens before the host has (`DecodeProgram.start`).

Weights that change in place are seen by the next step that is started. Another model, which is how engines take a
version, is another program: what was captured is dropped and made again as it is needed. The states stay where they are
in between, so whatever copies, frees or restores rows does so between two steps on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.paged import PagedCache
from k3rl.engine.sampling.device_sampler import unpacked
from k3rl.engine.sampling.sampler import Draws
from k3rl.kernels.sampling.draw import draw
from k3rl.model import K3ForCausalLM
from k3rl.model.cache import StepCache
from k3rl.model.fuse import fused
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.side_stream import side_streams

T = TypeVar("T")

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = 1 << 22  # latents that a layer gathers at once: 2 to 5 GiB
WARM_UPS = 2  # of a shape before its first capture: kernels are compiled and workspaces made then; later one
_COLUMNS = 6  # token, slot, past, place, temperature, uniform; the table comes after them


def padded_batch(rows: int) -> int:
    """The smallest of `BATCHES` that holds so many rows, which are at most the largest of them."""
    return next(batch for batch in BATCHES if batch >= rows)


def _power(blocks: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (blocks - 1).bit_length()


@fused
def _tokens(given: Tensor, last: Tensor) -> Tensor:
    """Token ids [B], and -1 - i for the i-th of `last` -> token ids [B]."""
    return torch.where(given < 0, last[(-1 - given).clamp(min=0)], given)


class _Outputs(NamedTuple):
    """Of the program, on the device: logits [B, V], routes int16 [B, M, k], drawn float64 [B, 3] (`kernels.draw`)."""

    logits: Tensor
    routes: Tensor
    drawn: Tensor

    def first(self, rows: int) -> _Outputs:
        """Those of so many rows; what is left out is padding."""
        return _Outputs(*(tensor[:rows] for tensor in self))


class _Columns(NamedTuple):
    """The inputs of n rows: int64 [n] each, float64 [n] the last two; place [n + 1], its last of padding."""

    token: np.ndarray
    slot: np.ndarray
    past: np.ndarray
    place: np.ndarray
    temperature: np.ndarray
    uniform: np.ndarray


class _Shape:
    """The buffers of one batch and number of pages: all inputs in one run of int64, moved by one copy."""

    def __init__(self, batch: int, blocks: int, device: torch.device) -> None:
        size = batch * (_COLUMNS + blocks)
        self.batch, self.blocks, self._on_gpu = batch, blocks, device.type == "cuda"
        self._pinned = torch.zeros(size, dtype=torch.int64, pin_memory=self._on_gpu)
        self._given = self._pinned.numpy()
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if self._on_gpu else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.compiled = False  # for an earlier model, too
        self.outputs: _Outputs | None = None  # of the captured graph
        self._back: list[tuple[Tensor, Tensor]] = []  # pinned copies of what steps gave, used in turn

    def fill(self, given: _Columns, table: np.ndarray) -> None:
        """Sets the inputs, table [n, at most `blocks`]; the rest is padding.

        The host writes only after the copy of the step before has left.
        """
        if self._copied is not None:
            self._copied.synchronize()
        n, batch, scratch = len(given.token), self.batch, given.place[-1]
        columns = self._given[: _COLUMNS * batch].reshape(_COLUMNS, batch)
        columns[:4, :n] = given.token, given.slot, given.past, given.place[:n]
        columns[4:, :n].view(np.float64)[:] = given.temperature, given.uniform
        columns[:, n:] = np.array([[0], [-1], [0], [scratch], [0], [0]])
        pages = self._given[_COLUMNS * batch :].reshape(batch, self.blocks)
        pages[:n, : table.shape[1]] = table
        pages[:n, table.shape[1] :], pages[n:] = 0, 0
        self._device.copy_(self._pinned, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def clear(self, scratch: int) -> None:
        """Makes every row padding."""
        none, reals = np.zeros(0, np.int64), np.zeros(0)
        self.fill(_Columns(none, none, none, np.array([scratch]), reals, reals), np.zeros((0, self.blocks), np.int64))

    def inputs(self, cache: PagedCache) -> tuple[Tensor, StepCache]:
        """(token ids [batch], the states to step), views of the buffers."""
        tokens, slot, past, place = self._device[: 4 * self.batch].view(4, self.batch).unbind()
        table = self._device[_COLUMNS * self.batch :].view(self.batch, self.blocks)
        return tokens, cache.step_cache(slot, past, place, table)

    def draw_inputs(self) -> tuple[Tensor, Tensor]:
        """(temperature, uniform) float64 [batch], views of the buffers."""
        heat, uniform = self._device[4 * self.batch : 6 * self.batch].view(torch.float64).view(2, self.batch).unbind()
        return heat, uniform

    def on_the_way(self, found: _Outputs, with_routes: bool) -> Started:
        """What a step gives, as copies that leave the device behind it."""
        if not self._on_gpu:
            return Started(found.drawn, found.routes if with_routes else None, None)
        if not self._back:
            sizes = [(self.batch, *tensor.shape[1:]) for tensor in (found.drawn, found.routes)]
            kinds = found.drawn.dtype, found.routes.dtype
            for _ in range(2):  # a step may be started while the one before it has not been read
                drawn, routes = (torch.empty(s, dtype=k, pin_memory=True) for s, k in zip(sizes, kinds, strict=True))
                self._back.append((drawn, routes))
        self._back.reverse()
        drawn, routes = (buffer[: len(found.drawn)] for buffer in self._back[0])
        drawn.copy_(found.drawn, non_blocking=True)
        if with_routes:
            routes.copy_(found.routes, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Started(drawn, routes if with_routes else None, arrived)


class Started:
    """A step that the device computes: what it draws, and its routes where they were asked for."""

    def __init__(self, drawn: Tensor, routes: Tensor | None, arrived: torch.cuda.Event | None) -> None:
        self._drawn, self._routes, self._arrived = drawn, routes, arrived

    def read(self) -> tuple[Draws, np.ndarray | None]:
        """Waits; (draws of the rows, routes int16 [n, M, k]). To be read before the second next step is started."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return unpacked(self._drawn.numpy()), None if self._routes is None else self._routes.numpy().copy()


class DecodeProgram:
    """Decode steps over the rows of a paged cache.

    capture: replay CUDA graphs; by default on a GPU where every layer's kernels run.
    """

    def __init__(self, model: K3ForCausalLM, cache: PagedCache, *, capture: bool | None = None) -> None:
        self._model, self._cache = model, cache
        self.capture = captures(model) if capture is None else capture
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._memory = torch.cuda.graph_pool_handle() if self.capture else None  # which all graphs share
        self._last = torch.zeros(BATCHES[-1], dtype=torch.int64, device=model.device)  # what the last run drew

    @property
    def captured(self) -> int:
        """Shapes that have a graph now."""
        return sum(shape.graph is not None for shape in self._shapes.values())

    @torch.inference_mode()
    def run(self, model: K3ForCausalLM, rows: Sequence[int], tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        """Rows read their next token, tokens int64 [n], by the weights of `model`; room for it has been claimed.

        -> logits [n, V] and routes int16 [n, M, k] on the device, which the next call may overwrite.
        """
        self._serve(model)
        index = np.asarray(rows, np.int64)
        pieces = self._pieces(index)
        nothing = np.zeros(len(index))
        if len(pieces) == 1:
            return self._piece(index, tokens, nothing, nothing)[1][:2]
        found = []
        for places in pieces:
            _, out = self._piece(index[places], tokens[places], nothing[places], nothing[places])
            found.append((out.logits.clone(), out.routes.clone()))
        back = torch.from_numpy(np.argsort(np.concatenate(pieces))).to(self._model.device)
        logits, routes = (torch.cat(parts).index_select(0, back) for parts in zip(*found, strict=True))
        return logits, routes

    def starts(self, rows: np.ndarray) -> bool:
        """Whether these rows int64 [n] can be started together."""
        return len(self._pieces(rows)) == 1

    @torch.inference_mode()
    def start(
        self,
        model: K3ForCausalLM,
        rows: np.ndarray,
        tokens: np.ndarray,
        temperature: np.ndarray,
        uniform: np.ndarray,
        with_routes: bool,
    ) -> Started:
        """Like `run`, and draws from the logits at temperature [n] with uniform [n], for rows that keep every token.

        A token of -1 - i is the one that the step started before this drew for its i-th row; the host need not know it.
        Does not wait for the device.
        """
        self._serve(model)
        shape, found = self._piece(rows, tokens, temperature, uniform)
        return shape.on_the_way(found, with_routes)

    def _serve(self, model: K3ForCausalLM) -> None:
        if model is not self._model:
            self._forget(model)

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
        if self.capture:  # a step that was started may still run
            torch.cuda.current_stream().synchronize()
        for shape in self._shapes.values():
            shape.graph, shape.outputs = None, None
        if self.capture:  # a pool whose graphs are all gone must not be used again
            self._memory = torch.cuda.graph_pool_handle()

    def _piece(
        self, rows: np.ndarray, tokens: np.ndarray, temperature: np.ndarray, uniform: np.ndarray
    ) -> tuple[_Shape, _Outputs]:
        past, place, table = self._cache.step_places(rows)
        key = padded_batch(len(rows)), _power(table.shape[1])
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape(*key, self._model.device)
        if self.capture and shape.graph is None:
            self._capture(shape)
        shape.fill(_Columns(tokens, rows, past, place, temperature, uniform), table)
        if shape.graph is None or not self.capture:
            found = self._compute(shape)
        else:
            shape.graph.replay()
            assert shape.outputs is not None
            found = shape.outputs
        self._cache.step_done(rows)
        return shape, found.first(len(rows))

    def _compute(self, shape: _Shape) -> _Outputs:
        """The program itself."""
        given, states = shape.inputs(self._cache)
        tokens = _tokens(given, self._last)
        hidden, routes = self._model.step(tokens, states)
        logits = self._model.logits(hidden)
        drawn = draw(logits, *shape.draw_inputs())
        self._last[: shape.batch].copy_(drawn[:, 0])
        return _Outputs(logits, routes, drawn)

    def _capture(self, shape: _Shape) -> None:
        """Records the program of one shape. It warms up on padding alone, which changes no state."""
        last = self._last.clone()
        shape.clear(self._cache.scratch_place)
        warm_ups = 1 if shape.compiled else WARM_UPS
        shape.graph, shape.outputs = recorded(lambda: self._compute(shape), self._memory, warm_ups)
        shape.compiled = True
        self._last.copy_(last)


def recorded(run: Callable[[], T], memory: Any, warm_ups: int) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what `run` does, in a pool of memory, and its results there; it runs `warm_ups` times first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), side_streams():
        for _ in range(warm_ups):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may use the device meanwhile.
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"), side_streams():
        results = run()
    return graph, results


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
