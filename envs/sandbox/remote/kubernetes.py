"""Kubernetes: one pod per sandbox, through the API server's REST interface and its exec websocket.

A pod runs as an ordinary user with a read-only root, without capabilities or a service account token, and ends by
itself at its deadline. That pods have no network is the work of a NetworkPolicy, which is made with the first sandbox;
it needs a network plug-in that obeys policies.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from k3rl.config import NOT_HASHED
from k3rl.envs.sandbox.base import SandboxDied, SandboxError, SandboxLimits, SandboxUnavailable
from k3rl.envs.sandbox.remote.base import Machine, RemoteConfig, RemoteProvider, Reply
from k3rl.envs.sandbox.remote.http import ask, client

if TYPE_CHECKING:
    import aiohttp

LABEL = "k3rl-sandbox"
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STDIN, _STDOUT, _STDERR, _STATUS, _CLOSE = 0, 1, 2, 3, 255
_CHUNK = 32768
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_POLL_S = 0.2


class KubernetesConfig(RemoteConfig):
    """Where the API server is. Inside a cluster the service account of this pod is taken."""

    type: Literal["kubernetes"] = "kubernetes"
    """The service."""

    api_url: str | None = Field(default=None, json_schema_extra=NOT_HASHED)
    """Address of the API server."""

    token: str | None = Field(default=None, json_schema_extra=NOT_HASHED, repr=False)
    """A bearer token; by default KUBERNETES_TOKEN, or the service account's."""

    ca_file: str | None = Field(default=None, json_schema_extra=NOT_HASHED)
    """The certificate that signed the API server's."""

    namespace: str = Field(default="default", json_schema_extra=NOT_HASHED)
    """Where the pods live; the token may create, get and delete pods, exec into them, and create network policies."""

    image: str = "python:3.12-slim"
    """Any image with `python3` and `sleep`."""

    runtime_class: str | None = Field(default=None, json_schema_extra=NOT_HASHED)
    """A RuntimeClass of the cluster, such as gVisor's."""


class KubernetesProvider(RemoteProvider):
    """Makes pods."""

    name = "kubernetes"

    def __init__(self, config: KubernetesConfig) -> None:
        super().__init__(config)
        self._cluster = config

    def check(self) -> None:
        """Raises SandboxUnavailable when no API server or token is known."""
        self._access()

    def _access(self) -> tuple[str, str, str | None]:
        """(address of the API server, token, certificate file)."""
        config, host = self._cluster, os.environ.get("KUBERNETES_SERVICE_HOST")
        url = config.api_url
        if url is None and host:
            url = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        token = config.token or os.environ.get("KUBERNETES_TOKEN")
        if not token and (_ACCOUNT / "token").is_file():
            token = (_ACCOUNT / "token").read_text().strip()
        if not url or not token:
            raise SandboxUnavailable(
                "no Kubernetes API server is known; set `api_url` and KUBERNETES_TOKEN, or run inside the cluster"
            )
        own = str(_ACCOUNT / "ca.crt") if (_ACCOUNT / "ca.crt").is_file() else None
        return url.rstrip("/"), token, config.ca_file or own

    def manifest(self, name: str, limits: SandboxLimits) -> dict[str, Any]:
        """The pod."""
        config = self._cluster
        memory = limits.memory_bytes + limits.tmp_bytes
        hard = {"memory": str(memory), "ephemeral-storage": str(limits.workspace_bytes + limits.tmp_bytes)}
        if limits.cpus is not None:
            hard["cpu"] = f"{max(1, round(limits.cpus * 1000))}m"
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": config.lifetime_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65534,
                "runAsGroup": 65534,
                "fsGroup": 65534,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "box",
                    "image": config.image,
                    "command": ["sleep", str(config.lifetime_s)],
                    "workingDir": config.workspace,
                    "resources": {"limits": hard},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [
                        {"name": "box", "mountPath": config.workspace},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "box", "emptyDir": {"sizeLimit": str(limits.workspace_bytes)}},
                {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": str(limits.tmp_bytes)}},
            ],
        }
        if config.runtime_class is not None:
            spec["runtimeClassName"] = config.runtime_class
        metadata = {"name": name, "labels": {"app.kubernetes.io/managed-by": "k3rl", "app": LABEL}}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    async def _machine(self, limits: SandboxLimits) -> Machine:
        url, token, ca_file = self._access()
        session = client({"Authorization": f"Bearer {token}"}, ca_file=ca_file)
        name = f"k3rl-{uuid.uuid4().hex[:16]}"
        pod = _Pod(session, f"{url}/api/v1/namespaces/{self._cluster.namespace}/pods", name)
        try:
            policies = f"{url}/apis/networking.k8s.io/v1/namespaces/{self._cluster.namespace}/networkpolicies"
            await ask(session, "POST", policies, json=_NO_NETWORK, fine=[409])
            await ask(session, "POST", pod.pods, json=self.manifest(name, limits))
            await pod.until_running()
        except BaseException:
            await pod.destroy()
            raise
        return pod


_NO_NETWORK = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "k3rl-no-network"},
    "spec": {"podSelector": {"matchLabels": {"app": LABEL}}, "policyTypes": ["Ingress", "Egress"]},
}


class _Pod(Machine):
    def __init__(self, session: aiohttp.ClientSession, pods: str, name: str) -> None:
        self._session, self.pods, self._url = session, pods, f"{pods}/{name}"

    async def until_running(self) -> None:
        while True:
            about = await ask(self._session, "GET", self._url)
            phase = about.get("status", {}).get("phase")
            if phase == "Running":
                return
            if phase in ("Failed", "Succeeded"):
                raise SandboxDied(f"the pod ended before it was used: {json.dumps(about['status'])[:300]}")
            await asyncio.sleep(_POLL_S)

    async def run(self, argv: Sequence[str], stdin: bytes, timeout_s: float, max_bytes: int) -> Reply:
        import aiohttp

        words = [("command", word) for word in argv]
        flags = [(name, "true") for name in ("stdin", "stdout", "stderr")]
        try:
            async with self._session.ws_connect(
                f"{self._url}/exec", params=[*words, *flags, ("container", "box")], protocols=PROTOCOLS, max_msg_size=0
            ) as socket:
                for start in range(0, len(stdin), _CHUNK):
                    await socket.send_bytes(bytes([_STDIN]) + stdin[start : start + _CHUNK])
                if socket.protocol == PROTOCOLS[0]:
                    await socket.send_bytes(bytes([_CLOSE, _STDIN]))
                return await self._follow(socket, max_bytes)
        except aiohttp.WSServerHandshakeError as error:
            kind = SandboxDied if error.status in (404, 500, 502, 503) else SandboxError
            raise kind(f"the pod takes no command: {error.status} {error.message}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise SandboxDied(f"the connection to the pod broke: {error!r}") from error

    @staticmethod
    async def _follow(socket: Any, max_bytes: int) -> Reply:
        out, complaint, code = bytearray(), bytearray(), None
        while code is None:
            message = await socket.receive()
            if not isinstance(message.data, bytes):
                raise SandboxDied("the connection to the pod broke before the command's status came")
            channel, data = message.data[0], message.data[1:]
            if channel == _STDOUT:
                out += data
            elif channel == _STDERR:
                complaint += data[: max(0, 4096 - len(complaint))]
            elif channel == _STATUS:
                code = _code_of(json.loads(data))
            if len(out) > max_bytes:
                raise SandboxError(f"the pod answered with more than {max_bytes} bytes")
        return Reply(bytes(out), code, complaint.decode("utf-8", "replace")[-400:])

    async def destroy(self) -> None:
        try:
            await ask(self._session, "DELETE", self._url, json={"gracePeriodSeconds": 0}, fine=[404])
        finally:
            await self._session.close()


def _code_of(status: dict[str, Any]) -> int:
    """The exit status in a Status object. Raises SandboxDied for one that tells of another failure."""
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise SandboxDied(f"the pod did not run the command: {str(status.get('message'))[:300]}")
