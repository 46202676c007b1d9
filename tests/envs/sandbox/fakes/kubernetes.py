"""The part of a Kubernetes API server that pods and their exec websocket need."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import WSMsgType, web
from sandbox_fakes.service import KEY, HttpService


class Kubernetes(HttpService):
    """One namespace, `lab`, with the restricted pod security standard."""

    provider_name = "kubernetes"
    protocols: tuple[str, ...] = ("v5.channel.k8s.io", "v4.channel.k8s.io")

    def __init__(self) -> None:
        self.policies: set[str] = set()
        self.pending: set[str] = set()
        self.names: dict[str, str] = {}
        super().__init__()

    def options(self) -> dict[str, Any]:
        return {"api_url": self.url, "token": KEY, "namespace": "lab"}

    def routes(self) -> list[web.RouteDef]:
        pods = "/api/v1/namespaces/lab/pods"
        return [
            web.post("/apis/networking.k8s.io/v1/namespaces/lab/networkpolicies", self.policy),
            web.post(pods, self.create),
            web.get(pods + "/{name}", self.get),
            web.delete(pods + "/{name}", self.delete),
            web.get(pods + "/{name}/exec", self.exec),
        ]

    def refused(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return status(401, "Unauthorized")
        name = request.match_info.get("name")
        if name is not None and not (name in self.names and self.machines[self.names[name]].alive):
            return status(404, f'pods "{name}" not found')
        return None

    async def policy(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert "ingress" not in body["spec"]
        if body["metadata"]["name"] in self.policies:
            return status(409, "already exists")
        self.policies.add(body["metadata"]["name"])
        return web.json_response(body, status=201)

    async def create(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        pod = await request.json()
        (container,) = pod["spec"]["containers"]
        own, all_of_it = container["securityContext"], pod["spec"]["securityContext"]
        restricted = (
            own["allowPrivilegeEscalation"] is False
            and own["capabilities"] == {"drop": ["ALL"]}
            and all_of_it["runAsNonRoot"] is True
            and all_of_it["seccompProfile"]["type"] == "RuntimeDefault"
        )
        if not restricted or pod["spec"]["automountServiceAccountToken"]:
            return status(403, "violates PodSecurity")
        folders = [mount["mountPath"] for mount in container["volumeMounts"] if mount["mountPath"] != "/tmp"]
        name = pod["metadata"]["name"]
        self.names[name] = self.made(*folders)
        self.pending.add(name)
        return web.json_response({**pod, "status": {"phase": "Pending"}}, status=201)

    async def get(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        name = request.match_info["name"]
        phase = "Pending" if name in self.pending else "Running"
        self.pending.discard(name)
        return web.json_response({"kind": "Pod", "status": {"phase": phase}})

    async def delete(self, request: web.Request) -> web.Response:
        if (refusal := self.refused(request)) is not None:
            return refusal
        self.machines[self.names[request.match_info["name"]]].end()
        return web.json_response({"kind": "Pod"})

    async def exec(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self.refused(request)) is not None:
            return refusal
        socket = web.WebSocketResponse(protocols=self.protocols, max_msg_size=0)
        await socket.prepare(request)
        machine = self.machines[self.names[request.match_info["name"]]]
        process = await asyncio.create_subprocess_exec(
            *entering(machine, request.query.getall("command")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        feeding = asyncio.create_task(feed(socket, process))
        await asyncio.gather(pump(socket, 1, process.stdout), pump(socket, 2, process.stderr))
        code = await process.wait()
        if not machine.alive:  # the node is gone: the connection ends without a status
            feeding.cancel()
            await socket.close()
            return socket
        end: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if code:
            cause = {"reason": "ExitCode", "message": str(128 - code if code < 0 else code)}
            end = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
        await socket.send_bytes(b"\x03" + json.dumps(end).encode())
        feeding.cancel()
        await socket.close()
        return socket


class KubernetesV4(Kubernetes):
    """An older one, which cannot close standard input."""

    protocols = ("v4.channel.k8s.io",)


def entering(machine: Any, argv: list[str]) -> list[str]:
    from sandbox_fakes.machine import entering as line

    return line(machine.outer, argv)


async def feed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    async for message in socket:
        if message.type is not WSMsgType.BINARY:
            return
        if message.data[0] == 0:
            process.stdin.write(message.data[1:])
        elif message.data == b"\xff\x00":
            assert socket.ws_protocol == "v5.channel.k8s.io"
            process.stdin.close()


async def pump(socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader | None) -> None:
    assert stream is not None
    await socket.send_bytes(bytes([channel]))
    while part := await stream.read(32768):
        await socket.send_bytes(bytes([channel]) + part)


def status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return web.json_response(body, status=code)
