"""Recording sessions over HTTP, for agent programs that run outside of our sandboxes.

Each session has a URL of its own, `/s/<token>/v1`, which is its secret; see `k3rl.envs.gateway`. Needs the packages
of the extra `serve`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from k3rl.data import preprocess_files
from k3rl.engine import ContextExceeded, InvalidRequest
from k3rl.envs import ContextOutgrown
from k3rl.envs.gateway import MAX_BODY_BYTES, Answer, GatewaySession, answer, models, not_found
from k3rl.serve.driver import EngineDriver
from k3rl.serve.events import disconnected
from k3rl.tokens.openai import RequestError
from k3rl.types import Completion, EncodedImage, SamplingParams


class EnginePolicy:
    """An engine of this process as the policy of sessions."""

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver

    async def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[EncodedImage] = ()
    ) -> Completion:
        """Sample one completion; cancelling it aborts the request.

        Raises ContextOutgrown, and RequestError for another request that no engine could serve.
        """
        stream = self._driver.submit(list(prompt_ids), params, images=preprocess_files(images, {}))
        try:
            return await stream.result()
        except ContextExceeded as error:
            raise ContextOutgrown(str(error)) from error
        except InvalidRequest as error:
            raise RequestError(str(error), code="invalid_request") from error
        finally:
            self._driver.abort(stream)


class Gateway:
    """Open sessions by their tokens. `app` answers for all of them."""

    def __init__(self) -> None:
        self._sessions: dict[str, GatewaySession] = {}
        self.app = Starlette(
            routes=[
                Route("/s/{token}/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/s/{token}/v1/models", self._models),
            ],
            exception_handlers={404: _missing, 405: _missing},
        )

    def open(self, session: GatewaySession) -> str:
        """The token of a session that is served from now on."""
        token = secrets.token_hex(16)
        self._sessions[token] = session
        return token

    def close(self, token: str) -> None:
        """Close a session; its URL answers 410. `forget` drops it."""
        self._sessions[token].close()

    def forget(self, token: str) -> None:
        """Close a session and drop it; its URL answers 404."""
        self._sessions.pop(token).close()

    async def _chat(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["token"])
        if session is None:
            return _response(not_found("this session"))
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                break  # the dialect refuses it
        work = asyncio.ensure_future(answer(session, bytes(body)))
        gone = asyncio.ensure_future(disconnected(request.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return _response(work.result()) if work.done() else Response(status_code=499)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _models(self, request: Request) -> Response:
        return _response(models() if request.path_params["token"] in self._sessions else not_found("this session"))


class _Quiet(uvicorn.Server):
    """Leaves the signals of the process to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """A gateway on a port of its own, for the length of an `async with`. `url(token)` is a session's base URL."""

    def __init__(self, gateway: Gateway, host: str = "127.0.0.1", port: int = 0) -> None:
        self._gateway, self._host, self._port = gateway, host, port

    async def __aenter__(self) -> GatewayServer:
        self._socket = socket.create_server((self._host, self._port))
        self._port = self._socket.getsockname()[1]
        config = uvicorn.Config(self._gateway.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self._server = _Quiet(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task
        self._socket.close()

    def url(self, token: str) -> str:
        """What a program gets as OPENAI_BASE_URL."""
        return f"http://{self._host}:{self._port}/s/{token}/v1"


def _response(given: Answer) -> Response:
    kind, body = given.text()
    return Response(body, given.status, media_type=kind)


async def _missing(request: Request, _error: Exception) -> Response:
    return _response(not_found(f"{request.method} {request.url.path}"))
