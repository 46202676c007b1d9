"""How requests reach an engine and answers come back: in batches, each answer as soon as there is one.

A conversation's tokens cross once: a turn brings those that the engine's actor lacks (`conversations.py`), and an
answer those that were sampled.

`AnswerStreams` is the side of the engine's actor, `EngineClient` that of whoever asks. Neither needs torch.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from k3rl.actors.conversations import Conversations, KeptTokens, SessionLost, SessionTurn, turn_of, whole_turn
from k3rl.envs import ContextOutgrown, EngineFailed
from k3rl.types import Completion, EncodedImage, SamplingParams

Request: TypeAlias = tuple[Sequence[int], SamplingParams] | tuple[Sequence[int], SamplingParams, Sequence[EncodedImage]]
"""Prompt ids, how to sample, and, where the prompt has placeholders, an image for each."""
Answer: TypeAlias = Completion | Exception


_GATHER_S = 0.005  # answers that come within it travel together: a message costs as much as a step of an engine


class _Outbox:
    """Answers for one client that were not sent yet, and its requests that have none."""

    def __init__(self) -> None:
        self.live: dict[int, asyncio.Future[Completion]] = {}
        self.answers: list[tuple[int, Answer]] = []
        self.changed = asyncio.Event()
        self.closed = False

    def put(self, ticket: int, future: asyncio.Future[Completion]) -> None:
        """The answer to a request, unless it was taken back."""
        if self.live.pop(ticket, None) is None or future.cancelled():
            return
        error = future.exception()
        self.answers.append((ticket, error if isinstance(error, Exception) else future.result()))
        self.changed.set()


class AnswerStreams(ABC):
    """What an engine's actor offers to clients, each of which has a name and numbers its requests by tickets."""

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox] = {}
        self._tokens = KeptTokens()
        self._moved = 0

    @abstractmethod
    def begin(self, requests: Sequence[Request]) -> list[asyncio.Future[Completion]]:
        """Starts requests together. What is wrong with one is its future's exception."""

    def take_back(self, futures: Sequence[asyncio.Future[Completion]]) -> None:
        """Ends requests that nobody waits for any more."""
        for future in futures:
            future.cancel()

    def end_sessions(self, names: Sequence[str]) -> None:
        """Conversations that do not go on, by the names that their requests' parameters had."""
        return

    @property
    def rows(self) -> int | None:
        """Requests that the engine decodes at a time, where that is known."""
        return None

    async def demand(self) -> tuple[int, int | None]:
        """(requests of all clients that have no answer, `rows`)."""
        return sum(len(outbox.live) for outbox in self._outboxes.values()), self.rows

    async def submit(
        self, client: str, batch: Sequence[tuple[int, SessionTurn]], ended: Sequence[int] = (), moved: int = 0
    ) -> tuple[int, int | None]:
        """Starts the requests of these tickets; `answers` gives what becomes of them. ended: conversations that do not
        go on. moved: conversations among them that another engine had; returns the `demand` with them."""
        self._end(client, ended)
        self._moved += moved
        outbox = self._outboxes.setdefault(client, _Outbox())
        ready: list[tuple[int, SessionTurn]] = []
        requests: list[Request] = []
        for ticket, turn in batch:
            try:
                ids, params, images = self._tokens.begin(client, turn)
            except SessionLost as lost:
                outbox.answers.append((ticket, lost))
                outbox.changed.set()
                continue
            row = cast(Sequence[int], ids)
            requests.append((row, params, images) if images else (row, params))
            ready.append((ticket, turn))
        if not ready:  # conversations that ended, and nothing else
            return await self.demand()
        for (ticket, turn), future in zip(ready, self.begin(requests), strict=True):
            outbox.live[ticket] = future
            turns = self._tokens.turns(client, turn.session)
            future.add_done_callback(partial(self._answered, client, turn.session, turns))
            future.add_done_callback(partial(outbox.put, ticket))
        return await self.demand()

    def _answered(self, client: str, session: int, turns: int, future: asyncio.Future[Completion]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._tokens.answered(client, session, turns, future.result())

    def _end(self, client: str, sessions: Sequence[int] | None) -> None:
        if names := self._tokens.end(client, sessions):
            self.end_sessions(names)

    async def answers(self, client: str, together: bool = False) -> AsyncIterator[list[tuple[int, Answer]]]:
        """Tickets with their answers, as they come, until the client is cancelled as a whole.

        together: only when none of its requests is left, for who would wait for the last one anyway.
        """
        outbox = self._outboxes.setdefault(client, _Outbox())
        while not outbox.closed:
            await outbox.changed.wait()
            outbox.changed.clear()
            if outbox.live and together:
                continue
            if outbox.live and not outbox.closed:
                await asyncio.sleep(_GATHER_S)
            found, outbox.answers = outbox.answers, []
            if found:
                yield found

    async def cancel(self, client: str, tickets: Sequence[int] | None = None) -> None:
        """Ends requests of a client: these, or all of them with its conversations and its stream of answers."""
        if (outbox := self._outboxes.get(client)) is None:
            return
        if tickets is None:
            self._end(client, None)
        gone = list(outbox.live) if tickets is None else [ticket for ticket in tickets if ticket in outbox.live]
        self.take_back([outbox.live.pop(ticket) for ticket in gone])
        outbox.changed.set()
        if tickets is None:
            outbox.closed = True
            del self._outboxes[client]

    async def take_counts(self) -> dict[str, float]:
        """What was counted since the last call, by name: here the conversations that came from other engines."""
        moved, self._moved = self._moved, 0
        return {"moved_conversations": float(moved)}

    async def check(self) -> None:
        """Comes back if the engine can go on. Raises EngineFailed."""
        return


class Increments:
    """What sums have grown by since they were last asked for. Sums that start again count from 0."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def since(self, sums: Mapping[str, float]) -> dict[str, float]:
        """By name, of sums since some start."""
        restarted = any(sums[name] < last for name, last in self._last.items() if name in sums)
        before, self._last = {} if restarted else self._last, dict(sums)
        return {name: value - before.get(name, 0) for name, value in sums.items()}


class EngineClient:
    """An engine's actor as one client sees it. Requests of one turn of the event loop travel together."""

    def __init__(self, engine: Any, name: str, told: Callable[[int, int | None], None] = lambda *_: None) -> None:
        """engine: the handle of an actor that has `AnswerStreams`. told: is given its demand and rows, as they become
        known."""
        self._engine, self._name, self._told = engine, name, told
        self._moved = 0  # of what goes out next
        self._tickets = itertools.count()
        self._live: dict[int, asyncio.Future[Completion]] = {}
        self._conversations = Conversations()
        self._outgoing: list[tuple[int, SessionTurn]] = []
        self._ended: list[int] = []  # conversations
        self._unwanted: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self.together = False
        """Whether answers are of use only when all have come; set before the first request."""

    async def complete(
        self, request: Request, episode: str = "", last: bool = False, moved: bool = False
    ) -> Completion:
        """The completion of a request, of the conversation of this episode that its prompt goes on; last: the episode
        asks for nothing more; moved: another engine had the conversation so far. Raises ContextOutgrown, and
        EngineFailed for whatever else goes wrong."""
        self._moved += moved
        prompt, params, images = request if len(request) == 3 else (*request, ())
        ids, shown = np.asarray(prompt, np.int32), tuple(images)
        with self._conversations.turn(episode, ids) as (mine, base):
            turn = turn_of(mine, base, ids, shown, params, last)
            try:
                completion = await self._ask(turn)
            except SessionLost:
                completion = await self._ask(whole_turn(mine, ids, shown, params, last))
            return mine.answered(ids, shown, params, completion)

    async def _ask(self, turn: SessionTurn) -> Completion:
        ticket, future = next(self._tickets), asyncio.get_running_loop().create_future()
        self._live[ticket] = future
        self._flush_soon()
        self._outgoing.append((ticket, turn))
        try:
            completion: Completion = await future
            return completion
        finally:
            if self._live.pop(ticket, None) is not None:  # whoever asked was ended meanwhile
                self._take_back(ticket)

    async def look(self) -> None:
        """Has the engine tell its demand."""
        self._told(*await self._engine.demand.remote())

    def end(self, episode: str) -> None:
        """The conversations of an episode do not go on."""
        if ended := self._conversations.end(episode):
            self._flush_soon()
            self._ended += ended

    def close(self) -> None:
        """Ends what still waits."""
        for task in [*self._tasks, *([self._reader] if self._reader else [])]:
            task.cancel()

    def _flush_soon(self) -> None:
        if not self._outgoing and not self._ended:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        batch, self._outgoing = self._outgoing, []
        ended, self._ended = self._ended, []
        moved, self._moved = self._moved, 0
        if batch:
            self._reader = self._reader or asyncio.ensure_future(self._read())
        self._in_background(self._submit(batch, ended, moved))

    async def _submit(self, batch: Sequence[tuple[int, SessionTurn]], ended: Sequence[int], moved: int) -> None:
        try:
            self._told(*await self._engine.submit.remote(self._name, batch, ended, moved))
        except Exception as error:  # a lost engine is every waiting episode's error, and each reports it
            self._answer([(ticket, error) for ticket, _ in batch])

    async def _read(self) -> None:
        try:
            async for ref in self._engine.answers.remote(self._name, self.together):
                self._answer(await ref)
            error: Exception = EngineFailed("the engine ended the stream of its answers")
        except Exception as lost:
            error = lost
        self._reader = None
        self._answer([(ticket, error) for ticket in self._live])

    def _answer(self, answers: Sequence[tuple[int, Answer]]) -> None:
        for ticket, answer in answers:
            future = self._live.pop(ticket, None)
            if future is None or future.done():
                continue
            if isinstance(answer, Completion):
                future.set_result(answer)
            elif isinstance(answer, ContextOutgrown | EngineFailed | SessionLost):
                future.set_exception(answer)
            else:
                future.set_exception(EngineFailed(f"{type(answer).__name__}: {answer}"))

    def _take_back(self, ticket: int) -> None:
        if not self._unwanted:
            asyncio.get_running_loop().call_soon(self._cancel)
        self._unwanted.append(ticket)

    def _cancel(self) -> None:
        unwanted, self._unwanted = self._unwanted, []
        self._in_background(self._cancelled(unwanted))

    async def _cancelled(self, tickets: Sequence[int]) -> None:
        try:
            await self._engine.cancel.remote(self._name, tickets)
        except Exception:  # it is lost, and its requests with it
            return

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
