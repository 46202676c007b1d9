"""How requests reach an engine and answers come back: in batches, each answer as soon as there is one.

`AnswerStreams` is the side of the engine's actor, `EngineClient` that of whoever asks. Neither needs torch.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, TypeAlias

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

    @abstractmethod
    def begin(self, requests: Sequence[Request]) -> list[asyncio.Future[Completion]]:
        """Starts requests together. What is wrong with one is its future's exception."""

    def take_back(self, futures: Sequence[asyncio.Future[Completion]]) -> None:
        """Ends requests that nobody waits for any more."""
        for future in futures:
            future.cancel()

    async def submit(self, client: str, batch: Sequence[tuple[int, Request]]) -> None:
        """Starts the requests of these tickets; `answers` gives what becomes of them."""
        outbox = self._outboxes.setdefault(client, _Outbox())
        for (ticket, _), future in zip(batch, self.begin([request for _, request in batch]), strict=True):
            outbox.live[ticket] = future
            future.add_done_callback(partial(outbox.put, ticket))

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
        """Ends requests of a client: these, or all of them and its stream of answers."""
        if (outbox := self._outboxes.get(client)) is None:
            return
        gone = list(outbox.live) if tickets is None else [ticket for ticket in tickets if ticket in outbox.live]
        self.take_back([outbox.live.pop(ticket) for ticket in gone])
        outbox.changed.set()
        if tickets is None:
            outbox.closed = True
            del self._outboxes[client]

    async def check(self) -> None:
        """Comes back if the engine can go on. Raises EngineFailed."""
        return


class EngineClient:
    """An engine's actor as one client sees it. Requests of one turn of the event loop travel together."""

    def __init__(self, engine: Any, name: str) -> None:
        """engine: the handle of an actor that has `AnswerStreams`."""
        self._engine, self._name = engine, name
        self._tickets = itertools.count()
        self._live: dict[int, asyncio.Future[Completion]] = {}
        self._outgoing: list[tuple[int, Request]] = []
        self._unwanted: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self.together = False
        """Whether answers are of use only when all have come; set before the first request."""

    async def complete(self, request: Request) -> Completion:
        """The completion of a request. Raises ContextOutgrown, and EngineFailed for whatever else goes wrong."""
        ticket, future = next(self._tickets), asyncio.get_running_loop().create_future()
        self._live[ticket] = future
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append((ticket, request))
        try:
            completion: Completion = await future
            return completion
        finally:
            if self._live.pop(ticket, None) is not None:  # whoever asked was ended meanwhile
                self._take_back(ticket)

    def close(self) -> None:
        """Ends what still waits."""
        for task in [*self._tasks, *([self._reader] if self._reader else [])]:
            task.cancel()

    def _flush(self) -> None:
        self._reader = self._reader or asyncio.ensure_future(self._read())
        batch, self._outgoing = self._outgoing, []
        self._in_background(self._submit(batch))

    async def _submit(self, batch: Sequence[tuple[int, Request]]) -> None:
        try:
            await self._engine.submit.remote(self._name, batch)
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
            elif isinstance(answer, ContextOutgrown | EngineFailed):
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
