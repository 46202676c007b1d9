"""Prompts of an engine's requests: which forward computes them, and who samples from them.

The members of a group share one `PromptState`; what is computed in the row of the first is copied to the others, and
to the parked row when some wait for one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from k3rl.engine.batch import Batch
from k3rl.engine.compute import exact
from k3rl.engine.compute.prefill_graph import CapturedPrefill
from k3rl.engine.counters import EngineCounters
from k3rl.engine.images import image_inputs
from k3rl.engine.memory import prefill_run
from k3rl.engine.protocol import EngineError
from k3rl.engine.running import PromptState, Running
from k3rl.engine.sampling.grammar import Grammars
from k3rl.engine.scheduler import Plan, Segment, portions
from k3rl.engine.uploads import upload
from k3rl.engine.weights import ServedWeights

RowLogits = tuple[np.ndarray, Tensor]  # rows int64 [R], and logits [R, V] to sample from


class Prefill:
    """Computes prompts in the rows of a batch. exact: every row by itself (`k3rl.engine.compute.exact`)."""

    def __init__(
        self,
        batch: Batch,
        weights: ServedWeights,
        grammars: Grammars,
        counters: EngineCounters,
        captured: CapturedPrefill | None,
        *,
        exact: bool,
    ) -> None:
        self._batch, self._weights, self._grammars, self._counters = batch, weights, grammars, counters
        self._captured, self._exact = captured, exact

    def run(self, plan: Plan) -> list[RowLogits]:
        """Does what the plan has to do with prompts; the rows that sample their first token, or go on, in this step."""
        for members, row in plan.cached:
            self._restore(self._batch.requests[members[0]], members, row)
        parts = []
        if plan.from_parked:  # before the prompts, which may park another state
            parts.append(self._start_from_parked(plan.from_parked))
        if plan.drop_parked:
            self._batch.pool.drop_parked()
        if plan.segments:
            parts.append(self._read(plan.segments))
        return parts

    def _restore(self, leader: Running, members: Sequence[int], row: int) -> None:
        """Copies a cached prefix state into the row where the rest of the prompt will be computed."""
        assert leader.hit is not None
        self._batch.pool.restore(row, leader.hit)
        self._counters.cached_tokens += leader.hit.length
        self._share(members, PromptState.of(leader.hit))
        leader.hit = None

    def _share(self, members: Sequence[int], prompt: PromptState) -> None:
        for number in members:
            self._batch.requests[number].prompt_state = prompt

    def _start_from_parked(self, pairs: Sequence[tuple[int, int]]) -> RowLogits:
        prompt, pool = self._batch.requests[pairs[0][0]].prompt_state, self._batch.pool
        if prompt is None or prompt.logits is None:
            raise EngineError("the scheduler admits from the parked state, and none is parked")
        pool.copy([(pool.parked_row, row) for _, row in pairs])
        return self._start(pairs, prompt), prompt.logits.expand(len(pairs), -1)

    def _read(self, segments: list[Segment]) -> RowLogits:
        """Computes all segments in one packed call; the rows that the prompts which it completes start."""
        began = time.perf_counter()
        fresh = [segment for segment in segments if segment.start == 0]
        self._batch.pool.reset([segment.row for segment in fresh])
        for segment in fresh:
            self._share(segment.members, PromptState())
        work = [segment for segment in segments if segment.stop > segment.start]
        model, adapters = self._weights.model, self._weights.adapters
        for name, own in adapters.grouped(work, lambda s: self._batch.requests[s.leader].params.adapter):
            with adapters.serving(model, name):
                for run in portions(own, prefill_run(model)):
                    self._compute(run)
        complete = [segment for segment in segments if segment.starts]
        hidden = [last for s in complete if (last := self._prompt(s).hidden) is not None]
        if self._exact or not hidden:
            logits = exact.logits(model, hidden, [segment.stop for segment in complete])
        else:
            logits = model.logits(torch.cat(hidden))
        self._counters.prefill_s += time.perf_counter() - began
        return self._start_groups(complete, logits)

    def _prompt(self, segment: Segment) -> PromptState:
        prompt = self._batch.requests[segment.leader].prompt_state
        assert prompt is not None
        return prompt

    def _compute(self, segments: list[Segment]) -> None:
        """Runs prompt tokens through the model, those before checkpoints first, where states are kept."""
        before, behind = [], []
        for segment in segments:
            cut = self._batch.requests[segment.leader].checkpoint
            if cut is None or not segment.start < cut < segment.stop:
                before.append(segment)
                continue
            before.append(replace(segment, stop=cut, starts=(), parks=False))
            behind.append(replace(segment, start=cut))
        self._compute_run(before)
        for segment in before:
            leader = self._batch.requests[segment.leader]
            if self._batch.prefix is not None and leader.checkpoint == segment.stop:
                self._batch.prefix.keep_checkpoint(leader, segment.row, self._prompt(segment))
        if behind:
            self._compute_run(behind)

    def _compute_run(self, segments: list[Segment]) -> None:
        """Runs prompt tokens through the model; their routes and last hidden rows go to the prompts."""
        counts = [s.stop - s.start for s in segments]
        self._counters.prefilled_tokens += sum(counts)
        if self._exact:
            self._compute_exactly(segments)
            return
        ids = np.concatenate([self._batch.requests[s.leader].ids[s.start : s.stop] for s in segments])
        rows, bounds = [s.row for s in segments], np.cumsum([0, *counts])
        self._batch.pool.claim(rows, counts)
        if self._captured is not None and self._captured.takes(self._weights.model, ids, counts):
            last, chosen = self._captured.run(self._weights.model, rows, ids, counts)
        else:
            last, chosen = self._forward(segments, ids, bounds)
        for segment, part, row in zip(segments, np.split(chosen.cpu().numpy(), bounds[1:-1]), last, strict=True):
            prompt = self._prompt(segment)
            prompt.routes.append(part)
            prompt.hidden = row

    def _forward(self, segments: list[Segment], ids: np.ndarray, bounds: np.ndarray) -> tuple[list[Tensor], Tensor]:
        """One ordinary forward of ids int64 [N]; each segment's last row [1, H], routes [N, M, k]."""
        model, requests = self._weights.model, self._batch.requests
        read = [(requests[s.leader].images, self._prompt(s).features, s.start, s.stop) for s in segments]
        out = model.hidden(
            upload(ids.clip(0), model.device)[None],
            cu_seqlens=torch.from_numpy(bounds),
            cache=self._batch.pool.view([s.row for s in segments]),
            images=image_inputs(model, read),
        )
        return [out.hidden[0, end - 1 : end] for end in bounds[1:].tolist()], out.routes[0]

    def _compute_exactly(self, segments: list[Segment]) -> None:
        for s in segments:
            running, prompt = self._batch.requests[s.leader], self._prompt(s)
            given = (running.ids[: s.stop], s.start, running.images, prompt.features)
            prompt.hidden, routes = exact.compute(self._weights.model, self._batch.pool, s.row, *given)
            prompt.routes.append(routes)

    def _start_groups(self, segments: list[Segment], logits: Tensor) -> RowLogits:
        """Copies computed prompts to their siblings, and parks them when some wait for a row.

        logits [S, V] of the S prompts' last tokens -> (rows [R], logits [R, V]) of all who sample from them.
        """
        pool = self._batch.pool
        copies, rows, source = [], [], []
        self._keep(segments, logits)
        for index, segment in enumerate(segments):
            prompt = self._prompt(segment)
            prompt.logits = logits[index : index + 1]
            rows.append(self._start(segment.starts, prompt))
            source += [index] * len(segment.starts)
            copies += [(segment.row, row) for _, row in segment.starts[1:]]
            if segment.parks:
                copies.append((segment.row, pool.parked_row))
        pool.copy(copies)
        return np.concatenate(rows or [np.empty(0, np.int64)]), logits[source]

    def _keep(self, segments: Sequence[Segment], logits: Tensor) -> None:
        """Leaves the states of computed prompts to the prefix cache; a broken one is of no use to anyone."""
        prefix, requests = self._batch.prefix, self._batch.requests
        if prefix is None:
            return
        kept = [index for index, segment in enumerate(segments) if prefix.keeps_prompt(requests[segment.leader])]
        if not kept:
            return
        whole = logits[kept].isfinite().all(-1).tolist()
        for segment in (segments[index] for index, good in zip(kept, whole, strict=True) if good):
            prefix.keep_prompt(requests[segment.leader], segment.row, self._prompt(segment))

    def _start(self, pairs: Sequence[tuple[int, int]], prompt: PromptState) -> np.ndarray:
        for number, row in pairs:
            running = self._batch.requests[number]
            if running.matcher is None:
                running.matcher = self._grammars.matcher(running.params)
            self._batch.table.start(row, running, prompt, self._weights.version_for(running.params))
        return np.array([row for _, row in pairs])
