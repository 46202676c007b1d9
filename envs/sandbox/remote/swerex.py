"""SWE-ReX: servers that someone has started (`swerex-remote`), each of which is one machine.

A server is used by one sandbox at a time. What it isolates is the affair of
where it runs; between two sandboxes only the workspace and what commands left running are removed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from k3rl.config import NOT_HASHED, Config, ConfigError
from k3rl.envs.sandbox.base import SandboxDied, SandboxError, SandboxLimits, SandboxSlow
from k3rl.envs.sandbox.remote.base import (
    FILES_S,
    Machine,
    RemoteConfig,
    RemoteProvider,
    Reply,
    UploadingMachine,
    credential,
)
from k3rl.envs.sandbox.remote.http import ask, client

if TYPE_CHECKING:
    import aiohttp

_FAILED = 511  # the server's own status for an exception, which it describes in the body
_POLL_S = 0.05
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 1.0
_NOT_YET = 99
_BACKGROUND = """
("$@" > "$0.out" 2> "$0.err" < /dev/null; echo $? > "$0.new"; mv "$0.new" "$0.code") > /dev/null 2>&1 &
echo $!
"""
# A command may have killed everything that it could reach: then nobody is left to write the status.
_LOOK = f"""
if ! test -e "$0.code"; then
    kill -0 "$2" 2> /dev/null && exit {_NOT_YET}
    test -e "$0.code" || echo 137 > "$0.code"
fi
cat "$0.code"; head -c "$1" "$0.out"; tail -c 400 "$0.err" >&2; rm -f "$0.code" "$0.out" "$0.err"
"""


class SweRexServer(Config):
    """One server."""

    url: str = Field(json_schema_extra=NOT_HASHED)
    """Its address, such as http://host:8000."""

    token: str | None = Field(default=None, json_schema_extra=NOT_HASHED, repr=False)
    """What it was started with as `--auth-token`; by default SWEREX_AUTH_TOKEN."""


class SweRexConfig(RemoteConfig):
    """The servers to share among sandboxes."""

    type: Literal["swe-rex"] = "swe-rex"
    """The service."""

    servers: tuple[SweRexServer, ...] = Field(default=(), json_schema_extra=NOT_HASHED)
    """At least one; as many sandboxes as servers live at a time, the others wait."""

    workspace: str = Field(default="/tmp/k3rl-box", pattern=r"^/[\w/.-]+$", json_schema_extra=NOT_HASHED)
    """The folder inside that is the workspace; it is deleted before and after each sandbox."""


class SweRexProvider(RemoteProvider):
    """Lends servers to sandboxes. `safe` says nothing about a server that runs on this machine without a container."""

    name = "swe-rex"

    def __init__(self, config: SweRexConfig) -> None:
        super().__init__(config)
        self._swerex = config
        self._free = list(config.servers)

    def check(self) -> None:
        """Raises ConfigError without a server."""
        if not self._swerex.servers:
            raise ConfigError(
                "the sandbox provider swe-rex needs the addresses of its servers", key="servers", wanted="one or more"
            )

    async def _machine(self, limits: SandboxLimits) -> Machine:
        self.check()
        while not self._free:
            await asyncio.sleep(_POLL_S)
        server = self._free.pop(0)
        machine = _SweRex(client({"X-API-Key": credential(server.token, "SWEREX_AUTH_TOKEN")}), server, self)
        try:
            await machine.clear()
        except BaseException:
            await machine.destroy()
            raise
        return machine

    def give_back(self, server: SweRexServer) -> None:
        """A server is free again."""
        self._free.append(server)

    @property
    def workspace(self) -> str:
        """The folder that is deleted between two sandboxes."""
        return self._swerex.workspace


class _SweRex(UploadingMachine):
    def __init__(self, session: aiohttp.ClientSession, server: SweRexServer, provider: SweRexProvider) -> None:
        self._session, self._server, self._provider = session, server, provider
        self._url = server.url.rstrip("/")
        self._prefix = f"/tmp/k3rl-{secrets.token_hex(8)}-"
        self._lent = True

    async def _ask(self, path: str, **more: Any) -> Any:
        headers = {"X-Request-ID": secrets.token_hex(16)}
        said = await ask(self._session, "POST", f"{self._url}/{path}", headers=headers, fine=[_FAILED], **more)
        if isinstance(said, dict) and (failure := said.get("swerexception")):
            kind = SandboxSlow if failure["class_path"].endswith("CommandTimeoutError") else SandboxError
            raise kind(f"the SWE-ReX server failed: {failure['class_path']}: {failure['message'][:300]}")
        return said

    async def clear(self) -> None:
        """Remove the workspace, and what a command that was dropped has left beside it."""
        await self._execute(["sh", "-c", 'rm -rf "$0" "$1"*', self._provider.workspace, self._prefix])

    def scratch(self) -> str:
        """Under a name by which `clear` finds it."""
        return f"{self._prefix}{secrets.token_hex(8)}"

    async def upload(self, path: str, data: bytes) -> None:
        import aiohttp

        form = aiohttp.FormData()
        form.add_field("file", data, filename="input", content_type="application/octet-stream")
        form.add_field("target_path", path)
        form.add_field("unzip", "false")
        await self._ask("upload", data=form)

    async def shell(self, argv: Sequence[str], timeout_s: float, max_bytes: int) -> Reply:
        """In the background, because the server does nothing else while a command of its own runs."""
        name = self.scratch()
        process = (await self._execute(["sh", "-c", _BACKGROUND, name, *argv]))["stdout"].strip()
        look, wait_s = ["sh", "-c", _LOOK, name, str(max_bytes), process], _FIRST_LOOK_S
        while (done := await self._execute(look, max_bytes))["exit_code"] == _NOT_YET:
            await asyncio.sleep(wait_s)
            wait_s = min(_LAST_LOOK_S, 1.5 * wait_s)
        code, _, output = done["stdout"].partition("\n")
        return Reply(output.encode(), int(code) if code.isdigit() else None, done["stderr"][-400:])

    async def _execute(self, argv: Sequence[str], max_bytes: int = 65536) -> Any:
        body = {"command": list(argv), "timeout": FILES_S, "shell": False}
        return await self._ask("execute", json=body, max_bytes=65536 + 2 * max_bytes)

    async def destroy(self) -> None:
        if not self._lent:
            return
        self._lent = False
        try:
            await self.clear()
        except SandboxDied:
            return  # it is gone with all that was in it, and is lent to nobody any more
        else:
            self._provider.give_back(self._server)
        finally:
            await self._session.close()
