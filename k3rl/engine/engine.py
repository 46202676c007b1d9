"""The rollout engine: continuous batching of one K3 model, tokens and logprobs that training can trust.

A step computes at most `prefill_tokens` tokens of waiting prompts in one packed call, decodes every running row
in another, and samples once over both. Rows that end leave at once and waiting requests take their place.
Single-threaded: whoever drives it calls `step` in a loop and may submit, abort, pause or update weights in between.

State across a weight update: the states of running requests are computed again from their tokens by the new weights,
or, with `in_flight="carry"`, they go on with what the old ones computed; a completion names the versions of its first
and last token. Prompts that nothing has been sampled from yet start over under the new weights either way.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from k3rl.data.images import ImagePatches
from k3rl.engine import diagnose, memory, weights
from k3rl.engine.adapters import AdapterStore
from k3rl.engine.cache import MemoryPlan, StatePool
from k3rl.engine.compute import exact
from k3rl.engine.compute.decode_graph import DecodeProgram, captures
from k3rl.engine.compute.decoding import Decoder
from k3rl.engine.compute.prefill_graph import PrefillProgram, prefill_program
from k3rl.engine.counters import EngineCounters
from k3rl.engine.images import Placed, image_inputs
from k3rl.engine.prefix.cache import Hit, PrefixCache
from k3rl.engine.prefix.states import Checkpoints
from k3rl.engine.prompts import check_options, checked_prompt
from k3rl.engine.protocol import (
    EngineError,
    InFlight,
    InvalidRequest,
    NonFiniteLogits,
    Outcome,
    PauseMode,
    UnknownRequest,
)
from k3rl.engine.rows import Progress, PromptState, Request, RowTable
from k3rl.engine.sampling import alternatives, device_sampler, sampler
from k3rl.engine.sampling.grammar import DeadEnd, Grammars, constrain
from k3rl.engine.sampling.sampler import Draws
from k3rl.engine.sampling.stopping import StopStrings
from k3rl.engine.scheduler import Scheduler, Segment, portions
from k3rl.engine.weights import DeltaUpdate, DirectoryUpdate, Update, WeightReceiver, WeightUpdate, check_names
from k3rl.model import K3ForCausalLM
from k3rl.tokens import Tokenizer
from k3rl.types import Completion, SamplingParams, StopReason


class Engine:
    """A `RolloutEngine` over one in-process model, which it never writes to: a new version is a new copy.

    max_running: rows, that is requests that can be decoded together. max_context: prompt plus sampled tokens of one
    request, images by their rows, at most (default and upper bound: the model's `max_position_embeddings`).
    prefill_tokens: prompt tokens per step. seed: of requests that bring none. version: number of the weights that
    `model` holds. poison: fill rows that nobody owns with NaN, so that a state read by mistake is seen. tokenizer:
    for stop strings only. prefix_cache: keeps the states at prompt and turn ends, for prompts that begin with them.
    memory_bytes: what states and latents may take together. Latents then live in pages of `page_tokens`, there are as
    many rows as leave room for one longest request, requests are admitted by the pages left, and the youngest are
    preempted (and go on with the same tokens) when running ones need them; how many are admitted follows from how
    often that happened (`throttle.py`). "auto": a share of what the machine has free, when `max_running` requests of
    `max_context` tokens could take more than that. None: `max_running` is the only limit.
    in_flight: what running requests do when the weights change: recompute their states, or carry them on.
    exact: computes every row by itself, so that logprobs are the bits of `k3rl.model.exact`; many times slower.
    static_decode: decodes by `decode_graph.DecodeProgram`, and computes few prompt tokens by
    `prefill_graph.PrefillProgram`; None: on a GPU whose kernels the model fits, captured.
    overlap: such steps may be started before the tokens of the last one are read (`decoding.py`); results are equal.
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
        prefill_tokens: int = 8192,
        version: int = 0,
        tokenizer: Tokenizer | None = None,
        prefix_cache: PrefixCache | None = None,
        memory_bytes: int | Literal["auto"] | None = "auto",
        page_tokens: int = 64,
        in_flight: InFlight = "recompute",
        exact: bool = False,
        static_decode: bool | None = None,
        overlap: bool = True,
        packed: bool = True,
    ) -> None:
        model, config = weights.as_served(model, exact) if packed else model, model.config
        self._in_flight, self._exact = in_flight, exact
        self.model, self.max_context = model, max_context or config.max_position_embeddings
        if self.max_context > config.max_position_embeddings:
            raise ValueError(f"max_context is {max_context}; the model allows {config.max_position_embeddings}")
        self.seed, self._version, self._tokenizer = seed, version, tokenizer
        self.counters, self._grammars = EngineCounters(), Grammars(tokenizer, config.vocab_size)
        fixed = not exact and (captures(model) if static_decode is None else static_decode)
        plan = MemoryPlan.when_needed(model, memory_bytes, max_running, self.max_context, page_tokens, fixed)
        max_running = max_running if plan is None else plan.rows
        self._scheduler = Scheduler(max_running, prefill_tokens, None if plan is None else plan.pages, page_tokens)
        self._pool = StatePool(model, max_running, poison, plan)
        self.program = DecodeProgram(model, self._pool.paged) if fixed and self._pool.paged is not None else None
        self.prefill: PrefillProgram | None = None
        if self.program is not None and self._pool.paged is not None:
            self.prefill = prefill_program(model, self._pool.paged, self.max_context)
        self._table = RowTable(max_running, (len(config.moe_layers), config.num_experts_per_token))
        self._prompts = [PromptState() for _ in range(max_running)]  # of rows being prefilled
        self._spare: PromptState | None = None  # of the state in the spare row
        self.prefix_cache = prefix_cache
        self._hits: dict[int, Hit] = {}  # found for requests that are admitted in this step
        self._requests: dict[int, Request] = {}
        self._submitted = 0
        self._ended: list[tuple[int, Outcome]] = []  # not yet handed out by `step`
        self._pause: PauseMode | None = None
        self._receiver, self.adapters = WeightReceiver(model), AdapterStore()
        self._checkpoints: Checkpoints | None = None
        if prefix_cache is not None:
            self._checkpoints = Checkpoints(
                prefix_cache, self._pool, self._table, self.adapters, self._requests, whole_blocks=exact
            )
        self._decoder = Decoder(
            self._pool, self._table, self.adapters, self._requests, self.counters, self.program, exact=exact,
            overlaps=overlap and prefix_cache is None and in_flight == "recompute",
        )  # fmt: skip

    @property
    def version(self) -> int:
        """The weight version that samples the next token."""
        return self._version

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Requests with a row, being prefilled or decoded."""
        return len(self._scheduler.occupants)

    # ---- requests

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches] = ()) -> int:
        """Queues one prompt and returns its id. images: one for each placeholder of the prompt, in order.

        Raises InvalidRequest for an empty prompt, an id outside the vocabulary, images that do not fit the prompt or
        the model, a prompt longer than the context (an image counts all its rows), max_tokens that do not fit behind
        it, or options that this engine cannot keep.
        """
        return self._queue(*self._validated(prompt_ids, params, images), params)

    def _queue(self, prompt: np.ndarray, placed: Placed, params: SamplingParams) -> int:
        number, self._submitted = self._submitted, self._submitted + 1
        seed = sampler.request_seed(params.seed, self.seed, number)
        stop = StopStrings(params.stop, self._tokenizer) if params.stop and self._tokenizer is not None else None
        self._requests[number] = Request(number, prompt, params, seed, stop, images=placed)
        self._scheduler.submit(number, (prompt.tobytes(), params.cache_salt, params.adapter), len(prompt))
        return number

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches] = ()) -> None:
        """Raises InvalidRequest as `submit` would, and queues nothing. Any thread may ask."""
        self._validated(prompt_ids, params, images)

    def abort(self, request: int) -> None:
        """Frees the request's slot at once; the next `step` returns it as aborted. Raises UnknownRequest."""
        self.held(request)
        self._end([(request, self._aborted(request))])

    def sampled(self, request: int, start: int = 0) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """(ids, logprobs) of what a live request has sampled from its `start`-th token on; nothing while it waits."""
        if (held := self.held(request)) is None:
            return (), ()
        return tuple(held.tokens[start:].tolist()), tuple(held.logprobs[start:].tolist())

    def routes(self, request: int, start: int = 0) -> np.ndarray | None:
        """int16 [n, M, k] of prompt and sampled tokens from the `start`-th on, as far as known; None without any."""
        held, row = self.held(request), self._scheduler.row_of.get(request)
        if row is not None:
            return self._table.routes_of(row, start)
        return None if held is None or held.routes is None else held.routes[start:]

    def held(self, request: int) -> Progress | None:
        """What a live request has, its routes aside, in arrays that its next step changes; None while it waits."""
        if request not in self._requests:
            raise UnknownRequest(f"request {request} is neither waiting nor running: it ended or never was")
        row = self._scheduler.row_of.get(request)
        return self._requests[request].progress if row is None else self._table.held(row)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        images: Sequence[Sequence[ImagePatches]] | None = None,
    ) -> list[Completion]:
        """Completes all prompts, in their order; images: those of each prompt.

        Raises InvalidRequest before any work, or a request's EngineError.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        asked = list(zip(prompts, each, [()] * len(prompts) if images is None else images, strict=True))
        checked = [self._validated(*one) for one in asked]
        numbers = [self._queue(*one, params) for one, params in zip(checked, each, strict=True)]
        outcomes: dict[int, Outcome] = {}
        while not outcomes.keys() >= set(numbers):
            self._refuse_if_stalled()
            outcomes.update(self.step())
        mine = [outcomes.pop(number) for number in numbers]
        self._ended += outcomes.items()  # of requests that others submitted
        for outcome in mine:
            if isinstance(outcome, EngineError):
                raise outcome
        return [outcome for outcome in mine if isinstance(outcome, Completion)]

    def samples(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, images: Sequence[ImagePatches] = ()
    ) -> list[Completion]:
        """n completions of one prompt, which is computed once; a seed gives each its own, the first one itself."""
        return self.generate([prompt_ids] * n, sampler.request_samples(params, n), [images] * n)

    def drain(self) -> list[tuple[int, Outcome]]:
        """Runs until every submitted request has ended, and returns the outcomes not handed out yet."""
        outcomes: list[tuple[int, Outcome]] = []
        while self._requests:
            self._refuse_if_stalled()
            outcomes += self.step()
        return outcomes + self.step()

    def pause(self, mode: PauseMode) -> None:
        """keep: freeze everything; abort: end everything now; wait: finish what has a row, admit nothing.

        Requests may be submitted during a pause and wait. With `wait`, the pause is reached when `num_running` is 0.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause mode is {mode!r}; it must be 'keep', 'abort' or 'wait'")
        self._pause = mode
        if mode == "abort":
            self._end([(number, self._aborted(number)) for number in list(self._requests)])

    def resume(self) -> None:
        """Ends a pause."""
        self._pause = None

    # ---- one step

    def step(self) -> list[tuple[int, Outcome]]:
        """Samples one token for every running request; returns the requests that ended since the last call."""
        if self._pause in (None, "wait") and self._requests:
            began = time.perf_counter()
            with torch.inference_mode():
                self._advance(admit=self._pause is None)
            self.counters.steps += 1
            self.counters.step_s += time.perf_counter() - began
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, admit: bool) -> None:
        victims = self._scheduler.overcommitted()
        if victims:
            self._preempt(victims)
            self.counters.preempted += len(victims)
        if self._scheduler.spare is None:
            self._drop_spare()
        plan = self._scheduler.plan(admit, self._cached if self._checkpoints is not None else None)
        for number, row in plan.cached:
            hit = self._hits[number]
            self._pool.restore(row, hit)
            known = [None] if hit.routes is None else hit.routes.pieces
            self._prompts[row] = PromptState([*known], hit.fixed.hidden, cached=hit.length)
        self._hits.clear()
        parts = []
        if plan.from_spare:  # before the prefill, which may put another prompt into the spare row
            parts.append(self._start_from_spare(plan.from_spare))
        if plan.drop_spare:
            self._drop_spare()
        if plan.segments:
            parts.append(self._prefill(plan.segments))
        decoded = self._decoder.decode(self.model, plan.decode, not parts, self._scheduler.fits)
        self._sample([*parts, *decoded.parts], decoded.drawn)

    def _cached(self, members: Sequence[int]) -> int:
        """How many tokens of these requests' prompt the prefix cache has; the hit is kept for this step."""
        assert self._checkpoints is not None
        hit = self._checkpoints.find(members, self._version)
        if hit is None:
            return 0
        self._hits[members[0]] = hit
        return hit.length

    def _start_from_spare(self, pairs: list[tuple[int, int]]) -> tuple[np.ndarray, Tensor]:
        spare = self._spare
        if spare is None or spare.logits is None:
            raise EngineError("the scheduler admits from the spare row, and the spare row holds no prompt")
        self._pool.copy([(self._pool.spare, row) for _, row in pairs])
        return self._start(pairs, spare), spare.logits.expand(len(pairs), -1)

    def _prefill(self, segments: list[Segment]) -> tuple[np.ndarray, Tensor]:
        """Computes all segments in one packed call; (rows, logits [rows, V]) of the prompts that it completes."""
        began = time.perf_counter()
        fresh = [segment.row for segment in segments if segment.start == 0]
        self._pool.reset(fresh)
        for row in fresh:
            self._prompts[row] = PromptState()
        work = [segment for segment in segments if segment.stop > segment.start]
        for name, own in self.adapters.grouped(work, lambda s: self._requests[s.request].params.adapter):
            with self.adapters.serving(self.model, name):
                for run in portions(own, memory.prefill_run(self.model)):
                    self._compute(run)
        complete = [segment for segment in segments if segment.starts]
        hidden = [last for segment in complete if (last := self._prompts[segment.row].hidden) is not None]
        if self._exact or not hidden:
            logits = exact.logits(self.model, hidden, [segment.stop for segment in complete])
        else:
            logits = self.model.logits(torch.cat(hidden))
        self.counters.prefill_s += time.perf_counter() - began
        return self._start_groups(complete, logits)

    def _compute(self, segments: list[Segment]) -> None:
        """Runs prompt tokens through the model; their routes and last hidden rows go to the rows' prompts."""
        if self._exact:
            for s in segments:
                request, own = self._requests[s.request], self._prompts[s.row]
                given = (request.ids[: s.stop], s.start, request.images, own.features)
                own.hidden, routes = exact.compute(self.model, self._pool, s.row, *given)
                own.routes.append(routes)
                self.counters.prefilled_tokens += s.stop - s.start
            return
        ids = np.concatenate([self._requests[s.request].ids[s.start : s.stop] for s in segments])
        counts = [s.stop - s.start for s in segments]
        bounds = np.cumsum([0, *counts])
        self._pool.claim([s.row for s in segments], counts)
        if self.prefill is not None and self.prefill.takes(self.model, ids, counts):
            last, chosen = self.prefill.run(self.model, [s.row for s in segments], ids, counts)
        else:
            read = [
                (self._requests[s.request].images, self._prompts[s.row].features, s.start, s.stop) for s in segments
            ]
            out = self.model.hidden(
                self._tensor(ids.clip(0))[None],
                cu_seqlens=torch.from_numpy(bounds),
                cache=self._pool.view([s.row for s in segments]),
                images=image_inputs(self.model, read),
            )
            last, chosen = [out.hidden[0, end - 1 : end] for end in bounds[1:].tolist()], out.routes[0]
        self.counters.prefilled_tokens += len(ids)
        for segment, part, row in zip(segments, np.split(chosen.cpu().numpy(), bounds[1:-1]), last, strict=True):
            prompt = self._prompts[segment.row]
            prompt.routes.append(part)
            prompt.hidden = row

    def _start_groups(self, segments: list[Segment], logits: Tensor) -> tuple[np.ndarray, Tensor]:
        """Copies computed prompts to their siblings, and to the spare when some wait for a row.

        logits [S, V] of the S prompts' last tokens -> (rows [R], logits [R, V]) of all who sample from them.
        """
        copies, rows, source = [], [], []
        for index, segment in enumerate(segments):
            prompt, self._prompts[segment.row] = self._prompts[segment.row], PromptState()
            prompt.logits = logits[index : index + 1]
            if self._checkpoints is not None:
                self._checkpoints.keep_prompt(segment.request, segment.row, prompt, self._version)
            rows.append(self._start(segment.starts, prompt))
            source += [index] * len(segment.starts)
            copies += [(segment.row, row) for _, row in segment.starts[1:]]
            if segment.hold:
                copies.append((segment.row, self._pool.spare))
                self._spare = prompt
        self._pool.copy(copies)
        return np.concatenate(rows or [np.empty(0, np.int64)]), logits[source]

    def _start(self, pairs: Sequence[tuple[int, int]], prompt: PromptState) -> np.ndarray:
        for number, row in pairs:
            request = self._requests[number]
            if request.params.return_routes:
                prompt.join_routes()
            matcher = self._grammars.matcher(request)
            routes = prompt.routes[0] if request.params.return_routes else None
            self._table.start(row, request, routes, self._version_of(request), prompt.cached, matcher)
            if request.progress is not None:
                self._table.resume(row, request, request.progress)
        return np.array([row for _, row in pairs])

    def _keep_turns(self, keeper: Checkpoints, ended: list[tuple[int, Outcome]]) -> None:
        """Gives the states of rows that end well to the prefix cache.

        A row that was carried over a weight update has states of two versions and is not kept.
        """
        for number, outcome in ended:
            row = self._scheduler.row_of.get(number)
            if row is None or isinstance(outcome, EngineError):
                continue
            version = self._version_of(self._requests[number])
            if self._in_flight == "carry" and self._table.first_version[row] != version:
                continue
            keeper.keep_turn(number, row, self._version)

    def _sample(self, parts: list[tuple[np.ndarray, Tensor]], drawn: list[tuple[np.ndarray, Draws]]) -> None:
        """Samples the rows of `parts` from their logits; they and those of `drawn` take what they drew."""
        ended: list[tuple[int, Outcome]] = []
        rows = np.concatenate([rows for rows, _ in parts]) if parts else np.empty(0, np.int64)
        if rows.size:
            logits = torch.cat([logits for _, logits in parts]) if len(parts) > 1 else parts[0][1]
            drawn = [self._draw(rows, logits, ended), *drawn]
        for rows, draws in drawn:
            complete = self._table.append(
                rows, draws, self.adapters.versions(rows, self._decoder.adapter_in, self._version)
            )
            self.counters.sampled_tokens += int(draws.finite.sum())
            ended += [(int(self._table.request[row]), self._table.completion(row)) for row in complete]
            if not draws.finite.all():
                ended += self._broken(rows[~draws.finite])
        self._end(ended)

    def _draw(self, rows: np.ndarray, logits: Tensor, ended: list[tuple[int, Outcome]]) -> tuple[np.ndarray, Draws]:
        table = self._table
        free = constrain(table, rows, logits)
        ended += [(number, DeadEnd.of(number)) for number in table.request[free.dead].tolist()]
        rows, biases = free.rows, table.biases(free.rows)
        draws = (exact.sample if self._exact else device_sampler.sample)(
            free.logits,
            table.temperature[rows],
            table.top_p[rows],
            table.top_k[rows],
            sampler.uniforms(table.seed[rows], table.count[rows]),
            table.min_p[rows],
            biases,
            free.allowed,
        )
        alternatives.record(table, free, biases, draws)
        return rows, draws

    # ---- endings

    def _end(self, ended: list[tuple[int, Outcome]]) -> None:
        """Forgets requests, closes the holes they leave, and frees the rows at the end."""
        if not ended:
            return
        if self._checkpoints is not None:
            self._keep_turns(self._checkpoints, ended)
        used = len(self._scheduler.occupants)
        self._close_holes(self._scheduler.remove([number for number, _ in ended]), used)
        for number, _ in ended:
            del self._requests[number]
            if self._checkpoints is not None:
                self._checkpoints.forget(number)
        self._ended += ended

    def _preempt(self, victims: list[int], keep: bool = True) -> int:
        """Running requests, the youngest first, lose their rows and wait, with what they have sampled, to be computed
        again; how many tokens that is. keep: their states are of use to the prefix cache."""
        if keep and self._checkpoints is not None:
            self._keep_turns(self._checkpoints, [(number, self._aborted(number)) for number in victims])
        waiting = []
        for number in victims:
            request = self._requests[number]
            progress = self._table.progress(self._scheduler.row_of[number])
            self._requests[number] = dataclasses.replace(request, progress=progress)
            waiting.append((number, len(request.prompt) + len(progress.tokens)))
        used = len(self._scheduler.occupants)
        self._close_holes(self._scheduler.preempt(waiting), used)
        return sum(length for _, length in waiting)

    def _close_holes(self, moves: list[tuple[int, int]], used: int) -> None:
        """Follows the scheduler's moves and frees the rows behind the last one in use; `used` were in use before."""
        self._pool.move(moves)
        self._table.move(moves)
        for source, target in moves:
            self._prompts[target] = self._prompts[source]
        self._pool.free(range(len(self._scheduler.occupants), used))
        if self._spare is not None and self._scheduler.spare is None:
            self._drop_spare()

    def _aborted(self, number: int) -> Completion:
        row = self._scheduler.row_of.get(number)
        if row is not None:
            return self._table.completion(row, aborted=True)
        request = self._requests[number]
        if request.progress is not None:
            return request.progress.aborted()
        return Completion((), (), StopReason.ABORTED, self._version_of(request), self._version_of(request))

    def _broken(self, rows: np.ndarray) -> list[tuple[int, Outcome]]:
        """Errors of the rows whose logits are not finite. One is examined: a broken model breaks all of them."""
        table = self._table
        ended: list[tuple[int, Outcome]] = []
        for row in rows.tolist():
            number = int(table.request[row])
            ids = np.concatenate([self._requests[number].prompt, table.tokens[row, : table.count[row]]])
            if not ended:
                placed = self._requests[number].images
                with self.adapters.serving(self.model, self._decoder.adapter_in(row)):
                    layer, detail = diagnose.describe(self.model, self._pool, row, self._tensor(ids), placed)
            else:
                layer, detail = None, f"request {ended[0][0]} broke in the same step and was examined"
            ended.append((number, NonFiniteLogits(number, len(ids) - 1, layer, detail)))
        return ended

    # ---- weights

    def init_weight_transfer(self, names: Iterable[str]) -> None:
        """Handshake at start: raises WeightUpdateError unless `names` are the tensors that this model stores."""
        check_names(self.model, names)

    @property
    def manifest(self) -> dict[str, str]:
        """Official name -> digest of the weights that are served."""
        return self._receiver.manifest(self.model)

    def start_weight_update(self, version: int, manifest: Mapping[str, str]) -> None:
        """Opens an update to a later version. manifest: official name -> `weights.digest` of the stored tensor."""
        self._open(WeightUpdate(version, manifest))

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes stored tensors in. They must not change until the update is verified. An error drops the update."""
        self._receiver.add(named_tensors)

    def _open(self, update: Update) -> None:
        self.adapters.refuse_new_weights()
        self._receiver.open(update, self._version)

    def start_weight_delta(self, header: bytes) -> None:
        """Opens an update that is a delta (`k3rl.checkpoint.delta`) to the served version; refuses one to another."""
        self._open(DeltaUpdate(header, self._version, self.model, self.manifest))

    def update_weights_by_delta(self, bucket: bytes) -> None:
        """Takes a bucket of the delta in, in any order. An error drops the update."""
        self._receiver.add_bucket(bucket)

    def load_weight_update(self, version: int, directory: Path, manifest: Mapping[str, str] | None = None) -> None:
        """First phase of an update from a checkpoint directory: proves it (by `manifest`, if given) and builds it."""
        self._open(DirectoryUpdate(version, directory, manifest))
        self._receiver.verify(self.model)

    def verify_weight_update(self) -> None:
        """First phase: proves the update whole and builds its model, or adapter, beside the one that serves.

        Raises WeightUpdateError and drops the update when a tensor is missing, altered or does not fit.
        """
        if not self.adapters.verify(self.model):
            self._receiver.verify(self.model)

    def finish_weight_update(self, version: int) -> None:
        """Second phase: serves the new version from the next token on, verifying it first when that is not done.

        Raises WeightUpdateError and drops the update, as `verify_weight_update` does or for another version.
        """
        name = self.adapters.finish(version, self.model)  # of an adapter; None when the model itself is exchanged
        if name is None:
            self.adapters.refuse_new_weights(self._receiver.abort)  # some may have come since the update was opened
            self.model, self._version = self._receiver.take(version, self.model), version
        if self._in_flight == "recompute":
            running = [n for n in self._scheduler.row_of if name in (None, self._requests[n].params.adapter)]
            running.sort(reverse=True)
            self.counters.recomputed_tokens += self._preempt(running, keep=False)
        self._scheduler.restart()
        self._drop_spare()
        if self._checkpoints is not None and name is None:
            self._checkpoints.clear()

    def abort_weight_update(self) -> None:
        """Drops an open or prepared update, if any; the current version stays."""
        self._receiver.abort()
        self.adapters.abort()

    # ---- small things

    def _version_of(self, request: Request) -> int:
        return self.adapters.version(request.params.adapter, self._version)

    def _validated(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches] = ()
    ) -> tuple[np.ndarray, Placed]:
        """The prompt in rows, int64 [P], and where its images are."""
        prompt, placed = checked_prompt(prompt_ids, images, params.max_tokens, self.model.config, self.max_context)
        self._grammars.check(params)
        self.adapters.check(params.adapter)
        if self._exact and params.adapter:
            raise InvalidRequest("an exact engine does not compute adapters; use an engine without `exact` for them")
        check_options(params, self.model.config.vocab_size, has_tokenizer=self._tokenizer is not None)
        return prompt, placed

    def _refuse_if_stalled(self) -> None:
        """A paused engine would be waited for without end."""
        stalled = self._pause in ("keep", "abort") or (self._pause == "wait" and self._scheduler.idle)
        if stalled and not self._ended:
            raise EngineError(f"the engine is paused ({self._pause}) and requests wait; call resume first")

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._pool.free([self._pool.spare])
            self._spare = None

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)
