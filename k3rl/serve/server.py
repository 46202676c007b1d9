"""The OpenAI server over one engine: chat completions, completions, models, health, Prometheus metrics.

`create_app` gives an ASGI application, `serve` runs it. `/health` and `/ready` are open; everything else asks for the
bearer token when there is one. A request whose client leaves is aborted, and its slot is free at the next step.
Needs the packages starlette and uvicorn (extra `dashboard`); `k3rl.engine` itself does not import this module.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from k3rl.checkpoint import load_checkpoint
from k3rl.config import ConfigError, MissingResource
from k3rl.data.images import ImageError, ImagePatches, preprocess_files
from k3rl.engine.engine import Engine
from k3rl.engine.prefix.cache import PrefixCache
from k3rl.engine.protocol import ContextExceeded, EngineError, InvalidRequest, Tokens
from k3rl.engine.sampling.sampler import request_samples
from k3rl.model.device import DeviceName, place_of
from k3rl.serve import openai
from k3rl.serve.driver import EngineDriver, Stream
from k3rl.serve.events import EventStream, disconnected, merged
from k3rl.serve.metrics import ServerMetrics, engine_counters
from k3rl.serve.openai import ChatRequest, Choice, PlainText, RequestError, TextRequest
from k3rl.tokens import Tokenizer, xtml
from k3rl.tokens.vocab import TokenizerError
from k3rl.types import Completion, EncodedImage, SamplingParams

_TEXT_TOKENS = 16  # of a completions request that names no max_tokens, as in the dialect


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """body_bytes of one request; context_tokens: prompt and answer together (None: the engine's own limit);
    samples: completions in flight, all clients together; images of one request; image_pixels of each, looked at before
    it is decoded; stalled_s: how long a client may neither send nor take anything before its request is dropped."""

    body_bytes: int = 4 << 20
    context_tokens: int | None = None
    samples: int = 256
    images: int = 16
    image_pixels: int = 1 << 24
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
        await server.driver.close()

    routes = [
        Route("/v1/chat/completions", server.endpoint("chat", server.chat), methods=["POST"]),
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
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
    server, driver = uvicorn.Server(config), app.state.server.driver

    def stop() -> None:
        server.should_exit = True

    driver.on_failure = stop
    with suppress(KeyboardInterrupt):
        server.run()
    if driver.error is not None:
        raise driver.error


def serve_checkpoint(
    directory: Path,
    *,
    host: str,
    port: int,
    token: str,
    max_running: int = 64,
    threads: int = 1,
    prefix_cache: Callable[[], PrefixCache | None] = lambda: None,
    memory_bytes: int | Literal["auto"] | None = "auto",
    exact: bool = False,
    device: DeviceName = "cpu",
    context: int | None = None,
    limits: ServerLimits | None = None,
) -> None:
    """Serves a checkpoint in the official layout until interrupted. context: tokens of one request, prompt and answer.

    Raises CheckpointError when it cannot be read, ConfigError for sizes that it cannot have, MissingResource when there
    is no such device.
    """
    tokenizer = Tokenizer.load(directory)
    torch.set_num_threads(threads)
    place, dtype = place_of(device)

    def load() -> Engine:
        model = load_checkpoint(directory, dtype, place, packed=not exact and "served")
        try:
            return Engine(
                model,
                max_running=max_running,
                max_context=context,
                tokenizer=tokenizer,
                prefix_cache=prefix_cache(),
                memory_bytes=memory_bytes,
                exact=exact,
            )
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from error

    serve(create_app(load, tokenizer, model_name=directory.resolve().name, token=token, limits=limits), host, port)


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path} is not served here; see /v1/chat/completions and /v1/completions"
    return JSONResponse(openai.error_object(what, status), status)


async def _crashed(_request: Request, error: Exception) -> Response:
    """The error is in the log, too: Starlette raises it again."""
    return JSONResponse(openai.error_object(f"the server failed: {type(error).__name__}: {error}", 500), 500)


@dataclass(slots=True)
class _Job:
    """One request being answered: its prompts and their rows in the model, one stream and one choice per sample."""

    id: str
    created: int
    chat: bool
    body: ChatRequest | TextRequest
    prompts: list[list[int]]
    rows: list[int]
    streams: list[Stream]
    choices: list[Choice]
    began: float

    @property
    def thinks(self) -> bool:
        return isinstance(self.body, ChatRequest) and self.body.thinks

    def head(self, model: str, streamed: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind + (".chunk" if self.chat and streamed else ""),
            "created": self.created,
            "model": model,
        }


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

    def endpoint(
        self, name: str, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """`handler` behind the bearer token, its errors as OpenAI error objects, its answers counted."""

        async def answer(request: Request) -> Response:
            try:
                self._authorize(request)
                response = await handler(request)
            except ValidationError as error:
                message, param = openai.validation_message(error.errors())
                response = _refusal(RequestError(message, param=param or None))
            except InvalidRequest as error:
                code = "context_length_exceeded" if isinstance(error, ContextExceeded) else None
                response = _refusal(RequestError(str(error), code=code))
            except (xtml.XTMLError, TokenizerError, ImageError) as error:
                response = _refusal(RequestError(str(error), param="messages"))
            except RequestError as error:
                response = _refusal(error)
            except EngineError as error:
                response = _refusal(RequestError(str(error), status=500))
            except MissingResource as error:
                response = _refusal(RequestError(str(error), status=501, code="not_installed"))
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
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.model_name, "object": "model", "created": self._began, "owned_by": "k3rl"}

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
        body = ChatRequest.model_validate_json(await self._body(request))
        sees = self._engine().model.config.vision_config is not None
        shown, images = await asyncio.to_thread(self._images, body, sees)  # none of this may keep others waiting
        prompt = await asyncio.to_thread(body.prompt_ids, self.tokenizer, shown)
        return await self._answer(request, body, [prompt], images)

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
    ) -> Response:
        await self._compile(body)
        job = self._begin(body, prompts, images)
        if body.stream:
            return EventStream(self._events(job), lambda: self._end(job), self.limits.stalled_s)
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
            completions = work.result()
            return JSONResponse(self._whole(job, completions))
        finally:
            self._end(job)

    async def _compile(self, body: ChatRequest | TextRequest) -> None:
        """Compiles the request's constraint on a thread of its own: others are answered meanwhile."""
        try:
            constraint = body.constraint()
        except ValueError as error:
            raise RequestError(str(error), param="response_format") from error
        if constraint is not None:
            only = SamplingParams(max_tokens=1, stop_ids=(xtml.stop_id(self.tokenizer),), constraint=constraint)
            await asyncio.to_thread(self._engine().check, [0], only)

    def _begin(self, body: ChatRequest | TextRequest, prompts: list[list[int]], images: Sequence[ImagePatches]) -> _Job:
        """Checks the limits and submits every sample; `images` are those of every prompt."""
        engine = self._engine()
        chat, n = isinstance(body, ChatRequest), body.n or 1
        if body.model:
            self._check_model(body.model)
        if not prompts or not all(prompts):
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        wanted = n * len(prompts)
        if wanted > self.limits.samples:
            raise RequestError(f"this asks for {wanted} samples; {self.limits.samples} are the most at once", param="n")
        if self._in_flight + wanted > self.limits.samples:
            message = (
                f"{self._in_flight} of {self.limits.samples} samples are in flight and this asks for {wanted}; "
                "try later"
            )
            raise RequestError(message, status=429, code="rate_limit_exceeded")
        context = min(self.limits.context_tokens or engine.max_context, engine.max_context)
        streams: list[Stream] = []
        choices: list[Choice] = []
        asked = []
        rows = [len(prompt) + sum(image.rows - 1 for image in images) for prompt in prompts]
        for prompt, length in zip(prompts, rows, strict=True):
            room = context - length
            try:
                default = room if chat else min(room, _TEXT_TOKENS)
                params = body.params(max(default, 1), xtml.stop_id(self.tokenizer))
            except ValueError as error:
                raise RequestError(str(error)) from error
            if params.max_tokens > room:
                message = f"{length} prompt tokens and {params.max_tokens} to sample exceed the context of {context}"
                raise RequestError(message, code="context_length_exceeded")
            asked += [(prompt, own) for own in request_samples(params, n)]
        for prompt, own in asked:
            engine.check(prompt, own, images)
        for index, (prompt, own) in enumerate(asked):
            streams.append(self.driver.submit(prompt, own, bool(body.stream), images))
            if isinstance(body, ChatRequest):
                choices.append(Choice(index, openai.Channels(self.tokenizer, own.stop, body.thinks)))
            else:
                choices.append(Choice(index, openai.PlainText(self.tokenizer, own.stop)))
        self._in_flight += len(streams)
        number = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        return _Job(number, int(time.time()), chat, body, prompts, rows, streams, choices, time.perf_counter())

    def _end(self, job: _Job) -> None:
        """Counts a request that is over, and takes back what its client did not wait for."""
        left = [stream for stream in job.streams if not stream.ended]
        for stream in left:
            self.driver.abort(stream)
        self.metrics.cancelled += bool(left)
        self.metrics.whole.observe(time.perf_counter() - job.began)
        self._in_flight -= len(job.streams)
        done = [stream.completion for stream in job.streams if stream.completion is not None]
        counts = openai.usage(job.rows, done)
        self.metrics.prompt_tokens += counts["prompt_tokens"]
        self.metrics.sampled_tokens += counts["completion_tokens"]
        self.metrics.cached_tokens += counts["prompt_tokens_details"]["cached_tokens"]

    def _whole(self, job: _Job, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        answer = job.head(self.model_name, streamed=False)
        answer["choices"] = [
            self._choice(job, choice, completion) for choice, completion in zip(job.choices, completions, strict=True)
        ]
        if job.body.return_token_ids:
            answer["prompt_token_ids"] = job.prompts[0] if len(job.prompts) == 1 else job.prompts
        return {**answer, "usage": openai.usage(job.rows, completions)}

    def _choice(self, job: _Job, choice: Choice, completion: Completion) -> dict[str, Any]:
        choice.add(completion.token_ids, final=True)
        found: dict[str, Any] = {"index": choice.index, "logprobs": None, **openai.extras(job.body, completion)}
        if not job.chat:
            if job.body.logprobs is not None:
                found["logprobs"] = self._text_logprobs(choice, _sampled(completion))
            return {**found, "text": choice.said.get("text", ""), "finish_reason": openai.finish_reason(completion)}
        calls = self._calls(job, choice)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.said.get("content") or (None if calls else ""),
        }
        if job.thinks:
            message["reasoning_content"] = choice.said.get("reasoning_content", "")
        if calls:
            message["tool_calls"] = calls
        if job.body.logprobs:
            found["logprobs"] = openai.chat_logprobs(self.tokenizer, _sampled(completion))
        return {**found, "message": message, "finish_reason": openai.finish_reason(completion, calls)}

    def _text_logprobs(self, choice: Choice, event: Tokens) -> dict[str, Any]:
        """Of the last tokens of a choice of the completions dialect."""
        offsets = choice.text.offsets[len(choice.ids) - len(event.ids) :] if isinstance(choice.text, PlainText) else ()
        return openai.text_logprobs(self.tokenizer, event, offsets)

    def _calls(self, job: _Job, choice: Choice) -> list[dict[str, Any]]:
        message = openai.parse_turn(self.tokenizer, choice.ids, job.thinks)
        return openai.tool_calls(message, job.id[-8:], choice.index)

    # ---- streaming

    async def _events(self, job: _Job) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks of all choices as their tokens come, then the usage when it is asked for."""
        head = job.head(self.model_name, streamed=True)
        if job.chat:
            for choice in job.choices:
                yield {**head, "choices": [self._delta(choice.index, {"role": "assistant", "content": ""})]}
        first = True
        async with aclosing(merged(list(zip(job.choices, job.streams, strict=True)))) as events:
            async for choice, event in events:
                if first:
                    self.metrics.first_token.observe(time.perf_counter() - job.began)
                    first = False
                if isinstance(event, Tokens):
                    chunk = self._chunk(job, choice, event)
                else:
                    chunk = self._last_chunk(job, choice, event)
                yield {**head, "choices": [chunk]}
        if job.body.stream_options is not None and job.body.stream_options.include_usage:
            completions = [stream.completion for stream in job.streams if stream.completion is not None]
            yield {**head, "choices": [], "usage": openai.usage(job.rows, completions)}

    def _chunk(self, job: _Job, choice: Choice, event: Tokens) -> dict[str, Any]:
        said: dict[str, str] = {}
        for channel, piece in choice.add(event.ids):
            said[channel] = said.get(channel, "") + piece
        chunk = self._delta(choice.index, said) if job.chat else self._text(choice.index, said.get("text", ""))
        if job.body.return_token_ids:
            chunk["token_ids"] = list(event.ids)
        if event.routes is not None:
            chunk["routes"] = openai.encoded_routes(event.routes)
        if job.chat and job.body.logprobs:
            chunk["logprobs"] = openai.chat_logprobs(self.tokenizer, event)
        elif not job.chat and job.body.logprobs is not None:
            chunk["logprobs"] = self._text_logprobs(choice, event)
        return chunk

    def _last_chunk(self, job: _Job, choice: Choice, completion: Completion) -> dict[str, Any]:
        said: dict[str, Any] = {}
        for channel, piece in choice.add((), final=True):
            said[channel] = said.get(channel, "") + piece
        extras = openai.extras(job.body, completion)
        for told in ("token_ids", "routes"):
            extras.pop(told, None)  # they came with the chunks
        if not job.chat:
            chunk = {**self._text(choice.index, said.get("text", "")), **extras}
            return {**chunk, "finish_reason": openai.finish_reason(completion)}
        calls = self._calls(job, choice)
        if calls:
            said["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        chunk = {**self._delta(choice.index, said), **extras}
        return {**chunk, "finish_reason": openai.finish_reason(completion, calls)}

    @staticmethod
    def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    @staticmethod
    def _text(index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    # ---- guards

    def _engine(self) -> Engine:
        if self.driver.state == "starting":
            raise RequestError("the model is still loading; ask /ready", status=503, code="starting")
        return self.driver.engine

    def _authorize(self, request: Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._token.encode())  # headers are read as latin-1
        if scheme.lower() != "bearer" or not same:
            raise RequestError("the bearer token is missing or wrong", status=401, code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """The body, never more of it in memory than the limit."""
        limit, pieces = self.limits.body_bytes, aiter(request.stream())
        too_large = RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
        said = request.headers.get("content-length", "")
        if said.isdecimal() and int(said) > limit:
            raise too_large
        received = bytearray()
        try:
            while True:
                async with asyncio.timeout(self.limits.stalled_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    return bytes(received)
                received += piece
                if len(received) > limit:
                    raise too_large
        except TimeoutError:
            message = f"nothing of the body came for {self.limits.stalled_s:g} s"
            raise RequestError(message, status=408, code="timeout") from None
        except ClientDisconnect:
            raise RequestError("the client closed the connection", status=499) from None


def _sampled(completion: Completion) -> Tokens:
    return Tokens(completion.token_ids, completion.logprobs, completion.top_logprobs or ())


def _refusal(error: RequestError) -> Response:
    told = openai.error_object(str(error), error.status, error.code, error.param)
    return JSONResponse(told, error.status, {"Retry-After": "1"} if error.status == 429 else None)
