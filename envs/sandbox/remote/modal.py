"""Modal, through its own package: the service documents no plain HTTP interface."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import Field

from k3rl.config import NOT_HASHED, MissingResource
from k3rl.envs.sandbox.base import MEBIBYTE, SandboxDied, SandboxError, SandboxLimits, SandboxUnavailable
from k3rl.envs.sandbox.remote.base import Machine, RemoteConfig, RemoteProvider, Reply

_CHUNK = MEBIBYTE  # of standard input at a time; the package buffers at most twice as much
_GONE = (
    *("NotFoundError", "SandboxTerminatedError", "SandboxTimeoutError", "ConnectionError", "ClientClosed"),
    *("ConflictError", "InternalFailure"),
)
_LOGIN = ("AuthError", "PermissionDeniedError")


class ModalConfig(RemoteConfig):
    """An account of Modal; its token is where `modal token set` or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET put it."""

    type: Literal["modal"] = "modal"
    """The service."""

    app: str = Field(default="k3rl-sandboxes", json_schema_extra=NOT_HASHED)
    """The app that the sandboxes belong to; made when there is none."""

    image: str = "python:3.12-slim"
    """An image of a registry, with `python3` and `sleep`."""

    region: str | None = Field(default=None, json_schema_extra=NOT_HASHED)
    """Where."""


class ModalProvider(RemoteProvider):
    """Makes sandboxes of Modal."""

    name = "modal"

    def __init__(self, config: ModalConfig) -> None:
        super().__init__(config)
        self._account = config

    def check(self) -> None:
        """Raises MissingResource without the package."""
        _package()

    async def _machine(self, limits: SandboxLimits) -> Machine:
        modal, config = _package(), self._account
        memory = max(128, math.ceil((limits.memory_bytes + limits.tmp_bytes) / MEBIBYTE))
        cpus = {} if limits.cpus is None else {"cpu": (limits.cpus, limits.cpus)}
        async with _typed():
            app = await modal.App.lookup.aio(config.app, create_if_missing=True)
            sandbox = await modal.Sandbox.create.aio(
                "sleep",
                str(config.lifetime_s),
                app=app,
                image=modal.Image.from_registry(config.image),
                timeout=config.lifetime_s,
                memory=(memory, memory),
                block_network=True,
                region=config.region,
                **cpus,
            )
        return _Modal(sandbox)


class _Modal(Machine):
    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox

    async def run(self, argv: Sequence[str], stdin: bytes, timeout_s: float, max_bytes: int) -> Reply:
        async with _typed():
            process = await self._sandbox.exec.aio(*argv, text=False, timeout=math.ceil(timeout_s))
            for start in range(0, len(stdin), _CHUNK):
                process.stdin.write(stdin[start : start + _CHUNK])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            out = bytearray()
            async for part in process.stdout:
                out += part
                if len(out) > max_bytes:
                    raise SandboxError(f"the sandbox answered with more than {max_bytes} bytes")
            complaint = await process.stderr.read.aio()
            code = await process.wait.aio()
        return Reply(bytes(out), code, complaint[-400:].decode("utf-8", "replace"))

    async def destroy(self) -> None:
        async with _typed():
            await self._sandbox.terminate.aio()


def _package() -> Any:
    try:
        return importlib.import_module("modal")
    except ImportError:
        raise MissingResource("the sandbox provider modal needs the package modal: pip install 'k3rl[modal]'") from None


@contextlib.asynccontextmanager
async def _typed() -> AsyncIterator[None]:
    """The package's exceptions as ours."""
    errors = importlib.import_module("modal.exception")
    try:
        yield
    except errors.Error as error:
        names = {kind.__name__ for kind in type(error).__mro__}
        text = f"Modal: {type(error).__name__}: {error}"[:400]
        if names & set(_LOGIN):
            raise SandboxUnavailable(f"{text}; run `modal token set`") from error
        raise SandboxDied(text) if names & set(_GONE) else SandboxError(text) from error
