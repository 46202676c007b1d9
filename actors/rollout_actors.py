"""The actors of a stream of rollouts, and whether its engines go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from k3rl.actors.calls import ActorLost, no_answer
from k3rl.actors.worker_pool import WorkerPool
from k3rl.envs import BlockWatch, FaultConfig

_LOOK_S = 30.0  # between two looks at engines
_SLACK_S = 60.0  # beyond what a worker's own watch takes to end code that does not give way


@dataclass(frozen=True)
class Actors:
    """Who makes rollouts. env: the environment's name in episodes. timeout_s: of any call but an episode's. lost_nodes:
    which nodes that had actors of the run answer no more, and what they had."""

    engines: Sequence[Any]
    environments: WorkerPool
    rewards: WorkerPool
    env: str
    faults: FaultConfig
    timeout_s: float
    lost_nodes: Callable[[], Sequence[str]] = lambda: ()

    @property
    def silence_s(self) -> float:
        """How long a worker may be silent before it counts as hung."""
        return self.faults.deadline_s or BlockWatch.KILL_AFTER * self.faults.blocked_s + _SLACK_S

    async def watch_engines(self) -> None:
        """Looks at the engines now and then, for ever. Raises as `check_engines`."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.check_engines()

    async def check_nodes(self) -> None:
        """Raises ActorLost where a node that had actors of the run is gone: nothing can be started again there."""
        if lost := await asyncio.to_thread(self.lost_nodes):
            raise ActorLost("; ".join(lost))

    async def check_engines(self) -> None:
        """Raises ActorLost where an engine is gone or broken: no other one may take its requests."""
        for number, engine in enumerate(self.engines):
            what = f"rollout actor {number}"
            try:
                await asyncio.wait_for(asyncio.wrap_future(engine.check.remote().future()), self.timeout_s)
            except TimeoutError:
                raise no_answer(what, self.timeout_s) from None
            except RayActorError as error:
                await self.check_nodes()
                raise ActorLost(f"{what} died:\n{error}") from error
            except RayTaskError as error:
                raise ActorLost(f"{what} is broken:\n{error}") from error
