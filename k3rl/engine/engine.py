"""The rollout engine: continuous batching of one K3 model, tokens and logprobs that training can trust.

A step computes at most `prefill_tokens` tokens of waiting prompts in one packed call, decodes every running row
in another, and samples once over both. Rows that end leave at once and waiting requests take their place.
Single-threaded: whoever drives it (`driver.py`) calls `step` in a loop and may submit, abort, pause or update weights
in between.

State across a weight update: the states of running requests are computed again from their tokens by the new weights,
or, with `in_flight="carry"`, they go on with what the old ones computed; a completion names the versions of its first
and last token. Prompts that nothing has been sampled from yet start over under the new weights either way.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from k3rl.checkpoint import FlatShard
from k3rl.data import ImagePatches
from k3rl.engine import diagnose
from k3rl.engine.batch import Batch
from k3rl.engine.cache import MemoryPlan, StatePool
from k3rl.engine.compute import exact as exact_mode
from k3rl.engine.compute.decode_graph import CapturedDecode, captures
from k3rl.engine.compute.decoding import Decoder, DrawnRows
from k3rl.engine.compute.prefill import Prefill, RowLogits
from k3rl.engine.compute.prefill_graph import CapturedPrefill
from k3rl.engine.counters import EngineCounters
from k3rl.engine.memory import prefill_step
from k3rl.engine.outcomes import BlockingCalls
from k3rl.engine.prefix.cache import PrefixCache
from k3rl.engine.prefix.states import PrefixStates
from k3rl.engine.prompts import Admission
from k3rl.engine.protocol import EngineError, InFlight, Outcome, PauseMode, Prompt, Tokens
from k3rl.engine.rows import RowTable
from k3rl.engine.running import Running
from k3rl.engine.sampling import device_sampler
from k3rl.engine.sampling.grammar import DeadEnd, Grammars
from k3rl.engine.sampling.sample_rows import Sample, sample_rows
from k3rl.engine.scheduler import Scheduler
from k3rl.engine.weights import ServedWeights, WeightUpdate, as_served, check_names
from k3rl.model import K3ForCausalLM
from k3rl.tokens import Tokenizer
from k3rl.types import SamplingParams


class Engine(BlockingCalls):
    """A `RolloutEngine` over one in-process model, which it never writes to: a new version is a new copy.

    max_running: rows, that is requests that can be decoded together. max_context: prompt plus sampled tokens of one
    request, images by their rows, at most (default and upper bound: the model's `max_position_embeddings`).
    prefill_tokens: prompt tokens per step; None: as many as suit the model (`memory.prefill_step`). seed: of requests
    that bring none. version: number of the weights that `model` holds. poison: fill rows that nobody owns with NaN, so
    that a state read by mistake is seen. tokenizer: for stop strings only. prefix_cache: keeps the states at prompt and
    turn ends, for prompts that begin with them.
    memory_bytes: what states and latents may take together. Latents then live in pages of `page_tokens`, there are as
    many rows as leave room for one longest request, requests are admitted by the pages left, and the youngest are
    preempted (and go on with the same tokens) when running ones need them; how many are admitted follows from how
    often that happened (`throttle.py`). "auto": a share of what the machine has free, when `max_running` requests of
    `max_context` tokens could take more than that; where others have their part of the device, `device_share` of it.
    None: `max_running` is the only limit.
    in_flight: what running requests do when the weights change: recompute their states, or carry them on.
    exact: computes every row by itself, so that logprobs are the bits of `k3rl.model.exact`; many times slower.
    static_decode: decodes by the captured step of `decode_graph.py`, and computes few prompt tokens by that of
    `prefill_graph.py`; None: on a GPU whose kernels the model fits.
    overlap: such steps may be launched before the tokens of the last one are read (`decoding.py`); results are equal.
    packed: where kernels multiply with experts as stored bytes, the engine holds them so (`weights.as_served`).
    """

    def __init__(
        self,
        model: K3ForCausalLM,
        max_running: int = 64,
        max_context: int | None = None,
        seed: int = 0,
        poison: bool = False,
        *,
        prefill_tokens: int | None = None,
        version: int = 0,
        tokenizer: Tokenizer | None = None,
        prefix_cache: PrefixCache | None = None,
        memory_bytes: int | Literal["auto"] | None = "auto",
        device_share: float = 1.0,
        page_tokens: int = 64,
        in_flight: InFlight = "recompute",
        exact: bool = False,
        static_decode: bool | None = None,
        overlap: bool = True,
        packed: bool = True,
    ) -> None:
        model, config = as_served(model, exact) if packed else model, model.config
        max_context = max_context or config.max_position_embeddings
        if max_context > config.max_position_embeddings:
            raise ValueError(f"max_context is {max_context}; the model allows {config.max_position_embeddings}")
        self.max_context, self.counters, self.prefix_cache = max_context, EngineCounters(), prefix_cache
        self._pause: PauseMode | None = None
        self._recomputes, self.weights = in_flight == "recompute", ServedWeights(model, version)
        self.adapters = self.weights.adapters
        grammars = Grammars(tokenizer, config.vocab_size)
        self._admission = Admission(self.weights, max_context, tokenizer, grammars, exact=exact)

        fixed = not exact and (captures(model) if static_decode is None else static_decode)
        beside = 0 if prefix_cache is None else prefix_cache.memory_bytes(on_cpu=model.device.type == "cpu")
        limits = max_running, max_context, page_tokens, fixed, device_share, beside
        plan = MemoryPlan.when_needed(model, memory_bytes, *limits)
        rows, pages = (max_running, None) if plan is None else (plan.rows, plan.pages)
        pool = StatePool(model, rows, poison, plan)
        table = RowTable(rows, (len(config.moe_layers), config.num_experts_per_token))
        prefix = None
        if prefix_cache is not None:
            prefix = PrefixStates(prefix_cache, pool, table, self.weights, carries=not self._recomputes)
        scheduler = Scheduler(rows, prefill_tokens or prefill_step(model), pages, page_tokens, dense=not fixed)
        self.batch = Batch(scheduler, pool, table, prefix, seed)

        super().__init__(self.batch.ended, self.batch.requests, partial(_refuse_to_wait, self))

        self.captured_decode: CapturedDecode | None = None
        self.captured_prefill: CapturedPrefill | None = None
        if fixed and pool.paged is not None:
            self.captured_decode = CapturedDecode(model, pool.paged)
            self.captured_prefill = CapturedPrefill.where_it_pays(model, pool.paged, max_context)
        given = self.batch, self.weights
        self._prefill = Prefill(*given, grammars, self.counters, self.captured_prefill, exact=exact)
        self._decoder = Decoder(*given, self.counters, self.captured_decode, exact=exact, overlaps=overlap)
        if prefix is not None:
            prefix.read_ahead = self._decoder.route_ahead
        self._sample_by: Sample = exact_mode.sample if exact else device_sampler.sample

    @property
    def model(self) -> K3ForCausalLM:
        """The model that samples the next token."""
        return self.weights.model

    @property
    def version(self) -> int:
        """The weight version that samples the next token."""
        return self.weights.version

    @property
    def manifest(self) -> dict[str, str]:
        """Official name -> digest of the weights that are served."""
        return self.weights.manifest

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return self.batch.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Requests with a row, being prefilled or decoded."""
        return self.batch.scheduler.num_running

    @property
    def max_running(self) -> int:
        """Requests that can have a row at a time."""
        return self.batch.scheduler.rows

    @property
    def is_paused(self) -> bool:
        """Whether a step computes nothing until `resume`."""
        return self._pause in ("keep", "abort") or (self._pause == "wait" and not self.num_running)

    # ---- requests

    def submit(
        self, prompt_ids: Sequence[int] | Prompt, params: SamplingParams, images: Sequence[ImagePatches] = ()
    ) -> int:
        """Queues one prompt and returns its id. images: one for each placeholder of the prompt, in order.

        Raises InvalidRequest for an empty prompt, an id outside the vocabulary, images that do not fit the prompt or
        the model, a prompt longer than the context (an image counts all its rows), max_tokens that do not fit behind
        it, or options that this engine cannot keep.
        """
        return self.batch.add(self._admission.check(prompt_ids, params, images))

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches] = ()) -> Prompt:
        """Raises InvalidRequest as `submit` would, and queues nothing -> the prompt, which any number of requests may
        be submitted with: it is checked and copied once. Any thread may ask."""
        running = self._admission.check(prompt_ids, params, images)
        return Prompt(running.prompt, running.images, running.key)

    def abort(self, *requests: int) -> None:
        """Frees their slots at once; the next `step` returns them as aborted. Raises UnknownRequest for those that are
        not live, once the others are aborted."""
        live = [running for number in requests if (running := self.batch.requests.get(number)) is not None]
        version_for = self.weights.version_for
        self.batch.end([(running, self.batch.aborted(running, version_for(running.params))) for running in live])
        if len(live) < len(requests):
            self.batch.find(next(number for number in requests if number not in {one.number for one in live}))

    def clear(self) -> None:
        """Forgets every request without an outcome, in whatever state a step that raised has left them."""
        self.batch.clear()

    def end_sessions(self, *names: str) -> None:
        """These conversations do not go on: what is kept for them is let go."""
        self.batch.end_sessions(names)

    def new_tokens(self, request: int, seen: int, routed: int = 0) -> Tokens | None:
        """What a live request has sampled beyond `seen` tokens, if anything, with its routes beyond those of `routed`
        tokens of prompt and answer where it wants them."""
        running = self.batch.find(request)
        held = self.batch.held(running, seen)
        if held is None or not held.tokens.size:
            return None
        others = () if held.alternatives is None else tuple(held.alternatives)
        ids, logprobs = tuple(held.tokens.tolist()), tuple(held.logprobs.tolist())
        return Tokens(ids, logprobs, others, self.batch.routes(running, routed))

    def pause(self, mode: PauseMode) -> None:
        """keep: freeze everything; abort: end everything now; wait: finish what has a row, admit nothing.

        Requests may be submitted during a pause and wait. With `wait`, the pause is reached when `num_running` is 0.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause mode is {mode!r}; it must be 'keep', 'abort' or 'wait'")
        self._pause = mode
        if mode == "abort":
            self.abort(*self.batch.requests)

    def resume(self) -> None:
        """Ends a pause."""
        self._pause = None

    # ---- one step

    def step(self) -> list[tuple[int, Outcome]]:
        """Samples one token for every running request; returns the requests that ended since the last call."""
        if self._pause in (None, "wait") and self.batch.requests:
            began = time.perf_counter()
            with torch.inference_mode():
                self.counters.preempted += self.batch.make_room()
                plan = self.batch.plan(admit=self._pause is None)
                parts = self._prefill.run(plan)
                decoded = self._decoder.decode(plan.decode, alone=not parts)
                self._sample([*parts, *decoded.parts], decoded.drawn)
            self.counters.steps += 1
            self.counters.step_s += time.perf_counter() - began
        return self.batch.ended.take()

    def _sample(self, parts: list[RowLogits], drawn: list[DrawnRows]) -> None:
        """Samples the rows of `parts` from their logits; they and those of `drawn` take what they drew."""
        table, ended = self.batch.table, list[tuple[Running, Outcome]]()
        by_versions = [(rows, draws, np.full(len(rows), version)) for rows, draws, version in drawn]
        rows = np.concatenate([rows for rows, _ in parts]) if parts else np.empty(0, np.int64)
        if rows.size:
            logits = torch.cat([logits for _, logits in parts]) if len(parts) > 1 else parts[0][1]
            rows, draws, dead = sample_rows(table, rows, logits, self._sample_by)
            by_versions.insert(0, (rows, draws, self.weights.versions_in(rows, table.running)))
            ended += [(running, DeadEnd.of(running.number)) for running in table.running[dead]]
        for rows, draws, versions in by_versions:
            complete = table.append(rows, draws, versions)
            self.counters.sampled_tokens += int(draws.finite.sum())
            ended += [(table.running[row], table.completion(row)) for row in complete]
            if not draws.finite.all():
                broken = rows[~draws.finite]
                errors = diagnose.errors_of(self.weights, self.batch.pool, table, broken)
                ended += zip(table.running[broken], errors, strict=True)
        self.batch.end(ended)

    # ---- weights

    def init_weight_transfer(self, names: Iterable[str]) -> None:
        """Handshake at start: raises WeightUpdateError unless `names` are the tensors that this model stores."""
        check_names(self.model, names)

    def start_weight_update(self, version: int, manifest: Mapping[str, str]) -> None:
        """Opens an update to a later version. manifest: official name -> `k3rl.checkpoint.digest` of the stored
        tensor.
        """
        self.weights.open(WeightUpdate(version, manifest))

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes stored tensors in. They must not change until the update is verified. An error drops the update."""
        self.weights.add(named_tensors)

    def start_weight_delta(self, header: bytes) -> None:
        """Opens an update that is a delta (`k3rl.checkpoint.delta`) to the served version; refuses one to another."""
        self.weights.open_delta(header)

    def update_weights_by_delta(self, bucket: bytes) -> None:
        """Takes a bucket of the delta in, in any order. An error drops the update."""
        self.weights.add_bucket(bucket)

    def start_flat_update(self, version: int, shards: Sequence[FlatShard]) -> None:
        """Opens an update to a later version, which comes in a flat buffer for each of these shards."""
        self.weights.open_flat(version, shards)

    def update_weights_by_shard(self, number: int, buffer: Tensor) -> None:
        """Proves and takes in shard `number`, uint8 [n] on the model's device. An error drops the update.

        Steps may run meanwhile in another thread, and while the update is verified.
        """
        self.weights.add_shard(number, buffer)

    def verify_weight_update(self) -> None:
        """First phase: proves the update whole and builds its model, or adapter, beside the one that serves.

        Raises WeightUpdateError and drops the update when a tensor is missing, altered or does not fit.
        """
        self.weights.verify()

    def finish_weight_update(self, version: int) -> None:
        """Second phase: serves the new version from the next token on, verifying it first when that is not done.

        Raises WeightUpdateError and drops the update, as `verify_weight_update` does or for another version.
        """
        adapter = self.weights.finish(version)
        if self._recomputes:
            self.counters.recomputed_tokens += self.batch.recompute(adapter)
        self.batch.restart()
        if self.batch.prefix is not None and adapter is None:
            self.batch.prefix.clear()

    def abort_weight_update(self) -> None:
        """Drops an open or prepared update, if any; the current version stays."""
        self.weights.abort()


def totals_of(engine: Engine) -> dict[str, float]:
    """What an engine has counted since it started, by the names of a run's metrics (`docs/runs.md`)."""
    counters, cache = engine.counters, engine.prefix_cache
    return {
        "prompt_tokens_computed": counters.prefilled_tokens,
        "prompt_tokens_cached": counters.cached_tokens,
        "sampled_tokens": counters.sampled_tokens,
        "recomputed_tokens": counters.recomputed_tokens,
        "preempted": counters.preempted,
        "decode_steps": counters.decode_steps,
        "ahead_steps": counters.ahead_steps,
        "split_steps": counters.split_steps,
        "uncaptured_steps": counters.uncaptured_steps,
        "evicted_states": 0 if cache is None else cache.evicted,
    }


def _refuse_to_wait(engine: Engine) -> None:
    """Raises EngineError while the engine is paused: whoever waited for its requests would do so without end."""
    if engine.is_paused:
        raise EngineError(f"the engine is paused ({engine._pause}) and requests wait; call resume first")
