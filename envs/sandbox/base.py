"""Where commands of an agent or of a grader run: the interface of sandboxes and of who makes them.

A `Sandbox` is one private workspace in which commands run; a `SandboxProvider` makes sandboxes. The local
providers can also hold a program server (`programs.py`): a long-lived process that runs many tiny programs.
What a submission does is an `ExecResult` with a typed `outcome`; what a machine or a service does is an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from k3rl.config import MissingResource

MEBIBYTE = 2**20
GONE_S = 5.0  # how long a killed server may take to let go of its socket


class SandboxError(RuntimeError):
    """A sandbox did not do what it must: the infrastructure's fault, never a submission's."""


class SandboxUnavailable(SandboxError, MissingResource):
    """This machine cannot make such a sandbox; the message names the package or setting and the command."""


class SandboxDied(SandboxError):
    """A sandbox ended by itself, or the connection to it broke, while it was needed."""


class SandboxSlow(SandboxError):
    """A sandbox or its service did not answer within the deadline of the call; what it did is not known."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one command may use. Sizes in bytes, times in seconds."""

    memory_bytes: int = 1024 * MEBIBYTE  # of all processes together
    processes: int = 64
    cpus: float | None = None  # processors at a time; only a cgroup or a service can hold a command to it
    file_bytes: int = 64 * MEBIBYTE  # one file
    tmp_bytes: int = 64 * MEBIBYTE  # all of /tmp
    workspace_bytes: int = 256 * MEBIBYTE
    open_files: int = 256
    cpu_s: int = 600
    output_bytes: int = 64 * 1024  # kept of stdout and of stderr; 16 times as much ends the command


class ExecOutcome(StrEnum):
    """Which limit ended a command, if one did."""

    EXITED = "exited"  # by itself, whatever its status
    TIME_LIMIT = "time_limit"  # wall or processor time
    OUTPUT_LIMIT = "output_limit"
    MEMORY_LIMIT = "memory_limit"
    DISK_LIMIT = "disk_limit"
    PROCESS_LIMIT = "process_limit"  # only where the kernel cannot refuse the fork itself


_CPU_TIME_OVER = (-signal.SIGXCPU, 128 + signal.SIGXCPU)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. `returncode` is negative for a signal, None when it was killed from outside."""

    returncode: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool
    workspace_exceeded: bool
    wall_s: float
    out_of_memory: bool = False
    too_many_processes: bool = False  # it was ended for it; where a fork fails instead, it goes on

    @property
    def outcome(self) -> ExecOutcome:
        """The limit that ended the command."""
        if self.out_of_memory:
            return ExecOutcome.MEMORY_LIMIT
        if self.workspace_exceeded:
            return ExecOutcome.DISK_LIMIT
        if self.too_many_processes:
            return ExecOutcome.PROCESS_LIMIT
        if self.timed_out or self.returncode in _CPU_TIME_OVER:
            return ExecOutcome.TIME_LIMIT
        return ExecOutcome.OUTPUT_LIMIT if self.returncode is None else ExecOutcome.EXITED


class Sandbox(ABC):
    """One workspace, /box, in which commands run. Paths are relative to it, also with a slash before.

    `stop` always; it is idempotent.
    """

    @abstractmethod
    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """Run one command and everything it starts, until it ends or a limit ends it. Nothing survives it.

        A command that does not exist ends with 127, one that may not be run with 126.
        Raises SandboxDied, SandboxSlow, ValueError for a `cwd` outside the workspace, FileNotFoundError without it.
        """

    @abstractmethod
    async def read(self, path: str, max_bytes: int = MEBIBYTE) -> bytes:
        """At most `max_bytes` of a regular file; links are not followed. Raises OSError as `open` does."""

    @abstractmethod
    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Make or replace a file, its folders too."""

    @abstractmethod
    async def stop(self) -> None:
        """Remove the workspace. Idempotent."""

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class SandboxProvider(ABC):
    """Makes sandboxes. `safe` tells whether a hostile submission is kept away from this machine."""

    name: str
    safe: bool

    @abstractmethod
    def check(self) -> None:
        """Raises SandboxUnavailable, naming the remedy, when sandboxes cannot be made here."""

    @abstractmethod
    async def create(self, limits: SandboxLimits | None = None) -> Sandbox:
        """A fresh, empty sandbox."""

    def start_program_server(self) -> ProgramServerProcess:
        """Start the fork server of `sandboxed/program_server.py`; its first message says that it is ready.

        Raises SandboxUnavailable where there is none: a program a millisecond needs a sandbox of this machine.
        """
        raise SandboxUnavailable(
            f"the sandbox provider {self.name!r} runs commands, not program servers; "
            'set the provider of this environment to "bwrap"'
        )


class ProgramServerProcess:
    """A running program server: its process, the control socket (SEQPACKET), and a file with what it complained.

    `release` gives back what the server held; `explain` turns a complaint at the start into advice for a person.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        errors: int,
        release: Callable[[], None] = lambda: None,
        explain: Callable[[str], str] = str,
    ) -> None:
        self.process = process
        self.control = control
        self.explain = explain
        self._errors = errors
        self._release = release
        self._lock = threading.Lock()
        self._ended = False

    def receive(self) -> bytes:
        """The next message; empty when the server is gone."""
        try:
            return self.control.recv(65536)
        except OSError:
            return b""

    def complaint(self) -> str:
        """The end of what the server wrote to its standard error."""
        with self._lock:
            if self._ended:
                return ""
            with contextlib.suppress(subprocess.TimeoutExpired):  # a closing socket is seen before the exit
                self.process.wait(1.0)
            code = self.process.returncode
            size = os.fstat(self._errors).st_size
            text = os.pread(self._errors, 600, max(0, size - 600)).decode("utf-8", "replace").strip()
        return text if code is None else f"{text} (exit status {code})".strip()

    def kill(self) -> None:
        """End the server and all that it runs, and wait until they are gone. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self.process.kill()
            self.process.wait()
            self.control.settimeout(GONE_S)
            with contextlib.suppress(OSError):
                while self.control.recv(65536):
                    continue
            self.control.close()
            os.close(self._errors)
            self._release()
