"""The `subprocess` provider: plain processes with limits and no isolation. Only for programs that you trust.

It is never chosen unasked. A submission could read and change whatever this user can.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence

from k3rl.envs.sandbox.base import ExecResult, ProgramServerProcess, Sandbox, SandboxLimits, SandboxProvider
from k3rl.envs.sandbox.local import PROGRAM_SERVER, Workspace, capture, control_sockets, sealed_file

_warned = False


class SubprocessProvider(SandboxProvider):
    """Runs commands as this user. Warns once per process."""

    name = "subprocess"
    safe = False

    def __init__(self) -> None:
        global _warned
        if not _warned:
            _warned = True
            warnings.warn(
                "the `subprocess` sandbox is unsafe: a program can read and change what this user can; "
                "use `bwrap` for anything that a model wrote",
                stacklevel=2,
            )

    def check(self) -> None:
        """Always available."""

    async def create(self, limits: SandboxLimits | None = None) -> Sandbox:
        """A temporary folder."""
        return SubprocessSandbox(limits or SandboxLimits())

    def start_program_server(self) -> ProgramServerProcess:
        """A program server as an ordinary child process."""
        ours, theirs = control_sockets()
        errors = sealed_file("errors", b"")
        command = f"import sys; exec(compile({PROGRAM_SERVER.decode()!r}, 'server', 'exec'))"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", command, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            cwd="/",
            start_new_session=True,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        return ProgramServerProcess(process, ours, errors)


class SubprocessSandbox(Sandbox):
    """A temporary folder in which commands run as this user."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._workspace = Workspace(None)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """See `Sandbox.exec`; what leaves its process group survives."""
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(self._workspace.path)}
        limits = self.limits
        command = ["prlimit", f"--as={limits.memory_bytes}", f"--fsize={limits.file_bytes}", f"--cpu={limits.cpu_s}"]
        captured = await capture(
            [*command, f"--nofile={limits.open_files}", "--core=0", "--", *argv],
            stdin=stdin,
            timeout_s=timeout_s,
            output_bytes=limits.output_bytes,
            popen={"cwd": os.path.join(self._workspace.path, cwd), "env": {**variables, **(env or {})}},
        )
        return captured.result(workspace_exceeded=self._workspace.size() > limits.workspace_bytes)

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """See `Sandbox.read`."""
        return self._workspace.read(path, max_bytes)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox.write`."""
        self._workspace.write(path, data, mode)

    async def stop(self) -> None:
        """Remove the folder."""
        self._workspace.remove()
