"""A machine of a fake service: a bubblewrap that stays, and commands that enter it, as in a container."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

PATH = "/usr/local/bin:/usr/bin:/bin"


def begin(folders: tuple[str, ...], seconds: int = 600) -> int:
    """Start one; the process id of its first process. `folders`: what is writable in it, in memory."""
    writable = [word for folder in folders for word in ("--perms", "1777", "--size", "67108864", "--tmpfs", folder)]
    links = [
        word
        for name in ("bin", "lib", "lib64", "sbin")
        if Path("/", name).is_symlink()
        for word in ("--symlink", os.readlink(f"/{name}"), f"/{name}")
    ]
    process = subprocess.Popen(
        [
            *("bwrap", "--unshare-user", "--unshare-pid", "--as-pid-1", "--unshare-net", "--unshare-ipc", "--clearenv"),
            *("--setenv", "PATH", PATH, "--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev"),
            *(*writable, "--remount-ro", "/", "--", "/bin/sh", "-c", f"echo ready; exec sleep {seconds}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
    return process.pid


def inside(outer: int) -> int:
    """The host's number for the first process inside, 0 when it is gone."""
    try:
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
    except (OSError, IndexError):
        return 0


def entering(outer: int, argv: list[str]) -> list[str]:
    """The command line that runs `argv` in it."""
    target = ["--target", str(inside(outer)), "--user", "--preserve-credentials"]
    return ["nsenter", *target, "--mount", "--pid", "--net", "--ipc", "--wd=/", "--root", "--", *argv]


def end(outer: int) -> None:
    """Kill it with all that runs in it."""
    for pid in (inside(outer), outer):
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(outer, 0)


class Machine:
    """One, for a server in this process. `alive` is what the service would say."""

    def __init__(self, *folders: str) -> None:
        self.outer = begin((*folders, "/tmp"))
        self.alive = True

    async def run(self, argv: list[str], stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        """(status, output, errors) of a command; 137 when it was killed."""
        process = await asyncio.create_subprocess_exec(
            *entering(self.outer, argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": PATH},
        )
        out, err = await process.communicate(stdin)
        code = process.returncode or 0
        return (128 - code if code < 0 else code), out, err

    async def put(self, path: str, data: bytes) -> None:
        """Make a file in it."""
        code, _, err = await self.run(["sh", "-c", 'mkdir -p "$(dirname "$0")" && cat > "$0"', path], data)
        assert code == 0, err

    def end(self) -> None:
        """Remove it."""
        if self.alive:
            self.alive = False
            end(self.outer)
