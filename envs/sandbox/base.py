"""Where commands of an agent or of a grader run: the interface of sandboxes and of who makes them.

A `Sandbox` is one private workspace in which commands run; a `SandboxProvider` makes sandboxes. The local
providers can also hold a program server (`programs.py`): a long-lived process that runs many tiny programs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from k3rl.config import MissingResource

MEBIBYTE = 2**20
GONE_S = 5.0  # how long a killed server may take to let go of its socket


class SandboxError(RuntimeError):
    """A sandbox did not do what it must: the infrastructure's fault, never a submission's."""


class SandboxUnavailable(SandboxError, MissingResource):
    """This machine cannot make such a sandbox; the message names the package or setting and the command."""


class SandboxDied(SandboxError):
    """A sandbox ended by itself while it was needed."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one command may use. Sizes in bytes, times in seconds."""

    memory_bytes: int = 1024 * MEBIBYTE  # address space of each process
    processes: int = 64
    file_bytes: int = 64 * MEBIBYTE  # one file
    tmp_bytes: int = 64 * MEBIBYTE  # all of /tmp
    workspace_bytes: int = 256 * MEBIBYTE
    open_files: int = 256
    cpu_s: int = 600
    output_bytes: int = 64 * 1024  # kept of stdout and of stderr; 16 times as much ends the command


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


class Sandbox(ABC):
    """One workspace, /box, in which commands run. Paths are relative to it. `stop` always, it is idempotent."""

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
        """Run one command and everything it starts, until it ends or the time is over. Nothing survives it."""

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

    @abstractmethod
    def start_program_server(self) -> ProgramServerProcess:
        """Start the fork server of `sandboxed/program_server.py`; its first message says that it is ready."""


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
