"""The rollout actor: one engine, which steps on a thread of its own while any caller waits for tokens.

Every process that is given the actor imports this file. Environment workers are, and they have no torch: what needs it
is imported where it is used.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from k3rl.actors.answers import AnswerStreams, Increments, Request
from k3rl.actors.cluster import ClusterConfig
from k3rl.data import ImageError, ImagePatches, preprocess_files
from k3rl.envs import ContextOutgrown, EngineFailed
from k3rl.types import Completion, EncodedImage

if TYPE_CHECKING:
    from k3rl.actors.weight_sync import BaseVersion, Link, Location, Payload
    from k3rl.engine import Engine, EngineThread, News, Submission, VLLMEngine

    _Shown = tuple[Submission, Sequence[EncodedImage]]

T = TypeVar("T")
_FAILED_STEPS = 3  # in a row, after which an engine does not mend by itself
_CLOSE_S = 10.0  # for the step in progress when the process ends


class RolloutActor(AnswerStreams):
    """An asyncio Ray actor. Calls overlap; their requests share the engine's batch.

    The engine steps on a thread of its own (`k3rl.engine.EngineThread`), so that calls are answered while it computes.
    A step that raises fails the requests that the engine had then, and leaves none behind.
    """

    def __init__(self, config: ClusterConfig, number: int = 0, max_running: int | None = None, seed: int = 0) -> None:
        """number: of this actor among those of the cluster; with the vLLM backend, of its server too. max_running:
        sequences decoded at a time; None: as many as suit model and device."""
        import torch

        from k3rl.actors.weight_sync import WeightSink

        if config.rollout_device == "cuda" and config.rollout.backend == "k3rl":
            from k3rl.kernels import compile_cache

            compile_cache.use()
        torch.set_num_threads(config.rollout_threads)
        torch.set_flush_denormal(True)
        super().__init__()
        self._config = config
        self._number = number
        self._max_running = max_running
        self._seed = seed
        self._counts = Increments()
        self._resting = False
        self._preparing: set[asyncio.Task[None]] = set()  # of images
        self._thread = self._new_thread()
        self.weights = WeightSink(config.rollout_device, direct=config.rollout.backend == "k3rl")

    def _new_thread(self) -> EngineThread[Engine | VLLMEngine]:
        from k3rl.engine import EngineThread

        thread: EngineThread[Engine | VLLMEngine] = EngineThread(_answer, patience=_FAILED_STEPS)
        weakref.finalize(self, thread.close, _CLOSE_S)
        return thread

    async def load(self, checkpoint: str, quantization: Mapping[str, str] | None = None) -> int:
        """A fresh engine over a checkpoint directory; returns its weight version (0).

        quantization: see `load_checkpoint`; a vLLM server computes what it was started with.
        """
        from k3rl.actors.engines import k3rl_engine, vllm_engine

        rows, seed = self._max_running, self._seed

        def make(before: Engine | VLLMEngine | None) -> Engine | VLLMEngine:
            if self._config.rollout.backend == "vllm":
                return vllm_engine(self._config, self._number, Path(checkpoint), before, max_running=rows, seed=seed)
            return k3rl_engine(self._config, Path(checkpoint), quantization=quantization, max_running=rows, seed=seed)

        if self._thread.error is not None:
            self._thread = self._new_thread()
        elif self._resting:
            await self._between_steps(self._wake)
        engine = await asyncio.wrap_future(self._thread.load(make))
        if self._config.rollout_device == "cuda" and self._config.rollout.backend == "k3rl":
            self._thread.run(self._warm_up)  # beside whatever else starts; calls for the engine come after it
        return engine.version

    def _warm_up(self, engine: Engine | VLLMEngine) -> None:
        from k3rl.actors.engines import warm_up
        from k3rl.engine import Engine, totals_of

        if isinstance(engine, Engine):
            warm_up(engine)
            self._counts.since(totals_of(engine))  # of requests that nobody made

    async def slow_paths(self) -> list[str]:
        """What of this actor's GPU runs without its kernels."""
        from k3rl.kernels import slow_paths
        from k3rl.model import place_of

        if self._config.rollout.backend == "vllm":
            return []
        return slow_paths(place_of(self._config.rollout_device)[0])

    @property
    def engine(self) -> Engine | VLLMEngine:
        """The engine, which only its thread may touch while it has requests."""
        return self._thread.engine

    async def _between_steps(self, function: Callable[[Engine | VLLMEngine], T]) -> T:
        """What a function of the engine returns, called on its thread."""
        return await asyncio.wrap_future(self._thread.run(function))

    async def close(self) -> None:
        """Ends what is in flight, and the engine's thread after the step in progress."""
        await asyncio.to_thread(self._thread.close, _CLOSE_S)

    async def generate(self, requests: Sequence[Request]) -> list[Completion | Exception]:
        """One completion for each request, in order; a refused request gives its typed error instead, one that exceeds
        the context ContextOutgrown.

        An image that several of them show is prepared once.
        """
        answers = await asyncio.gather(*self.begin(requests), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
        return answers  # type: ignore[return-value]

    def begin(self, requests: Sequence[Request]) -> list[asyncio.Future[Completion]]:
        """See `AnswerStreams`."""
        from k3rl.engine import Submission

        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = []
        ready: list[Submission] = []
        shown: list[_Shown] = []
        for request in requests:
            future = _Asked(loop=loop)
            future.submission = Submission(future, request[0], request[1])
            futures.append(future)
            if len(request) > 2 and request[2]:
                shown.append((future.submission, request[2]))
            else:
                ready.append(future.submission)
        self._submit(ready)
        if shown:
            task = loop.create_task(self._submit_shown(shown))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        return futures

    def _submit(self, submissions: Sequence[Submission]) -> None:
        from k3rl.engine import EngineStopped

        if submissions:
            try:
                self._thread.submit(submissions)
            except EngineStopped as error:
                _settle([(submission, error) for submission in submissions])

    async def _submit_shown(self, shown: Sequence[_Shown]) -> None:
        """Submits requests with images once these are prepared, which may take long."""
        refused = await asyncio.to_thread(_prepare, shown)
        for submission, error in refused:
            submission.ticket.set_exception(error)
        self._submit([submission for submission, _ in shown if not submission.ticket.done()])

    def take_back(self, futures: Sequence[asyncio.Future[Completion]]) -> None:
        """See `AnswerStreams`."""
        from k3rl.engine import EngineStopped

        left = [future.submission for future in futures if isinstance(future, _Asked) and not future.done()]
        with suppress(EngineStopped):  # which ended them
            self._thread.abort(left)
        super().take_back(futures)

    def end_sessions(self, names: Sequence[str]) -> None:
        """See `AnswerStreams`."""
        from k3rl.engine import Engine, EngineStopped

        def end(engine: Engine | VLLMEngine) -> None:
            if isinstance(engine, Engine):  # a vLLM server keeps what it has room for
                engine.end_sessions(*names)

        with suppress(EngineStopped):  # and with it what it had kept
            self._thread.run(end)

    @property
    def rows(self) -> int | None:
        """See `AnswerStreams`."""
        from k3rl.engine import Engine, EngineStopped

        with suppress(EngineStopped):
            engine = self.engine
            return engine.batch.scheduler.rows if isinstance(engine, Engine) else self._max_running
        return None

    async def take_counts(self) -> dict[str, float]:
        """See `AnswerStreams`."""
        from k3rl.engine import Engine, EngineStopped, totals_of

        counts = await super().take_counts()
        try:
            engine = self.engine
        except EngineStopped:  # nothing is loaded, or `check` says what happened
            return counts
        return counts | self._counts.since(totals_of(engine)) if isinstance(engine, Engine) else counts

    async def check(self) -> None:
        """See `AnswerStreams`."""
        if self._thread.error is not None:
            raise EngineFailed(str(self._thread.stopped))

    async def pause(self) -> None:
        """Requests rest until the next version of the weights."""
        await self._between_steps(self._rest)

    def _rest(self, engine: Engine | VLLMEngine) -> None:
        engine.pause("keep")
        self._resting = True

    def _wake(self, engine: Engine | VLLMEngine) -> None:
        if self._resting:
            engine.resume()
            self._resting = False

    # --------------------------------------------------------------------------------------------------- weights

    async def served(self) -> BaseVersion:
        """The version that samples the next token."""
        from k3rl.actors.weight_sync import base_version

        return await self._between_steps(base_version)

    async def location(self) -> Location:
        """Where this engine's weights are."""
        return self.weights.location()

    async def join_transfer(self, links: Sequence[Link], number: int) -> None:
        """Meets the ranks of the learner that send weights, as receiver `number`. Raises TransferBroken."""
        await self.weights.join(links, number)

    async def close_transfer(self) -> None:
        self.weights.close()

    async def prepare(self, version: int, manifest: Mapping[str, str], payload: Payload) -> dict[str, float]:
        """First phase: builds and verifies version `version` beside the one that serves, while that is stepped;
        -> seconds of its parts."""
        return await self.weights.prepare(self.engine, version, manifest, payload)

    async def commit(self, version: int) -> float:
        """Second phase: switches to the prepared version, with which requests that rested go on; -> seconds in which
        the engine could not step because of the version."""

        def switch(engine: Engine | VLLMEngine) -> float:
            paused_s = self.weights.commit(engine, version)
            self._wake(engine)
            return paused_s

        return await self._between_steps(switch)

    async def rollback(self) -> None:
        """Drops a prepared version; the old one goes on serving."""
        await self._between_steps(lambda engine: engine.abort_weight_update())


class _Asked(asyncio.Future[Completion]):
    """The answer to a request, which the engine's thread knows by its submission."""

    submission: Submission


def _prepare(shown: Sequence[_Shown]) -> list[tuple[Submission, ImageError]]:
    """Gives submissions their images, each prepared once -> those whose images cannot be read."""
    made: dict[EncodedImage, ImagePatches] = {}
    refused = []
    for submission, images in shown:
        try:
            submission.images = preprocess_files(images, made)
        except ImageError as error:
            refused.append((submission, error))
    return refused


def _answer(news: News) -> None:
    """Hands what ended, on the engine's thread, to whoever waits for it: one call for each event loop."""
    for loop, own in groupby(news, lambda one: one[0].ticket.get_loop()):
        with suppress(RuntimeError):  # the loop is closed, and nobody is left to be told
            loop.call_soon_threadsafe(_settle, list(own))


def _settle(news: News) -> None:
    from k3rl.engine import ContextExceeded, EngineStopped

    for submission, outcome in news:
        future = submission.ticket
        if future.done():  # nobody waits for it any more
            continue
        if isinstance(outcome, Completion):
            future.set_result(outcome)
        elif isinstance(outcome, ContextExceeded):
            future.set_exception(ContextOutgrown(str(outcome)))  # which environments, without torch, know
        elif isinstance(outcome, EngineStopped):
            future.set_exception(EngineFailed(str(outcome)))
        else:
            future.set_exception(outcome)
