"""The rollout actor: one engine, stepped while any caller waits for tokens.

Every process that is given the actor imports this file. Environment workers are, and they have no torch: what needs it
is imported where it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.actors.cluster import ClusterConfig
from k3rl.config import K3Error
from k3rl.data import ImageError, ImagePatches, preprocess_files
from k3rl.envs import ContextOutgrown
from k3rl.types import Completion, EncodedImage, SamplingParams

if TYPE_CHECKING:
    from k3rl.actors.weight_sync import BaseVersion, Link, Location, Payload
    from k3rl.engine import Engine, VLLMEngine

# Prompt ids, how to sample, and, where the prompt has placeholders, an image for each.
Request = tuple[Sequence[int], SamplingParams] | tuple[Sequence[int], SamplingParams, Sequence[EncodedImage]]


class RolloutActor:
    """An asyncio Ray actor. Calls overlap; their requests share the engine's batch."""

    def __init__(self, config: ClusterConfig, number: int = 0, max_running: int = 64, seed: int = 0) -> None:
        """number: of this actor among those of the cluster; with the vLLM backend, of its server too."""
        import torch

        from k3rl.actors.weight_sync import WeightSink

        torch.set_num_threads(config.rollout_threads)
        torch.set_flush_denormal(True)
        self._config = config
        self._number = number
        self._max_running = max_running
        self._seed = seed
        self._engine: Engine | VLLMEngine | None = None
        self._futures: dict[Any, asyncio.Future[Completion]] = {}
        self._pump: asyncio.Task[None] | None = None
        self.weights = WeightSink(config.rollout_device, direct=config.rollout.backend == "k3rl")

    async def load(self, checkpoint: str) -> int:
        """A fresh engine over a checkpoint directory; returns its weight version (0)."""
        from k3rl.actors.engines import k3rl_engine, vllm_engine

        if self._futures:
            raise RuntimeError(f"{len(self._futures)} requests are in flight; load a checkpoint when none is")
        limits = {"max_running": self._max_running, "seed": self._seed}
        if self._config.rollout.backend == "vllm":
            self._engine = vllm_engine(self._config, self._number, Path(checkpoint), self._engine, **limits)
        else:
            self._engine = k3rl_engine(self._config, Path(checkpoint), **limits)
        return self._engine.version

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
        made: dict[EncodedImage, ImagePatches] = {}
        answers = await asyncio.gather(*(self._submit(made, *each) for each in requests), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
        return answers  # type: ignore[return-value]

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
        try:
            while self._futures:
                for request, outcome in self.engine.step():
                    future = self._futures.pop(request)
                    if isinstance(outcome, Exception):
                        future.set_exception(outcome)
                    else:
                        future.set_result(outcome)
                await asyncio.sleep(0)
        except Exception as error:
            for future in self._futures.values():
                future.set_exception(error)
            self._futures.clear()
            raise

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
        """Second phase: switches to the prepared version."""
        self.engine.finish_weight_update(version)
        return self.engine.version

    async def rollback(self) -> None:
        """Drops a prepared version; the old one goes on serving."""
        self.engine.abort_weight_update()
