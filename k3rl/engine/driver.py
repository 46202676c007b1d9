"""Drives an engine on a thread of its own: callers go on while it computes.

Callers of any thread leave commands, which are done in their order between two steps: requests, aborts, and whatever
else touches the engine. What became of requests is told once for each step, all of it together.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from k3rl.data import ImagePatches
from k3rl.engine.protocol import (
    EngineError,
    EngineStopped,
    Outcome,
    Prompt,
    RolloutEngine,
    Tokens,
    UnknownRequest,
)
from k3rl.types import SamplingParams

E = TypeVar("E", bound=RolloutEngine)
T = TypeVar("T")
_PAUSED_S = 0.1  # between two looks at an engine that computes nothing; a command ends the wait


@dataclass(eq=False, slots=True)
class Submission:
    """A request on its way through a driver. ticket: what its caller knows it by; incremental: whether its tokens are
    told as they come. number: the engine's, once it has the request."""

    ticket: Any
    prompt: Sequence[int] | Prompt
    params: SamplingParams
    images: Sequence[ImagePatches] = ()
    incremental: bool = False
    number: int | None = None
    seen: int = 0  # sampled tokens that were told
    routed: int = 0  # tokens of prompt and answer whose routes were told

    def told(self, event: Tokens) -> Tokens:
        """The event, which counts as told."""
        self.seen += len(event.ids)
        self.routed += 0 if event.routes is None else len(event.routes)
        return event


News: TypeAlias = list[tuple[Submission, Tokens | Outcome]]


@dataclass(frozen=True, slots=True)
class _Command:
    """Done on the thread, between two steps, or refused where the thread ends before."""

    do: Callable[[News], None]
    refuse: Callable[[EngineStopped, News], None]


class EngineThread(Generic[E]):
    """Steps the engine that `load` gave it for as long as it has requests.

    tell: called on the thread, after each step that brought something; it must not block. A step that raises ends the
    requests that the engine had, by EngineStopped, and later ones work. After `patience` such steps in a row the thread
    has failed: `error` is what the last one raised, and every call raises `stopped`, as after `close`.
    """

    def __init__(
        self, tell: Callable[[News], None], *, patience: int = 1, failed: Callable[[], None] | None = None
    ) -> None:
        """failed: called on the thread when it has failed, before anything else is told of it."""
        self._tell, self._patience, self._failed = tell, patience, failed
        self._engine: E | None = None
        self._live: dict[int, Submission] = {}
        self._watched: dict[int, Submission] = {}  # the incremental ones
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()  # None: close
        self._gate = threading.Lock()  # nothing is queued once `stopped` is set
        self.stopped: EngineStopped | None = None
        self.error: Exception | None = None
        self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="k3rl-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> E:
        """Raises EngineStopped before one was loaded, and after the thread has failed or was closed."""
        if self.stopped is not None:
            raise self.stopped
        if self._engine is None:
            raise EngineStopped("no engine is loaded yet")
        return self._engine

    def load(self, make: Callable[[E | None], E]) -> Future[E]:
        """Replaces the engine by what `make` makes, on the thread, of the one before. Its future raises what that
        raises, the engine staying as it was, or EngineError while requests are in flight."""

        def replace() -> E:
            if self._live:
                raise EngineError(f"{len(self._live)} requests are in flight; load a checkpoint when none is")
            self._engine = make(self._engine)
            return self._engine

        return self._call(replace)

    def run(self, function: Callable[[E], T]) -> Future[T]:
        """Runs it on the engine between two steps. The future raises what it raises."""
        return self._call(lambda: function(self.engine))

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Gives requests to the engine together. A refused one is told its InvalidRequest. Those that have the same
        object as their prompt share what is made of it."""

        def refuse(error: EngineStopped, news: News) -> None:
            news += [(submission, error) for submission in submissions]

        self._send(_Command(partial(self._take_in, submissions), refuse))

    def abort(self, submissions: Sequence[Submission]) -> None:
        """Takes requests back; those that have not ended are told so, with what they had."""

        def take_back(_news: News) -> None:
            numbers = [one.number for one in submissions if one.number is not None and one.number in self._live]
            if numbers:
                with suppress(UnknownRequest):  # they have ended, and what they ended with is on the way
                    self._loaded.abort(*numbers)

        self._send(_Command(take_back, lambda _error, _news: None))

    def close(self, timeout_s: float = 60.0) -> None:
        """Ends requests in flight by EngineStopped, and the thread after the step in progress; one that takes longer is
        left to itself."""
        with self._gate:
            if self.stopped is None:
                self.stopped = EngineStopped("the engine was closed")
                self._commands.put(None)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():  # whoever waits hears of it all the same
            self._drop(self.stopped, [])

    # ---- commands

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def do(_news: News) -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits any more
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        def refuse(error: EngineStopped, _news: News) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._send(_Command(do, refuse))
        return future

    def _send(self, command: _Command) -> None:
        with self._gate:
            if self.stopped is not None:
                raise self.stopped
            self._commands.put(command)

    def _next(self) -> list[_Command | None]:
        """Commands that wait; waits for some while there is nothing to compute."""
        wait_s: float | None = 0.0
        if not self._live:
            wait_s = None
        elif self._engine is not None and self._engine.is_paused:
            wait_s = _PAUSED_S
        found: list[_Command | None] = []
        try:
            found.append(self._commands.get(block=wait_s != 0.0, timeout=wait_s))
            while True:
                found.append(self._commands.get_nowait())
        except queue.Empty:
            return found

    # ---- the thread

    @property
    def _loaded(self) -> E:
        """The engine, while something is live in it."""
        assert self._engine is not None
        return self._engine

    def _run(self) -> None:
        while True:
            news: News = []
            for command in self._next():
                if command is None:
                    assert self.stopped is not None
                    self._drop(self.stopped, news)
                    return
                command.do(news)
            if self._live and not self._step(news):
                assert self.stopped is not None
                self._drop(self.stopped, news)
                return
            if news:
                self._tell(news)

    def _take_in(self, submissions: Sequence[Submission], news: News) -> None:
        counts = Counter(id(submission.prompt) for submission in submissions)
        checked: dict[int, Prompt] = {}  # of prompts that several of them have
        for submission in submissions:
            own, same = submission, id(submission.prompt)
            try:
                engine, prompt = self.engine, own.prompt
                if counts[same] > 1 and not isinstance(prompt, Prompt):
                    if same not in checked:
                        checked[same] = engine.check(prompt, own.params, own.images)
                    prompt = checked[same]
                own.number = engine.submit(prompt, own.params, own.images)
            except EngineError as error:
                news.append((own, error))
            except Exception as error:  # its caller's alone: nothing was queued
                news.append((own, EngineError(f"the request could not be read: {type(error).__name__}: {error}")))
            else:
                self._live[own.number] = own
                if own.incremental:
                    self._watched[own.number] = own

    def _step(self, news: News) -> bool:
        """One step, and what it brought; whether the thread goes on."""
        engine = self._loaded
        try:
            for number, outcome in engine.step():
                self._watched.pop(number, None)
                if (submission := self._live.pop(number, None)) is not None:
                    news.append((submission, outcome))
            for number, submission in self._watched.items():
                if (tokens := engine.new_tokens(number, submission.seen, submission.routed)) is not None:
                    news.append((submission, submission.told(tokens)))
        except Exception as error:  # whatever it is, it is the answer of everyone whom the engine computed for
            return self._step_failed(engine, error, news)
        self._failed_steps = 0
        return True

    def _step_failed(self, engine: E, error: Exception, news: News) -> bool:
        """Ends every request, in the engine too, which later ones find empty; whether there may be later ones."""
        self._failed_steps += 1
        said = f"{type(error).__name__}: {error}"
        if self._failed_steps < self._patience:
            try:
                engine.clear()
            except Exception as worse:  # an engine that cannot even be emptied does not mend
                said += f"; then it could not be emptied: {type(worse).__name__}: {worse}"
            else:
                stopped = EngineStopped(f"a step of the engine failed: {said}")
                news += [(submission, stopped) for submission in self._live.values()]
                self._live.clear()
                self._watched.clear()
                return True
        what = "the engine" if self._failed_steps == 1 else f"the last {self._failed_steps} steps of the engine"
        with self._gate:
            self.error, self.stopped = error, EngineStopped(f"{what} failed: {said}")
        if self._failed is not None:
            self._failed()
        return False

    def _drop(self, error: EngineStopped, news: News) -> None:
        """Everything that waits ends by this error."""
        news += [(submission, error) for submission in list(self._live.values())]
        self._live.clear()
        self._watched.clear()
        with suppress(queue.Empty):
            while True:
                if (command := self._commands.get_nowait()) is not None:
                    command.refuse(error, news)
        if news:
            self._tell(news)
