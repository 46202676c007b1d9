"""Daytona: the REST interface and the toolbox behind its proxy."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from sandbox_fakes.service import KEY, HttpService


class Daytona(HttpService):
    """One organization."""

    provider_name = "daytona"

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        super().__init__()

    def options(self) -> dict[str, Any]:
        return {"api_url": self.url, "api_key": KEY, "organization": "org"}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/sandbox", self.create),
            web.get("/sandbox/{id}", self.get),
            web.delete("/sandbox/{id}", self.delete),
            web.get("/sandbox/{id}/toolbox-proxy-url", self.proxy),
            web.post("/toolbox/{id}/files/bulk-upload", self.upload),
            web.post("/toolbox/{id}/process/execute", self.execute),
        ]

    def refused(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"statusCode": 401, "message": "Unauthorized"}, status=401)
        assert request.headers["X-Daytona-Organization-ID"] == "org"
        name = request.match_info.get("id")
        if name is not None and not self.machines[name].alive:
            return web.json_response({"statusCode": 404, "message": f"Sandbox {name} not found"}, status=404)
        return None

    async def create(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        body = await request.json()
        known = {"labels", "networkBlockAll", "autoStopInterval", "autoDeleteInterval", "ttlMinutes", "snapshot"}
        assert body.keys() <= known
        assert body["networkBlockAll"] is True
        assert body["ttlMinutes"] > 0
        return web.json_response({"id": self.made(), "state": "creating"})

    async def get(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        name = request.match_info["id"]
        self.asked[name] = self.asked.get(name, 0) + 1
        return web.json_response({"id": name, "state": "starting" if self.asked[name] == 1 else "started"})

    async def delete(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        self.machines[request.match_info["id"]].end()
        return web.json_response({"id": request.match_info["id"], "state": "destroying"})

    async def proxy(self, request: web.Request) -> web.Response:
        return self.refused(request) or web.json_response({"url": f"{self.url}/toolbox"})

    async def upload(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        form = await request.post()
        path, field = form["files[0].path"], form["files[0].file"]
        assert isinstance(path, str)
        assert isinstance(field, web.FileField)
        await self.machines[request.match_info["id"]].put(path, field.file.read())
        return web.json_response({})

    async def execute(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        body = await request.json()
        machine = self.machines[request.match_info["id"]]
        try:
            async with asyncio.timeout(body["timeout"]):
                code, out, err = await machine.run(["sh", "-c", body["command"]])
        except TimeoutError:
            return web.json_response({"message": "command execution timeout"}, status=408)
        if not machine.alive:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"exitCode": code, "result": (err + out).decode("utf-8", "replace")})
