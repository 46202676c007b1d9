"""Prefill of few tokens in steps of fixed shapes, so that CUDA can replay them as decode steps are replayed.

What a multi-turn agent adds to a cached prefix is some hundred tokens, for which a forward of many small launches costs
the host more than the device. N new tokens of a few rows run as the next of `TOKENS`, or in several runs; segments that
are not there are empty, and the rest of the rows are padding: one more segment, which starts from nothing and whose
states and latents are kept nowhere (`model.cache.ChunkCache`). Attention reads latents where they lie, so the length of
what came before is no part of a shape. Each shape is captured when it is first met (`shape_buckets.py`); on a CPU the
same step runs uncaptured. Longer chunks, images and adapters take the ordinary path, with the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.compute.decode_graph import captures
from k3rl.engine.compute.shape_buckets import CurrentModel, Shape, ShapeBucket, ShapeBuckets
from k3rl.engine.paged import PagedCache
from k3rl.kernels import CapturedStep, StagedInputs, limits
from k3rl.model import ChunkCache, FixedLayout, K3ForCausalLM

TOKENS = (16, 32, 64, 128, 256, 512, 1024)
SEGMENTS = (1, 8)
RUNS = 4  # steps for one call, at most; beyond, an ordinary forward of all tokens is the cheaper one


class PrefillInputs:
    """The buffers of so many tokens and segments."""

    def __init__(self, shape: Shape, blocks: int, device: torch.device) -> None:
        self.tokens, self.segments = tokens, segments = shape
        self.blocks = blocks
        widths = {
            **dict.fromkeys(("id", "past", "place"), tokens),
            **dict.fromkeys(("slot", "source", "last"), segments),
            "ends": segments + 2,
            "pages": (segments + 1) * blocks,
        }
        self._staged = StagedInputs(widths, device)

    @property
    def device(self) -> dict[str, Tensor]:
        """What a step reads, by name."""
        return self._staged.device

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
        """Sets the inputs: ids, past and place of N rows, slots and tokens of S segments and their pages [S, n]."""
        self._staged.wait()
        host, count, bounds = self._staged.host, len(rows), np.cumsum(counts)
        columns = {"id": (ids, 0), "past": (past, 0), "place": (place, scratch), "slot": (rows, rows[0])}
        columns |= {"source": (np.arange(count), 0), "last": (np.maximum(bounds - 1, 0), 0)}
        for name, (values, padding) in columns.items():
            host[name][: len(values)], host[name][len(values) :] = values, padding
        ends = host["ends"]
        ends[0], ends[1 : count + 1], ends[count + 1 : -1], ends[-1] = 0, bounds, bounds[-1], self.tokens
        pages = host["pages"].reshape(self.segments + 1, self.blocks)
        pages[:count, : table.shape[1]] = table
        pages[-1, 0] = 0
        self._staged.send()

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


class CapturedPrefill:
    """Chunks of new tokens for rows of a paged cache, whose tables have `blocks` pages at most.

    capture: replay CUDA graphs; on a GPU only where `captures_prefill`.
    """

    def __init__(self, model: K3ForCausalLM, cache: PagedCache, blocks: int, *, capture: bool) -> None:
        device = model.device

        def bucket(shape: Shape, current: CurrentModel) -> ShapeBucket[PrefillInputs]:
            inputs = PrefillInputs(shape, blocks, device)
            return ShapeBucket(inputs, CapturedStep(lambda: prefill(current.model, cache, inputs)))

        self._cache = cache
        self.buckets = ShapeBuckets(model, bucket, capture=capture)

    @classmethod
    def where_it_pays(cls, model: K3ForCausalLM, cache: PagedCache, max_context: int) -> Self | None:
        """For rows of `max_context` tokens at most; None on a GPU that could not capture it."""
        captured = captures_prefill(model, cache)
        if model.device.type == "cuda" and not captured:
            return None
        return cls(model, cache, -(-max_context // cache.page) + 1, capture=captured)

    @property
    def shapes(self) -> Collection[Shape]:
        """(tokens, segments) of the steps that ran."""
        return self.buckets.shapes

    def takes(self, model: K3ForCausalLM, ids: np.ndarray, counts: Sequence[int]) -> bool:
        """Whether these tokens int64 [N], so many of each of some rows, can be computed so.

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
        self.buckets.serve(model)
        index, lengths = np.asarray(rows, np.int64), np.asarray(counts, np.int64)
        last: list[Tensor] = []
        routes: list[Tensor] = []
        done, runs = 0, _runs(counts)
        for run in runs:
            count = int(lengths[run].sum())
            hidden, chosen = self._step(index[run], ids[done : done + count], lengths[run])
            last += hidden.clone().split(1)
            routes.append(chosen if len(runs) == 1 else chosen.clone())
            done += count
        return last, torch.cat(routes) if len(runs) > 1 else routes[0]

    def _step(self, index: np.ndarray, ids: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
        """One step -> [S, H] and [N, M, k], which the next one overwrites."""
        past, place, table = self._cache.chunk_places(index, lengths)
        bucket, scratch = self.bucket(len(ids), len(index)), self._cache.scratch_place
        if self.buckets.needs_capture(bucket):  # it warms up on padding alone, which changes no state
            bucket.inputs.clear(int(index[0]), scratch)
            self.buckets.record(bucket)
        bucket.inputs.fill(ids, past, place, index, lengths, table, scratch)
        hidden, routes = bucket.step()
        self._cache.stepped(index, lengths)
        return hidden[: len(index)], routes[: len(ids)]

    def bucket(self, tokens: int, segments: int) -> ShapeBucket[PrefillInputs]:
        """That of the smallest shape which holds so much."""
        return self.buckets[next(n for n in TOKENS if n >= tokens), next(n for n in SEGMENTS if n >= segments)]


def prefill(model: K3ForCausalLM, cache: PagedCache, inputs: PrefillInputs) -> tuple[Tensor, Tensor]:
    """The step itself: each segment's last token after the final norm [S, H], routes int16 [N, M, k]."""
    given = inputs.device
    ends, bounds = given["ends"], given["ends"].to(torch.int32)
    padding = torch.arange(inputs.tokens, device=ends.device) >= ends[inputs.segments]
    layout = FixedLayout(bounds, inputs.tokens, inputs.tokens, padding)
    table = given["pages"].view(inputs.segments + 1, inputs.blocks)
    at = cache.step_cache(given["slot"], given["past"], given["place"], table)
    hidden, routes = model.step(given["id"], ChunkCache(at, given["source"], bounds), layout)
    return hidden.index_select(0, given["last"]), routes


def captures_prefill(model: K3ForCausalLM, cache: PagedCache) -> bool:
    """Whether these steps can be captured: where decode steps can, and a kernel reads latents in pages of this size."""
    rope = model.config.qk_rope_head_dim
    return captures(model) and all(limits.PAGED_LATENTS.takes(pages, rope) for pages in cache.latent.values())
