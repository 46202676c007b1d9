"""The environment worker: runs episodes against rollout actors, each in an asyncio task of its own."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from k3rl.actors.answers import EngineClient, Request
from k3rl.actors.engine_places import EnginePlaces, Place
from k3rl.actors.jobs import EpisodeJob, Tasks
from k3rl.actors.schedule import Header
from k3rl.envs import (
    NOT_GRADED,
    BlockWatch,
    ContextOutgrown,
    EngineFailed,
    EnvConfig,
    EpisodeContext,
    EpisodeState,
    GuardedEnv,
    GuardedHarness,
    KeptState,
    PromptCache,
    TurnSettings,
    gradable,
    make,
    run_episode,
)
from k3rl.envs.gateway import run_program
from k3rl.envs.sandbox import ProgramRunner, provider_named
from k3rl.tokens import Tokenizer
from k3rl.types import Completion, EncodedImage, Episode, Failed, FailureKind, SamplingParams

_STOP_S = 10.0  # for episodes to close their environments
HEARTBEAT_S = 2.0  # an idle worker says so often that it lives


class Lockstep:
    """Holds requests back until every episode of a cohort waits for tokens, and lets them go sorted by episode.

    So the batch that the engine sees depends on the tasks and the weights, not on timing: the same seed gives the
    same rollouts. The price is that a turn waits for the slowest tool call of the cohort.
    """

    def __init__(self, episodes: int) -> None:
        self._active = episodes
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}  # a program may wait for several answers at once

    async def wait(self, order: int) -> None:
        """Until all others wait too. order: of the episode in its cohort."""
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(order, []).append(gate)
        self._open_when_all_wait()
        try:
            await gate
        finally:
            if gate.cancelled() and gate in (own := self._waiting.get(order, [])):  # its program was ended
                own.remove(gate)
                if not own:
                    del self._waiting[order]

    def leave(self) -> None:
        """One episode of the cohort has ended."""
        self._active -= 1
        self._open_when_all_wait()

    def _open_when_all_wait(self) -> None:
        if len(self._waiting) < self._active:
            return
        cohort, self._waiting = sorted(self._waiting.items()), {}
        for _, gates in cohort:
            for gate in gates:
                if not gate.done():
                    gate.set_result(None)


class _Seat:
    """One episode at its engine (the `Policy` that `run_episode` sees). tokens: that it has been given.

    place: its engine, which `places` may change between two turns, but for episodes in lockstep, whose batches are to
    be the same in every run. name: of the episode's conversations, which the engine keeps until it leaves. turns: that
    it may ask for, at most. kept: its newest state, from which it may go on in another process; resume: the one from
    which it goes on here.
    """

    def __init__(
        self, clients: Sequence[EngineClient], places: EnginePlaces, place: Place, lockstep: Lockstep | None,
        order: int, name: str,
    ) -> None:  # fmt: skip
        self._clients, self._places, self.place = clients, places, place
        self._lockstep, self._order, self._name = lockstep, order, name
        self.tokens = 0
        self.turns: int | None = None
        self.kept: KeptState | None = None
        self.resume: bytes | None = None
        self._asked = self._waiting = 0

    async def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[EncodedImage] = ()
    ) -> Completion:
        if self._lockstep is not None:
            await self._lockstep.wait(self._order)
        request: Request = (prompt_ids, params, tuple(images)) if images else (prompt_ids, params)
        self._asked += 1
        before = self.place.engine
        moves = self._places.ask(self.place, stay=self._lockstep is not None or self._waiting > 0)
        if moves:
            self._clients[before].end(self._name)
        engine, last = self.place.engine, self._asked == self.turns
        self._waiting += 1
        try:
            completion = await self._clients[engine].complete(request, self._name, last=last, moved=moves)
        finally:
            self._waiting -= 1
            self._places.answered(engine)
        self.tokens += len(completion.token_ids)
        return completion

    def leave(self) -> None:
        """The episode has ended."""
        self._clients[self.place.engine].end(self._name)
        self._places.leave(self.place)
        if self._lockstep is not None:
            self._lockstep.leave()


class EnvironmentWorker:
    """An asyncio Ray actor without torch. Rewards are given elsewhere; episodes leave here ungraded.

    `start` begins episodes, `events` tells of those that ended, `abort` and `stop` end them.
    """

    def __init__(
        self, env: EnvConfig, *engines: Any, home: Sequence[int] | None = None, rows: int | None = None
    ) -> None:
        """engines: the rollout actors that sample. home: numbers of those on which episodes begin, those of a group on
        one; None: all. rows: requests that an engine decodes at a time, by which episodes may move; see
        `EnginePlaces`."""
        self._faults = env.faults
        self._watch: BlockWatch | None = None
        self._environment = make(env.name, **env.args)
        self._tasks = Tasks(self._environment.source)
        self._engines = engines
        self._home, self._rows = range(len(engines)) if home is None else home, rows
        self._places = EnginePlaces(self._home, len(engines), rows)
        self._looking: asyncio.Task[None] | None = None  # at what engines have to do
        self._clients: list[EngineClient] = []
        self._sandboxes = provider_named(env.sandbox, **env.sandbox_args)
        needs_programs = self._environment.needs_programs
        self._programs = ProgramRunner(provider_named(env.local_sandbox)) if needs_programs else None
        self._tokenizer, self._prompts = Tokenizer.builtin(), PromptCache()
        self._episodes: dict[tuple[str, int], tuple[asyncio.Task[None], _Seat]] = {}
        self._ended: list[tuple[EpisodeJob, int, Episode]] = []
        self._changed = asyncio.Event()
        self._stopped = False
        gc.collect()
        gc.freeze()  # what was imported stays; looking at it again and again costs a third of short episodes

    async def set_tokenizer(self, directory: str) -> None:
        """From now on the tokenizer of this checkpoint directory."""
        self._tokenizer, self._prompts = Tokenizer.load(directory), PromptCache()

    async def open(self, client: str) -> None:
        """Ends what ran before; from now on its requests are those of this client."""
        await self.stop()
        self._stopped = False
        self._watch = self._watch or BlockWatch(self._faults.blocked_s)  # on the thread of the event loop
        places = self._places = EnginePlaces(self._home, len(self._engines), self._rows)

        def told(number: int, load: int, rows: int | None) -> None:
            places.told(number, load, places.asking(number), rows)

        self._clients = [
            EngineClient(engine, client, partial(told, number)) for number, engine in enumerate(self._engines)
        ]

    async def start(
        self,
        jobs: Sequence[tuple[EpisodeJob, int]],
        sampling: SamplingParams,
        lockstep: bool,
        resume: Mapping[str, bytes] | None = None,
        keep_s: float | None = None,
    ) -> None:
        """Begins episodes: jobs, each with the number of the attempt.

        lockstep: those of one call that share an engine send their requests together; see `Lockstep`. resume: states
        from which episodes go on, by id. keep_s: how often a state of each is kept, for `states`; None: never.
        """
        for client in self._clients:
            client.together = lockstep
        placed = [self._places.begin(job.group_id) for job, _ in jobs]
        counts = Counter(place.engine for place in placed)
        cohorts = {engine: Lockstep(count) for engine, count in counts.items()} if lockstep else {}
        for order, ((job, attempt), place) in enumerate(zip(jobs, placed, strict=True)):
            cohort, name = cohorts.get(place.engine), f"{job.episode_id} {attempt}"
            seat = _Seat(self._clients, self._places, place, cohort, order, name)
            seat.kept = None if keep_s is None else KeptState(keep_s)
            seat.resume = (resume or {}).get(job.episode_id)
            task = asyncio.create_task(self._play(job, attempt, seat, sampling))
            self._episodes[job.episode_id, attempt] = task, seat
            task.add_done_callback(partial(self._left, job, attempt, seat))

    async def events(self) -> AsyncIterator[Any]:
        """In turns: ungraded episodes that ended, and (header, attempt) of each. Every few seconds, if only to say
        that this worker lives, until it is stopped."""
        while not self._stopped:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
            self._changed.clear()
            if self._places.crowded and (self._looking is None or self._looking.done()):
                self._looking = asyncio.ensure_future(self._look())
            ended, self._ended = self._ended, []
            yield [episode for _, _, episode in ended]
            yield [(header_of(job, episode), attempt) for job, attempt, episode in ended]

    async def _look(self) -> None:
        """Asks all engines how many requests they have."""
        with suppress(Exception):  # whoever has requests in a lost one is told so
            await asyncio.gather(*(client.look() for client in self._clients))

    async def states(self) -> dict[str, tuple[int, bytes]]:
        """The newest state of each episode that runs and has one, by id, with its attempt; see `EpisodeState`.

        An episode that was resumed and has none yet gives the state from which it went on.
        """
        found: dict[str, tuple[int, bytes]] = {}
        for (name, attempt), (_, seat) in list(self._episodes.items()):
            if seat.kept is not None and seat.kept.state is not None:
                found[name] = attempt, await asyncio.to_thread(seat.kept.state.to_bytes)
            elif seat.resume is not None:
                found[name] = attempt, seat.resume
        return found

    async def abort(self, episodes: Sequence[tuple[str, int]]) -> int:
        """Ends these attempts, (episode id, attempt), without a word; the tokens that they had sampled."""
        tokens = 0
        for name in episodes:
            if name in self._episodes:
                task, seat = self._episodes[name]
                tokens += seat.tokens
                task.cancel()
        return tokens

    async def stop(self) -> None:
        """Ends everything, `events` included."""
        tasks = [task for task, _ in self._episodes.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_S)
        for client in self._clients:
            client.close()
        self._ended.clear()
        self._stopped = True
        self._changed.set()

    def _left(self, job: EpisodeJob, attempt: int, seat: _Seat, _: asyncio.Task[None]) -> None:
        """An episode does not run any more, whether it ended or was ended."""
        del self._episodes[job.episode_id, attempt]
        seat.leave()

    async def _play(self, job: EpisodeJob, attempt: int, seat: _Seat, sampling: SamplingParams) -> None:
        episode = await self._episode(job, seat, sampling)
        self._ended.append((job, attempt, episode))
        self._changed.set()

    async def _episode(self, job: EpisodeJob, seat: _Seat, sampling: SamplingParams) -> Episode:
        """An ungraded episode. One whose environment fails says so."""
        try:
            task = self._tasks.get(job.task).public()
            seat.turns = task.budgets.turns
            seeded = replace(sampling, seed=job.sampling_seed)
            settings = TurnSettings(self._tokenizer, seeded, job.thinking, job.thinking_effort, self._prompts)
            context = EpisodeContext(
                seed=job.sampling_seed, group=job.group_id, programs=self._programs, sandboxes=self._sandboxes
            )
            if self._environment.make_harness is not None:
                program = GuardedHarness(self._environment.make_harness(), self._watched())
                return await run_program(program, task, seat, settings, episode_id=job.episode_id, context=context)
            env = GuardedEnv(self._environment.make_env(), self._faults, self._watched())
            resume = None if seat.resume is None else EpisodeState.from_bytes(seat.resume)
            return await run_episode(
                env, task, seat, settings, episode_id=job.episode_id, context=context, resume=resume, kept=seat.kept
            )
        except (EngineFailed, ContextOutgrown) as error:
            return job.failed(self._environment.name, Failed(f"engine: {error}"[:500], FailureKind.ENGINE))
        except Exception as error:  # the last line of defence: user code must not end the run
            failed = Failed(f"{type(error).__name__}: {error}"[:500], FailureKind.RAISED)
            return job.failed(self._environment.name, failed)

    def _watched(self) -> BlockWatch:
        if self._watch is None:
            raise RuntimeError("no client has opened this worker")
        return self._watch


def header_of(job: EpisodeJob, episode: Episode) -> Header:
    """What the driver has to know of an episode that ended. Without an answer to grade it has its score."""
    turns = [turn for branch in episode.branches for turn in branch.turns]
    score = None if episode.score == NOT_GRADED else episode.score
    if score is None and not gradable(episode):
        score = Failed(f"the episode ended as {episode.stop_reason} and has no answer to grade")
    tokens = sum(len(turn.sampled_ids) for turn in turns)
    return Header(job.episode_id, tokens, min((turn.first_version for turn in turns), default=None), score)
