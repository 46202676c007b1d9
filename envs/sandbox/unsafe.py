"""The `subprocess` provider: plain processes with limits and no isolation. Only for programs that you trust.

It is never chosen unasked. A submission could read and change whatever this user can.
"""

from __future__ import annotations

import errno
import secrets
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence

from k3rl.envs.sandbox.base import ExecResult, ProgramServerProcess, Sandbox, SandboxLimits, SandboxProvider
from k3rl.envs.sandbox.launch import Order
from k3rl.envs.sandbox.leases import end_processes
from k3rl.envs.sandbox.local import (
    PROGRAM_SERVER,
    Holding,
    capture,
    control_sockets,
    groups_for,
    rlimits,
    sealed_file,
)

CALL = "K3RL_CALL"  # in the environment, to tell the processes of one command from those beside it
_warned = False


class SubprocessProvider(SandboxProvider):
    """Runs commands as this user. Warns once per process. `cgroups=False` leaves control groups alone."""

    name = "subprocess"
    safe = False

    def __init__(self, *, cgroups: bool = True) -> None:
        global _warned
        self._cgroups = cgroups
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
        return SubprocessSandbox(limits or SandboxLimits(), cgroups=self._cgroups)

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

    def __init__(self, limits: SandboxLimits, *, cgroups: bool = True) -> None:
        self.limits = limits
        self.holding = Holding(None, limits, groups_for(cgroups))

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """See `Sandbox.exec`. A process that leaves its session and clears its environment survives without cgroups."""
        held, grouped = self.holding, self.holding.group is not None
        held.begin()
        root, call = held.workspace.path, secrets.token_hex(8)
        if not (folder := root / held.folder(cwd)).is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder in the workspace", cwd)
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(root)}
        order = Order(
            ["/usr/bin/env", "--", *argv],
            {**variables, **(env or {}), **held.mark, CALL: call},
            str(folder),
            held.group_files,
            limits=rlimits(self.limits, grouped=grouped),
        )

        captured = await capture(
            order,
            stdin=stdin,
            timeout_s=timeout_s,
            output_bytes=self.limits.output_bytes,
            watch=held.watch(count=held.group is None),
            sweep=lambda: end_processes(f"{CALL}={call}"),
        )
        return captured.result()

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """See `Sandbox.read`."""
        return self.holding.workspace.read(path, max_bytes)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox.write`."""
        self.holding.workspace.write(path, data, mode)

    async def stop(self) -> None:
        """Remove the folder."""
        self.holding.end()
