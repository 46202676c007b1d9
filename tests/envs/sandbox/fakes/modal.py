"""The part of Modal's package that the provider uses: its names, its signatures, its exceptions, its `.aio` twins."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

from sandbox_fakes.machine import Machine
from sandbox_fakes.service import Service


class Both:
    """A function of the package: called it would block, `.aio` is its coroutine."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.aio = function


class Error(Exception):
    """modal.exception.Error"""


class NotFoundError(Error):
    """modal.exception.NotFoundError"""


class Stream:
    """A StreamReader in byte mode."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = Both(read)
        self._read = read

    async def __aiter__(self) -> AsyncIterator[bytes]:
        data = await self._read()
        for begin in range(0, len(data), 65536):
            yield data[begin : begin + 65536]


class Input:
    """A StreamWriter: nothing is sent before `drain`, and no more than 2 MiB may wait."""

    def __init__(self) -> None:
        self.data, self._waiting, self._eof = bytearray(), bytearray(), False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.drain = Both(self._drain)

    def write(self, data: bytes) -> None:
        if len(self._waiting) + len(data) > 2 * 2**20:
            raise BufferError("Buffer size exceed limit. Call drain to clear the buffer.")
        self._waiting += data

    def write_eof(self) -> None:
        self._eof = True

    async def _drain(self) -> None:
        self.data += self._waiting
        self._waiting.clear()
        if self._eof and not self.closed.done():
            self.closed.set_result(None)


class Process:
    """A ContainerProcess."""

    def __init__(self, sandbox: Sandbox, argv: tuple[str, ...]) -> None:
        self.stdin = Input()
        self._sandbox = sandbox
        self._done = asyncio.ensure_future(self._run(list(argv)))
        self.stdout, self.stderr = Stream(lambda: self._part(1)), Stream(lambda: self._part(2))
        self.wait = Both(lambda: self._part(0))

    async def _run(self, argv: list[str]) -> tuple[int, bytes, bytes]:
        await self.stdin.closed
        await asyncio.sleep(self._sandbox.service.delay_s)
        done = await self._sandbox.machine.run(argv, bytes(self.stdin.data))
        if not self._sandbox.machine.alive:
            raise NotFoundError("Sandbox not found")
        return done

    async def _part(self, index: int) -> Any:
        return (await asyncio.shield(self._done))[index]


class Sandbox:
    """A modal.Sandbox."""

    def __init__(self, service: Modal, machine: Machine) -> None:
        self.service, self.machine = service, machine
        self.exec, self.terminate = Both(self._exec), Both(self._terminate)

    async def _exec(self, *args: str, text: bool = True, timeout: int | None = None) -> Process:
        assert text is False
        assert isinstance(timeout, int)
        if not self.machine.alive:
            raise NotFoundError("Sandbox not found")
        return Process(self, args)

    async def _terminate(self) -> None:
        self.machine.end()


class Modal(Service):
    """The package, in the place of the real one while the service lives."""

    provider_name = "modal"

    def __init__(self) -> None:
        super().__init__()
        package, errors = types.ModuleType("modal"), types.ModuleType("modal.exception")
        errors.Error, errors.NotFoundError = Error, NotFoundError  # type: ignore[attr-defined]
        members = {
            "exception": errors,
            "App": types.SimpleNamespace(lookup=Both(self._lookup)),
            "Image": types.SimpleNamespace(from_registry=lambda tag: ("image", tag)),
            "Sandbox": types.SimpleNamespace(create=Both(self._create)),
        }
        for name, member in members.items():
            setattr(package, name, member)
        self._before = {name: sys.modules.get(name) for name in ("modal", "modal.exception")}
        sys.modules["modal"], sys.modules["modal.exception"] = package, errors

    def options(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        super().close()
        for name, module in self._before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module

    async def _lookup(self, name: str, *, create_if_missing: bool = False) -> str:
        assert create_if_missing
        return name

    async def _create(
        self,
        *args: str,
        app: Any = None,
        image: Any = None,
        timeout: int | None = 300,
        region: str | None = None,
        cpu: tuple[float, float] | None = None,
        memory: tuple[int, int] | None = None,
        block_network: bool = False,
    ) -> Sandbox:
        assert app is not None
        assert block_network
        assert isinstance(timeout, int)
        assert isinstance(memory, tuple)
        name = f"m{len(self.machines)}"
        self.machines[name] = Machine("/box")
        return Sandbox(self, self.machines[name])
