"""Docker and Podman through their command line: one container per sandbox.

A container has no network, a read-only root, no capability, an ordinary user, and limits of its own on memory,
processes and processors; its workspace and /tmp are memory file systems of limited size. It ends by itself when its
lifetime is over.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from k3rl.config import NOT_HASHED
from k3rl.envs.sandbox.base import SandboxDied, SandboxError, SandboxLimits, SandboxSlow, SandboxUnavailable
from k3rl.envs.sandbox.launch import Order, enter, leave
from k3rl.envs.sandbox.local import Captured, capture
from k3rl.envs.sandbox.remote.base import FILES_S, Machine, RemoteConfig, RemoteProvider, Reply

USER = "65534:65534"
KEEPER = "65532:65534"  # runs the container's first program, which commands thus cannot signal
_VARIABLES = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "CONTAINER_HOST")
_GONE = ("no such container", "is not running", "no container with name", "container state improper")
_ENGINE = ("cannot connect to the docker daemon", "failed to connect to the docker api", "cannot connect to podman")


class ContainerConfig(RemoteConfig):
    """Containers of an engine on this machine, or of the one that DOCKER_HOST names."""

    type: Literal["docker", "podman"] = "docker"
    """Which command line."""

    image: str = "python:3.12-slim"
    """Any image with `python3`, `sh` and `sleep`."""

    runtime: str | None = Field(default=None, json_schema_extra=NOT_HASHED)
    """A container runtime of the engine, such as "runsc" (gVisor) or "kata"; by default the engine's own."""


class ContainerProvider(RemoteProvider):
    """Makes containers."""

    def __init__(self, config: ContainerConfig) -> None:
        super().__init__(config)
        self.name = config.type
        self._containers = config

    def check(self) -> None:
        """Raises SandboxUnavailable when the command or its engine is missing."""
        asyncio.run(self._engine())

    async def _engine(self) -> None:
        enter()
        try:
            done = await _command(self.name, ["version"], b"", FILES_S, 65536)
        finally:
            leave()
        if done.returncode != 0:
            raise SandboxUnavailable(f"{self.name} has no engine here: {_said(done)}; start it, or set DOCKER_HOST")

    def arguments(self, name: str, limits: SandboxLimits) -> list[str]:
        """The words after `docker run`."""
        config = self._containers
        memory = str(limits.memory_bytes + limits.tmp_bytes + limits.workspace_bytes)  # its files are memory too
        tmpfs = "rw,exec,nosuid,nodev,mode=1777,size="
        return [
            *("--detach", "--rm", "--init", "--name", name, "--label", "k3rl.sandbox=1", "--network", "none"),
            *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", KEEPER),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes + 8)),
            *([] if limits.cpus is None else ["--cpus", str(limits.cpus)]),
            *([] if config.runtime is None else ["--runtime", config.runtime]),
            *("--tmpfs", f"{config.workspace}:{tmpfs}{limits.workspace_bytes}"),
            *("--tmpfs", f"/tmp:{tmpfs}{limits.tmp_bytes}", "--workdir", config.workspace),
            *("--entrypoint", "sleep", config.image, str(config.lifetime_s)),
        ]

    async def _machine(self, limits: SandboxLimits) -> Machine:
        name = f"k3rl-{uuid.uuid4().hex[:16]}"
        container = _Container(self.name, name)
        try:
            line = ["run", *self.arguments(name, limits)]
            done = await _command(self.name, line, b"", self._config.start_s, 65536)
            if done.returncode != 0:
                kind = SandboxUnavailable if _has(done, _ENGINE) else SandboxError
                raise kind(f"{self.name} could not start a container: {_said(done)}")
        except BaseException:
            await container.destroy()
            raise
        return container


class _Container(Machine):
    def __init__(self, program: str, name: str) -> None:
        self._program, self._name, self._entered = program, name, True
        enter()

    async def run(self, argv: Sequence[str], stdin: bytes, timeout_s: float, max_bytes: int) -> Reply:
        line = ["exec", "--interactive", "--user", USER, self._name, *argv]
        done = await _command(self._program, line, stdin, timeout_s, max_bytes)
        if done.why == "time":
            raise SandboxSlow(f"{self._program} took longer than {timeout_s:g} s")
        if done.truncated:
            raise SandboxError(f"{self._program} answered with more than {max_bytes} bytes")
        if done.returncode != 0 and _has(done, (*_GONE, *_ENGINE)):
            raise SandboxDied(f"the container is gone: {_said(done)}")
        return Reply(done.stdout, done.returncode, _said(done))

    async def destroy(self) -> None:
        try:
            done = await _command(self._program, ["rm", "--force", "--volumes", self._name], b"", FILES_S, 65536)
        finally:
            if self._entered:
                self._entered = False
                leave()
        if done.returncode != 0 and not _has(done, _GONE):
            raise SandboxError(f"{self._program} could not remove the container {self._name}: {_said(done)}")


async def _command(program: str, words: Sequence[str], stdin: bytes, timeout_s: float, max_bytes: int) -> Captured:
    path = shutil.which(program)
    if path is None:
        raise SandboxUnavailable(
            f"the command `{program}` is not installed; run `sudo apt-get install -y "
            f'{"docker.io" if program == "docker" else program}`, or choose the sandbox provider "bwrap"'
        )
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    order = Order([path, *words], variables)
    return await capture(order, stdin=stdin, timeout_s=timeout_s, output_bytes=max_bytes)


def _said(done: Captured) -> str:
    return done.stderr.decode("utf-8", "replace").strip()[-400:]


def _has(done: Captured, phrases: Sequence[str]) -> bool:
    text = _said(done).lower()
    return any(phrase in text for phrase in phrases)
