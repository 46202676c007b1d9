"""HTTP to one vLLM server: calls with deadlines, one streamed answer, and what a server must have.

All traffic runs on an event loop in a thread of its own, so that answers are read while the caller does other things.
A call is sent again only when nothing of it can have been done: it only asks, the connection was refused, or the
server said 503 or 429, as vLLM does while it is paused or full. A call that broke off later is never repeated.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from k3rl.config import MissingResource
from k3rl.engine.protocol import EngineError
from k3rl.engine.vllm.wire import GENERATE, ServerInfo, error_of, finite_seconds
from k3rl.tokens import openai

T = TypeVar("T")

OLDEST = "0.32.0"  # the first whose answers name the weight version of every token
_POSTS = ("/pause", "/resume", "/abort_requests", "/update_weight_version", GENERATE)
_UPDATE_POSTS = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
)
_BUSY = (429, 503)


class EngineLost(EngineError):
    """The server is gone, or holds weights that are no version: nothing is served until `reconnect`."""


class Unreachable(EngineError):
    """Nothing of a call can have been done: no connection, or the server was busy to the deadline."""


class IncompatibleServer(EngineError):
    """A vLLM server lacks what rollouts need. missing: each thing, with the flag that brings it."""

    def __init__(self, url: str, missing: list[str]) -> None:
        super().__init__(url, missing)
        self.url, self.missing = url, missing

    def __str__(self) -> str:
        return f"the vLLM server at {self.url} cannot serve rollouts; it lacks:\n" + "\n".join(
            f"  - {item}" for item in self.missing
        )


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. connect: one attempt; busy: refused or busy in all; call: a control call; update: one weight message,
    and the load of a version; drain: `pause("wait")` and everything else that waits for running requests; stall:
    between two tokens of a request that is not paused, its wait in the server's queue included."""

    connect: float = 10.0
    busy: float = 120.0
    call: float = 60.0
    update: float = 1800.0
    drain: float = 600.0
    stall: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            finite_seconds(name, getattr(self, name))


class Client:
    """One server. `close` ends the thread; calls may come from any thread but the client's own."""

    def __init__(self, url: str, token: str | None, deadlines: Deadlines, connections: int) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingResource(
                f"the vLLM backend speaks HTTP through httpx, which is not installed ({error}): "
                "pip install 'k3rl[vllm-client]'"
            ) from None
        self.url, self.deadlines = url.rstrip("/"), deadlines
        self._httpx = httpx
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="k3rl-vllm", daemon=True)
        self._thread.start()
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        # Streams of live requests hold connections; control calls must find a free one beside them. None is used
        # twice: vLLM hangs up after some answers of 500, and a call that meets that end may or may not have been done.
        limits = httpx.Limits(max_connections=connections + 8, max_keepalive_connections=0)
        timeout = httpx.Timeout(deadlines.call, connect=deadlines.connect)
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, limits=limits)

    def close(self) -> None:
        """Breaks off what is under way."""
        if not self._loop.is_running():
            return
        self.wait(self._shutdown(), self.deadlines.call)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self.deadlines.call)
        self._loop.close()

    async def _shutdown(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.aclose()

    # ---- from the caller's thread

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the client's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Runs a coroutine on the client's loop and waits for it. Raises EngineError at the deadline."""
        future = self.start(work)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            raise EngineError(f"the vLLM server at {self.url} did not answer within {deadline_s:g} s") from None

    def soon(self, function: Callable[[], Any]) -> None:
        """Runs a function on the client's loop."""
        self._loop.call_soon_threadsafe(function)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
    ) -> Any:
        """The JSON of one call. Raises InvalidRequest, Unreachable or EngineError."""
        limit = self.deadlines.call if deadline_s is None else deadline_s
        work = self.fetch(method, path, body=body, query=query, deadline_s=limit)
        return self.wait(work, limit + self.deadlines.busy + self.deadlines.connect)

    # ---- on the loop

    async def fetch(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
    ) -> Any:
        """What `call` returns."""
        status, answer = await self._sent(method, path, body, query, deadline_s or self.deadlines.call)
        if status >= 400:
            raise error_of(status, answer)
        return answer

    async def status(self, method: str, path: str, query: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """(HTTP status, JSON or text) of one call, whatever the status."""
        return await self._sent(method, path, None, query, self.deadlines.call)

    async def _sent(
        self, method: str, path: str, body: Any, query: Mapping[str, Any] | None, deadline_s: float
    ) -> tuple[int, Any]:
        give_up, pause = time.monotonic() + self.deadlines.busy, 0.05
        while True:
            try:
                async with asyncio.timeout(deadline_s):
                    answer = await self._http.request(method, path, json=body, params=query, timeout=deadline_s)
            except (self._httpx.ConnectError, self._httpx.ConnectTimeout, self._httpx.PoolTimeout) as error:
                reason = f"{type(error).__name__}: {error}"
            except (self._httpx.HTTPError, TimeoutError) as error:
                reason = f"{type(error).__name__} {error}".strip()
                if method != "GET":
                    message = f"{method} {path} of {self.url} broke off ({reason}); it may have been done"
                    raise EngineError(message) from error
            else:
                if answer.status_code not in _BUSY:
                    return answer.status_code, _json_or_text(answer)
                reason = f"it answered {answer.status_code}: {answer.text[:300]}"
            if time.monotonic() + pause > give_up:
                raise Unreachable(
                    f"{method} {path} of {self.url} was not taken for {self.deadlines.busy:g} s: {reason}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def stream(self, body: Mapping[str, Any], feed: Callable[[Any], None], moving: Callable[[], bool]) -> None:
        """POSTs one generate request and feeds the events of its stream, in order, to the end.

        moving: whether tokens are to be expected now; only then does the stall deadline run. Raises Unreachable when
        the request was not taken, EngineError or InvalidRequest otherwise.
        """
        httpx = self._httpx
        timeout = httpx.Timeout(None, connect=self.deadlines.connect, write=self.deadlines.call)
        try:
            async with self._http.stream("POST", GENERATE, json=body, timeout=timeout) as answer:
                if answer.status_code != 200:
                    async with asyncio.timeout(self.deadlines.call):
                        await answer.aread()
                    error = error_of(answer.status_code, _json_or_text(answer))
                    raise Unreachable(str(error)) if answer.status_code in _BUSY else error
                async for line in self._lines(answer, moving):
                    if line == openai.DONE:
                        return
                    feed(json.loads(line))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Unreachable(f"no connection to the vLLM server at {self.url}: {error}") from error
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            if isinstance(error, EngineError):
                raise
            detail = f"{type(error).__name__} {error}".strip()
            raise EngineError(f"the vLLM server at {self.url} broke off in mid-answer ({detail})") from error
        raise EngineError(f"the vLLM server at {self.url} ended an answer without its last event")

    async def _lines(self, answer: Any, moving: Callable[[], bool]) -> Any:
        """The data of the stream's events. Raises TimeoutError when none comes for the stall deadline."""
        lines = answer.aiter_lines()
        last = time.monotonic()
        while True:
            following = asyncio.ensure_future(anext(lines, None))
            try:
                while not (await asyncio.wait({following}, timeout=min(1.0, self.deadlines.stall)))[0]:
                    if not moving():
                        last = time.monotonic()
                    elif time.monotonic() - last > self.deadlines.stall:
                        raise TimeoutError(f"no token for {self.deadlines.stall:g} s")
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
            last, line = time.monotonic(), following.result()
            if line is None:
                return
            if (data := openai.event_data(line)) is not None:
                yield data


def _json_or_text(answer: Any) -> Any:
    try:
        return answer.json()
    except ValueError:
        return answer.text


# ---- what a server must have


def handshake(client: Client, model: str | None, require: Collection[str], backend: str) -> ServerInfo:
    """Asks a server for everything that rollouts need. Raises IncompatibleServer that lists all that is missing.

    require: of "sampling_masks", "routes" and "weights", what has to be there; without it the first two are only looked
    for.
    backend: of the weight transfer.
    """
    return client.wait(_handshake(client, model, require, backend), 20 * client.deadlines.call)


async def _handshake(client: Client, model: str | None, require: Collection[str], backend: str) -> ServerInfo:
    missing: list[str] = []
    version = str((await client.fetch("GET", "/version")).get("version", "unknown"))
    if not _at_least(version, OLDEST):
        missing.append(f"vLLM {OLDEST} or newer: it is {version}")
    posts = _POSTS + (_UPDATE_POSTS if "weights" in require else ())
    absent = [path for path in posts if (await client.status("GET", path))[0] != 405]  # 405: there, and not for GET
    status, info = await client.status("GET", "/server_info", {"config_format": "json"})
    if absent or status != 200:
        named = ", ".join(absent + (["/server_info"] if status != 200 else []))
        missing.append(f"endpoints {named}: start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out")
    config = info.get("vllm_config", {}) if isinstance(info, Mapping) and status == 200 else {}
    config = config if isinstance(config, Mapping) else {}
    settings = config.get("model_config") or {}
    if status == 200 and settings.get("logprobs_mode") != "processed_logprobs":
        found = settings.get("logprobs_mode")
        missing.append(f"logprobs of the sampling distribution: --logprobs-mode processed_logprobs (it has {found})")
    if settings.get("skip_tokenizer_init"):
        # Only with a tokenizer does vLLM look whether its model has a token id; without one a wrong id ends the server.
        missing.append("a check of token ids: leave out --skip-tokenizer-init and --tokens-only")
    mask = bool(settings.get("return_sampling_mask"))
    routes = bool((config.get("aux_output_config") or {}).get("enable_return_routed_experts"))
    if "sampling_masks" in require and not mask:
        missing.append("sampling masks of top-p, top-k and min-p: --return-sampling-mask (model runner V2)")
    if "routes" in require and not routes:
        missing.append("routed experts: --enable-return-routed-experts")
    transfer = (config.get("weight_transfer_config") or {}).get("backend")
    if "weights" in require and transfer != backend:
        missing.append(
            f"weight transfer backend {backend!r} (it has {transfer!r}): put k3rl/engine/vllm/vllm_worker.py on its "
            f'path, --worker-extension-cls vllm_worker.Worker --weight-transfer-config \'{{"backend": "{backend}"}}\''
        )
    for path, key, remedy in (("/is_paused", "is_paused", "/resume"), ("/is_sleeping", "is_sleeping", "/wake_up")):
        status, answer = await client.status("GET", path)
        if status == 200 and answer.get(key):
            missing.append(f"a server that serves: it answers {key} at {path}; POST {remedy} first")
    listed = (await client.fetch("GET", "/v1/models")).get("data", [])
    chosen = [entry for entry in listed if model in (None, entry.get("id"))]
    if not chosen or (model is None and len(chosen) > 1):
        missing.append(f"the model {model!r}: it serves {[entry.get('id') for entry in listed]}; name one of them")
    elif not isinstance(chosen[0].get("max_model_len"), int):
        missing.append(f"max_model_len of {chosen[0].get('id')} in /v1/models")
    if missing:
        raise IncompatibleServer(client.url, missing)
    return ServerInfo(version, chosen[0]["id"], chosen[0]["max_model_len"], mask, routes, config)


def _at_least(found: str, wanted: str) -> bool:
    try:
        return Version(Version(found).base_version) >= Version(wanted)
    except InvalidVersion:
        return False
