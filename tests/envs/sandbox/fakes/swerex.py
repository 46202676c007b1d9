"""A SWE-ReX server: one machine, one command after the other, exceptions as status 511."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from sandbox_fakes.service import KEY, HttpService


class SweRex(HttpService):
    """Three servers on three paths of one address."""

    provider_name = "swe-rex"
    count = 3

    def __init__(self) -> None:
        super().__init__()
        for _ in range(self.count):
            self.made("/scratch")
        self.turns = {name: asyncio.Lock() for name in self.machines}

    def options(self) -> dict[str, Any]:
        servers = [{"url": f"{self.url}/{name}", "token": KEY} for name in self.machines]
        return {"servers": servers, "workspace": "/scratch/box"}

    def living(self) -> int:
        """The machines belong to whoever started the servers: none is a sandbox's that still has a workspace."""
        return sum(
            machine.alive and asyncio.run(machine.run(["test", "-e", "/scratch/box"]))[0] == 0
            for machine in self.machines.values()
        )

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/{id}/upload", self.upload), web.post("/{id}/execute", self.execute)]

    def refused(self, request: web.Request) -> web.Response | None:
        if not self.machines[request.match_info["id"]].alive:
            assert request.transport is not None
            request.transport.abort()
        if request.headers.get("X-API-Key") != KEY:
            return web.json_response({"detail": "Invalid API Key"}, status=401)
        return None

    async def upload(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        form = await request.post()
        path, field = form["target_path"], form["file"]
        assert isinstance(path, str)
        assert isinstance(field, web.FileField)
        assert form["unzip"] == "false"
        await self.machines[request.match_info["id"]].put(path, field.file.read())
        return web.json_response({})

    async def execute(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        body = await request.json()
        assert isinstance(body["command"], list)
        assert body.get("shell", False) is False
        name = request.match_info["id"]
        machine = self.machines[name]
        async with self.turns[name]:
            try:
                async with asyncio.timeout(body["timeout"]):
                    code, out, err = await machine.run(body["command"])
            except TimeoutError:
                failure = {"message": "Timeout", "class_path": "swerex.exceptions.CommandTimeoutError", "traceback": ""}
                return web.json_response({"swerexception": {**failure, "extra_info": {}}}, status=511)
        if not machine.alive:
            assert request.transport is not None
            request.transport.abort()
        texts = {"stdout": out.decode(errors="backslashreplace"), "stderr": err.decode(errors="backslashreplace")}
        return web.json_response({**texts, "exit_code": code})
