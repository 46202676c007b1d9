"""What the local providers share: the interpreter, the workspace folder, and running one capped command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3rl.envs.sandbox.base import ExecResult

STOP_S = 0.5  # for a process to take notice of SIGSTOP; longer than any system call of a sandbox's start
# Read once: what runs inside stays the code that this process talks to.
PROGRAM_SERVER = (Path(__file__).parent / "sandboxed" / "program_server.py").read_bytes()


def find_interpreter() -> str:
    """A Python that exists inside /usr, or else the running one (its real path)."""
    for candidate in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(candidate, os.X_OK) and os.path.realpath(candidate).startswith("/usr/"):
            return candidate
    return os.path.realpath(sys.executable)


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """(ours, the server's): connected, message by message."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def sealed_file(name: str, data: bytes) -> int:
    """A descriptor of an anonymous file with this content, at its start. The caller closes it."""
    number = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(number, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(number, 0, os.SEEK_SET)
    return number


class Workspace:
    """A private folder of the host that a sandbox sees as /box. No path leaves it, no link is followed."""

    def __init__(self, uid: int | None) -> None:
        self._uid = uid
        self.path = Path(tempfile.mkdtemp(prefix="k3rl-box-"))
        if uid is not None:
            os.chown(self.path, uid, uid)

    def read(self, path: str, max_bytes: int) -> bytes:
        """At most `max_bytes` of a regular file. Raises OSError, also for links and devices."""
        folder, name = self._folder(path, create=False)
        try:
            number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            with open(number, "rb") as file:
                if not stat.S_ISREG(os.fstat(number).st_mode):
                    raise OSError(f"{path} is not a regular file")
                return file.read(max_bytes)
        finally:
            os.close(folder)

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Make or replace a file and its folders."""
        folder, name = self._folder(path, create=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            number = os.open(name, flags, mode, dir_fd=folder)
            with open(number, "wb") as file:
                file.write(data)
                os.fchmod(number, mode)
                self._give(number)
        finally:
            os.close(folder)

    def size(self) -> int:
        """Bytes on disk of everything in the workspace."""
        total = 0
        for folder, _, files in os.walk(self.path):
            for name in files:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
                except FileNotFoundError:
                    continue
        return total

    def remove(self) -> None:
        """Delete the folder. Idempotent."""
        if self.path.exists():
            shutil.rmtree(self.path, onerror=_unlock)

    def _folder(self, path: str, *, create: bool) -> tuple[int, str]:
        """(descriptor of the folder that holds `path`, last name), walked without following links."""
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            raise ValueError(f"{path!r} is not a path inside the workspace")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(self.path, flags)
        for part in parts[:-1]:
            try:
                if create:
                    self._make(part, folder)
                inner = os.open(part, flags, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
        return folder, parts[-1]

    def _make(self, name: str, folder: int) -> None:
        try:
            os.mkdir(name, 0o755, dir_fd=folder)
        except FileExistsError:
            return
        if self._uid is not None:
            os.chown(name, self._uid, self._uid, dir_fd=folder, follow_symlinks=False)

    def _give(self, number: int) -> None:
        if self._uid is not None:
            os.fchown(number, self._uid, self._uid)


def _unlock(function: Any, path: str, _: Any) -> None:
    """Retry a removal after giving back the permissions that a command took away."""
    os.chmod(os.path.dirname(path), 0o700)
    if not os.path.islink(path):
        os.chmod(path, 0o700)
    function(path)


@dataclass(slots=True)
class Captured:
    """What is known of a command that ended."""

    returncode: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool
    wall_s: float

    def result(self, *, workspace_exceeded: bool) -> ExecResult:
        """With what the workspace says."""
        return ExecResult(
            self.returncode, self.stdout, self.stderr, self.truncated, self.timed_out, workspace_exceeded, self.wall_s
        )


async def capture(
    command: Sequence[str],
    *,
    stdin: bytes,
    timeout_s: float,
    output_bytes: int,
    pass_fds: Sequence[int] = (),
    popen: Mapping[str, Any] | None = None,
) -> Captured:
    """Run a command; keep `output_bytes` of each stream, end it at 16 times as much or when the time is over.

    Raises OSError when it cannot be started. Start it from a thread that lives on (an event loop's is): the
    kernel's parent-death signal follows the thread.
    """
    started = time.monotonic()
    process = await _started(command, pass_fds, popen or {})
    flooded = asyncio.Event()
    streams = [asyncio.create_task(_keep(stream, output_bytes, flooded)) for stream in (process.stdout, process.stderr)]
    feed = asyncio.create_task(_feed(process, stdin))
    ended = asyncio.create_task(process.wait())
    flood = asyncio.create_task(flooded.wait())
    timed_out = False
    try:
        done, _ = await asyncio.wait({ended, flood}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        timed_out = not done
    finally:
        if not ended.done():
            kill_tree(process.pid)
        await ended
        flood.cancel()
        feed.cancel()
        kept = await asyncio.gather(*streams)
        await _close_input(process)
    killed = timed_out or flooded.is_set()
    (stdout, stdout_cut), (stderr, stderr_cut) = kept
    return Captured(
        None if killed else process.returncode,
        stdout,
        stderr,
        truncated=stdout_cut or stderr_cut,
        timed_out=timed_out,
        wall_s=time.monotonic() - started,
    )


async def _started(
    command: Sequence[str], pass_fds: Sequence[int], popen: Mapping[str, Any]
) -> asyncio.subprocess.Process:
    """The process of a command, with pipes. Whoever is cancelled meanwhile ends the whole group of processes.

    asyncio by itself would end the first process only; a bubblewrap whose parent is killed while it sets itself up
    waits for it for ever, and holds the pipes.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,
            **popen,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        process = await starting
        kill_tree(process.pid)
        await process.communicate(b"")
        await _close_input(process)
        raise


def kill_tree(leader: int) -> None:
    """SIGKILL to a process that leads a group, to the group, and to its children, whatever group they are in.

    The first process inside a bubblewrap's namespace leaves the group, and for a moment around that the death of its
    parent does not reach it: killing the group alone then leaves it waiting for ever, with the pipes open. The leader
    is stopped first, so that no child appears after they were listed. Who is gone already is no error.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGSTOP)
        deadline = time.monotonic() + STOP_S
        while _state(leader) not in "TtZX" and time.monotonic() < deadline:
            time.sleep(0.0002)
        for child in _children(leader):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.killpg(leader, signal.SIGKILL)


def _state(process: int) -> str:
    """The letter of `proc(5)`; X when it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _children(process: int) -> list[int]:
    """Its direct children, by one look at its threads."""
    found: list[int] = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, listed.read_text().split())
    return found


async def _close_input(process: asyncio.subprocess.Process) -> None:
    """Closes our end of the input of a process that ended; the loop would do so only if it went on."""
    if process.stdin is not None:
        process.stdin.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await process.stdin.wait_closed()


async def _keep(stream: asyncio.StreamReader | None, limit: int, flooded: asyncio.Event) -> tuple[bytes, bool]:
    """(the first `limit` bytes of a stream, whether there were more)."""
    if stream is None:
        raise ValueError("the command was started without this stream")
    kept, total = bytearray(), 0
    while part := await stream.read(65536):
        total += len(part)
        kept += part[: max(0, limit - len(kept))]
        if total > 16 * limit:
            flooded.set()
    return bytes(kept), total > limit


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    if process.stdin is None:
        raise ValueError("the command was started without standard input")
    try:
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        return  # it ended without reading all of its input, which it may
