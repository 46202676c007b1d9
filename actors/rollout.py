"""The rollout actor: one engine, stepped while any caller waits for tokens.

Every process that is given the actor imports this file. Environment workers are, and they have no torch: what needs it
is imported where it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.actors.answers import AnswerStreams, Request
from k3rl.actors.cluster import ClusterConfig
from k3rl.config import K3Error
from k3rl.data import ImageError, ImagePatches, preprocess_files
from k3rl.envs import ContextOutgrown, EngineFailed
from k3rl.types import Completion, EncodedImage, SamplingParams

if TYPE_CHECKING:
    from k3rl.actors.weight_sync import BaseVersion, Link, Location, Payload
    from k3rl.engine import Engine, VLLMEngine

_REST_S = 0.01  # between two looks at an engine that rests
_FAILED_STEPS = 3  # in a row, after which an engine does not mend by itself


class RolloutActor(AnswerStreams):
    """An asyncio Ray actor. Calls overlap; their requests share the engine's batch.

    An engine that raises in a step fails the requests that it had then, and leaves none behind.
    """

    def __init__(self, config: ClusterConfig, number: int = 0, max_running: int = 64, seed: int = 0) -> None:
        """number: of this actor among those of the cluster; with the vLLM backend, of its server too."""
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
        self._engine: Engine | VLLMEngine | None = None
        self._futures: dict[Any, asyncio.Future[Completion]] = {}  # of each live request
        self._failed_steps = 0
        self._resting = False
        self._pump: asyncio.Task[None] | None = None
        self.weights = WeightSink(config.rollout_device, direct=config.rollout.backend == "k3rl")

    async def load(self, checkpoint: str) -> int:
        """A fresh engine over a checkpoint directory; returns its weight version (0)."""
        from k3rl.actors.engines import k3rl_engine, vllm_engine

        if self._futures:
            raise RuntimeError(f"{len(self._futures)} requests are in flight; load a checkpoint when none is")
        self._wake()
        limits = {"max_running": self._max_running, "seed": self._seed}
        if self._config.rollout.backend == "vllm":
            self._engine = vllm_engine(self._config, self._number, Path(checkpoint), self._engine, **limits)
        else:
            self._engine = k3rl_engine(self._config, Path(checkpoint), **limits)
        return self._engine.version

    async def slow_paths(self) -> list[str]:
        """What of this actor's GPU runs without its kernels."""
        from k3rl.kernels import slow_paths
        from k3rl.model import place_of

        if self._config.rollout.backend == "vllm":
            return []
        return slow_paths(place_of(self._config.rollout_device)[0])

    @property
    def engine(self) -> Engine | VLLMEngine:
        if self._engine is None:
            raise RuntimeError("this rollout actor has no weights yet; call load(checkpoint) first")
        return self._engine

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
        made: dict[EncodedImage, ImagePatches] = {}
        return [self._submit(made, *each) for each in requests]

    def take_back(self, futures: Sequence[asyncio.Future[Completion]]) -> None:
        """See `AnswerStreams`."""
        unwanted = set(futures)
        for request in [request for request, future in self._futures.items() if future in unwanted]:
            del self._futures[request]
            with suppress(K3Error):  # it has ended by itself
                self.engine.abort(request)
        super().take_back(futures)

    async def check(self) -> None:
        """See `AnswerStreams`."""
        if self._failed_steps >= _FAILED_STEPS:
            raise EngineFailed(f"the last {self._failed_steps} steps of the engine failed")

    async def pause(self) -> None:
        """Requests rest until the next version of the weights."""
        self.engine.pause("keep")
        self._resting = True

    def _submit(
        self,
        made: dict[EncodedImage, ImagePatches],
        ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[EncodedImage] = (),
    ) -> asyncio.Future[Completion]:
        from k3rl.engine import ContextExceeded

        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        try:
            self._futures[self.engine.submit(ids, params, preprocess_files(images, made))] = future
        except ContextExceeded as error:
            future.set_exception(ContextOutgrown(str(error)))  # which environments, without torch, know
            return future
        except (K3Error, ImageError) as error:
            future.set_exception(error)
            return future
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return future

    async def _run(self) -> None:
        """Steps the engine until nothing waits. Between steps other calls get their turn."""
        while self._futures:
            try:
                outcomes = self.engine.step()
            except Exception as error:  # whatever it is, it is the answer of everyone who waits for this engine
                self._fail_all(EngineFailed(f"{type(error).__name__}: {error}"))
                continue
            self._failed_steps = 0
            for request, outcome in outcomes:
                future = self._futures.pop(request, None)
                if future is None or future.done():  # nobody waits for it any more
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
            await asyncio.sleep(_REST_S if self._resting else 0)

    def _wake(self) -> None:
        if self._resting:
            self.engine.resume()
            self._resting = False

    def _fail_all(self, error: EngineFailed) -> None:
        """A step failed: every request ends, in the engine too, which the next ones then find empty."""
        self._failed_steps += 1
        failed, self._futures = self._futures, {}
        for request, future in failed.items():
            with suppress(Exception):  # a request that cannot even be ended is found by the next step
                self.engine.abort(request)
            if not future.done():
                future.set_exception(error)

    # --------------------------------------------------------------------------------------------------- weights

    async def served(self) -> BaseVersion:
        """The version that samples the next token."""
        from k3rl.actors.weight_sync import base_version

        return base_version(self.engine)

    async def location(self) -> Location:
        """Where this engine's weights are."""
        return self.weights.location()

    async def join_transfer(self, link: Link, number: int) -> None:
        """Meets the learner, as receiver `number`, to be sent weights by it. Raises TransferBroken."""
        await self.weights.join(link, number)

    async def close_transfer(self) -> None:
        self.weights.close()

    async def prepare(self, version: int, manifest: Mapping[str, str], payload: Payload) -> None:
        """First phase: builds and verifies version `version` beside the one that serves."""
        await self.weights.prepare(self.engine, version, manifest, payload)

    async def commit(self, version: int) -> int:
        """Second phase: switches to the prepared version, with which requests that rested go on."""
        self.engine.finish_weight_update(version)
        self._wake()
        return self.engine.version

    async def rollback(self) -> None:
        """Drops a prepared version; the old one goes on serving."""
        self.engine.abort_weight_update()
