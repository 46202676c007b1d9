"""E2B and services that speak its interface: REST for the life of a sandbox, `envd` inside it for files and processes.

A process is started with a Connect call whose answer is a stream of enveloped JSON messages.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from k3rl.config import NOT_HASHED
from k3rl.envs.sandbox.base import SandboxDied, SandboxError, SandboxLimits
from k3rl.envs.sandbox.remote.base import Machine, RemoteConfig, RemoteProvider, Reply, UploadingMachine, credential
from k3rl.envs.sandbox.remote.http import ask, client, stream

if TYPE_CHECKING:
    import aiohttp

ENVD_PORT = 49983
_END = 0x02  # flag of the envelope that closes a stream
_HEAD = struct.Struct(">BI")  # flags, bytes of the message
_GONE = ("unavailable", "not_found", "canceled")


class E2BConfig(RemoteConfig):
    """An account of E2B, or an own server with the same interface."""

    type: Literal["e2b"] = "e2b"
    """The service."""

    api_url: str = Field(default="https://api.e2b.app", json_schema_extra=NOT_HASHED)
    """Address of the REST interface."""

    sandbox_url: str = Field(default="https://{port}-{id}.{domain}", json_schema_extra=NOT_HASHED)
    """Address of envd; {port}, {id} and {domain} are filled in."""

    api_key: str | None = Field(default=None, json_schema_extra=NOT_HASHED, repr=False)
    """By default E2B_API_KEY."""

    template: str = "base"
    """The template, with `python3`. Its size is the sandbox's: memory and processors are not set per sandbox."""

    user: str = "user"
    """The user that runs commands."""

    lifetime_s: int = Field(default=3600, gt=0)
    """Seconds after which the service removes the sandbox; accounts have a maximum."""

    workspace: str = Field(default="/tmp/k3rl-box", pattern=r"^/[\w/.-]+$", json_schema_extra=NOT_HASHED)
    """The folder inside that is the workspace."""


class E2BProvider(RemoteProvider):
    """Makes sandboxes of E2B."""

    name = "e2b"

    def __init__(self, config: E2BConfig) -> None:
        super().__init__(config)
        self._account = config

    def check(self) -> None:
        """Raises SandboxUnavailable without a key."""
        credential(self._account.api_key, "E2B_API_KEY")

    async def _machine(self, limits: SandboxLimits) -> Machine:
        config = self._account
        session = client({"X-API-KEY": credential(config.api_key, "E2B_API_KEY")})
        body = {
            "templateID": config.template,
            "timeout": config.lifetime_s,
            "allow_internet_access": False,
            "metadata": {"k3rl": "sandbox"},
        }
        try:
            made = await ask(session, "POST", f"{config.api_url}/v2/sandboxes", json=body)
        except BaseException:
            await session.close()
            raise
        return _E2B(session, config, made)


class _E2B(UploadingMachine):
    def __init__(self, api: aiohttp.ClientSession, config: E2BConfig, made: dict[str, Any]) -> None:
        name, domain = made["sandboxID"], made.get("domain") or "e2b.app"
        self._api, self._config = api, config
        self._of_api = f"{config.api_url}/sandboxes/{name}"
        self._envd = config.sandbox_url.format(port=ENVD_PORT, id=name, domain=domain)
        headers = {"E2b-Sandbox-Id": name, "E2b-Sandbox-Port": str(ENVD_PORT)}
        if token := made.get("envdAccessToken"):
            headers["X-Access-Token"] = token
        self._session = client(headers)

    async def upload(self, path: str, data: bytes) -> None:
        import aiohttp

        form = aiohttp.FormData()
        form.add_field("file", data, filename=path, content_type="application/octet-stream")
        query = {"path": path, "username": self._config.user}
        await ask(self._session, "POST", f"{self._envd}/files", params=query, data=form)

    async def shell(self, argv: Sequence[str], timeout_s: float, max_bytes: int) -> Reply:
        message = json.dumps({"process": {"cmd": argv[0], "args": list(argv[1:])}, "stdin": False}).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(int(timeout_s * 1000)),
            "Keepalive-Ping-Interval": "50",
            "Authorization": "Basic " + base64.b64encode(f"{self._config.user}:".encode()).decode(),
        }
        parts = stream(
            self._session,
            f"{self._envd}/process.Process/Start",
            max_bytes=2 * max_bytes,  # base64 and JSON around what the program printed
            data=_HEAD.pack(0, len(message)) + message,
            headers=headers,
        )
        out, complaint, code, buffer = bytearray(), bytearray(), None, b""
        async for part in parts:
            buffer += part
            while len(buffer) >= _HEAD.size and len(buffer) >= (end := _HEAD.size + _HEAD.unpack_from(buffer)[1]):
                flags, said = buffer[0], json.loads(buffer[_HEAD.size : end])
                buffer = buffer[end:]
                if flags & _END:
                    _raise_end(said)
                    continue
                event = said.get("event", {})
                out += base64.b64decode(event.get("data", {}).get("stdout", ""))
                complaint += base64.b64decode(event.get("data", {}).get("stderr", ""))
                if "end" in event:
                    code = int(event["end"].get("exitCode", 0))  # a zero is left out of this JSON
        if code is None:
            raise SandboxDied("the connection to the sandbox broke before the command's end came")
        return Reply(bytes(out), code, complaint[-400:].decode("utf-8", "replace"))

    async def destroy(self) -> None:
        try:
            await ask(self._api, "DELETE", self._of_api, fine=[404])
        finally:
            await self._session.close()
            await self._api.close()


def _raise_end(said: dict[str, Any]) -> None:
    """The error of a stream's last envelope, if it has one."""
    if error := said.get("error"):
        text = f"the sandbox answered {error.get('code')}: {error.get('message', '')[:300]}"
        raise SandboxDied(text) if error.get("code") in _GONE else SandboxError(text)
