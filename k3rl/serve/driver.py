"""Drives an engine for callers of an event loop: steps on one thread of its own, hands tokens out as they come.

Everything that touches the engine runs on that thread, between two steps: submitting, aborting, weight updates. The
event loop stays free for clients while the model computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, TypeAlias, TypeVar

from k3rl.data import ImagePatches
from k3rl.engine import Engine, EngineError, Outcome, Tokens, UnknownRequest
from k3rl.types import Completion, SamplingParams

T = TypeVar("T")
State: TypeAlias = Literal["starting", "ready", "failed", "closed"]
PAUSED_S = 0.1  # between two looks at an engine that computes nothing; a command ends the wait


class Stream:
    """One request in flight. Iterating gives `Tokens` (when asked for) and ends with `completion` set."""

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams, incremental: bool) -> None:
        self.prompt_ids, self.params, self.incremental = prompt_ids, params, incremental
        self.completion: Completion | None = None
        self.ended = False  # by a completion or an error
        self.number: int | None = None  # the engine's, once it has the request
        self.seen = 0  # sampled tokens handed out
        self.routed = 0  # tokens of prompt and answer whose routes were handed out
        self.events: asyncio.Queue[Tokens | Outcome] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        while self.completion is None:
            event = await self.events.get()
            self.ended = not isinstance(event, Tokens)
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Completion):
                self.completion = event
                rest = Tokens(
                    event.token_ids[self.seen :],
                    event.logprobs[self.seen :],
                    (event.top_logprobs or ())[self.seen :],
                    None if event.routes is None else event.routes[self.routed :],
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
        self._engine: Engine | None = None
        self.state: State = "starting"
        self.failure: str | None = None
        self.error: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="k3rl-engine")
        self._live: dict[int, Stream] = {}  # of the thread
        self._open: set[Stream] = set()  # of the loop: streams whose end has not been told
        self._calls: set[asyncio.Future[Any]] = set()  # of the loop: calls that have not been made
        self._commands: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        """Raises EngineError while it is loading and after it failed."""
        if self.state != "ready" or self._engine is None:
            raise EngineError(f"the engine is {self.state}" + (f": {self.failure}" if self.failure else ""))
        return self._engine

    def start(self) -> None:
        """Begins loading and, after it, stepping."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends every request in flight with an EngineError and stops after the step in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.state = "closed"
        self._thread.shutdown(wait=True)
        self._fail_all(EngineError("the engine was closed"))

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        incremental: bool = False,
        images: Sequence[ImagePatches] = (),
    ) -> Stream:
        """A stream of this request. An InvalidRequest comes out of the stream."""
        engine, stream = self.engine, Stream(prompt_ids, params, incremental)

        def command() -> None:
            try:
                stream.number = engine.submit(prompt_ids, params, images)
                self._live[stream.number] = stream
            except EngineError as error:
                self._tell(stream, error)
            except Exception as error:  # its caller's alone: nothing was queued
                self._tell(stream, EngineError(f"the request could not be read: {type(error).__name__}: {error}"))

        self._open.add(stream)
        self._send(command)
        return stream

    def abort(self, stream: Stream) -> None:
        """Aborts a request that has not ended; its slot is free at the next step."""

        def command() -> None:
            if stream.number is not None and stream.number in self._live:
                try:
                    self.engine.abort(stream.number)
                except UnknownRequest:
                    return  # it ended in the last step, and its outcome is on the way

        if not stream.ended:
            self._send(command)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs `function` on the engine between two steps and returns what it returns.

        Raises what it raises, or EngineError when the engine fails or is closed before.
        """
        engine, loop = self.engine, asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def settle(result: T | None, error: Exception | None) -> None:
            if future.done():
                return  # nobody waits any more
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def command() -> None:
            try:
                result = function(engine)
            except Exception as error:
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, result, None)

        self._send(command)
        return await future

    # ---- the loop

    def _send(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            self._engine = await self._loop.run_in_executor(self._thread, self._load)
            self.state = "ready"
            while True:
                if not self._commands and not self._live:
                    self._wake.clear()
                    await self._wake.wait()
                commands, self._commands = self._commands, []
                if not await self._loop.run_in_executor(self._thread, self._turn, self._engine, commands):
                    self._wake.clear()
                    if not self._commands:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self._wake.wait(), PAUSED_S)
        except Exception as error:
            self.state, self.failure, self.error = "failed", f"{type(error).__name__}: {error}", error
            self._fail_all(EngineError(f"the engine failed: {self.failure}"))
            self.on_failure()
            raise

    def _turn(self, engine: Engine, commands: list[Callable[[], None]]) -> bool:
        """On the thread: commands, one step, and news for whoever waits for them; whether anything was computed."""
        for command in commands:
            command()
        steps = engine.counters.steps
        for number, outcome in engine.step():
            stream = self._live.pop(number, None)
            if stream is not None:
                self._tell(stream, outcome)
        for number, stream in self._live.items():
            if stream.incremental:
                ids, logprobs = engine.sampled(number, stream.seen)
                if ids:
                    held = engine.held(number)
                    others = () if held is None or held.alternatives is None else held.alternatives[stream.seen :]
                    routes = engine.routes(number, stream.routed)
                    self._tell(stream, Tokens(ids, logprobs, tuple(others), routes))
        return engine.counters.steps > steps

    def _tell(self, stream: Stream, event: Tokens | Outcome) -> None:
        def put() -> None:
            stream.events.put_nowait(event)
            if not isinstance(event, Tokens):
                self._open.discard(stream)

        if isinstance(event, Tokens):
            stream.seen += len(event.ids)
            stream.routed += 0 if event.routes is None else len(event.routes)
        self._loop.call_soon_threadsafe(put)

    def _fail_all(self, error: EngineError) -> None:
        for stream in self._open:
            stream.events.put_nowait(error)
        self._open.clear()
        self._live.clear()
        for call in list(self._calls):
            if not call.done():  # one that was cancelled a moment ago is still among them
                call.set_exception(error)
