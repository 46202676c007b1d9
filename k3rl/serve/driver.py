"""An engine for callers of an event loop: tokens are handed out as they come, while the engine steps on its own thread.

Everything that touches the engine runs on that thread, between two steps (`k3rl.engine.EngineThread`). The event loop
stays free for clients while the model computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Literal, TypeAlias, TypeVar

from k3rl.data import ImagePatches
from k3rl.engine import (
    Engine,
    EngineError,
    EngineStopped,
    EngineThread,
    News,
    Outcome,
    Prompt,
    Submission,
    Tokens,
)
from k3rl.types import Completion, SamplingParams

T = TypeVar("T")
State: TypeAlias = Literal["starting", "ready", "failed", "closed"]


class Stream:
    """One request in flight. Iterating gives `Tokens` (when asked for) and ends with `completion` set."""

    def __init__(self, prompt_ids: Sequence[int] | Prompt, params: SamplingParams, incremental: bool) -> None:
        self.prompt_ids, self.params, self.incremental = prompt_ids, params, incremental
        self.completion: Completion | None = None
        self.ended = False  # by a completion or an error
        self.submission = Submission(self, prompt_ids, params, incremental=incremental)
        self.events: asyncio.Queue[Tokens | Outcome] = asyncio.Queue()

    @property
    def number(self) -> int | None:
        """The engine's, once it has the request."""
        return self.submission.number

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        while self.completion is None:
            event = await self.events.get()
            self.ended = not isinstance(event, Tokens)
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Completion):
                self.completion = event
                seen, routed = self.submission.seen, self.submission.routed
                rest = Tokens(
                    event.token_ids[seen:],
                    event.logprobs[seen:],
                    (event.top_logprobs or ())[seen:],
                    None if event.routes is None else event.routes[routed:],
                )
                if self.incremental and rest.ids:
                    yield rest
            else:
                yield event

    async def result(self) -> Completion:
        """Waits for the end. Raises the EngineError that ended this request."""
        async for _ in self:
            pass
        assert self.completion is not None
        return self.completion


class EngineDriver:
    """Owns an engine that `load` makes on the driver's thread. `start` first, `close` at last.

    state: starting until it is loaded, then ready; failed when loading or a step raised (`error`; `failure` says what).
    on_failure is called then, in the event loop.
    """

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._thread: EngineThread[Engine] | None = None
        self.state: State = "starting"
        self.failure: str | None = None
        self.error: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def engine(self) -> Engine:
        """Raises EngineError while it is loading and after it failed."""
        return self._ready().engine

    def _ready(self) -> EngineThread[Engine]:
        if self.state != "ready" or self._thread is None:
            raise EngineError(f"the engine is {self.state}" + (f": {self.failure}" if self.failure else ""))
        return self._thread

    def start(self) -> None:
        """Begins loading and, after it, stepping."""
        self._loop = asyncio.get_running_loop()
        thread = self._thread = EngineThread(self._tell, failed=lambda: self._soon(self._broken))
        self._loading = asyncio.ensure_future(self._loaded(thread))

    async def _loaded(self, thread: EngineThread[Engine]) -> None:
        try:
            await asyncio.wrap_future(thread.load(lambda _: self._load()))
        except EngineStopped:  # closed before
            return
        except Exception as error:
            self._fail(error)
        else:
            self.state = "ready"

    async def close(self) -> None:
        """Ends every request in flight with an EngineError and stops after the step in progress."""
        self.state = "closed"
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close)
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

    def submit(
        self,
        prompt_ids: Sequence[int] | Prompt,
        params: SamplingParams,
        incremental: bool = False,
        images: Sequence[ImagePatches] = (),
    ) -> Stream:
        """A stream of this request. An InvalidRequest comes out of the stream."""
        stream = Stream(prompt_ids, params, incremental)
        stream.submission.images = images
        self._ready().submit([stream.submission])
        return stream

    def submit_all(self, asked: Sequence[tuple[Prompt, SamplingParams]], incremental: bool) -> list[Stream]:
        """Streams of requests that begin together."""
        streams = [Stream(prompt, params, incremental) for prompt, params in asked]
        self._ready().submit([stream.submission for stream in streams])
        return streams

    def abort(self, *streams: Stream) -> None:
        """Aborts requests that have not ended; their slots are free at the next step."""
        left = [stream.submission for stream in streams if not stream.ended]
        if left and self._thread is not None:
            with suppress(EngineStopped):  # which ended them
                self._thread.abort(left)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs `function` on the engine between two steps and returns what it returns.

        Raises what it raises, or EngineError when the engine fails or is closed before.
        """
        return await asyncio.wrap_future(self._ready().run(function))

    # ---- news from the thread

    def _tell(self, news: News) -> None:
        self._soon(_put, news)

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody is left to be told
            self._loop.call_soon_threadsafe(function, *arguments)

    def _broken(self) -> None:
        assert self._thread is not None
        if self._thread.error is not None:
            self._fail(self._thread.error)

    def _fail(self, error: Exception) -> None:
        self.state, self.failure, self.error = "failed", f"{type(error).__name__}: {error}", error
        self.on_failure()


def _put(news: News) -> None:
    for submission, event in news:
        stream: Stream = submission.ticket
        stream.events.put_nowait(event)
