"""Requests on their way to a vLLM server and back, each carried by a task on the client's loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from k3rl.engine.outcomes import Outcomes
from k3rl.engine.protocol import EngineError, Outcome, Prompt, UnknownRequest
from k3rl.engine.vllm import wire
from k3rl.engine.vllm.client import Client, Unreachable
from k3rl.engine.vllm.server_state import ServerState
from k3rl.engine.vllm.session import Session
from k3rl.types import Completion, SamplingParams, StopReason


@dataclass(eq=False, slots=True)
class Request:
    """A request that has not ended. `sent` while the server may have it; `version`: that it was sent under."""

    number: int
    prompt: Prompt
    params: SamplingParams
    seed: int
    name: str
    answer: wire.Answer
    aborted: bool = False
    sent: bool = False
    version: int = 0
    task: Future[None] | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Requests:
    """The live requests of one engine, at most `max_running` of them at the server; others wait here.

    ended: called on the client's loop when an outcome was added to `outcomes`.
    """

    def __init__(
        self, client: Client, session: Session, state: ServerState, max_running: int, ended: Callable[[], None]
    ) -> None:
        self._client, self._session, self._state, self._deadlines = client, session, state, client.deadlines
        self._notify = ended
        self.outcomes = Outcomes()
        self.live: dict[int, Request] = {}
        self._open = asyncio.Event()  # of the client's loop: requests may be sent
        self._slots = asyncio.Semaphore(max_running)

    # ---- from the caller's thread

    @property
    def num_sent(self) -> int:
        """Requests that the server may have."""
        return sum(request.sent for request in list(self.live.values()))

    def find(self, number: int) -> Request:
        """Raises UnknownRequest."""
        request = self.live.get(number)
        if request is None:
            raise UnknownRequest(f"request {number} is neither waiting nor running: it ended or never was")
        return request

    def start(self, request: Request) -> None:
        """Sends a request as soon as it may be sent."""
        self.live[request.number] = request
        request.task = self._client.start(self._serve(request))

    def gate(self) -> None:
        """Lets requests go to the server, or holds them, as its state says."""
        self._client.soon(self._open.clear if self._state.holds_requests else self._open.set)

    def abort(self, requests: Sequence[Request], deadline_s: float) -> None:
        """Ends requests: those that wait at once, those that run by the server, or by hanging up on it."""
        self._client.wait(self._take_back(requests), deadline_s)

    def wait_until_done(self, requests: Sequence[Request], deadline_s: float) -> None:
        """Waits for these requests, no longer than the deadline."""
        self._client.wait(self._finished(requests, deadline_s), 2 * deadline_s)

    # ---- on the client's loop

    async def _serve(self, request: Request) -> None:
        """Carries one request to its one outcome."""
        outcome: Outcome
        try:
            outcome = await self._sampled(request)
        except asyncio.CancelledError:
            outcome = self._taken_back(request) if request.aborted else EngineError("the vLLM engine was closed")
        except EngineError as error:
            outcome = self._taken_back(request) if request.aborted and isinstance(error, Unreachable) else error
        except Exception as error:  # whatever it is, this request's caller must hear of it
            outcome = EngineError(f"the answer of vLLM could not be read ({type(error).__name__}: {error})")
        request.sent = False
        self.live.pop(request.number, None)
        self.outcomes.add([(request.number, outcome)])
        self._notify()
        request.done.set()

    async def _sampled(self, request: Request) -> Completion:
        async with self._slots:
            give_up, pause = time.monotonic() + self._deadlines.busy, 0.05
            while True:
                if not self._open.is_set():
                    await self._open.wait()
                    give_up = time.monotonic() + self._deadlines.busy
                if request.aborted:
                    return self._taken_back(request)
                try:
                    return await self._attempt(request)
                except Unreachable:
                    request.sent = False
                    if request.aborted or time.monotonic() + pause > give_up:
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)

    async def _attempt(self, request: Request) -> Completion:
        session, answer = self._session, request.answer
        request.version, request.sent = session.version, True
        salt = wire.wire_salt(session.label(request.version), request.params.cache_salt)
        given = request.prompt.rows.tolist(), request.params, request.seed, salt
        body = wire.generate_body(request.name, session.server.model, *given)
        await self._client.stream(body, answer.feed, lambda: self._state.pause is None)
        versions = [session.version_of(label, request.version) for label, _, _ in answer.spans] or [session.version]
        if answer.ids and not answer.spans:
            raise EngineError("vLLM named no weight version for what it sampled")
        return answer.completion(versions, session.shape.moe_layers, session.shape.experts_per_token)

    def _taken_back(self, request: Request) -> Completion:
        """What an aborted request had, where the server said no more about it: no routes and no sampling masks."""
        answer = request.answer
        version = request.version if answer.ids else self._session.version
        return Completion(tuple(answer.ids), tuple(answer.logprobs), StopReason.ABORTED, version, version)

    async def _take_back(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.aborted = True
            if not request.sent and request.task is not None:
                request.task.cancel()
        names = [wire.engine_id(request.name) for request in requests if request.sent]
        if names:
            try:
                await self._client.fetch("POST", "/abort_requests", body={"request_ids": names})
                await self._finished(requests, self._deadlines.call)
            except EngineError:
                pass  # hanging up, which comes next, ends a request as well
            for request in requests:
                if not request.done.is_set() and request.task is not None:
                    request.task.cancel()
        await self._finished(requests, self._deadlines.call)

    async def _finished(self, requests: Iterable[Request], deadline_s: float) -> bool:
        end = time.monotonic() + deadline_s
        while not all(request.done.is_set() for request in requests):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.005)
        return True
