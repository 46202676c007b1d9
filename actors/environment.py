"""The environment worker: runs episodes against a rollout actor, each in an asyncio task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from k3rl.actors.jobs import EpisodeJob, Tasks
from k3rl.envs import (
    BlockWatch,
    ContextOutgrown,
    EngineFailed,
    EnvConfig,
    EpisodeContext,
    GuardedEnv,
    GuardedHarness,
    TurnSettings,
    make,
    run_episode,
)
from k3rl.envs.gateway import run_program
from k3rl.envs.sandbox import ProgramRunner, provider_named
from k3rl.tokens import Tokenizer
from k3rl.types import Completion, EncodedImage, Episode, Failed, FailureKind, SamplingParams


class LockstepPolicy:
    """Sends requests when every episode of the cohort waits for tokens, sorted by episode.

    So the batch that the engine sees depends on the tasks and the weights, not on timing: the same seed gives the
    same rollouts. The price is that a turn waits for the slowest tool call of the cohort.
    """

    def __init__(self, rollout: Any, episodes: int) -> None:
        self._rollout = rollout
        self._active = episodes
        self._waiting: list[tuple[int, tuple[Any, ...], asyncio.Future[Completion]]] = []

    async def complete(
        self, order: int, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[EncodedImage] = ()
    ) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = (list(prompt_ids), params, tuple(images)) if images else (list(prompt_ids), params)
        self._waiting.append((order, request, future))
        self._flush_when_all_wait()
        return await future

    def leave(self) -> None:
        """One episode of the cohort has ended."""
        self._active -= 1
        self._flush_when_all_wait()

    def _flush_when_all_wait(self) -> None:
        self._waiting = [entry for entry in self._waiting if not entry[2].done()]  # of programs that were ended
        # a program may wait for several answers at once, so episodes are counted, not requests
        if self._waiting and len({order for order, *_ in self._waiting}) >= self._active:
            cohort, self._waiting = sorted(self._waiting, key=lambda entry: entry[0]), []
            self._sending = asyncio.ensure_future(self._send(cohort))

    async def _send(self, cohort: list) -> None:
        try:
            answers = await self._rollout.generate.remote([request for _, request, _ in cohort])
        except Exception as error:  # a lost engine is every waiting episode's error, and each reports it
            answers = [error] * len(cohort)
        for (_, _, future), answer in zip(cohort, answers, strict=True):
            if future.done():  # its program was ended meanwhile
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class _Seat:
    """One episode's place in the cohort (the `Policy` that `run_episode` sees)."""

    def __init__(self, policy: LockstepPolicy, order: int) -> None:
        self._policy = policy
        self._order = order

    async def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[EncodedImage] = ()
    ) -> Completion:
        try:
            return await self._policy.complete(self._order, prompt_ids, params, images)
        except ContextOutgrown:
            raise
        except Exception as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error


class EnvironmentWorker:
    """An asyncio Ray actor without torch. Rewards are given elsewhere; episodes leave here ungraded."""

    def __init__(self, env: EnvConfig, rollout: Any) -> None:
        """rollout: the actor whose engine samples."""
        self._faults = env.faults
        self._watch: BlockWatch | None = None
        self._environment = make(env.name, **env.args)
        self._tasks = Tasks(self._environment.source)
        self._rollout = rollout
        self._sandboxes = provider_named(env.sandbox)
        self._programs = ProgramRunner(self._sandboxes) if self._environment.needs_programs else None
        self._tokenizer = Tokenizer.builtin()

    async def set_tokenizer(self, directory: str) -> None:
        """From now on the tokenizer of this checkpoint directory."""
        self._tokenizer = Tokenizer.load(directory)

    async def run(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> list[Episode]:
        """One ungraded episode a job, in order. An episode whose environment fails says so; the others go on."""
        self._watch = self._watch or BlockWatch(self._faults.blocked_s)  # on the thread of the event loop
        policy = LockstepPolicy(self._rollout, len(jobs))
        return list(await asyncio.gather(*(self._run(policy, i, job, sampling) for i, job in enumerate(jobs))))

    async def _run(self, policy: LockstepPolicy, order: int, job: EpisodeJob, sampling: SamplingParams) -> Episode:
        try:
            task = self._tasks.get(job.task).public()
            seat = _Seat(policy, order)
            settings = TurnSettings(self._tokenizer, replace(sampling, seed=job.sampling_seed))
            context = EpisodeContext(
                seed=job.sampling_seed, group=job.group_id, programs=self._programs, sandboxes=self._sandboxes
            )
            if self._environment.make_harness is not None:
                program = GuardedHarness(self._environment.make_harness(), self._watched())
                return await run_program(program, task, seat, settings, episode_id=job.episode_id, context=context)
            env = GuardedEnv(self._environment.make_env(), self._faults, self._watched())
            return await run_episode(env, task, seat, settings, episode_id=job.episode_id, context=context)
        except (EngineFailed, ContextOutgrown) as error:
            return job.failed(self._environment.name, Failed(f"engine: {error}"[:500], FailureKind.ENGINE))
        except Exception as error:  # the last line of defence: user code must not end the run
            failed = Failed(f"{type(error).__name__}: {error}"[:500], FailureKind.RAISED)
            return job.failed(self._environment.name, failed)
        finally:
            policy.leave()

    def _watched(self) -> BlockWatch:
        if self._watch is None:
            raise RuntimeError("episodes are run by `run`")
        return self._watch
