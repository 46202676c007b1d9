"""A `RolloutEngine` over a vLLM server in its own environment, across HTTP.

Follows vLLM 0.33.0, read from its released package: `/inference/v1/generate` for tokens, the RL routes for pauses and
weights. The server is started with (one line):

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=folder/of/vllm_worker.py vllm serve MODEL --enable-scale-out
        --logprobs-mode processed_logprobs --return-sampling-mask --enable-return-routed-experts
        --worker-extension-cls vllm_worker.Worker --weight-transfer-config '{"backend": "k3rl"}'

State across a weight update: the caches of requests in flight are dropped and computed again from their tokens by the
new weights or, with `in_flight="carry"`, go on as the old ones computed them; both as in `Engine`. The prefix cache is
salted with the version, so no later request reads an old entry.
Draws are vLLM's own: a seed repeats a sample there, and is not the sample that `Engine` draws from it.
What was exercised against a real server, and what only against the fake of the tests, is in docs/vllm.md.
"""

from __future__ import annotations

import asyncio
import collections
import os
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import numpy as np
from torch import Tensor

from k3rl.data.images import ImagePatches
from k3rl.engine.prompts import check_numbers, token_row
from k3rl.engine.protocol import (
    ContextExceeded,
    EngineError,
    InvalidRequest,
    Outcome,
    PauseMode,
    UnknownRequest,
    WeightUpdateError,
)
from k3rl.engine.sampling import sampler
from k3rl.engine.vllm import wire
from k3rl.engine.vllm.client import Client, Deadlines, EngineLost, IncompatibleServer, Unreachable, handshake
from k3rl.engine.vllm.weights import BACKEND, WeightTransfer
from k3rl.engine.weights import digest
from k3rl.model import K3Config
from k3rl.types import Completion, SamplingParams, StopReason

_CANARY_TOKENS = 4


@dataclass(eq=False, slots=True)
class _Live:
    """A request that has not ended. `sent` while the server may have it; `label` of the version it was sent under."""

    number: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    name: str
    answer: wire.Answer
    aborted: bool = False
    sent: bool = False
    version: int = 0
    task: Future[None] | None = None
    done: threading.Event = field(default_factory=threading.Event)


class VLLMEngine:
    """A `RolloutEngine` that a vLLM server serves. Raises IncompatibleServer at once when the server lacks something.

    url: of the server. vocab_size, moe_layers (depth indexes of the M MoE layers) and experts_per_token k are those of
    the model being trained (`for_config` takes them from its config). model: the served name, needed when there are
    several. token: the server's API key. max_running: requests in flight; more wait here. version: number of the
    weights that the server holds now. require: of "sampling_masks" (top-p, top-k, min-p), "routes" and "weights"
    (updates), what the handshake insists on. transfer_dir: a folder that both sides see, through which weights go as
    safetensors files; None sends them inside the HTTP messages, `chunk_bytes` at most in each. in_flight: what running
    requests do when the weights change.

    Drive it from one thread, as `Engine`; use it as a context manager or call `close`.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        moe_layers: Sequence[int] = (),
        experts_per_token: int = 0,
        model: str | None = None,
        token: str | None = None,
        max_running: int = 256,
        seed: int = 0,
        version: int = 0,
        require: Collection[str] = ("sampling_masks", "weights"),
        transfer_dir: str | os.PathLike[str] | None = None,
        chunk_bytes: int = 64 << 20,
        deadlines: Deadlines | None = None,
        in_flight: Literal["recompute", "carry"] = "recompute",
    ) -> None:
        if unknown := set(require) - {"sampling_masks", "routes", "weights"}:
            raise ValueError(f"require names {sorted(unknown)}; it may hold 'sampling_masks', 'routes' and 'weights'")
        if max_running < 1:
            raise ValueError(f"max_running is {max_running}; it must be at least 1")
        self.vocab_size, self.seed = vocab_size, seed
        self._moe_layers, self._experts_per_token = tuple(moe_layers), experts_per_token
        self._model_name, self._require = model, tuple(require)
        self._deadlines, self._in_flight = deadlines or Deadlines(), in_flight
        self._requests: dict[int, _Live] = {}
        self._submitted = 0
        self._ended: collections.deque[tuple[int, Outcome]] = collections.deque()
        self._news = threading.Event()
        self._pause: PauseMode | None = None
        self._asleep = False
        self._dropped = False  # the weights, by a deep sleep
        self._canary: wire.Answer | None = None  # of before a sleep
        self._lost: str | None = None
        self._client = Client(url, token, self._deadlines, max_running)
        self._transfer = WeightTransfer(self._client, transfer_dir, chunk_bytes, self._lose)
        self._open = asyncio.Event()  # of the client's loop: requests may be sent
        self._slots = asyncio.Semaphore(max_running)
        try:
            self._connect(version)
        except BaseException:
            self._client.close()
            raise

    @classmethod
    def for_config(cls, url: str, config: K3Config, **options: Any) -> Self:
        """An engine for a model of this config."""
        return cls(
            url,
            vocab_size=config.vocab_size,
            moe_layers=config.moe_layers,
            experts_per_token=config.num_experts_per_token,
            **options,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Breaks off every request and the connection; the server goes on."""
        self._client.close()

    def reconnect(self, version: int) -> None:
        """A new handshake after the server was lost and started again with the weights of `version`."""
        self._lost, self._pause, self._asleep, self._dropped = None, None, False, False
        self._transfer.forget()
        self._connect(version)

    @property
    def version(self) -> int:
        """The weight version that samples the next token."""
        return self._version

    @property
    def num_running(self) -> int:
        """Requests that the server may have."""
        return sum(live.sent for live in list(self._requests.values()))

    @property
    def num_waiting(self) -> int:
        """Requests that wait here, for a place or for the end of a pause."""
        return len(self._requests) - self.num_running

    # ---- the server at start

    def _connect(self, version: int) -> None:
        self.served = handshake(self._client, self._model_name, self._require, BACKEND)
        self._run = uuid.uuid4().hex[:12]  # in labels and names, so that a restarted server cannot answer for this one
        self._versions: dict[str, int] = {}
        self._version = version
        self._versions[self._labelled(version)] = version
        if "weights" in self._require:
            self._transfer.cancel()
        self._client.call("POST", "/update_weight_version", body={"new_version": self._labelled(version)})
        try:
            self._probe()
        except EngineLost:
            raise
        except EngineError as error:
            raise IncompatibleServer(
                self._client.url, [f"an answer to two tokens as rollouts need it: {error}"]
            ) from error
        self._gate()

    def _labelled(self, version: int) -> str:
        return f"{self._run}-{version}"

    def _probe(self) -> None:
        """Samples two tokens and looks at everything that an answer must carry. Raises EngineError."""
        params = SamplingParams(top_k=1, max_tokens=2, return_routes="routes" in self._require)
        answer = self._ask_alone([self.vocab_size - 1], params, sampling_mask=self.served.sampling_mask)
        if not answer.spans or answer.spans[-1][0] != self._labelled(self._version):
            raise EngineError(f"vLLM answered with weight versions {answer.spans} right after one was set")
        if len(answer.ids) != 2 or max(map(abs, answer.logprobs)) > 1e-3:
            raise EngineError(
                f"with top_k 1 vLLM sampled {answer.ids} with logprobs {answer.logprobs}; two tokens of logprob 0 "
                "were wanted, so these are not the logprobs of the sampling distribution"
            )

    def _ask_alone(self, prompt: list[int], params: SamplingParams, *, sampling_mask: bool = True) -> wire.Answer:
        """One request past the queue, checked as all are."""
        answer = wire.Answer(len(prompt), params)
        name = f"{self._run}-probe-{uuid.uuid4().hex[:8]}"
        body = wire.generate_body(name, self.served.model, prompt, params, 0, name)
        self._client.wait(self._client.stream(body, answer.feed, lambda: True), self._deadlines.stall)
        if sampling_mask:
            answer.completion([self._version], self._moe_layers, self._experts_per_token)
        return answer

    # ---- requests

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches] = ()) -> int:
        """Queues one prompt and returns its id; see `RolloutEngine`.

        Raises InvalidRequest also for what vLLM would not do exactly as asked (`vllm_wire.check_options`) and for
        images, which this engine does not send; EngineLost after the server was lost.
        """
        prompt = self._validated(prompt_ids, params, images)
        self._refuse_if_lost()
        number, self._submitted = self._submitted, self._submitted + 1
        seed = wire.wire_seed(sampler.request_seed(params.seed, self.seed, number))
        live = _Live(number, prompt, params, seed, f"{self._run}-{number}", wire.Answer(len(prompt), params))
        self._requests[number] = live
        live.task = self._client.start(self._serve(live))
        return number

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches] = ()) -> None:
        """Raises InvalidRequest as `submit` would, and queues nothing."""
        self._validated(prompt_ids, params, images)

    def step(self) -> list[tuple[int, Outcome]]:
        """The requests that ended since the last call; waits a moment when there is none and some are running."""
        if not self._ended and self._requests and self._pause is None:
            self._news.wait(0.01)
        self._news.clear()
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def sampled(self, request: int, start: int = 0) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """(ids, logprobs) of what a live request has sampled from its `start`-th token on; nothing while it waits."""
        answer = self._live(request).answer
        count = min(len(answer.ids), len(answer.logprobs))
        return tuple(answer.ids[start:count]), tuple(answer.logprobs[start:count])

    def abort(self, request: int) -> None:
        """Takes a request back; the next `step` returns it as aborted. Raises UnknownRequest."""
        live = self._live(request)
        self._client.wait(self._take_back([live]), 3 * self._deadlines.call)
        live.done.wait(self._deadlines.call)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Completes all prompts, in their order. Raises InvalidRequest before any work, or a request's EngineError."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        for prompt, own in zip(prompts, each, strict=True):
            self.check(prompt, own)
        numbers = [self.submit(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
        outcomes: dict[int, Outcome] = {}
        while not outcomes.keys() >= set(numbers):
            self._refuse_if_stalled()
            outcomes.update(self.step())
        mine = [outcomes.pop(number) for number in numbers]
        self._ended.extend(outcomes.items())  # of requests that others submitted
        completions = []
        for outcome in mine:
            if isinstance(outcome, EngineError):
                raise outcome
            completions.append(outcome)
        return completions

    def drain(self) -> list[tuple[int, Outcome]]:
        """Runs until every submitted request has ended, and returns the outcomes not handed out yet."""
        outcomes: list[tuple[int, Outcome]] = []
        while self._requests:
            self._refuse_if_stalled()
            outcomes += self.step()
        return outcomes + self.step()

    # ---- on the client's loop

    async def _serve(self, live: _Live) -> None:
        """Carries one request to its one outcome."""
        outcome: Outcome
        try:
            outcome = await self._sampled(live)
        except asyncio.CancelledError:
            outcome = self._taken_back(live) if live.aborted else EngineError("the vLLM engine was closed")
        except EngineError as error:
            outcome = self._taken_back(live) if live.aborted and isinstance(error, Unreachable) else error
        except Exception as error:  # whatever it is, this request's caller must hear of it
            outcome = EngineError(f"the answer of vLLM could not be read ({type(error).__name__}: {error})")
        live.sent = False
        self._requests.pop(live.number, None)
        self._ended.append((live.number, outcome))
        self._news.set()
        live.done.set()

    async def _sampled(self, live: _Live) -> Completion:
        async with self._slots:
            give_up, pause = time.monotonic() + self._deadlines.busy, 0.05
            while True:
                if not self._open.is_set():
                    await self._open.wait()
                    give_up = time.monotonic() + self._deadlines.busy
                if live.aborted:
                    return self._taken_back(live)
                try:
                    return await self._attempt(live)
                except Unreachable:
                    live.sent = False
                    if live.aborted or time.monotonic() + pause > give_up:
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)

    async def _attempt(self, live: _Live) -> Completion:
        live.version, live.sent = self._version, True
        salt = wire.wire_salt(self._labelled(live.version), live.params.cache_salt)
        body = wire.generate_body(live.name, self.served.model, live.prompt, live.params, live.seed, salt)
        await self._client.stream(body, live.answer.feed, self._moving)
        versions = [self._number(label, live) for label, _, _ in live.answer.spans] or [self._version]
        if live.answer.ids and not live.answer.spans:
            raise EngineError("vLLM named no weight version for what it sampled")
        return live.answer.completion(versions, self._moe_layers, self._experts_per_token)

    def _number(self, label: str, live: _Live) -> int:
        version = self._versions.get(label)
        if version is None or version < live.version:
            raise EngineError(
                f"vLLM sampled under the weight version {label!r}, which this engine never set after version "
                f"{live.version} was served; it was restarted or updated by someone else: reconnect and publish again"
            )
        return version

    def _moving(self) -> bool:
        return self._pause is None

    def _taken_back(self, live: _Live) -> Completion:
        """What an aborted request had, where the server said no more about it: no routes and no sampling masks."""
        answer = live.answer
        version = live.version if answer.ids else self._version
        return Completion(tuple(answer.ids), tuple(answer.logprobs), StopReason.ABORTED, version, version)

    async def _take_back(self, lives: Sequence[_Live]) -> None:
        """Ends requests: those that wait at once, those that run by the server, or by hanging up on it."""
        for live in lives:
            live.aborted = True
            if not live.sent and live.task is not None:
                live.task.cancel()
        names = [wire.engine_id(live.name) for live in lives if live.sent]
        if names:
            try:
                await self._client.fetch("POST", "/abort_requests", body={"request_ids": names})
                await self._finished(lives, self._deadlines.call)
            except EngineError:
                pass  # hanging up, which comes next, ends a request as well
            for live in lives:
                if not live.done.is_set() and live.task is not None:
                    live.task.cancel()
        await self._finished(lives, self._deadlines.call)

    async def _finished(self, lives: Iterable[_Live], deadline_s: float) -> bool:
        end = time.monotonic() + deadline_s
        while not all(live.done.is_set() for live in lives):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.005)
        return True

    # ---- pauses and sleep

    def pause(self, mode: PauseMode) -> None:
        """keep: freeze everything; abort: end everything now; wait: finish what runs (returns then), admit nothing.

        Requests may be submitted during a pause and wait here.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause mode is {mode!r}; it must be 'keep', 'abort' or 'wait'")
        self._refuse_if_lost()
        self._pause = mode
        self._gate()
        lives = list(self._requests.values())
        if mode == "abort":
            for live in lives:
                live.aborted = True
        limit = self._deadlines.drain if mode == "wait" else self._deadlines.call
        self._client.call("POST", "/pause", query={"mode": mode}, deadline_s=limit)
        if mode == "abort":
            self._client.wait(self._take_back(lives), 4 * self._deadlines.call)
        elif mode == "wait":
            running = [live for live in lives if live.sent]
            self._client.wait(self._finished(running, self._deadlines.drain), 2 * self._deadlines.drain)

    def resume(self) -> None:
        """Ends a pause."""
        self._client.call("POST", "/resume")
        self._pause = None
        self._gate()

    def sleep(self, level: int = 1) -> None:
        """Frees the server's GPU memory: caches and, to host memory (1) or for good (2), weights. Aborts what runs.

        Needs a server started with --enable-sleep-mode.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level is {level}; 1 keeps the weights in host memory, 2 drops them")
        if self._pause is not None:
            raise EngineError(f"the engine is paused ({self._pause}); call resume before sleep")
        self._asleep = True  # from here on requests wait
        query = {"level": level, "mode": "abort"}
        try:
            self.pause("abort")
            self.resume()
            self._canary = self._greedy()
            self._client.call("POST", "/sleep", query=query, deadline_s=self._deadlines.update)
        except EngineError:
            self._asleep = self._client.call("GET", "/is_sleeping").get("is_sleeping", True)
            self._gate()
            raise
        self._dropped = level == 2

    def wake(self, tags: Sequence[str] = ()) -> None:
        """Takes the memory back, all of it or that of `tags` ("weights", "kv_cache").

        Weights that were kept are proved by a greedy sample from before; after level 2 requests wait for a weight
        update. Raises EngineLost when the server woke with other weights.
        """
        query = {"tags": list(tags)} if tags else None
        answer = self._client.call("POST", "/wake_up", query=query, deadline_s=self._deadlines.update)
        self._asleep = answer.get("status") != "awake" if isinstance(answer, Mapping) else False
        if not self._asleep and not self._dropped:
            before, after = self._canary, self._greedy()
            # Equal weights give equal tokens, and logprobs that differ by less than any other weights would.
            if before is not None and (
                before.ids != after.ids or not np.allclose(before.logprobs, after.logprobs, rtol=0, atol=0.05)
            ):
                self._lose(
                    f"it woke with other weights: {before.ids} {before.logprobs}, now {after.ids} {after.logprobs}"
                )
        self._gate()

    def _greedy(self) -> wire.Answer:
        params = SamplingParams(temperature=0.0, max_tokens=_CANARY_TOKENS)
        return self._ask_alone([self.vocab_size - 1], params, sampling_mask=False)

    def _gate(self) -> None:
        """Lets requests go to the server, or holds them."""
        closed = self._pause is not None or self._asleep or self._dropped
        self._client.soon(self._open.clear if closed else self._open.set)

    # ---- weights

    def init_weight_transfer(self, names: Iterable[str]) -> None:
        """Handshake at start: raises WeightUpdateError unless `names` are the tensors of the served checkpoint."""
        self._refuse_if_lost()
        self._transfer.init(names)

    def start_weight_update(self, version: int, manifest: Mapping[str, str]) -> None:
        """Opens an update to a later version. manifest: official name -> `weights.digest` of the stored tensor."""
        self._refuse_if_lost()
        if version <= self._version:
            raise WeightUpdateError(f"version {version} is not later than {self._version}, which is served now")
        self._transfer.start(version, manifest)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sends stored tensors, each part checked on arrival. An error drops the update."""
        self._refuse_if_lost()
        self._transfer.send(named_tensors)

    def verify_weight_update(self) -> None:
        """First phase: the server proves the update whole and unaltered, and loads nothing yet."""
        self._refuse_if_lost()
        self._transfer.verify()

    def finish_weight_update(self, version: int) -> None:
        """Second phase: the server loads the version between two tokens and gives it its number at the end.

        Raises WeightUpdateError and drops the update for another version or when it is not whole. An error after
        that leaves a server of which nobody knows what it holds: EngineLost.
        """
        self._refuse_if_lost()
        self._transfer.prepare(version)
        frozen = self._pause is not None or self._asleep
        label = self._labelled(version)
        try:
            if not frozen:
                self._client.call("POST", "/pause", query={"mode": "keep"})
            self._versions[label] = version
            self._transfer.finish(label)
            if self._in_flight == "recompute":
                self._drop_caches()
            self._version, self._dropped = version, False
            if not frozen:
                self._client.call("POST", "/resume")
        except EngineError as error:
            self._lose(f"it failed while it switched to version {version}, and what it holds is unknown: {error}")
        self._gate()

    def _drop_caches(self) -> None:
        """Running requests are preempted, and their tokens are read again when they go on."""
        answer = self._client.call("POST", "/reset_prefix_cache", query={"reset_running_requests": "true"})
        if not (isinstance(answer, Mapping) and answer.get("success")):
            raise EngineError(f"the caches of the version before could not be dropped: {answer}")

    def abort_weight_update(self) -> None:
        """Drops an open update, if any; the current version stays."""
        self._transfer.abort()

    def load_weights(self, tensors: Mapping[str, Tensor], version: int = 0) -> None:
        """Replaces the weights whole and starts numbering anew, as a fresh engine over a checkpoint would.

        Every tensor is read twice, one at a time: for its digest, and to be sent.
        """
        if self._requests:
            raise EngineError(f"{len(self._requests)} requests are in flight; load weights when none is")
        before, run = self._version, self._run
        self._version, self._run = version - 1, uuid.uuid4().hex[:12]
        try:
            self.start_weight_update(version, {name: digest(tensors[name]) for name in tensors})
            self.update_weights((name, tensors[name]) for name in tensors)
            self.finish_weight_update(version)
        except WeightUpdateError:
            self._version, self._run = before, run
            raise

    # ---- small things

    def _validated(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches]
    ) -> list[int]:
        prompt = token_row(prompt_ids)
        if not prompt.size:
            raise InvalidRequest("the prompt is empty; it needs at least one token")
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise InvalidRequest(f"the prompt is {prompt.dtype} of shape {prompt.shape}; it must be a row of token ids")
        bad = prompt[(prompt < 0) | (prompt >= self.vocab_size)]
        if bad.size:
            raise InvalidRequest(f"token id {bad[0]} is outside the vocabulary of {self.vocab_size}")
        if images:
            raise InvalidRequest("the vLLM engine does not send images; use the k3rl engine for prompts that have some")
        room = self.served.max_context - prompt.size
        if params.max_tokens > room:
            raise ContextExceeded(
                f"{prompt.size} prompt tokens and max_tokens {params.max_tokens} exceed the context of "
                f"{self.served.max_context}; ask for at most {max(room, 0)}"
            )
        check_numbers(params)
        wire.check_options(params, self.served, self.vocab_size)
        return [int(token) for token in prompt]

    def _live(self, request: int) -> _Live:
        live = self._requests.get(request)
        if live is None:
            raise UnknownRequest(f"request {request} is neither waiting nor running: it ended or never was")
        return live

    def _lose(self, reason: str) -> NoReturn:
        self._lost = reason
        raise EngineLost(f"the vLLM server at {self._client.url} is lost: {reason}; restart it, then reconnect")

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            raise EngineLost(f"the vLLM server at {self._client.url} is lost: {self._lost}; restart it, then reconnect")

    def _refuse_if_stalled(self) -> None:
        """A paused engine would be waited for without end."""
        if self._ended:
            return
        if self._dropped:
            raise EngineError("the weights were dropped by sleep(2) and requests wait; update the weights first")
        if self._asleep:
            raise EngineError("the engine sleeps and requests wait; call wake first")
        if self._pause is not None and not (self._pause == "wait" and self.num_running):
            raise EngineError(f"the engine is paused ({self._pause}) and requests wait; call resume first")
