"""An environment whose code is watched: what hangs, holds the event loop, floods or forks ends its own episode only."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from k3rl.envs.base import Action, Env, EpisodeContext, Observation, StepResult
from k3rl.envs.faults import FaultConfig
from k3rl.envs.gateway import GatewaySession, Harness, HarnessResult
from k3rl.types import FailureKind, StopReason, Task

T = TypeVar("T")
MAX_SAID_CHARS = 32 * 2**20  # of one observation, images as data: URLs included
MAX_ANSWER_CHARS = 16 * 2**20
FORKED = 71  # exit status of a second copy of the process that code of an environment made


class EnvironmentFault(RuntimeError):
    """Code of an environment broke the rules, in a way that has a kind."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind


class EnvironmentBlocked(BaseException):
    """Raised inside code that does not give way. No `except Exception` of that code catches it."""


class BlockWatch:
    """Notices when code holds an event loop, and stops it: by an exception in it, else by `end`, which ends the
    process.

    Make it on the loop's thread, and `close` it. It works for Python code and for calls that let other threads run;
    a C loop that holds the interpreter is left to whoever waits for this process.
    """

    KILL_AFTER = 2.0  # times blocked_s: the exception did not help

    def __init__(self, blocked_s: float, end: Callable[[], None] = lambda: os._exit(77)) -> None:
        self._blocked_s = blocked_s
        self._end = end
        self._thread_id = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.Lock()
        self._entered: float | None = None
        self._raised = False
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="block-watch", daemon=True).start()

    def close(self) -> None:
        """No more watching."""
        self._closed.set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a piece of code that runs without giving way."""
        with self._lock:
            self._entered, self._raised = time.monotonic(), False
        try:
            yield
        finally:
            with self._lock:
                self._entered = None
                if self._raised:  # too late to matter, and it must not hit anyone else
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread_id, None)

    def _work(self) -> None:
        while not self._closed.wait(min(1.0, self._blocked_s / 4)):
            with self._lock:
                if self._entered is None:
                    continue
                held = time.monotonic() - self._entered
                if held > self._blocked_s and not self._raised:
                    self._raised = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread_id, ctypes.py_object(EnvironmentBlocked))
            if held > self.KILL_AFTER * self._blocked_s:
                self._end()
                return


class _Watched(Generic[T]):
    """Awaits a coroutine, every piece of it under a watch."""

    def __init__(self, work: Coroutine[Any, Any, T], watch: BlockWatch) -> None:
        self._work = work
        self._watch = watch

    def __await__(self) -> Generator[Any, Any, T]:
        go_on: Callable[[], Any] = partial(self._work.send, None)
        while True:
            try:
                with self._watch.step():
                    future = go_on()
            except StopIteration as done:
                value: T = done.value
                return value
            try:
                sent = yield future
            except BaseException as error:
                go_on = partial(self._work.throw, error)
            else:
                go_on = partial(self._work.send, sent)


class GuardedEnv(Env):
    """Another environment, each of whose calls is bounded in time and in what it says. Raises EnvironmentFault."""

    def __init__(self, env: Env, config: FaultConfig, watch: BlockWatch) -> None:
        self._env = env
        self._config = config
        self._watch = watch
        self._pid = os.getpid()

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """See Env."""
        return _small(await self._call(self._env.reset(task, context), "reset"))

    async def step(self, action: Action) -> StepResult:
        """See Env."""
        result = await self._call(self._env.step(action), "step")
        if result.observation is not None:
            _small(result.observation)
        _short(result.answer)
        return result

    async def conclude(self, reason: StopReason) -> str:
        """See Env."""
        return _short(await self._call(self._env.conclude(reason), "conclude"))

    async def snapshot(self) -> bytes:
        """See Env."""
        return await self._call(self._env.snapshot(), "snapshot")

    async def restore(self, task: Task, context: EpisodeContext, snapshot: bytes) -> None:
        """See Env."""
        await self._call(self._env.restore(task, context, snapshot), "restore")

    async def close(self) -> None:
        """See Env."""
        await self._call(self._env.close(), "close")

    async def _call(self, work: Coroutine[Any, Any, T], name: str) -> T:
        try:
            async with asyncio.timeout(self._config.call_s) as limit:
                return await _Watched(work, self._watch)
        except EnvironmentBlocked:
            held = f"{name} held its actor for {self._config.blocked_s:g} s without giving way"
            raise EnvironmentFault(held, FailureKind.HUNG) from None
        except TimeoutError:
            if not limit.expired():
                raise
            waited = f"{name} gave no answer within {self._config.call_s:g} s"
            raise EnvironmentFault(waited, FailureKind.HUNG) from None
        finally:
            if os.getpid() != self._pid:  # a fork that got here would play the same episodes once more
                os._exit(FORKED)


class GuardedHarness(Harness):
    """Another harness, whose own code is watched; its program has a deadline already. Raises EnvironmentFault."""

    def __init__(self, harness: Harness, watch: BlockWatch) -> None:
        self._harness = harness
        self._watch = watch

    async def run(self, task: Task, context: EpisodeContext, session: GatewaySession) -> HarnessResult:
        """See Harness."""
        try:
            result = await _Watched(self._harness.run(task, context, session), self._watch)
        except EnvironmentBlocked:
            raise EnvironmentFault("its harness held the actor without giving way", FailureKind.HUNG) from None
        _short(result.answer)
        return result


def _small(observation: Observation) -> Observation:
    said = sum(len(str(message.content)) for message in observation.messages)
    if said > MAX_SAID_CHARS:
        raise EnvironmentFault(f"it said {said} characters in one step", FailureKind.FLOODED)
    return observation


def _short(answer: str) -> str:
    if len(answer) > MAX_ANSWER_CHARS:
        raise EnvironmentFault(f"its answer has {len(answer)} characters", FailureKind.FLOODED)
    return answer
