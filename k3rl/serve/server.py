"""The server over one engine: OpenAI's chat completions and completions, Anthropic's messages, models, health, metrics.

`create_app` gives an ASGI application, `serve` runs it. `/health` and `/ready` are open; everything else asks for the
bearer token when there is one. A request whose client leaves is aborted, and its slot is free at the next step.
Needs the packages starlette and uvicorn (extra `serve`).
"""

from __future__ import annotations

import asyncio
import hmac
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from k3rl.checkpoint import load_checkpoint
from k3rl.config import ConfigError, MissingResource
from k3rl.data import ImagePatches, preprocess_files
from k3rl.engine import (
    ContextExceeded,
    Engine,
    EngineError,
    InvalidRequest,
    PrefixCache,
    Prompt,
    Tokens,
    end_compilers,
    request_samples,
)
from k3rl.model import DeviceName, place_of
from k3rl.serve.driver import EngineDriver
from k3rl.serve.events import ANTHROPIC, OPENAI, Dialect, EventStream, disconnected, merged
from k3rl.serve.job import Job
from k3rl.serve.metrics import ServerMetrics, engine_counters
from k3rl.tokens import Tokenizer, anthropic, openai, xtml
from k3rl.tokens.openai import MALFORMED, ChatRequest, RequestError, TextRequest
from k3rl.types import Completion, EncodedImage, SamplingParams

DRAIN_S = 5  # for requests in flight, once the server is asked to end
_CLOSE_S = 10  # for the engine's step and its files, after that
_TEXT_TOKENS = 16  # of a completions request that names no max_tokens, as in the dialect


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """body_bytes of one request; context_tokens: prompt and answer together (None: the engine's own limit);
    samples: completions in flight, all clients together; images of one request; image_pixels of each, looked at before
    it is decoded; compiling: constraints that are compiled or wait for it; stalled_s: how long a client may neither
    send nor take anything before its request is dropped."""

    body_bytes: int = 4 << 20
    context_tokens: int | None = None
    samples: int = 256
    images: int = 16
    image_pixels: int = 1 << 24
    compiling: int = 16
    stalled_s: float = 120.0


def create_app(
    load: Callable[[], Engine],
    tokenizer: Tokenizer,
    *,
    model_name: str = "k3rl",
    token: str | None = None,
    limits: ServerLimits | None = None,
) -> Starlette:
    """The application. `load` makes the engine, in the background: until then `/ready` and requests answer 503.

    `app.state.server` is the `Server` behind it, whose driver may be used for weight updates while it serves.
    """
    server = Server(EngineDriver(load), tokenizer, model_name, token, limits or ServerLimits())

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        server.driver.start()
        yield
        await server.close()

    routes = [
        Route("/v1/chat/completions", server.endpoint("chat", server.chat), methods=["POST"]),
        Route("/v1/messages", server.endpoint("messages", server.message, ANTHROPIC), methods=["POST"]),
        Route("/v1/completions", server.endpoint("completions", server.text), methods=["POST"]),
        Route("/v1/models", server.endpoint("models", server.models)),
        Route("/v1/models/{name:path}", server.endpoint("models", server.one_model)),
        Route("/metrics", server.endpoint("metrics", server.metrics_text)),
        Route("/health", server.health),
        Route("/ready", server.ready),
    ]
    told = {404: _not_found, 405: _not_found, Exception: _crashed}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=told)
    app.state.server = server
    return app


def serve(app: Starlette, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serves until interrupted or until the engine fails; requests in flight then get five seconds.

    Raises what the engine failed with, while it was loaded or later.
    """
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=DRAIN_S)
    server, driver = _Ending(config), app.state.server.driver

    def stop() -> None:
        server.should_exit = True

    driver.on_failure = stop
    with suppress(KeyboardInterrupt):
        server.run()
    if driver.error is not None:
        raise driver.error


class _Ending(uvicorn.Server):
    """Ends the process at a signal, whatever a step, a load or a thread still does."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        timer = threading.Timer(DRAIN_S + _CLOSE_S, _end_now, (sig,))
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)


def _end_now(sig: int) -> None:
    print(f"k3rl: the engine did not end within {DRAIN_S + _CLOSE_S} s of the signal; ended at once", file=sys.stderr)
    os._exit(128 + sig)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine of a served checkpoint. context: tokens of one request, prompt and answer (None: the model's own);
    memory_bytes: of states; exact: bits that depend on the request alone; threads: of torch; prefix_cache makes one."""

    max_running: int = 64
    context: int | None = None
    memory_bytes: int | Literal["auto"] | None = "auto"
    exact: bool = False
    device: DeviceName = "cpu"
    threads: int = 1
    prefix_cache: Callable[[], PrefixCache | None] = lambda: None


def serve_checkpoint(
    directory: Path,
    *,
    host: str,
    port: int,
    token: str,
    model_name: str | None = None,
    options: EngineOptions | None = None,
    limits: ServerLimits | None = None,
) -> None:
    """Serves a checkpoint in the official layout until interrupted. model_name: None is `name_of` the directory.

    Raises CheckpointError when it cannot be read, ConfigError for sizes that it cannot have, MissingResource when there
    is no such device.
    """
    options = options or EngineOptions()
    tokenizer = Tokenizer.load(directory)
    torch.set_num_threads(options.threads)
    place, dtype = place_of(options.device)

    def load() -> Engine:
        model = load_checkpoint(directory, dtype, place, packed=not options.exact and "served")
        try:
            return Engine(
                model,
                max_running=options.max_running,
                max_context=options.context,
                tokenizer=tokenizer,
                prefix_cache=options.prefix_cache(),
                memory_bytes=options.memory_bytes,
                exact=options.exact,
            )
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from error

    serve(
        create_app(load, tokenizer, model_name=model_name or name_of(directory), token=token, limits=limits), host, port
    )


def name_of(directory: Path) -> str:
    """A checkpoint's name for its clients: the folder's, or, in a Hugging Face cache, its repository's `owner/name`."""
    place = directory.absolute()  # a snapshot's files are links, and so may be the folder: its own path has the name
    for folder in (place, *place.parents, *directory.resolve().parents):
        kind, *parts = folder.name.split("--")
        if kind == "models" and parts and all(parts):
            return "/".join(parts)
    return directory.resolve().name


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path} is not served here; see /v1/chat/completions and /v1/completions"
    return JSONResponse(openai.error_object(what, status), status)


async def _crashed(_request: Request, error: Exception) -> Response:
    """The error is in the log, too: Starlette raises it again."""
    return JSONResponse(openai.error_object(f"the server failed: {type(error).__name__}: {error}", 500), 500)


class Server:
    """The endpoints."""

    def __init__(
        self, driver: EngineDriver, tokenizer: Tokenizer, model_name: str, token: str | None, limits: ServerLimits
    ) -> None:
        self.driver, self.tokenizer, self.model_name = driver, tokenizer, model_name
        self.limits, self.metrics = limits, ServerMetrics()
        self._token = token
        self._in_flight = 0  # samples
        self._began = int(time.time())
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="constraints")
        self._compiling_now = 0

    async def close(self) -> None:
        """Ends what compiles and every request in flight."""
        await asyncio.to_thread(end_compilers)
        self._compilers.shutdown(wait=False, cancel_futures=True)
        await self.driver.close()

    def endpoint(
        self, name: str, handler: Callable[[Request], Awaitable[Response]], dialect: Dialect = OPENAI
    ) -> Callable[[Request], Awaitable[Response]]:
        """`handler` behind the token, its errors as error objects of the dialect, its answers counted."""

        def refusal(error: RequestError) -> Response:
            body = error.body() if dialect is OPENAI else dialect.error(str(error), error.status)
            return JSONResponse(body, error.status, {"Retry-After": "1"} if error.status == 429 else None)

        async def answer(request: Request) -> Response:
            try:
                self._authorize(request)
                response = await handler(request)
            except InvalidRequest as error:
                code = "context_length_exceeded" if isinstance(error, ContextExceeded) else None
                response = refusal(RequestError(str(error), code=code))
            except (RequestError, *MALFORMED) as error:
                response = refusal(openai.request_error(error))
            except EngineError as error:
                response = refusal(RequestError(str(error), status=500))
            except MissingResource as error:
                response = refusal(RequestError(str(error), status=501, code="not_installed"))
            self.metrics.answers[name, response.status_code] += 1
            return response

        return answer

    # ---- small endpoints

    async def health(self, _request: Request) -> Response:
        """Alive: 200 while starting too; 500 once the engine failed."""
        failed = self.driver.state == "failed"
        return JSONResponse({"status": self.driver.state, "failure": self.driver.failure}, 500 if failed else 200)

    async def ready(self, _request: Request) -> Response:
        """200 when requests are served."""
        return JSONResponse({"status": self.driver.state}, 200 if self.driver.state == "ready" else 503)

    async def models(self, _request: Request) -> Response:
        return JSONResponse(openai.model_list([self._model()]))

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return openai.model_object(self.model_name, self._began)

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            message = f"the model {name!r} is not served here; it is {self.model_name!r}"
            raise RequestError(message, status=404, code="model_not_found", param="model")

    async def metrics_text(self, _request: Request) -> Response:
        ready = self.driver.state == "ready"
        gauges = {
            "k3rl_ready": ("1 when requests are served.", float(ready)),
            "k3rl_in_flight_samples": ("Samples of unanswered requests.", float(self._in_flight)),
        }
        counters: dict[str, tuple[str, float]] = {}
        if ready:
            engine, counters = self.driver.engine, engine_counters(self.driver.engine)
            gauges["k3rl_running_requests"] = ("Requests with a row.", float(engine.num_running))
            gauges["k3rl_waiting_requests"] = ("Requests without a row.", float(engine.num_waiting))
            gauges["k3rl_weight_version"] = ("Version that samples the next token.", float(engine.version))
        text = self.metrics.text(gauges, counters)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    # ---- completions

    async def chat(self, request: Request) -> Response:
        return await self._chat(request, ChatRequest.model_validate_json(await self._body(request)))

    async def message(self, request: Request) -> Response:
        """Anthropic's dialect, through the chat dialect."""
        body = anthropic.MessagesRequest.model_validate_json(await self._body(request)).chat()
        return await self._chat(request, body, ANTHROPIC)

    async def _chat(self, request: Request, body: ChatRequest, dialect: Dialect = OPENAI) -> Response:
        sees = self._engine().model.config.vision_config is not None
        shown, images = await asyncio.to_thread(self._images, body, sees)  # none of this may keep others waiting
        prompt = await asyncio.to_thread(body.prompt_ids, self.tokenizer, shown)
        return await self._answer(request, body, [prompt], images, dialect)

    def _images(self, body: ChatRequest, sees: bool) -> tuple[tuple[EncodedImage, ...], tuple[ImagePatches, ...]]:
        """The images of a request as they came and as the tower reads them."""
        shown = body.images(sees, self.limits.images, self.limits.image_pixels)
        return shown, preprocess_files(shown, {})

    async def text(self, request: Request) -> Response:
        body = TextRequest.model_validate_json(await self._body(request))
        return await self._answer(request, body, await asyncio.to_thread(body.prompts, self.tokenizer))

    async def _answer(
        self,
        request: Request,
        body: ChatRequest | TextRequest,
        prompts: list[list[int]],
        images: Sequence[ImagePatches] = (),
        dialect: Dialect = OPENAI,
    ) -> Response:
        await self._compile(body)
        job = await self._begin(body, prompts, images)
        if body.stream:
            events = self._events(job) if dialect is OPENAI else anthropic.events(self._events(job))
            return EventStream(events, lambda: self._end(job), self.limits.stalled_s, dialect)
        try:
            work: asyncio.Future[list[Completion]] = asyncio.ensure_future(
                asyncio.gather(*(stream.result() for stream in job.streams))
            )
            gone = asyncio.ensure_future(disconnected(request.receive))
            waiting: list[asyncio.Future[Any]] = [work, gone]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                raise RequestError("the client closed the connection", status=499)
            whole = job.answer(work.result())
            return JSONResponse(whole if dialect is OPENAI else anthropic.answer(whole))
        finally:
            self._end(job)

    async def _compile(self, body: ChatRequest | TextRequest) -> None:
        """Compiles the request's constraint on threads that do nothing else: others are answered meanwhile."""
        try:
            constraint = body.constraint()
        except ValueError as error:
            raise RequestError(str(error), param="response_format") from error
        if constraint is not None:
            only = SamplingParams(max_tokens=1, stop_ids=(xtml.stop_id(self.tokenizer),), constraint=constraint)
            if self._compiling_now >= self.limits.compiling:
                message = f"{self._compiling_now} constraints are being compiled; try later"
                raise RequestError(message, status=429, code="rate_limit_exceeded")
            self._compiling_now += 1
            try:
                work = asyncio.get_running_loop().run_in_executor(self._compilers, self._engine().check, [0], only)
                await work
            finally:
                self._compiling_now -= 1

    async def _begin(
        self, body: ChatRequest | TextRequest, prompts: list[list[int]], images: Sequence[ImagePatches]
    ) -> Job:
        """Checks the limits and submits every sample; `images` are those of every prompt, which is checked once."""
        engine, n = self._engine(), body.n or 1
        if body.model:
            self._check_model(body.model)
        if not prompts or not all(prompts):
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        self._check_room(n * len(prompts))
        context = min(self.limits.context_tokens or engine.max_context, engine.max_context)
        asked: list[tuple[Prompt, SamplingParams]] = []
        rows = [len(prompt) + sum(image.rows - 1 for image in images) for prompt in prompts]
        for prompt, length in zip(prompts, rows, strict=True):
            room = context - length
            try:
                default = room if isinstance(body, ChatRequest) else min(room, _TEXT_TOKENS)
                params = body.params(max(default, 1), xtml.stop_id(self.tokenizer))
            except ValueError as error:
                raise RequestError(str(error)) from error
            if params.max_tokens > room:
                message = f"{length} prompt tokens and {params.max_tokens} to sample exceed the context of {context}"
                raise RequestError(message, code="context_length_exceeded")
            checked = await asyncio.to_thread(engine.check, prompt, params, images)
            asked += [(checked, own) for own in request_samples(params, n)]
        self._check_room(len(asked))  # others may have come meanwhile
        job = Job(body, self.tokenizer, self.model_name, prompts, rows)
        for stream in self.driver.submit_all(asked, bool(body.stream)):
            job.add(stream)
        self._in_flight += len(job.streams)
        return job

    def _check_room(self, wanted: int) -> None:
        """Raises RequestError when this many more samples are too many."""
        most = self.limits.samples
        if wanted > most:
            raise RequestError(f"this asks for {wanted} samples; {most} are the most at once", param="n")
        if self._in_flight + wanted > most:
            message = f"{self._in_flight} of {most} samples are in flight and this asks for {wanted}; try later"
            raise RequestError(message, status=429, code="rate_limit_exceeded")

    def _end(self, job: Job) -> None:
        """Counts a request that is over, and aborts what its client did not wait for."""
        left = [stream for stream in job.streams if not stream.ended]
        self.driver.abort(*left)
        self.metrics.cancelled += bool(left)
        self.metrics.whole.observe(time.perf_counter() - job.began)
        self._in_flight -= len(job.streams)
        counts = job.usage()
        self.metrics.prompt_tokens += counts["prompt_tokens"]
        self.metrics.sampled_tokens += counts["completion_tokens"]
        self.metrics.cached_tokens += counts["prompt_tokens_details"]["cached_tokens"]

    # ---- streaming

    async def _events(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks of all choices as their tokens come, then the usage when it is asked for."""
        if job.chat:
            for choice in job.choices:
                yield job.chunk(openai.first_delta(choice.index))
        first = True
        async with aclosing(merged(list(zip(job.choices, job.streams, strict=True)))) as events:
            async for choice, event in events:
                if first:
                    self.metrics.first_token.observe(time.perf_counter() - job.began)
                    first = False
                yield job.new_tokens(choice, event) if isinstance(event, Tokens) else job.end(choice, event)
        if job.body.include_usage:
            yield job.usage_chunk()

    # ---- guards

    def _engine(self) -> Engine:
        if self.driver.state == "starting":
            raise RequestError("the model is still loading; ask /ready", status=503, code="starting")
        return self.driver.engine

    def _authorize(self, request: Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if not given and "x-api-key" in request.headers:  # of Anthropic's clients
            scheme, given = "bearer", request.headers["x-api-key"]
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._token.encode())  # headers are read as latin-1
        if scheme.lower() != "bearer" or not same:
            raise RequestError("the bearer token is missing or wrong", status=401, code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """The body, never more of it in memory than the limit."""
        limit, pieces = self.limits.body_bytes, aiter(request.stream())
        said = request.headers.get("content-length", "")
        if said.isdecimal() and int(said) > limit:
            raise openai.too_large(limit)
        received = bytearray()
        try:
            while True:
                async with asyncio.timeout(self.limits.stalled_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    return bytes(received)
                received += piece
                if len(received) > limit:
                    raise openai.too_large(limit)
        except TimeoutError:
            message = f"nothing of the body came for {self.limits.stalled_s:g} s"
            raise RequestError(message, status=408, code="timeout") from None
        except ClientDisconnect:
            raise RequestError("the client closed the connection", status=499) from None
