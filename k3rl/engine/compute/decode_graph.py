"""Decode in steps of fixed shapes: persistent inputs, no number that the host must know, so CUDA can replay them.

A step of n rows runs as the next of `BATCHES` and as many pages a row as the longest of them needs, rounded up to a
power of two; rows and pages that are not there are padding. Where that would be too many tokens, rows of like length
run together, one piece after the other. Each such shape is captured when it is first met (`shape_buckets.py`); on a CPU
the same step runs uncaptured.

The step also draws a token for every row, as `device_sampler` does for rows that keep every token, and remembers what
it drew: the next step may read those tokens before the host has (`CapturedDecode.launch`).

The states stay where they are from step to step, so whatever copies, frees or restores rows does so between two steps
on the same stream.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.compute.shape_buckets import CurrentModel, Shape, ShapeBucket, ShapeBuckets
from k3rl.engine.paged import PagedCache
from k3rl.engine.sampling.device_sampler import unpacked
from k3rl.engine.sampling.sampler import Draws
from k3rl.engine.uploads import upload
from k3rl.kernels import CapturedStep, StagedInputs, limits
from k3rl.kernels.sampling import draw
from k3rl.model import K3ForCausalLM, KimiDeltaAttention, StepCache, fused

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_TOKENS = 1 << 22  # latents that a layer gathers at once, where no kernel reads them in their pages: 2 to 5 GiB
_COLUMNS = ("token", "slot", "past", "place", "temperature", "uniform")  # one number for each row


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


class StepOutputs(NamedTuple):
    """Of a step, on the device: logits [B, V], routes int16 [B, M, k], drawn float64 [B, 3] (`kernels.draw`)."""

    logits: Tensor
    routes: Tensor
    drawn: Tensor

    def first(self, rows: int) -> StepOutputs:
        """Those of so many rows; the others are of padding."""
        return StepOutputs(*(tensor[:rows] for tensor in self))


class StepRows(NamedTuple):
    """What a step reads of n rows: int64 [n] each, float64 [n] the last two; place [n + 1], its last of padding."""

    token: np.ndarray
    slot: np.ndarray
    past: np.ndarray
    place: np.ndarray
    temperature: np.ndarray
    uniform: np.ndarray


class LaunchedStep:
    """A step that the device computes: what it draws, and its routes where they were asked for."""

    def __init__(self, drawn: Tensor, routes: Tensor | None, arrived: torch.cuda.Event | None) -> None:
        self._drawn, self._routes, self._arrived = drawn, routes, arrived
        self.has_routes = routes is not None
        self._found: tuple[Draws, np.ndarray | None] | None = None

    def read(self) -> tuple[Draws, np.ndarray | None]:
        """Waits; (draws of the rows, routes int16 [n, M, k]). First read before the second next step is launched."""
        if self._found is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            routes = None if self._routes is None else self._routes.numpy().copy()
            self._found = unpacked(self._drawn.numpy()), routes
        return self._found


class DecodeInputs:
    """The buffers of one batch and number of pages."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.batch, self.blocks = shape
        self._on_gpu = device.type == "cuda"
        widths = {**dict.fromkeys(_COLUMNS, self.batch), "pages": self.batch * self.blocks}
        self._staged = StagedInputs(widths, device, reals=("temperature", "uniform"))
        self._answers: list[tuple[Tensor, Tensor]] = []  # pinned copies of what steps gave, used in turn

    def fill(self, given: StepRows, table: np.ndarray) -> None:
        """Sets the inputs, table [n, at most `blocks`]; the rest is padding."""
        self._staged.wait()
        host, n = self._staged.host, len(given.token)
        padding = (0, -1, 0, given.place[-1], 0, 0)
        for name, values, filler in zip(_COLUMNS, given, padding, strict=True):
            host[name][:n], host[name][n:] = values[:n], filler
        pages = host["pages"].reshape(self.batch, self.blocks)
        pages[:n, : table.shape[1]] = table
        pages[:n, table.shape[1] :], pages[n:] = 0, 0
        self._staged.send()

    def clear(self, scratch: int) -> None:
        """Makes every row padding."""
        none, reals = np.zeros(0, np.int64), np.zeros(0)
        self.fill(StepRows(none, none, none, np.array([scratch]), reals, reals), np.zeros((0, self.blocks), np.int64))

    def read(self, cache: PagedCache) -> tuple[Tensor, StepCache]:
        """(token ids [batch], the states to step), views of the buffers."""
        given = self._staged.device
        table = given["pages"].view(self.batch, self.blocks)
        return given["token"], cache.step_cache(given["slot"], given["past"], given["place"], table)

    def draw_inputs(self) -> tuple[Tensor, Tensor]:
        """(temperature, uniform) float64 [batch], views of the buffers."""
        return self._staged.device["temperature"], self._staged.device["uniform"]

    def launched(self, found: StepOutputs, with_routes: bool) -> LaunchedStep:
        """What a step gives, as copies that leave the device behind it."""
        if not self._on_gpu:
            return LaunchedStep(found.drawn, found.routes if with_routes else None, None)
        if not self._answers:
            sizes = [(self.batch, *tensor.shape[1:]) for tensor in (found.drawn, found.routes)]
            kinds = found.drawn.dtype, found.routes.dtype
            for _ in range(2):  # a step may be launched while the one before it has not been read
                drawn, routes = (torch.empty(s, dtype=k, pin_memory=True) for s, k in zip(sizes, kinds, strict=True))
                self._answers.append((drawn, routes))
        self._answers.reverse()
        drawn, routes = (buffer[: len(found.drawn)] for buffer in self._answers[0])
        drawn.copy_(found.drawn, non_blocking=True)
        if with_routes:
            routes.copy_(found.routes, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return LaunchedStep(drawn, routes if with_routes else None, arrived)


class CapturedDecode:
    """Decode steps over the rows of a paged cache.

    capture: replay CUDA graphs; by default on a GPU where every layer's kernels run.
    """

    def __init__(self, model: K3ForCausalLM, cache: PagedCache, *, capture: bool | None = None) -> None:
        device = model.device
        last = torch.zeros(BATCHES[-1], dtype=torch.int64, device=device)  # what the last step drew

        def bucket(shape: Shape, current: CurrentModel) -> ShapeBucket[DecodeInputs]:
            inputs = DecodeInputs(shape, device)
            return ShapeBucket(inputs, CapturedStep(lambda: decode(current.model, cache, inputs, last)))

        self._cache, self._last = cache, last
        rope = model.config.qk_rope_head_dim
        self._gathers = not all(limits.PAGED_LATENTS.takes(pages, rope) for pages in cache.latent.values())
        self.buckets = ShapeBuckets(model, bucket, capture=captures(model) if capture is None else capture)

    @property
    def shapes(self) -> Collection[Shape]:
        """(batch, pages a row) of the steps that ran."""
        return self.buckets.shapes

    @torch.inference_mode()
    def run(self, model: K3ForCausalLM, rows: Sequence[int], tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        """Rows read their next token, tokens int64 [n], by the weights of `model`; room for it has been claimed.

        -> logits [n, V] and routes int16 [n, M, k] on the device, which the next call may overwrite.
        """
        self.buckets.serve(model)
        index = np.asarray(rows, np.int64)
        pieces = self._pieces(index)
        nothing = np.zeros(len(index))
        if len(pieces) == 1:
            return self._step(index, tokens, nothing, nothing)[1][:2]
        found = []
        for places in pieces:
            _, out = self._step(index[places], tokens[places], nothing[places], nothing[places])
            found.append((out.logits.clone(), out.routes.clone()))
        back = upload(np.argsort(np.concatenate(pieces)), model.device)
        logits, routes = (torch.cat(parts).index_select(0, back) for parts in zip(*found, strict=True))
        return logits, routes

    def fits(self, rows: np.ndarray) -> bool:
        """Whether these rows int64 [n] can be launched together."""
        return len(self._pieces(rows)) == 1

    @torch.inference_mode()
    def launch(
        self,
        model: K3ForCausalLM,
        rows: np.ndarray,
        tokens: np.ndarray,
        temperature: np.ndarray,
        uniform: np.ndarray,
        with_routes: bool,
    ) -> LaunchedStep:
        """Like `run`, and draws from the logits at temperature [n] with uniform [n], for rows that keep every token.

        A token of -1 - i is the one that the step launched before this drew for its i-th row; the host need not know
        it. Does not wait for the device.
        """
        self.buckets.serve(model)
        bucket, found = self._step(rows, tokens, temperature, uniform)
        return bucket.inputs.launched(found, with_routes)

    def _pieces(self, rows: np.ndarray) -> list[np.ndarray]:
        """Places in `rows` of those that run together: all of them, or, where that is too much, shorter ones first."""
        blocks = self._cache.step_blocks(rows)
        if self._together(len(rows), int(blocks.max())):
            return [np.arange(len(rows))]
        pieces: list[list[int]] = [[]]
        for place in np.argsort(blocks, kind="stable").tolist():
            if pieces[-1] and not self._together(len(pieces[-1]) + 1, int(blocks[place])):
                pieces.append([])
            pieces[-1].append(place)
        return [np.array(piece) for piece in pieces]

    def _together(self, rows: int, blocks: int) -> bool:
        """Whether a step takes so many rows, the longest of which has so many pages. How long rows are matters where
        their latents are gathered only: kernels read them where they lie."""
        if rows > BATCHES[-1]:
            return False
        return not self._gathers or padded_batch(rows) * _power(blocks) * self._cache.page <= _TOKENS

    def _step(
        self, rows: np.ndarray, tokens: np.ndarray, temperature: np.ndarray, uniform: np.ndarray
    ) -> tuple[ShapeBucket[DecodeInputs], StepOutputs]:
        past, place, table = self._cache.step_places(rows)
        bucket = self.buckets[padded_batch(len(rows)), _power(table.shape[1])]
        if self.buckets.needs_capture(bucket):
            self._capture(bucket)
        bucket.inputs.fill(StepRows(tokens, rows, past, place, temperature, uniform), table)
        found: StepOutputs = bucket.step()
        self._cache.stepped(rows)
        return bucket, found.first(len(rows))

    def _capture(self, bucket: ShapeBucket[DecodeInputs]) -> None:
        """Captures the step of one shape. It warms up on padding alone, which changes no state."""
        last = self._last.clone()
        bucket.inputs.clear(self._cache.scratch_place)
        self.buckets.record(bucket)
        self._last.copy_(last)


def decode(model: K3ForCausalLM, cache: PagedCache, inputs: DecodeInputs, last: Tensor) -> StepOutputs:
    """The step itself; `last` int64 [largest batch] has what the step before drew, and then what this one draws."""
    given, states = inputs.read(cache)
    hidden, routes = model.step(_tokens(given, last), states)
    logits = model.logits(hidden)
    drawn = draw(logits, *inputs.draw_inputs())
    last[: inputs.batch].copy_(drawn[:, 0])
    return StepOutputs(logits, routes, drawn)


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
