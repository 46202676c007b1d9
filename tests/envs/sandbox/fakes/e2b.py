"""E2B: the REST interface and envd, on one address."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from aiohttp import web
from sandbox_fakes.service import KEY, HttpService

HEAD = struct.Struct(">BI")
TOKEN = "envd-token"


class E2B(HttpService):
    """One account."""

    provider_name = "e2b"

    def options(self) -> dict[str, Any]:
        return {"api_url": self.url, "sandbox_url": self.url + "/of/{id}", "api_key": KEY}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v2/sandboxes", self.create),
            web.delete("/sandboxes/{id}", self.delete),
            web.post("/of/{id}/files", self.upload),
            web.post("/of/{id}/process.Process/Start", self.start),
        ]

    async def create(self, request: web.Request) -> web.Response:
        if request.headers.get("X-API-KEY") != KEY:
            return web.json_response({"code": 401, "message": "Invalid API key"}, status=401)
        body = await request.json()
        assert isinstance(body["templateID"], str)
        assert body["timeout"] > 0
        assert body["allow_internet_access"] is False
        name = self.made()
        made = {"templateID": body["templateID"], "sandboxID": name, "clientID": "c", "envdVersion": "0.5.7"}
        return web.json_response({**made, "envdAccessToken": TOKEN, "domain": None}, status=201)

    async def delete(self, request: web.Request) -> web.Response:
        machine = self.machines[request.match_info["id"]]
        if not machine.alive:
            return web.json_response({"code": 404, "message": "not found"}, status=404)
        machine.end()
        return web.Response(status=204)

    def refused(self, request: web.Request) -> web.Response | None:
        name = request.match_info["id"]
        if not self.machines[name].alive:
            return web.json_response({"code": 502, "message": "The sandbox was not found"}, status=502)
        if request.headers.get("X-Access-Token") != TOKEN:
            return web.json_response({"code": "unauthenticated"}, status=401)
        assert request.headers["E2b-Sandbox-Id"] == name
        assert request.headers["E2b-Sandbox-Port"] == "49983"
        return None

    async def upload(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        assert request.query["username"] == "user"
        field = (await request.post())["file"]
        assert isinstance(field, web.FileField)
        path = request.query["path"]
        await self.machines[request.match_info["id"]].put(path, field.file.read())
        return web.json_response([{"name": path.rpartition("/")[2], "type": "file", "path": path}])

    async def start(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self.refused(request)) is not None:
            return refusal
        assert request.content_type == "application/connect+json"
        assert request.headers["Connect-Protocol-Version"] == "1"
        assert base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")) == b"user:"
        body = await request.read()
        flags, size = HEAD.unpack_from(body)
        assert (flags, size) == (0, len(body) - HEAD.size)
        order = json.loads(body[HEAD.size :])
        assert order["stdin"] is False
        machine = self.machines[request.match_info["id"]]
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await answer.prepare(request)
        await answer.write(event({"start": {"pid": 7}}))
        process = order["process"]
        code, out, err = await machine.run([process["cmd"], *process["args"]])
        if not machine.alive:
            error = {"code": "unavailable", "message": "the sandbox ended before the stream completed"}
            await answer.write(envelope(2, {"error": error}))
            return answer
        await answer.write(event({"keepalive": {}}))
        for name, data in (("stdout", out), ("stderr", err)):
            for begin in range(0, len(data), 4096):
                await answer.write(event({"data": {name: base64.b64encode(data[begin : begin + 4096]).decode()}}))
        end: dict[str, Any] = {"exited": True, "status": f"exit status {code}"}
        await answer.write(event({"end": {**end, "exitCode": code} if code else end}))
        await answer.write(envelope(2, {}))
        return answer


def event(what: dict[str, Any]) -> bytes:
    return envelope(0, {"event": what})


def envelope(flags: int, what: dict[str, Any]) -> bytes:
    text = json.dumps(what).encode()
    return HEAD.pack(flags, len(text)) + text
