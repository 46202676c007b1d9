"""What the local providers share: the interpreter, the workspace folder, and running one capped command."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3rl.envs.sandbox.base import ExecResult, SandboxDied, SandboxLimits
from k3rl.envs.sandbox.cgroups import Cgroup, Cgroups, available
from k3rl.envs.sandbox.launch import Order, enter, launch, leave
from k3rl.envs.sandbox.launcher import COMPLAINT, FAILED
from k3rl.envs.sandbox.leases import MARK, Lease, marked, reap_once, unlock
from k3rl.envs.sandbox.sandboxed.supervisor import StreamHead, Watch, parts_of, read_inside, write_inside

TICK_S = 0.05  # between two looks at memory and disk of a running command
STREAMS_S = 5.0  # for the pipes of a command that has ended to close
_SEALS = 0x000F  # a memory file may not be written, grown, shrunk or sealed differently
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

    def __init__(self, path: Path, uid: int | None) -> None:
        self._uid = uid
        self.path = path
        path.mkdir(mode=0o700)
        if uid is not None:
            os.chown(path, uid, uid)

    def read(self, path: str, max_bytes: int) -> bytes:
        """At most `max_bytes` of a regular file. Raises OSError, also for links and devices."""
        return read_inside(str(self.path), path, max_bytes)

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Make or replace a file and its folders."""
        write_inside(str(self.path), path, data, mode, self._uid)

    def remove(self) -> None:
        """Delete the folder. Idempotent."""
        if self.path.exists():
            shutil.rmtree(self.path, onerror=unlock)


class Holding:
    """What one local sandbox has of this machine: a workspace, a control group where there are any, and the lease.

    The lease is written first, so that whatever was made is known when this process dies.
    """

    def __init__(self, uid: int | None, limits: SandboxLimits, groups: Cgroups | None) -> None:
        reap_once()
        path = Path(tempfile.gettempdir(), f"k3rl-box-{uuid.uuid4().hex[:16]}")
        self.limits = limits
        self.group: Cgroup | None = None if groups is None else groups.named()
        self.lease = Lease(folder=path, group=self.group, uid=uid)
        self._ended = self._over = False
        try:
            if self.group is not None:
                self.group.make(limits)
            self.workspace = Workspace(path, uid)
        except BaseException:
            if self.group is not None:
                self.group.remove()
            self.lease.release()
            raise
        enter()

    @property
    def group_files(self) -> list[str]:
        """What a process writes its id to, to enter the group."""
        return [] if self.group is None else [str(path / "cgroup.procs") for path in self.group.all_folders()]

    @property
    def mark(self) -> dict[str, str]:
        """For the environment of each process, by which the reaper knows it."""
        return {MARK: self.lease.name}

    def watch(self, *, count: bool = False) -> Callable[[int], str]:
        """What `capture` asks while a command runs, and with 0 when it has ended: the limit that is over, or nothing.

        count: count processes too, where neither a group nor a user of its own holds them.
        """
        group = self.group
        before = group.oom_kills() if group is not None else 0
        memory = 0 if group is not None else self.limits.memory_bytes
        threads = _threads() if count else 0
        looks = Watch(str(self.workspace.path), self.limits.workspace_bytes, memory, self._over)

        def look(pid: int) -> str:
            if group is not None and group.oom_kills() > before:
                return "memory"
            many = count and _threads() - threads > self.limits.processes
            if many and len(marked(f"{MARK}={self.lease.name}")) > self.limits.processes:
                return "processes"
            if pid:
                return looks.look(pid)
            self._over = looks.is_over()
            return "disk" if self._over else ""

        return look

    def folder(self, cwd: str) -> str:
        """`cwd` as a path below the workspace. Raises ValueError."""
        return "/".join(parts_of(cwd)) if cwd not in ("", ".") else ""

    def begin(self) -> None:
        """For each command. Raises SandboxDied after `end`."""
        if self._ended:
            raise SandboxDied("this sandbox was stopped")
        self.lease.renew()

    def end(self) -> None:
        """Remove everything. Idempotent."""
        if not self._ended:
            self._ended = True
            leave()
        if self.group is not None:
            self.group.remove()
        self.workspace.remove()
        self.lease.release()


def rlimits(limits: SandboxLimits, *, grouped: bool, processes: int | None = None) -> dict[str, tuple[int, int]]:
    """Limits of each process, (soft, hard) by the names of `resource`.

    grouped: a control group holds memory, so address space is free; otherwise it is a backstop for what allocates
    faster than the watch looks. processes: how many the user may have, where the user is the sandbox's own.
    """
    found = {
        "RLIMIT_FSIZE": (limits.file_bytes,) * 2,
        "RLIMIT_NOFILE": (limits.open_files,) * 2,
        "RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1),
        "RLIMIT_CORE": (0, 0),
    }
    if not grouped:
        found["RLIMIT_AS"] = (2 * limits.memory_bytes + 2**28,) * 2
    if processes is not None:
        found["RLIMIT_NPROC"] = (processes,) * 2
    return found


def _threads() -> int:
    """Of the whole machine: cheap to read, so that processes are looked at only when there are many new ones."""
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])


def groups_for(use: bool) -> Cgroups | None:
    """The control groups of this machine, None when they are not to be used or there are none."""
    return available() if use else None


@dataclass(slots=True)
class Captured:
    """What is known of a command that ended. `why`: the limit that ended it (time, flood, memory, disk, processes)."""

    returncode: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    why: str
    wall_s: float

    def result(self) -> ExecResult:
        """For whoever ran the command."""
        return ExecResult(
            None if self.why in ("time", "flood") else self.returncode,
            self.stdout,
            self.stderr,
            self.truncated,
            timed_out=self.why == "time",
            workspace_exceeded=self.why == "disk",
            wall_s=self.wall_s,
            out_of_memory=self.why == "memory",
            too_many_processes=self.why == "processes",
        )


async def capture(
    order: Order,
    *,
    stdin: bytes,
    timeout_s: float,
    output_bytes: int,
    descriptors: Sequence[int] = (),
    watch: Callable[[int], str] = lambda _: "",
    sweep: Callable[[], object] = lambda: None,
) -> Captured:
    """Run a command; keep `output_bytes` of each stream, end it at 16 times as much or when the time is over.

    descriptors: what the command has as 3, 4, ...; watch: asked now and then with the process id, and with 0 at the
    end, which limit is over; sweep: ends what the command left running. Raises SandboxDied when it cannot be started.
    """
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    flooded: asyncio.Future[None] = loop.create_future()
    with contextlib.ExitStack() as stack:
        streams = [_Stream(stack, loop, output_bytes, flooded) for _ in range(2)]
        given = _standard_input(stdin)
        try:
            launched = launch(order, [given, *(stream.write for stream in streams), *descriptors])
        finally:
            os.close(given)
            for stream in streams:
                stream.close_write()
        why, pid = "", 0
        try:
            pid = await launched.started
            why = await _until(launched.ended, flooded, started + timeout_s, lambda: watch(pid))
        finally:
            if not launched.ended.done():
                launched.kill()
            code = await launched.ended
            sweep()
            await asyncio.wait([stream.over for stream in streams], timeout=STREAMS_S)
        if code == FAILED and streams[1].kept.data.startswith(COMPLAINT):
            raise SandboxDied(streams[1].kept.data.decode("utf-8", "replace"))
        at_end = watch(0)
        return Captured(
            code,
            bytes(streams[0].kept.data),
            bytes(streams[1].kept.data),
            truncated=any(stream.kept.total > output_bytes for stream in streams),
            why=why or at_end,
            wall_s=time.monotonic() - started,
        )


async def _until(
    ended: asyncio.Future[int], flooded: asyncio.Future[None], deadline: float, watch: Callable[[], str]
) -> str:
    """Wait for a command; why it must be ended now, or nothing when it has ended."""
    while True:
        left = deadline - time.monotonic()
        either: list[asyncio.Future[Any]] = [ended, flooded]
        await asyncio.wait(either, timeout=max(0.0, min(TICK_S, left)), return_when=asyncio.FIRST_COMPLETED)
        if flooded.done():
            return "flood"
        if ended.done():
            return ""
        if left <= TICK_S:
            return "time"
        if why := watch():
            return why


def _standard_input(data: bytes) -> int:
    """A descriptor from which a command reads `data`, and which it can neither change nor fill."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    number = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(number, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(number, 0, os.SEEK_SET)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, _SEALS)
    return number


class _Stream:
    """An output of a command, read as it comes."""

    def __init__(
        self, stack: contextlib.ExitStack, loop: asyncio.AbstractEventLoop, limit: int, flooded: asyncio.Future[None]
    ) -> None:
        self._read, self.write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self.kept = StreamHead(limit)
        self.over: asyncio.Future[None] = loop.create_future()
        self._loop, self._flooded = loop, flooded
        self._open = {self._read, self.write}
        loop.add_reader(self._read, self._more)
        stack.callback(self._close)

    def close_write(self) -> None:
        """In this process: only the command writes."""
        self._open.discard(self.write)
        os.close(self.write)

    def _more(self) -> None:
        try:
            part = os.read(self._read, 65536)
        except BlockingIOError:
            return
        if not part:
            self._loop.remove_reader(self._read)
            self.over.set_result(None)
        elif self.kept.add(part) and not self._flooded.done():
            self._flooded.set_result(None)

    def _close(self) -> None:
        if not self.over.done():
            self._loop.remove_reader(self._read)
        for number in self._open:
            os.close(number)
