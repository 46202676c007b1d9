"""A vLLM server as far as rollouts see one: its HTTP shapes and rules, over our own engine, so that numbers are real.

Follows vllm/entrypoints of 0.33.0: `/inference/v1/generate` (streamed), the RL routes with their order
start -> update* -> finish, 503 for new requests in the pauses abort and wait, the version set by finish alone, aborts
by the engine's request id, sleep and wake, OpenAI error objects. The weights go through the staging that runs in
vLLM's workers (`k3rl.engine.vllm.vllm_worker`). Faults to order: `fail_next`, `corrupt`, `raw` and `hold`.

    python fake_vllm.py FILE    # a server in a process of its own, which writes its URL into FILE
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from k3rl.engine import Engine, InvalidRequest
from k3rl.engine.vllm.vllm_worker import BACKEND, StagedUpdate, UpdateInfo
from k3rl.serve.driver import EngineDriver, Stream
from k3rl.types import Completion, SamplingParams, StopReason

FINISH = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.ABORTED: "abort"}
CONFIG = {
    "model_config": {"skip_tokenizer_init": False, "logprobs_mode": "processed_logprobs", "return_sampling_mask": True},
    "aux_output_config": {"enable_return_routed_experts": True},
    "weight_transfer_config": {"backend": BACKEND},
}
Errors = dict[str, dict[str, Any]]


def error(status: int, kind: str, message: str) -> JSONResponse:
    """vLLM's ErrorResponse."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


class FakeVLLM:
    """The state behind the routes. `config` and `version` may be changed before a client's handshake."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self.driver = EngineDriver(lambda: self.held(load()))
        self.config: dict[str, Any] = json.loads(json.dumps(CONFIG))
        self.version = "0.33.0"
        self.scale_out = True
        self.label = "default"
        self.labels: dict[int, str] = {}
        self.switches: dict[int, list[tuple[str, int]]] = {}  # of running requests: (label, tokens before it)
        self.streams: dict[str, Stream] = {}
        self.paused: str | None = None
        self.staged: StagedUpdate | None = None
        self.names: list[str] | None = None
        self.sleeping = 0
        self.resets = 0
        self.fail_next: str | None = None  # a path whose next call answers 500
        self.seen: list[dict[str, Any]] = []  # bodies of generate requests
        self.corrupt = False  # makes one sampled logprob no logprob
        self.raw = False  # sends logprobs of something else than what was sampled from
        self.free = threading.Event()  # the engine steps
        self.free.set()

    def held(self, engine: Engine) -> Engine:
        """The engine, whose steps wait between `hold` and `release`."""
        step = engine.step

        def held_step() -> list[tuple[int, Any]]:
            self.free.wait(20)
            return step()

        engine.step = held_step  # type: ignore[method-assign]
        return engine

    def hold(self) -> None:
        """The engine hangs before its next step until `release`."""
        self.free.clear()

    def release(self) -> None:
        self.free.set()

    # ---- generate

    async def generate(self, request: Request) -> Any:
        body = await request.json()
        if not self.scale_out:
            return error(403, "PermissionDeniedError", "Scale-out endpoints are disabled.")
        if self.paused in ("abort", "wait"):
            return error(503, "ServiceUnavailableError", "Generation is paused. Please retry after it resumes.")
        if self.sleeping:
            return error(500, "InternalServerError", "the engine sleeps")
        if body["model"] != "tiny":
            return error(404, "NotFoundError", f"The model `{body['model']}` does not exist.")
        self.seen.append(body)
        if len(body["cache_salt"]) > 128 or set(body["cache_salt"]) & set("@/\\\0"):
            return error(400, "BadRequestError", "Parameter 'cache_salt' must be at most 128 characters ...")
        asked = body["sampling_params"]
        if self.config["model_config"]["return_sampling_mask"] and not (asked["temperature"] > 0 < asked["top_k"]):
            return error(400, "BadRequestError", "return_sampling_mask requires temperature > 0 and top_k > 0 ...")
        try:
            params = sampling(asked)
            self.driver.engine.check(body["token_ids"], params)
        except (InvalidRequest, ValueError) as refused:
            return error(400, "BadRequestError", str(refused))
        stream = self.driver.submit(body["token_ids"], params, incremental=True)
        name = "generate-tokens-" + body["request_id"]
        self.streams[name] = stream
        return StreamingResponse(self.events(name, stream, params), media_type="text/event-stream")

    async def events(self, name: str, stream: Stream, params: SamplingParams) -> AsyncIterator[str]:
        sent = 0
        try:
            async for tokens in stream:
                yield self.event(name, self.choice(tokens.ids, tokens.logprobs))
                sent += len(tokens.ids)
            done = stream.completion
            assert done is not None
            last = self.choice(done.token_ids[sent:], done.logprobs[sent:])
            yield self.event(name, {**last, **self.ending(stream, done)})
            yield self.event(name, None, usage={"prompt_tokens": len(stream.prompt_ids)})
        except Exception as failed:
            body = {"message": str(failed), "type": "InternalServerError", "param": None, "code": 500}
            yield f"data: {json.dumps({'error': body})}\n\n"
        finally:
            self.streams.pop(name, None)
            if not stream.ended:
                self.driver.abort(stream)  # the client hung up
        yield "data: [DONE]\n\n"

    def choice(self, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> dict[str, Any]:
        if self.corrupt and logprobs:
            logprobs, self.corrupt = (1.0, *logprobs[1:]), False
        if self.raw:
            logprobs = tuple(value - 1.0 for value in logprobs)
        content = [
            {"token_id": token, "logprob": max(value, -9999.0), "rank": 1, "top_logprobs": []}
            for token, value in zip(ids, logprobs, strict=True)
        ]
        return {"index": 0, "token_ids": list(ids), "logprobs": {"content": content}, "finish_reason": None}

    def ending(self, stream: Stream, done: Completion) -> dict[str, Any]:
        """What the last chunk carries beyond tokens."""
        ending: dict[str, Any] = {"finish_reason": FINISH[done.stop_reason], "stop_reason": done.stop_string}
        if self.config["aux_output_config"]["enable_return_routed_experts"] and done.routes is not None:
            every_layer = np.insert(done.routes, 0, 0, axis=1).astype(np.uint8)  # the dense layer has a row, too
            file = io.BytesIO()
            np.save(file, every_layer)
            ending["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        if self.config["model_config"]["return_sampling_mask"]:
            whole = range(self.driver.engine.model.config.vocab_size)
            ending["sampling_mask"] = [
                list(map(int, ids)) for ids in done.sampling_mask or [whole] * len(done.token_ids)
            ]
        assert stream.number is not None
        starts = self.switches.pop(stream.number, [])
        first = self.labels.get(done.first_version, self.label)
        starts = [(first, 0), *(switch for switch in starts if switch[1] < len(done.token_ids))]
        starts = starts if len(starts) < 2 or starts[1][1] else starts[1:]
        ends = [*(start for _, start in starts[1:]), len(done.token_ids)]
        spans = [{"version": v, "start": s, "end": e} for (v, s), e in zip(starts, ends, strict=True)]
        ending["weight_versions"] = spans if done.token_ids else None
        return ending

    @staticmethod
    def event(name: str, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> str:
        body = {"request_id": name, "usage": usage, "output_mode": "tokens", "choices": [choice] if choice else []}
        return f"data: {json.dumps(body)}\n\n"

    async def abort_requests(self, request: Request) -> Response:
        names = (await request.json()).get("request_ids") or list(self.streams)
        for name in names:
            if name in self.streams:
                self.driver.abort(self.streams[name])
        return JSONResponse({"status": "aborted", "aborted": len(names)})

    # ---- pauses, sleep

    async def pause(self, request: Request) -> Response:
        return await self.paused_as(request.query_params.get("mode", "abort"))

    async def paused_as(self, mode: str) -> Response:
        if mode not in ("abort", "wait", "keep"):
            return error(400, "BadRequestError", f"Invalid pause mode: {mode}")
        self.paused = mode
        if mode == "wait":
            while self.streams:
                await asyncio.sleep(0.002)
        await self.driver.call(lambda engine: engine.pause(mode))
        return JSONResponse({"status": "paused"})

    async def resume(self, _request: Request) -> Response:
        self.paused = None
        await self.driver.call(lambda engine: engine.resume())
        return JSONResponse({"status": "resumed"})

    async def sleep(self, request: Request) -> Response:
        level, mode = int(request.query_params["level"]), request.query_params["mode"]
        await self.paused_as(mode)
        self.paused, self.sleeping = mode, level
        if level == 2:
            self.staged = None
        return JSONResponse({"status": "sleeping", "level": level})

    async def wake_up(self, request: Request) -> Any:
        tags = request.query_params.getlist("tags") or None
        awake = tags is None or "kv_cache" in tags
        if awake:
            self.sleeping = 0
            await self.resume(request)
        return JSONResponse({"status": "awake" if awake else "sleeping", "tags": tags})

    # ---- weights

    async def init_weights(self, request: Request) -> Response:
        names = (await request.json())["init_info"]["names"]
        try:
            await self.driver.call(lambda engine: engine.init_weight_transfer(names))
        except Exception as refused:
            return error(500, "InternalServerError", str(refused))
        return JSONResponse({"message": "Weight transfer initialized"})

    async def start(self, _request: Request) -> Any:
        if self.staged is not None:
            return error(500, "InternalServerError", "start_weight_update called while a weight update is active.")
        self.staged = StagedUpdate()
        return JSONResponse({"message": "Weight update started"})

    async def update(self, request: Request) -> Any:
        if self.staged is None:
            return error(500, "InternalServerError", "start_weight_update must be called before update_weights.")
        try:
            self.staged.receive(UpdateInfo(**(await request.json())["update_info"]))
        except Exception as refused:
            self.staged = None  # vLLM's worker ends the session at any error
            return error(500, "InternalServerError", str(refused))
        return JSONResponse({"message": "Weights updated"})

    async def finish(self, request: Request) -> Any:
        label = (await request.json())["weight_version"]
        if self.staged is None:
            return error(500, "InternalServerError", "finish_weight_update called without a matching start.")
        staged = self.staged

        def switch(engine: Engine) -> None:
            tensors = dict(staged.tensors())
            number = engine.version + 1
            engine.start_weight_update(number, staged.digests)
            engine.update_weights(tensors.items())
            engine.finish_weight_update(number)
            for stream in self.streams.values():
                if stream.number is not None and (count := len(engine.sampled(stream.number)[0])):
                    self.switches.setdefault(stream.number, []).append((label, count))
            self.labels[number] = label

        try:
            await self.driver.call(switch)
        except Exception as refused:
            return error(500, "InternalServerError", str(refused))
        self.staged, self.label = None, label
        return JSONResponse({"message": "Weight update finished"})

    async def reset_cache(self, request: Request) -> Any:
        """The engine behind recomputes what runs at every switch by itself; this only says so."""
        self.resets += 1
        return JSONResponse({"success": request.query_params["reset_running_requests"] == "true"})

    async def set_label(self, request: Request) -> Any:
        self.label = (await request.json())["new_version"]
        self.labels[self.driver.engine.version] = self.label
        return JSONResponse({"success": True, "new_version": self.label})


def sampling(body: dict[str, Any]) -> SamplingParams:
    """vLLM's SamplingParams, as far as this server can do what they say."""
    known = {"ignore_eos", "logprobs", "detokenize", "watermarking"}
    fields = {"temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"}
    if unknown := body.keys() - known - fields - {"stop_token_ids", "stop", "logit_bias"}:
        raise ValueError(f"unknown sampling parameters {sorted(unknown)}")
    if not body["ignore_eos"] or body["logprobs"] != 0:
        raise ValueError("this server does what a rollout asks for: ignore_eos, and logprobs of sampled tokens")
    return SamplingParams(
        **{name: body[name] for name in fields},
        stop_ids=tuple(body["stop_token_ids"]),
        stop=tuple(body.get("stop", ())),
        logit_bias=tuple((int(token), bias) for token, bias in body.get("logit_bias", {}).items()),
        return_routes=True,
    )


def create_app(fake: FakeVLLM) -> Starlette:
    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        fake.driver.start()
        while fake.driver.state == "starting":
            await asyncio.sleep(0.001)
        yield
        await fake.driver.close()

    posts = {
        "/inference/v1/generate": fake.generate,
        "/abort_requests": fake.abort_requests,
        "/pause": fake.pause,
        "/resume": fake.resume,
        "/sleep": fake.sleep,
        "/wake_up": fake.wake_up,
        "/init_weight_transfer_engine": fake.init_weights,
        "/start_weight_update": fake.start,
        "/update_weights": fake.update,
        "/finish_weight_update": fake.finish,
        "/update_weight_version": fake.set_label,
        "/reset_prefix_cache": fake.reset_cache,
    }
    gets: dict[str, Callable[[], Any]] = {
        "/version": lambda: {"version": fake.version},
        "/health": lambda: None,
        "/v1/models": lambda: {"data": [{"id": "tiny", "object": "model", "max_model_len": 256}]},
        "/server_info": lambda: {"vllm_config": fake.config},
        "/is_paused": lambda: {"is_paused": fake.paused is not None},
        "/is_sleeping": lambda: {"is_sleeping": bool(fake.sleeping)},
        "/weight_info": lambda: {"weight_version": fake.label},
    }

    def asked(answer: Callable[[], Any]) -> Callable[[Request], Any]:
        async def found(_request: Request) -> Response:
            return JSONResponse(answer())

        return found

    def ordered(path: str, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def done(request: Request) -> Response:
            if path == fake.fail_next:
                fake.fail_next = None
                return error(500, "InternalServerError", "The server had an error while processing your request.")
            return await answer(request)

        return done

    routes = [Route(path, ordered(path, answer), methods=["POST"]) for path, answer in posts.items()]
    routes += [Route(path, asked(answer), methods=["GET"]) for path, answer in gets.items()]
    return Starlette(routes=routes, lifespan=lifespan)


@contextmanager
def serving(load: Callable[[], Engine]) -> Any:
    """(url, FakeVLLM) of a server on a free port, in a thread."""
    fake = FakeVLLM(load)
    server = uvicorn.Server(uvicorn.Config(create_app(fake), port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", fake
    finally:
        server.should_exit = True
        thread.join()


def main(place: str) -> None:
    """Serves a tiny model until the process is killed."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from conftest import build

    model = build()
    with serving(lambda: Engine(model, max_running=8)) as (url, _):
        with open(place + ".part", "w") as file:
            file.write(url)
        os.replace(place + ".part", place)
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
