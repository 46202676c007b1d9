"""Grading of episodes that ended, by whichever reward worker is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from k3rl.actors.calls import ActorFailure
from k3rl.actors.evaluating import Evaluating
from k3rl.actors.jobs import EpisodeJob
from k3rl.actors.rollout_actors import Actors
from k3rl.actors.schedule import Grade
from k3rl.config import K3Error
from k3rl.types import Failed, FailureKind, Score


class Grading:
    """Gives grades to the dispatcher. What a call raises that no score can say is raised by its task.

    spawn: runs a coroutine beside. saw: is told of each score. then: is called when scores have come.
    """

    def __init__(
        self,
        actors: Actors,
        dispatcher: Evaluating,
        *,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        saw: Callable[[EpisodeJob, Score], None],
        then: Callable[[], None],
    ) -> None:
        self._rewards, self._dispatcher, self._check_nodes = actors.rewards, dispatcher, actors.check_nodes
        self._limit_s = actors.faults.deadline_s or actors.timeout_s
        self._spawn, self._saw, self._then = spawn, saw, then
        self._grades: list[Grade] = []
        self._idle = set(range(len(actors.rewards)))  # places of reward workers that grade nothing

    def give_out(self, grades: Sequence[Grade]) -> None:
        """Queues grades; each reward worker takes all that wait when it is free."""
        self._grades += grades
        while self._grades and self._idle:
            share = -(-len(self._grades) // len(self._idle))
            place, mine = min(self._idle), self._grades[:share]
            self._idle.discard(place)
            del self._grades[:share]
            self._spawn(self._grade(place, mine))

    async def _grade(self, place: int, grades: Sequence[Grade]) -> None:
        """One call for all; where that breaks, one for each group, in a worker that may be a fresh one."""
        scores = await self._scores(place, grades)
        if not isinstance(scores, dict):
            found, scores = scores, {}
            for grade in grades:
                own = found if len(grades) == 1 else await self._scores(place, [grade])
                if own is None:
                    self._gone(grade)
                    continue
                scores |= dict.fromkeys((h.episode_id for h in grade.headers), own) if isinstance(own, Failed) else own
        attempts = {name: self._dispatcher.attempt_of(name) for name in scores}
        known = {name: attempt for name, attempt in attempts.items() if attempt is not None}
        for name in known:
            self._saw(self._dispatcher.member(name).job, scores[name])
        self._idle.add(place)
        self.give_out(self._dispatcher.graded({name: scores[name] for name in known}, known))
        self._then()

    def _gone(self, grade: Grade) -> None:
        """The records of some of these episodes are gone, and nothing says whose: all are played again."""
        attempts = {header.episode_id: self._dispatcher.attempt_of(header.episode_id) for header in grade.headers}
        self._dispatcher.gone({name: attempt for name, attempt in attempts.items() if attempt is not None})

    async def _scores(self, place: int, grades: Sequence[Grade]) -> dict[str, Score] | Failed | None:
        """Scores by episode, or why the worker gave none; None where records of these episodes are gone."""
        headers = [
            header
            for grade in grades
            for header in grade.headers
            if self._dispatcher.attempt_of(header.episode_id) is not None
        ]
        if not headers:
            return {}
        jobs = [self._dispatcher.member(header.episode_id).job for header in headers]
        payloads = list({header.payload for header in headers})
        limit_s = self._limit_s
        ref = self._rewards.actors[place].grade.remote(jobs, *payloads)
        try:
            scores: dict[str, Score] = await asyncio.wait_for(asyncio.wrap_future(ref.future()), limit_s)
            return scores
        except TimeoutError:
            failed = Failed(f"grading took more than {limit_s:g} s and was ended", FailureKind.HUNG)
        except RayTaskError as error:
            if isinstance(error.cause, K3Error):
                raise error.cause from None
            if isinstance(error.cause, ObjectLostError):
                return None
            return Failed(f"grading: {type(error.cause).__name__}: {error.cause}"[:500], FailureKind.RAISED)
        except RayActorError as error:
            if error.actor_init_failed:
                raise ActorFailure(f"reward worker {place} cannot be started:\n{error}") from error
            failed = Failed(f"the process of reward worker {place} died", FailureKind.DIED)
        except ObjectLostError:
            return None
        except RayError as error:
            failed = Failed(f"grading: {type(error).__name__}: {error}"[:500], FailureKind.DIED)
        await self._check_nodes()
        self._rewards.replace(place)
        return failed
