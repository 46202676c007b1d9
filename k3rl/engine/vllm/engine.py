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

import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from k3rl.checkpoint import digest
from k3rl.data import ImagePatches
from k3rl.engine.outcomes import BlockingCalls
from k3rl.engine.protocol import EngineError, Outcome, PauseMode, Prompt, Tokens, WeightUpdateError
from k3rl.engine.sampling import sampler
from k3rl.engine.vllm import wire
from k3rl.engine.vllm.client import Client, Deadlines
from k3rl.engine.vllm.live_requests import Request, Requests
from k3rl.engine.vllm.server_state import ServerState
from k3rl.engine.vllm.session import ModelShape, Session
from k3rl.engine.vllm.weights import WeightTransfer
from k3rl.model import K3Config
from k3rl.types import SamplingParams


class VLLMEngine(BlockingCalls):
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
        self.seed = seed
        self._deadlines, self._recomputes = deadlines or Deadlines(), in_flight == "recompute"
        self._submitted = 0
        self._news = threading.Event()
        self._canary: wire.Answer | None = None  # of before a sleep
        self._client = Client(url, token, self._deadlines, max_running)
        self._state = ServerState(self._client.url)
        shape = ModelShape(vocab_size, tuple(moe_layers), experts_per_token)
        self._session = Session(self._client, shape, model, require)
        self._requests = Requests(self._client, self._session, self._state, max_running, self._news.set)
        super().__init__(
            self._requests.outcomes, self._requests.live, lambda: self._state.refuse_if_stalled(self.num_running)
        )
        self._transfer = WeightTransfer(self._client, transfer_dir, chunk_bytes, self._state.lose)
        try:
            self.reconnect(version)
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
        """A new handshake, as after the server was lost and started again with the weights of `version`."""
        self._state.reset()
        self._transfer.forget()
        self._session.shake_hands(version)
        if self._session.updates_weights:
            self._transfer.cancel()
        self._session.begin()
        self._requests.gate()

    @property
    def version(self) -> int:
        """The weight version that samples the next token."""
        return self._session.version

    @property
    def server(self) -> wire.ServerInfo:
        """What the handshake found."""
        return self._session.server

    @property
    def num_running(self) -> int:
        """Requests that the server may have."""
        return self._requests.num_sent

    @property
    def num_waiting(self) -> int:
        """Requests that wait here, for a place or for the end of a pause."""
        return len(self._requests.live) - self.num_running

    @property
    def is_paused(self) -> bool:
        """Whether a step waits for nothing."""
        return self._state.pause is not None

    # ---- requests

    def submit(
        self, prompt_ids: Sequence[int] | Prompt, params: SamplingParams, images: Sequence[ImagePatches] = ()
    ) -> int:
        """Queues one prompt and returns its id; see `RolloutEngine`.

        Raises InvalidRequest also for what vLLM would not do exactly as asked (`wire.check_options`) and for images,
        which this engine does not send; EngineLost after the server was lost.
        """
        prompt = self._session.checked_prompt(prompt_ids, params, images)
        self._state.refuse_if_lost()
        number, self._submitted = self._submitted, self._submitted + 1
        seed = wire.wire_seed(sampler.request_seed(params.seed, self.seed, number))
        answer = wire.Answer(prompt.rows.size, params)
        self._requests.start(Request(number, prompt, params, seed, self._session.name(number), answer))
        return number

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImagePatches] = ()) -> Prompt:
        """Raises InvalidRequest as `submit` would, and queues nothing -> the prompt, which any number of requests may
        be submitted with."""
        return self._session.checked_prompt(prompt_ids, params, images)

    def step(self) -> list[tuple[int, Outcome]]:
        """The requests that ended since the last call; waits a moment when there is none and some are running."""
        if not self._requests.outcomes and self._requests.live and self._state.pause is None:
            self._news.wait(0.01)
        self._news.clear()
        return self._requests.outcomes.take()

    def sampled(self, request: int, start: int = 0) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """(ids, logprobs) of what a live request has sampled from its `start`-th token on; nothing while it waits."""
        answer = self._requests.find(request).answer
        count = min(len(answer.ids), len(answer.logprobs))
        return tuple(answer.ids[start:count]), tuple(answer.logprobs[start:count])

    def new_tokens(self, request: int, seen: int, routed: int = 0) -> Tokens | None:
        """What a live request has sampled beyond `seen` tokens, if anything; routes come with its end."""
        ids, logprobs = self.sampled(request, seen)
        return Tokens(ids, logprobs) if ids else None

    def abort(self, *requests: int) -> None:
        """Takes requests back; the next `step` returns them as aborted. Raises UnknownRequest for those that are not
        live, once the others are taken back."""
        live = [one for number in requests if (one := self._requests.live.get(number)) is not None]
        self._requests.abort(live, 3 * self._deadlines.call)
        for one in live:
            one.done.wait(self._deadlines.call)
        for number in {*requests} - {one.number for one in live}:
            self._requests.find(number)

    def clear(self) -> None:
        """Forgets every request without an outcome."""
        self.abort(*list(self._requests.live))
        self._requests.outcomes.take()

    # ---- pauses and sleep

    def pause(self, mode: PauseMode) -> None:
        """keep: freeze everything; abort: end everything now; wait: finish what runs (returns then), admit nothing.

        Requests may be submitted during a pause and wait here.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause mode is {mode!r}; it must be 'keep', 'abort' or 'wait'")
        self._state.refuse_if_lost()
        self._state.pause = mode
        self._requests.gate()
        live = list(self._requests.live.values())
        if mode == "abort":
            for request in live:
                request.aborted = True
        limit = self._deadlines.drain if mode == "wait" else self._deadlines.call
        self._client.call("POST", "/pause", query={"mode": mode}, deadline_s=limit)
        if mode == "abort":
            self._requests.abort(live, 4 * self._deadlines.call)
        elif mode == "wait":
            self._requests.wait_until_done([request for request in live if request.sent], self._deadlines.drain)

    def resume(self) -> None:
        """Ends a pause."""
        self._client.call("POST", "/resume")
        self._state.pause = None
        self._requests.gate()

    def sleep(self, level: int = 1) -> None:
        """Frees the server's GPU memory: caches and, to host memory (1) or for good (2), weights. Aborts what runs.

        Needs a server started with --enable-sleep-mode.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level is {level}; 1 keeps the weights in host memory, 2 drops them")
        if self._state.pause is not None:
            raise EngineError(f"the engine is paused ({self._state.pause}); call resume before sleep")
        self._state.asleep = True  # from here on requests wait
        query = {"level": level, "mode": "abort"}
        try:
            self.pause("abort")
            self.resume()
            self._canary = self._session.greedy()
            self._client.call("POST", "/sleep", query=query, deadline_s=self._deadlines.update)
        except EngineError:
            self._state.asleep = self._client.call("GET", "/is_sleeping").get("is_sleeping", True)
            self._requests.gate()
            raise
        self._state.lacks_weights = level == 2

    def wake(self, tags: Sequence[str] = ()) -> None:
        """Takes the memory back, all of it or that of `tags` ("weights", "kv_cache").

        Weights that were kept are proved by a greedy sample from before; after level 2 requests wait for a weight
        update. Raises EngineLost when the server woke with other weights.
        """
        query = {"tags": list(tags)} if tags else None
        answer = self._client.call("POST", "/wake_up", query=query, deadline_s=self._deadlines.update)
        self._state.asleep = answer.get("status") != "awake" if isinstance(answer, Mapping) else False
        if not self._state.asleep and not self._state.lacks_weights:
            before, after = self._canary, self._session.greedy()
            # Equal weights give equal tokens, and logprobs that differ by less than any other weights would.
            if before is not None and (
                before.ids != after.ids or not np.allclose(before.logprobs, after.logprobs, rtol=0, atol=0.05)
            ):
                self._state.lose(
                    f"it woke with other weights: {before.ids} {before.logprobs}, now {after.ids} {after.logprobs}"
                )
        self._requests.gate()

    # ---- weights

    def init_weight_transfer(self, names: Iterable[str]) -> None:
        """Handshake at start: raises WeightUpdateError unless `names` are the tensors of the served checkpoint."""
        self._state.refuse_if_lost()
        self._transfer.init(names)

    def start_weight_update(self, version: int, manifest: Mapping[str, str]) -> None:
        """Opens an update to a later version. manifest: official name -> `k3rl.checkpoint.digest` of the stored
        tensor.
        """
        self._state.refuse_if_lost()
        if version <= self.version:
            raise WeightUpdateError(f"version {version} is not later than {self.version}, which is served now")
        self._transfer.start(version, manifest)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sends stored tensors, each part checked on arrival. An error drops the update."""
        self._state.refuse_if_lost()
        self._transfer.send(named_tensors)

    def verify_weight_update(self) -> None:
        """First phase: the server proves the update whole and unaltered, and loads nothing yet."""
        self._state.refuse_if_lost()
        self._transfer.verify()

    def finish_weight_update(self, version: int) -> None:
        """Second phase: the server loads the version between two tokens and gives it its number at the end.

        Raises WeightUpdateError and drops the update for another version or when it is not whole. An error after
        that leaves a server of which nobody knows what it holds: EngineLost.
        """
        self._state.refuse_if_lost()
        self._transfer.prepare(version)
        frozen = self._state.pause is not None or self._state.asleep
        try:
            if not frozen:
                self._client.call("POST", "/pause", query={"mode": "keep"})
            self._transfer.finish(self._session.register(version), drop_caches=self._recomputes)
            self._session.version, self._state.lacks_weights = version, False
            if not frozen:
                self._client.call("POST", "/resume")
        except EngineError as error:
            self._state.lose(f"it failed while it switched to version {version}, and what it holds is unknown: {error}")
        self._requests.gate()

    def abort_weight_update(self) -> None:
        """Drops an open update, if any; the current version stays."""
        self._transfer.abort()

    def load_weights(self, tensors: Mapping[str, Tensor], version: int = 0) -> None:
        """Replaces the weights whole and starts numbering anew, as a fresh engine over a checkpoint would.

        Every tensor is read twice, one at a time: for its digest, and to be sent.
        """
        if self._requests.live:
            raise EngineError(f"{len(self._requests.live)} requests are in flight; load weights when none is")
        before = self._session.renumber(version - 1)
        try:
            self.start_weight_update(version, {name: digest(tensors[name]) for name in tensors})
            self.update_weights((name, tensors[name]) for name in tensors)
            self.finish_weight_update(version)
        except WeightUpdateError:
            self._session.restore(before)
            raise
