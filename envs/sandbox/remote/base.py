"""What the sandboxes of all services share: requests to the supervisor inside, deadlines, typed failures.

A service needs a Python 3.8 or newer, named `python3`, in its image, and nothing of ours.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from k3rl.config import NOT_HASHED, Config
from k3rl.envs.sandbox.base import (
    MEBIBYTE,
    ExecResult,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxLimits,
    SandboxProvider,
    SandboxSlow,
    SandboxUnavailable,
)
from k3rl.envs.sandbox.sandboxed.supervisor import parts_of

SUPERVISOR = (Path(__file__).parent.parent / "sandboxed" / "supervisor.py").read_bytes()
# The text of the supervisor comes first on standard input; the word by which `kill` finds it is its argument.
BOOT = (
    "import sys\nstream = sys.stdin.buffer\ncount = int(stream.readline())\n"
    "exec(compile(stream.read(count), 'supervisor', 'exec'))\nmain(stream)"
)
FILES_S = 60.0  # for reading, writing and ending
KILL_S = 10.0
_KILLED = 137


class RemoteConfig(Config):
    """What every service is told."""

    start_s: float = Field(default=120.0, gt=0)
    """Seconds for a sandbox to be there."""

    grace_s: float = Field(default=30.0, gt=0)
    """Seconds past a command's own limit before the service counts as not answering."""

    lifetime_s: int = Field(default=6 * 3600, gt=0)
    """Seconds after which the service itself removes a sandbox whose owner has gone."""

    workspace: str = Field(default="/box", pattern=r"^/[\w/.-]+$", json_schema_extra=NOT_HASHED)
    """The folder inside that is the workspace."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a program printed on a machine, and how it ended (None where the service does not say)."""

    output: bytes
    code: int | None
    complaint: str = ""


class Machine(ABC):
    """One sandbox of a service. Every method raises SandboxDied when it is gone, SandboxError for other refusals."""

    @abstractmethod
    async def run(self, argv: Sequence[str], stdin: bytes, timeout_s: float, max_bytes: int) -> Reply:
        """Run a program that reads `stdin`; at most `max_bytes` of what it prints are taken."""

    @abstractmethod
    async def destroy(self) -> None:
        """Remove it. One that is gone already is no error."""


class UploadingMachine(Machine):
    """A machine of a service that has no standard input: the input is put into a file first."""

    def scratch(self) -> str:
        """A path for a file that nobody has."""
        return f"/tmp/k3rl-{secrets.token_hex(8)}"

    @abstractmethod
    async def upload(self, path: str, data: bytes) -> None:
        """Make a file."""

    @abstractmethod
    async def shell(self, argv: Sequence[str], timeout_s: float, max_bytes: int) -> Reply:
        """Run a program without input."""

    async def run(self, argv: Sequence[str], stdin: bytes, timeout_s: float, max_bytes: int) -> Reply:
        """See `Machine.run`."""
        path = self.scratch()
        await self.upload(path, stdin)
        # The file is gone before the program starts: what it says is for the program alone.
        script = 'exec < "$0" && rm -f "$0" && exec "$@"'
        return await self.shell(["sh", "-c", script, path, *argv], timeout_s, max_bytes)


class RemoteSandbox(Sandbox):
    """A machine of a service behind the interface of all sandboxes."""

    def __init__(self, machine: Machine, limits: SandboxLimits, config: RemoteConfig) -> None:
        self.limits = limits
        self._machine, self._config = machine, config
        self._stopped = False

    async def begin(self) -> None:
        """Make the workspace. Raises SandboxUnavailable when the image has no Python."""
        await self._ask({"op": "begin"}, b"", self._config.start_s, 65536)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        home = self._config.workspace
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home}
        request = {
            "op": "exec",
            "argv": list(argv),
            "cwd": "" if cwd in ("", ".") else "/".join(parts_of(cwd)),
            "env": {**variables, **(env or {})},
            "timeout_s": timeout_s,
            "limits": {key: value for key, value in dataclasses.asdict(self.limits).items() if key != "cpus"},
        }
        room = 65536 + 4 * self.limits.output_bytes  # two streams in base64
        said = await self._ask(request, stdin, timeout_s + self._config.grace_s, room)
        why = said["why"]
        return ExecResult(
            said["returncode"],
            base64.b64decode(said["stdout"]),
            base64.b64decode(said["stderr"]),
            said["truncated"],
            timed_out=why == "time",
            workspace_exceeded=why == "disk",
            wall_s=said["wall_s"],
            out_of_memory=why == "memory",
        )

    async def read(self, path: str, max_bytes: int = MEBIBYTE) -> bytes:
        """See `Sandbox.read`."""
        parts_of(path)
        request = {"op": "read", "path": path, "max_bytes": max_bytes}
        said = await self._ask(request, b"", FILES_S, 65536 + 2 * max_bytes)
        return base64.b64decode(said["data"])

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox.write`."""
        parts_of(path)
        await self._ask({"op": "write", "path": path, "mode": mode}, data, FILES_S, 65536)

    async def stop(self) -> None:
        """Remove the machine."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(SandboxDied):
            await _within(self._machine.destroy(), FILES_S, "removing the sandbox")

    async def _ask(self, request: dict[str, Any], payload: bytes, timeout_s: float, max_bytes: int) -> dict[str, Any]:
        """The supervisor's answer. Raises OSError for what the supervisor refused."""
        if self._stopped:
            raise SandboxDied("this sandbox was stopped")
        # The command may see the supervisor's arguments, so the word of the answer is another one.
        word, handle = _words()
        try:
            reply = await self._send(word, handle, request, payload, timeout_s, max_bytes)
        except (asyncio.CancelledError, SandboxSlow):
            if request["op"] == "exec":
                await self._kill(handle)
            raise
        said = _answer_in(reply.output, word)
        if said is None:
            said = await self._without_answer(request, reply)
        if "errno" in said:
            raise OSError(said["errno"], os.strerror(said["errno"]), request.get("path"))
        return said

    async def _send(
        self, word: str, handle: str, request: dict[str, Any], payload: bytes, timeout_s: float, max_bytes: int
    ) -> Reply:
        header = {**request, "word": word, "root": self._config.workspace, "bytes": len(payload)}
        text = b"%d\n%b%b\n%b" % (len(SUPERVISOR), SUPERVISOR, json.dumps(header).encode(), payload)
        argv = ["python3", "-I", "-S", "-B", "-c", BOOT, handle]
        running = self._machine.run(argv, text, timeout_s, max_bytes)
        return await _within(running, timeout_s, f"`{request['op']}`")

    async def _without_answer(self, request: dict[str, Any], reply: Reply) -> dict[str, Any]:
        """Why the supervisor is silent: no Python, ended by the command that it ran, or the sandbox is gone."""
        about = f"{reply.complaint or reply.output[-200:].decode('utf-8', 'replace')} (status {reply.code})"
        if request["op"] == "begin":
            raise SandboxUnavailable(f"the sandbox's image has no usable python3: {about}")
        if request["op"] != "exec":
            raise SandboxDied(f"the sandbox gave no answer: {about}")
        alive = await self._send(*_words(), {"op": "begin"}, b"", FILES_S, 65536)
        if alive.code not in (0, None):
            raise SandboxDied(f"the sandbox gave no answer: {about}")
        code = reply.code if reply.code is not None else _KILLED
        return {"returncode": code, "stdout": "", "stderr": "", "truncated": False, "why": "", "wall_s": 0.0}

    async def _kill(self, handle: str) -> None:
        """End a command that nobody waits for any more, as far as the sandbox still answers."""
        with contextlib.suppress(SandboxError, OSError):
            await self._send(*_words(), {"op": "kill", "target": handle}, b"", KILL_S, 65536)


class RemoteProvider(SandboxProvider):
    """Makes machines of one service."""

    safe = True

    def __init__(self, config: RemoteConfig) -> None:
        self._config = config

    @abstractmethod
    async def _machine(self, limits: SandboxLimits) -> Machine:
        """A machine that runs. It removes what it has begun when it fails or is cancelled."""

    async def create(self, limits: SandboxLimits | None = None) -> Sandbox:
        """A fresh sandbox. Raises SandboxUnavailable, SandboxSlow, SandboxError."""
        limits = limits or SandboxLimits()
        machine = await _within(self._machine(limits), self._config.start_s, "starting a sandbox")
        sandbox = RemoteSandbox(machine, limits, self._config)
        try:
            await sandbox.begin()
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox


def _words() -> tuple[str, str]:
    """(the word of an answer, the word by which a supervisor is found)."""
    return secrets.token_hex(16), secrets.token_hex(16)


async def _within(work: Any, timeout_s: float, what: str) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise SandboxSlow(f"{what} took longer than {timeout_s:g} s") from None


def _answer_in(output: bytes, word: str) -> dict[str, Any] | None:
    """The JSON after the word, wherever a service's own lines stand around it."""
    for line in output.split(b"\n"):
        head, _, tail = line.strip().partition(b" ")
        if head == word.encode():
            with contextlib.suppress(ValueError):
                said: dict[str, Any] = json.loads(tail)
                return said
    return None


def credential(given: str | None, *variables: str) -> str:
    """A secret from the config or the environment. Raises SandboxUnavailable, naming the variables."""
    for found in (given, *(os.environ.get(name) for name in variables)):
        if found:
            return found
    raise SandboxUnavailable(f"no credential for this sandbox service; set {' or '.join(variables)}")
