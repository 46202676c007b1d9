"""HTTP for the services: one client per machine, bounded answers, statuses as typed errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3rl.config import MissingResource
from k3rl.envs.sandbox.base import SandboxDied, SandboxError, SandboxUnavailable

if TYPE_CHECKING:
    import aiohttp

JSON_BYTES = 4 * 2**20
_GONE = (404, 410, 502, 503)
_LOGIN = (401, 403)


def client(headers: Mapping[str, str] | None = None, *, ca_file: str | None = None) -> aiohttp.ClientSession:
    """A session. Deadlines are the caller's. Raises MissingResource without aiohttp."""
    try:
        import aiohttp
    except ImportError:
        raise MissingResource("remote sandboxes need the package aiohttp: pip install 'k3rl[sandboxes]'") from None
    connector = None
    if ca_file:
        import ssl

        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=ca_file))
    return aiohttp.ClientSession(
        headers=dict(headers or {}), timeout=aiohttp.ClientTimeout(total=None), connector=connector
    )


def raise_for(status: int, text: str, what: str) -> None:
    """Nothing below 300; else the error that a status means."""
    if status < 300:
        return
    about = f"{what} answered {status}: {text[:300]}"
    if status in _LOGIN:
        raise SandboxUnavailable(f"{about}; check the credential of this service")
    raise SandboxDied(about) if status in _GONE else SandboxError(about)


async def read_up_to(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body. Raises SandboxError when it is longer."""
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > max_bytes:
            raise SandboxError(f"the service answered with more than {max_bytes} bytes")
    return bytes(data)


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    max_bytes: int = JSON_BYTES,
    fine: Sequence[int] = (),
    **more: Any,
) -> Any:
    """The JSON that a request gives, None for an empty body; fine: statuses that are no errors."""
    import aiohttp

    try:
        async with session.request(method, url, **more) as response:
            data = await read_up_to(response, max_bytes)
            if response.status not in fine:
                raise_for(response.status, data.decode("utf-8", "replace"), f"{method} {response.url.path}")
    except aiohttp.ClientError as error:
        raise SandboxDied(f"the connection to the sandbox service broke: {error!r}") from error
    try:
        return json.loads(data) if data.strip() else None
    except ValueError as error:
        raise SandboxError(f"the service answered with what is no JSON: {data[:100]!r}") from error


async def stream(session: aiohttp.ClientSession, url: str, *, max_bytes: int, **more: Any) -> AsyncIterator[bytes]:
    """The parts of a long answer to a POST."""
    import aiohttp

    total = 0
    try:
        async with session.post(url, **more) as response:
            if response.status >= 300:
                raise_for(response.status, (await read_up_to(response, 65536)).decode("utf-8", "replace"), "POST")
            async for part in response.content.iter_any():
                total += len(part)
                if total > max_bytes:
                    raise SandboxError(f"the service answered with more than {max_bytes} bytes")
                yield part
    except aiohttp.ClientError as error:
        raise SandboxDied(f"the connection to the sandbox broke: {error!r}") from error
