"""A stream of rollouts: episodes run, are graded and wait in whole groups while the driver does something else.

`RolloutStream` drives a `Dispatcher` from an event loop in a thread of its own: it follows each environment worker,
hands grades out, and replaces what is lost. What it holds of an episode is a header and a reference; the episodes
themselves are fetched when the learner takes their group.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError

from k3rl.actors.calls import ActorFailure, ActorHung, ActorLost, wait
from k3rl.actors.evaluating import Evaluating
from k3rl.actors.grading import Grading
from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.rollout_actors import Actors
from k3rl.actors.schedule import Finished, Header, Mode
from k3rl.envs import Breaker
from k3rl.types import Episode, Failed, FailureKind, Group, SamplingParams, Score

_CLOSE_S = 20.0  # for workers to end what they play
_STATES_S = 60.0  # for a worker to give the states of its episodes
T = TypeVar("T")


class RolloutStream:
    """`take` groups as they become whole, say which version is `published`, and `close` in the end.

    Raises in `take` what ended it: ActorLost where an engine is gone or broken, EnvironmentTripped, or what drawing
    raised.
    """

    def __init__(
        self,
        actors: Actors,
        dispatcher: Evaluating,
        sampling: SamplingParams,
        breaker: Breaker,
        counts: Counter[str],
        prepare: Callable[[Any], Any],
        *,
        going_on: Mapping[str, bytes] | None = None,
        keep_s: float | None = None,
    ) -> None:
        """counts: what went wrong, added to. prepare: worker -> the call that comes first, if any. going_on: states
        from which episodes go on, by id. keep_s: how often states are kept, for `states`; None: never."""
        self._going_on, self._keep_s = dict(going_on or {}), keep_s
        self._actors, self._dispatcher, self._sampling = actors, dispatcher, sampling
        self._evaluation_sampling = sampling
        self._breaker, self._counts, self._prepare = breaker, counts, prepare
        self._synchronous = dispatcher.schedule.mode is Mode.SYNCHRONOUS
        self._error: BaseException | None = None
        self._closed = self._begun = False
        self._open: set[int] = set()  # places of environment workers that take episodes
        self._clients: dict[int, str] = {}
        self._grading = Grading(actors, dispatcher, spawn=self._spawn, saw=self._saw, then=self._fill)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._resting = False
        self.aborted_tokens = 0
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._on_loop(self._begin()).result()

    # ------------------------------------------------------------------------------------------ the driver's calls

    def take(self, timeout_s: float | None = None) -> list[Group]:
        """Waits for the next batch. Raises ActorHung after `timeout_s` with what was waited for."""
        finished = self._on_loop(self._take(timeout_s)).result()
        groups = self._fetched(finished)
        self._breaker.check([job.task.family for group in finished for job in group.jobs])
        return groups

    def evaluate(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> None:
        """Begins an evaluation of the version that is served, on what training leaves of the engines; `evaluation`
        waits for it, and has to, before the next version is published."""
        self._on_loop(self._evaluate(jobs, sampling)).result()

    def evaluation(self) -> list[Group]:
        """The graded episodes of the evaluation that was begun, each a group of its own."""
        return self._fetched(self._on_loop(self._take_evaluation()).result())

    def _fetched(self, finished: Sequence[Finished]) -> list[Group]:
        """Groups with their episodes. Raises ActorLost where the node that had them is gone."""
        refs = list({header.payload for group in finished for header in group.headers if header.payload is not None})
        try:
            parts = wait(refs, self._actors.timeout_s, "fetching episodes")
        except RayError as error:  # with the node that had them
            raise ActorLost(f"episodes that were played are gone:\n{error}") from error
        played = {ref: {episode.id: episode for episode in part} for ref, part in zip(refs, parts, strict=True)}
        groups = []
        for group in finished:
            pairs = zip(group.headers, group.jobs, strict=True)
            env = self._actors.env
            own = tuple(_episode(env, header, job, played.get(header.payload, {})) for header, job in pairs)
            groups.append(Group(group.group_id, own[0].task_id, own))
        return groups

    def published(self, version: int) -> None:
        """Engines serve this version from now on."""
        self._on_loop(self._published(version)).result()

    def drawn(self) -> tuple[int, list[tuple[int, list[EpisodeJob]]]]:
        """(number of the next group, groups that were drawn and not taken), where a resumed run goes on."""
        return self._on_loop(self._drawn()).result()

    def states(self) -> dict[str, bytes]:
        """The newest state of each episode of `drawn` that can go on later, by id; none where a worker does not give
        its own in time."""
        return self._on_loop(self._states()).result()

    def take_counts(self) -> dict[str, float]:
        """What did not reach the learner since the last call, by name."""
        return self._on_loop(self._take_counts()).result()

    def close(self) -> None:
        """Ends what still runs, in workers and engines."""
        if self._closed:
            return
        self.take_counts()
        self._closed = True
        with suppress(Exception):  # who is gone needs no ending
            self._on_loop(self._end()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _take(self, timeout_s: float | None) -> Any:
        began = time.monotonic()
        while True:
            if self._error is not None:
                raise self._error
            if self._dispatcher.ready:
                taken = self._dispatcher.take()
                self._fill()
                return taken
            left = None if timeout_s is None else timeout_s - (time.monotonic() - began)
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                raise ActorHung(f"no batch of rollouts within {timeout_s:g} s: {self._dispatcher}") from None
            self._changed.clear()

    async def _evaluate(self, jobs: Sequence[EpisodeJob], sampling: SamplingParams) -> None:
        self._evaluation_sampling = sampling
        self._dispatcher.evaluate(jobs)
        self._fill()

    async def _take_evaluation(self) -> list[Finished]:
        while not self._dispatcher.evaluated:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
            self._changed.clear()
        taken = self._dispatcher.take_evaluation()
        self._fill()
        return taken

    async def _published(self, version: int) -> None:
        self._resting = False
        aborts = self._dispatcher.published(version)
        by_worker: dict[int, list[tuple[str, int]]] = {}
        for abort in aborts:
            by_worker.setdefault(abort.worker, []).append((abort.episode_id, abort.attempt))
        for place, episodes in by_worker.items():
            self._spawn(self._abort(place, episodes))
        self._fill()

    async def _abort(self, place: int, episodes: Sequence[tuple[str, int]]) -> None:
        with suppress(RayError):  # its reader sees that it is lost
            self.aborted_tokens += await self._actors.environments.actors[place].abort.remote(episodes)

    async def _drawn(self) -> tuple[int, list[tuple[int, list[EpisodeJob]]]]:
        return self._dispatcher.drawn()

    async def _states(self) -> dict[str, bytes]:
        if self._keep_s is None:
            return {}
        calls = [self._actors.environments.actors[place].states.remote() for place in self._open]
        answers = (asyncio.wait_for(asyncio.wrap_future(call.future()), _STATES_S) for call in calls)
        given = await asyncio.gather(*answers, return_exceptions=True)  # of who is lost its reader hears
        every = {name: one for found in given if not isinstance(found, BaseException) for name, one in found.items()}
        training = self._dispatcher.training.groups
        current = {name: state for name, (attempt, state) in every.items() if training.attempt_of(name) == attempt}
        waiting = {name: state for name, state in self._going_on.items() if training.attempt_of(name) == 0}
        return waiting | current

    async def _take_counts(self) -> dict[str, float]:
        counts, aborted, self.aborted_tokens = self._dispatcher.take_counts(), self.aborted_tokens, 0
        self._counts["retried"] += counts.retried + counts.regraded
        return {
            "dropped_tokens": counts.dropped_tokens,
            "aborted_tokens": aborted,
            "dropped_groups": counts.dropped_groups,
            "dropped_episodes": counts.dropped_episodes,
            "aborted_episodes": counts.aborted_episodes,
            "restarted_episodes": counts.restarted,
            "replayed_episodes": counts.replayed,
            "continued_episodes": counts.continued,
            **({} if self._synchronous else {"most_running": counts.most_running}),
        } | {f"dropped_by_length/{2**bits // 2}": float(n) for bits, n in sorted(counts.by_length.items())}

    # ------------------------------------------------------------------------------------------- the event loop

    async def _begin(self) -> None:
        for place in range(len(self._actors.environments)):
            self._spawn(self._follow(place))
        self._spawn(self._actors.watch_engines())

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        calls = [self._actors.environments.actors[place].stop.remote() for place in self._open]
        calls += [engine.cancel.remote(name) for name in self._clients.values() for engine in self._actors.engines]
        await asyncio.gather(*calls, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs it beside; what it raises ends the stream."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._changed.set()

    def _fill(self) -> None:
        """Starts what may start, and says that something happened."""
        dispatcher = self._dispatcher
        self._changed.set()
        self._begun = self._begun or len(self._open) == len(self._actors.environments)
        if len(self._open) < len(self._actors.environments) and (self._synchronous or not self._begun):
            return  # whoever is there first would get everything
        starts = dispatcher.start()
        by_worker: dict[tuple[int, bool], list[tuple[EpisodeJob, int]]] = {}
        for start in starts:
            evaluates = dispatcher.evaluates(start.job.episode_id)
            by_worker.setdefault((start.worker, evaluates), []).append((start.job, start.attempt))
        for (place, evaluates), jobs in by_worker.items():
            worker, sampling = self._actors.environments.actors[place], self._sampling
            if evaluates:
                sampling = self._evaluation_sampling
            resume = {
                job.episode_id: self._going_on.pop(job.episode_id)
                for job, attempt in jobs
                if job.episode_id in self._going_on and attempt == 0
            }
            keep_s = None if evaluates else self._keep_s
            self._spawn(_sent(worker.start.remote(jobs, sampling, self._synchronous, resume, keep_s)))
        self._grading.give_out(dispatcher.take_due())
        if dispatcher.phase_over and not self._resting:
            self._resting = True
            self._spawn(_rest(self._actors.engines))

    # ------------------------------------------------------------------------------------- environment workers

    async def _follow(self, place: int) -> None:
        """One worker after another at a place, each for as long as it lives."""
        pool = self._actors.environments
        while True:
            worker, client = pool.actors[place], f"{place}-{secrets.token_hex(8)}"
            self._clients[place] = client
            try:
                await self._events(place, worker, client)
            except TimeoutError:
                lost = Failed(f"environment worker {place} was silent and was ended", FailureKind.HUNG)
            except RayActorError as error:
                if error.actor_init_failed:
                    raise ActorFailure(f"environment worker {place} cannot be started:\n{error}") from error
                lost = Failed(f"the process of environment worker {place} died", FailureKind.DIED)
            except RayError as error:  # an answer that cannot travel, or that was lost with its node
                lost = Failed(f"environment worker {place}: {type(error).__name__}: {error}"[:500], FailureKind.DIED)
            self._open.discard(place)
            self._dispatcher.close(place)
            await self._actors.check_engines()
            if not pool.can_replace:
                raise ActorLost(lost.reason)
            await self._actors.check_nodes()
            for engine in self._actors.engines:
                engine.cancel.remote(client)
            pool.replace(place)
            self._grading.give_out(self._dispatcher.lost(place, kind=lost.kind, why=lost.reason))
            for job, failed in self._dispatcher.take_guilty():
                self._saw(job, failed)
            self._fill()

    async def _events(self, place: int, worker: Any, client: str) -> None:
        """Follows one worker until it is lost, which raises."""
        limit_s = max(self._actors.timeout_s, self._actors.silence_s)  # a process that starts imports much
        if (first := self._prepare(worker)) is not None:
            await asyncio.wait_for(asyncio.wrap_future(first.future()), limit_s)
        await asyncio.wait_for(asyncio.wrap_future(worker.open.remote(client).future()), limit_s)
        events = worker.events.remote()
        self._open.add(place)
        self._dispatcher.open(place)
        self._fill()
        while True:
            payload = await asyncio.wait_for(anext(events), self._actors.silence_s)
            headers = await asyncio.wait_for(self._headers(events, payload), self._actors.silence_s)
            if headers:
                await self._ended(headers, payload)

    async def _headers(self, events: Any, payload: Any) -> list[tuple[Header, int]]:
        """Those of a payload. Raises RayError for a worker that is lost, whose last word is an error."""
        if (ref := await anext(events, None)) is None:
            await payload
            raise ActorFailure("an environment worker ended the stream of its episodes")
        headers: list[tuple[Header, int]] = await ref
        return headers

    async def _ended(self, headers: Sequence[tuple[Header, int]], payload: Any) -> None:
        failures = [header.score for header, _ in headers if isinstance(header.score, Failed)]
        if any(failed.kind is FailureKind.ENGINE for failed in failures):
            await self._actors.check_engines()
        for header, attempt in headers:
            if self._dispatcher.attempt_of(header.episode_id) == attempt:
                job = self._dispatcher.member(header.episode_id).job
                if isinstance(header.score, Failed):
                    self._saw(job, header.score)
            self._grading.give_out(self._dispatcher.ended(replace(header, payload=payload), attempt))
        self._fill()

    def _saw(self, job: EpisodeJob, score: Score) -> None:
        if self._dispatcher.evaluates(job.episode_id):
            return  # metrics and breaker are about training
        if isinstance(score, Failed):
            self._counts[f"failed_{score.kind}"] += 1
        self._breaker.saw(job.task.family, score)


async def _sent(ref: Any) -> None:
    """Waits for a call that starts episodes. Raises ActorFailure where the worker refuses them."""
    try:
        await ref
    except RayTaskError as error:
        raise ActorFailure(f"an environment worker cannot start episodes:\n{error}") from error
    except RayError:  # its reader sees that it is lost
        return


async def _rest(engines: Sequence[Any]) -> None:
    """Engines rest until the next version is published; tools go on."""
    await asyncio.gather(*(engine.pause.remote() for engine in engines))


def _episode(env: str, header: Header, job: EpisodeJob, played: Mapping[str, Episode]) -> Episode:
    """The episode of a header, with its score."""
    score = header.score if header.score is not None else Failed("not graded")
    if header.episode_id in played:
        return replace(played[header.episode_id], score=score)
    return job.failed(env, score if isinstance(score, Failed) else Failed("its record is gone"))
