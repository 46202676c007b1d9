"""Streamed answers: events of several samples in the order in which they come, sent until the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from k3rl.engine import EngineError, InvalidRequest, Tokens
from k3rl.serve.driver import Stream
from k3rl.serve.job import Choice
from k3rl.tokens import anthropic, openai
from k3rl.types import Completion


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(pairs: list[tuple[Choice, Stream]]) -> AsyncGenerator[tuple[Choice, Tokens | Completion], None]:
    """Events of several streams in the order in which they come; each ends with its completion."""
    queue: asyncio.Queue[tuple[Choice, Tokens | Completion | Exception]] = asyncio.Queue()

    async def forward(choice: Choice, stream: Stream) -> None:
        try:
            async for tokens in stream:
                queue.put_nowait((choice, tokens))
            queue.put_nowait((choice, await stream.result()))
        except EngineError as error:
            queue.put_nowait((choice, error))

    tasks = [asyncio.create_task(forward(*pair)) for pair in pairs]
    try:
        left = len(tasks)
        while left:
            choice, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            left -= isinstance(event, Completion)
            yield choice, event
    finally:
        for task in tasks:
            task.cancel()


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a stream is written. event: of an object; error: the object of a message and an HTTP status; done: the last
    line of a stream, None where its last event says so."""

    event: Callable[[Mapping[str, Any]], str]
    error: Callable[[str, int], dict[str, Any]]
    done: str | None = None


OPENAI = Dialect(openai.event, openai.error_object, openai.event(openai.DONE))
ANTHROPIC = Dialect(anthropic.event, anthropic.error_object)


class EventStream(Response):
    """Server-sent events of JSON objects. An EngineError becomes an error object.

    `end` is called once, however it ends; a client that leaves, or takes nothing for `stalled_s`, ends it.
    """

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        end: Callable[[], None],
        stalled_s: float,
        dialect: Dialect = OPENAI,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._end, self._stalled_s, self._dialect = events, end, stalled_s, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with suppress(TimeoutError):  # whoever takes nothing gets nothing more
                    sending.result()
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            self._end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._data(send, self._dialect.event(event))
        except EngineError as error:
            status = 400 if isinstance(error, InvalidRequest) else 500
            await self._data(send, self._dialect.event(self._dialect.error(str(error), status)))
        if self._dialect.done is not None:
            await self._data(send, self._dialect.done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _data(self, send: Send, data: str) -> None:
        body = {"type": "http.response.body", "body": data.encode(), "more_body": True}
        async with asyncio.timeout(self._stalled_s):
            await send(body)
