"""Daytona: REST for the life of a sandbox, the toolbox interface behind its proxy for files and commands."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from k3rl.config import NOT_HASHED
from k3rl.envs.sandbox.base import SandboxDied, SandboxLimits
from k3rl.envs.sandbox.remote.base import Machine, RemoteConfig, RemoteProvider, Reply, UploadingMachine, credential
from k3rl.envs.sandbox.remote.http import ask, client

if TYPE_CHECKING:
    import aiohttp

_POLL_S = 0.2
_LOST = ("error", "build_failed", "destroyed", "destroying", "archived", "stopped")


class DaytonaConfig(RemoteConfig):
    """An account of Daytona, or an own server."""

    type: Literal["daytona"] = "daytona"
    """The service."""

    api_url: str = Field(default="https://app.daytona.io/api", json_schema_extra=NOT_HASHED)
    """Address of the REST interface."""

    api_key: str | None = Field(default=None, json_schema_extra=NOT_HASHED, repr=False)
    """By default DAYTONA_API_KEY."""

    organization: str | None = Field(default=None, json_schema_extra=NOT_HASHED)
    """The organization's id, where the key belongs to several."""

    snapshot: str | None = None
    """The snapshot, with `python3`; its size is the sandbox's. By default the service's own."""

    target: str | None = Field(default=None, json_schema_extra=NOT_HASHED)
    """The region."""

    workspace: str = Field(default="/tmp/k3rl-box", pattern=r"^/[\w/.-]+$", json_schema_extra=NOT_HASHED)
    """The folder inside that is the workspace."""


class DaytonaProvider(RemoteProvider):
    """Makes sandboxes of Daytona."""

    name = "daytona"

    def __init__(self, config: DaytonaConfig) -> None:
        super().__init__(config)
        self._account = config

    def check(self) -> None:
        """Raises SandboxUnavailable without a key."""
        credential(self._account.api_key, "DAYTONA_API_KEY")

    async def _machine(self, limits: SandboxLimits) -> Machine:
        config = self._account
        headers = {"Authorization": f"Bearer {credential(config.api_key, 'DAYTONA_API_KEY')}"}
        if config.organization is not None:
            headers["X-Daytona-Organization-ID"] = config.organization
        minutes = max(1, -(-config.lifetime_s // 60))
        body: dict[str, Any] = {
            "labels": {"k3rl": "sandbox"},
            "networkBlockAll": True,
            "autoStopInterval": minutes,
            "autoDeleteInterval": 0,  # as soon as it is stopped
            "ttlMinutes": minutes,
        }
        body |= {key: value for key in ("snapshot", "target") if (value := getattr(config, key)) is not None}
        session = client(headers)
        machine = None
        try:
            made = await ask(session, "POST", f"{config.api_url}/sandbox", json=body)
            machine = _Daytona(session, f"{config.api_url}/sandbox/{made['id']}", made["id"])
            await machine.until_started(made)
        except BaseException:
            if machine is None:
                await session.close()
            else:
                await machine.destroy()
            raise
        return machine


class _Daytona(UploadingMachine):
    def __init__(self, session: aiohttp.ClientSession, url: str, name: str) -> None:
        self._session, self._url, self._name = session, url, name
        self._toolbox = ""

    async def until_started(self, about: dict[str, Any]) -> None:
        while (state := about.get("state")) != "started":
            if state in _LOST:
                raise SandboxDied(f"the sandbox did not start: {state} {about.get('errorReason') or ''}".strip())
            await asyncio.sleep(_POLL_S)
            about = await ask(self._session, "GET", self._url)
        proxy = about.get("toolboxProxyUrl")
        if not proxy:
            proxy = (await ask(self._session, "GET", f"{self._url}/toolbox-proxy-url"))["url"]
        self._toolbox = f"{proxy.rstrip('/')}/{self._name}"

    async def upload(self, path: str, data: bytes) -> None:
        import aiohttp

        form = aiohttp.FormData()
        form.add_field("files[0].path", path)
        form.add_field("files[0].file", data, filename="input", content_type="application/octet-stream")
        await ask(self._session, "POST", f"{self._toolbox}/files/bulk-upload", data=form)

    async def shell(self, argv: Sequence[str], timeout_s: float, max_bytes: int) -> Reply:
        body = {"command": shlex.join(argv), "timeout": int(timeout_s) + 1}
        url = f"{self._toolbox}/process/execute"
        said = await ask(self._session, "POST", url, json=body, max_bytes=2 * max_bytes)
        text = said.get("result") or ""
        return Reply(text.encode(), said.get("exitCode"), text[-400:])

    async def destroy(self) -> None:
        try:
            await ask(self._session, "DELETE", self._url, fine=[404])
        finally:
            await self._session.close()
