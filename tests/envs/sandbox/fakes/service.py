"""What the tests ask of every fake: a provider for it, and faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from sandbox_fakes.machine import Machine

from k3rl.envs.sandbox import SandboxProvider, provider_named

KEY = "the-key"


class Service:
    """A fake service with its machines by name."""

    provider_name = ""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.delay_s = 0.0

    def options(self) -> dict[str, Any]:
        """The config of its provider."""
        raise NotImplementedError

    def provider(self, **changes: Any) -> SandboxProvider:
        """A provider that talks to it."""
        return provider_named(self.provider_name, **{**self.options(), **changes})

    def living(self) -> int:
        """How many machines there are."""
        return sum(machine.alive for machine in self.machines.values())

    def lose(self) -> None:
        """All machines die, as with their node."""
        for machine in self.machines.values():
            machine.end()

    def close(self) -> None:
        """End it."""
        self.lose()


class HttpService(Service):
    """A fake with an HTTP server in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ready = threading.Event()
        self._stopped = asyncio.Event()
        self._thread.start()
        assert self._ready.wait(20)

    def routes(self) -> list[web.RouteDef]:
        """What it answers."""
        raise NotImplementedError

    def close(self) -> None:
        """End the server and its machines."""
        super().close()
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(20)

    def made(self, *folders: str) -> str:
        """A machine more; its name."""
        name = f"m{len(self.machines)}"
        self.machines[name] = Machine(*folders)
        return name

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        app = web.Application(middlewares=[self._late], client_max_size=2**28)
        app.add_routes(self.routes())
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        await self._stopped.wait()
        await runner.cleanup()

    @web.middleware
    async def _late(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.delay_s and (request.method == "POST" or "exec" in request.path):
            await asyncio.sleep(self.delay_s)
        return await handler(request)
