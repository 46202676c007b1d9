"""The adapter for OpenEnv: a client of a server that is running somewhere, one WebSocket session an episode.

An action is an object whose fields are the server's own. `field` puts the policy's text into one of them; without it
the reply is a JSON object. An observation is shown as the text of `show`, or as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from k3rl.config import ConfigError, MissingResource, from_tree
from k3rl.envs.adapters.bridge import ForeignDied, ForeignHung, ForeignLied, ForeignRaised, InvalidAction
from k3rl.envs.adapters.foreign import ForeignConfig, RewardedEnv, SeededTasks, mapping
from k3rl.envs.adapters.packages import named, played
from k3rl.envs.base import Environment
from k3rl.types import Message, Task

MAX_MESSAGE = 16 * 2**20  # bytes
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class OpenEnvConfig(ForeignConfig):
    """Options of `openenv:URL`."""

    field: str = ""
    """Field of the action that takes the policy's text; empty: the reply is the whole action as a JSON object."""
    action: dict[str, Any] = {}
    """Fields that every action has besides."""
    show: str = ""
    """Field of an observation that the policy reads; empty: all of it as JSON."""
    instructions: str = ""
    """What is asked, before the first observation."""
    reset: dict[str, Any] = {}
    """What `reset` is given besides the seed."""
    headers: dict[str, str] = {}
    """HTTP headers of the connection."""
    connect_s: float = Field(default=10.0, gt=0)
    """Deadline for the connection."""
    call_s: float = Field(default=60.0, gt=0)
    """Deadline for each answer."""


def address(target: str) -> str:
    """The WebSocket address of a server's URL. Raises ConfigError."""
    scheme, separator, rest = named(target, "openenv:http://HOST:PORT").partition("://")
    if not separator or scheme not in _SCHEMES or not rest.strip("/"):
        raise ConfigError(
            f"openenv:{target}: {target!r} is no address; write openenv:http://HOST:PORT", key="env.name", got=target
        )
    base = f"{_SCHEMES[scheme]}://{rest.rstrip('/')}"
    return base if base.endswith("/ws") else f"{base}/ws"


def reach(url: str, timeout_s: float) -> None:
    """Raises MissingResource when nobody listens at an address."""
    parts = urlsplit(url)
    try:
        place = parts.hostname or "", parts.port or (443 if parts.scheme == "wss" else 80)
        with socket.create_connection(place, timeout_s):
            pass
    except (OSError, ValueError) as error:
        raise unreachable(url, str(error)) from None


def unreachable(url: str, why: str) -> MissingResource:
    """The error for a server that is not there."""
    return MissingResource(f"no OpenEnv server at {url}: {why}; start it, or correct the address")


class OpenEnvClient(RewardedEnv):
    """One session of one server."""

    def __init__(self, config: OpenEnvConfig, url: str) -> None:
        super().__init__(config)
        self._own = config
        self._url = url
        self._session: Any = None
        self._socket: Any = None

    async def open(self, task: Task) -> Mapping[str, Any]:
        await self._connect()
        data = await self._ask("reset", {**self._own.reset, "seed": task.data["seed"]})
        text = "\n".join(filter(None, [self._own.instructions, self._text(data)]))
        return {"messages": [{"role": "user", "content": text}]}

    async def act(self, message: Message) -> Mapping[str, Any]:
        text = message.content if isinstance(message.content, str) else ""
        data = await self._ask("step", {**self._own.action, **self._fields(text)})
        reward, done = data.get("reward"), data.get("done")
        return {
            "messages": [{"role": "user", "content": self._text(data)}],
            "reward": float(reward) if isinstance(reward, bool) else reward,
            "done": done,
        }

    async def close(self) -> None:
        """Leave the session; the server drops its environment."""
        socket, session = self._socket, self._session
        self._socket = self._session = None
        try:
            if socket is not None and not socket.closed:
                async with asyncio.timeout(5.0):
                    with contextlib.suppress(ConnectionError):
                        await socket.send_str(json.dumps({"type": "close"}))
                    await socket.close()
        except TimeoutError:
            pass  # it has had its time; the connection is dropped below
        finally:
            if session is not None:
                await session.close()

    async def _connect(self) -> None:
        try:
            import aiohttp
        except ModuleNotFoundError:
            raise MissingResource('OpenEnv needs aiohttp; install it: pip install "k3rl[openenv]"') from None
        self._session = aiohttp.ClientSession(headers=self._own.headers)
        try:
            async with asyncio.timeout(self._own.connect_s):
                self._socket = await self._session.ws_connect(self._url, max_msg_size=MAX_MESSAGE, heartbeat=20.0)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await self.close()
            why = f"no answer within {self._own.connect_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise unreachable(self._url, why) from None

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """One request and its observation."""
        if self._socket is None:
            raise ForeignDied(f"the session with {self._url} is over")
        try:
            async with asyncio.timeout(self._own.call_s):
                await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                answer = await self._socket.receive()
        except TimeoutError:
            await self.close()
            raise ForeignHung(f"{self._url}: {kind} took more than {self._own.call_s:g} s") from None
        except ConnectionError as error:
            await self.close()
            raise ForeignDied(f"{self._url}: the connection broke during {kind}: {error}") from None
        except BaseException:  # cancelled: the answer that is on its way belongs to nobody
            await self.close()
            raise
        if answer.type.name != "TEXT":
            await self.close()
            raise ForeignDied(f"{self._url}: the server ended the session during {kind} ({answer.type.name})")
        return self._read(kind, answer.data)

    def _read(self, kind: str, text: str) -> Mapping[str, Any]:
        try:
            answer = mapping(json.loads(text))
            data = mapping(answer.get("data"))
        except ValueError:
            raise ForeignLied(f"{self._url}: {kind} answered what is not JSON: {text[:120]!r}") from None
        if answer.get("type") == "error":
            said = " ".join(str(data[key]) for key in ("message", "errors") if data.get(key))[:500]
            if kind == "step" and data.get("code") == "VALIDATION_ERROR":
                raise InvalidAction(said)
            raise ForeignRaised(f"{self._url}: {kind}: {data.get('code')}: {said}")
        if answer.get("type") != "observation":
            raise ForeignLied(f"{self._url}: {kind} answered a {answer.get('type')!r}, not an observation")
        return data

    def _fields(self, text: str) -> dict[str, Any]:
        if self._own.field:
            return {self._own.field: text}
        try:
            action = json.loads(text)
        except ValueError:
            action = None
        if not isinstance(action, dict):
            raise InvalidAction("the answer must be one JSON object, the fields of the action")
        return action

    def _text(self, data: Mapping[str, Any]) -> str:
        seen = mapping(data.get("observation"))
        if not self._own.show:
            return json.dumps({name: value for name, value in seen.items() if name != "metadata"}, sort_keys=True)
        if self._own.show not in seen:
            raise ForeignLied(f"{self._url}: an observation has no {self._own.show!r}; it has {', '.join(seen)}")
        shown = seen[self._own.show]
        return shown if isinstance(shown, str) else json.dumps(shown)


def openenv(target: str, **options: Any) -> Environment:
    """`openenv:URL`, for example `openenv:http://127.0.0.1:8000` with `field = "message"`."""
    config = from_tree(OpenEnvConfig, options)
    url = address(target)
    name = f"openenv:{target}"
    source = SeededTasks(name, config, family="openenv", ready=lambda: reach(url, config.connect_s))
    return played(name, f"the OpenEnv server at {target}", source, config, lambda: OpenEnvClient(config, url))
