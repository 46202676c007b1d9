"""Sandboxes by bubblewrap: own namespaces, read-only system, no network, system call filter, limits.

As root each sandbox runs as a user id of its own; as an ordinary user it works through user namespaces alone.
Where there are control groups (`cgroups.py`) one holds memory, processes and processors of each sandbox; elsewhere
`prlimit` inside the user namespace, where the count of processes is the sandbox's, and a watch over memory do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from k3rl.envs.sandbox import seccomp
from k3rl.envs.sandbox.base import (
    ExecResult,
    ProgramServerProcess,
    Sandbox,
    SandboxDied,
    SandboxLimits,
    SandboxProvider,
    SandboxUnavailable,
)
from k3rl.envs.sandbox.cgroups import OWN
from k3rl.envs.sandbox.launch import Order
from k3rl.envs.sandbox.leases import MARK, Lease, reap_once
from k3rl.envs.sandbox.local import (
    PROGRAM_SERVER,
    Captured,
    Holding,
    capture,
    control_sockets,
    find_interpreter,
    groups_for,
    rlimits,
    sealed_file,
)
from k3rl.envs.sandbox.slots import Slot

INSTALL = "apt-get install -y bubblewrap"
_NAMESPACES = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"),
    *(
        "--hostname",
        "box",
        "--clearenv",
        "--setenv",
        "PATH",
        "/usr/local/bin:/usr/bin:/bin",
        "--setenv",
        "LANG",
        "C.UTF-8",
    ),
)


class BwrapProvider(SandboxProvider):
    """The default provider. `interpreter`: the Python of program servers, by default one inside /usr.

    cgroups=False leaves control groups alone, also where there are some. readable: folders of the host that commands
    may read at their own paths; devices: device files that they may use.
    """

    name = "bwrap"
    safe = True

    def __init__(
        self,
        *,
        interpreter: str | None = None,
        cgroups: bool = True,
        readable: Sequence[str] = (),
        devices: Sequence[str] = (),
    ) -> None:
        self._interpreter = interpreter or find_interpreter()
        self._cgroups = cgroups
        self._readable = [part for path in readable for part in ("--ro-bind", path, path)]
        self._devices = [part for path in devices for part in ("--dev-bind", path, path)]

    def showing(self, readable: Sequence[str], devices: Sequence[str] = ()) -> BwrapProvider:
        """The same with other folders and devices."""
        return BwrapProvider(interpreter=self._interpreter, cgroups=self._cgroups, readable=readable, devices=devices)

    def check(self) -> None:
        """Raises SandboxUnavailable when bubblewrap is missing or namespaces are refused."""
        slot = Slot()
        filter_fd = sealed_file("filter", seccomp.filter_bytes())
        try:
            done = subprocess.run(
                [_bwrap(), *_NAMESPACES, *_system(), "--seccomp", str(filter_fd), "--", "/bin/true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=[filter_fd],
                check=False,
                **slot.popen_arguments(),  # type: ignore[call-overload]
            )
        finally:
            os.close(filter_fd)
            slot.release()
        if done.returncode != 0:
            raise SandboxUnavailable(refusal(done.stderr.decode("utf-8", "replace")))

    async def create(self, limits: SandboxLimits | None = None) -> Sandbox:
        """A sandbox with an empty workspace."""
        _bwrap()
        return BwrapSandbox(limits or SandboxLimits(), self._readable, self._devices, cgroups=self._cgroups)

    def start_program_server(self) -> ProgramServerProcess:
        """A program server in a sandbox without a writable file, without /proc and without sockets."""
        reap_once()
        slot = Slot()
        prefix = _prefix_of(self._interpreter, slot)
        lease = Lease(uid=slot.uid)

        def release() -> None:
            lease.release()
            slot.release()

        ours, theirs = control_sockets()
        errors = sealed_file("errors", b"")
        script = sealed_file("server", PROGRAM_SERVER)
        filter_fd = sealed_file("filter", seccomp.filter_bytes(sockets=False))
        opened = [script, filter_fd]
        command = [
            *(_bwrap(), *_NAMESPACES, "--as-pid-1", *_system()),
            *prefix,
            *(part for name in ("null", "zero", "urandom", "random") for part in ("--dev-bind", *[f"/dev/{name}"] * 2)),
            *("--ro-bind-data", str(script), "/server.py", "--remount-ro", "/", "--seccomp", str(filter_fd)),
            *("--", self._interpreter, "-I", "-S", "-B", "/server.py", str(theirs.fileno())),
        ]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd="/",
                start_new_session=True,
                pass_fds=[*opened, theirs.fileno()],
                env={"PATH": os.environ.get("PATH", ""), MARK: lease.name},
                **slot.popen_arguments(),  # type: ignore[call-overload]
            )
        except BaseException:
            ours.close()
            os.close(errors)
            release()
            raise
        finally:
            theirs.close()
            for number in opened:
                os.close(number)
        return ProgramServerProcess(process, ours, errors, release, refusal)


def refusal(complaint: str) -> str:
    """What to tell a person when bubblewrap could not start: its own words and the likely remedy."""
    text = f"bubblewrap cannot make a sandbox here: {complaint.strip()[-400:] or 'no reason given'}"
    if "uid map" in complaint or "namespace" in complaint or "Permission denied" in complaint:
        text += (
            "; user namespaces are refused: allow them with "
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 kernel.unprivileged_userns_clone=1` as root, "
            "or start the container with `--security-opt seccomp=unconfined`"
        )
    return text


def _bwrap() -> str:
    found = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")
    if found is None:
        raise SandboxUnavailable(f"bubblewrap is not installed (Debian package `bubblewrap`); run `sudo {INSTALL}`")
    return found


def _system() -> list[str]:
    """The read-only system: /usr and the usual links into it. No /etc, no home, no project."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib32", "lib64", "sbin"):
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments


def _prefix_of(interpreter: str, slot: Slot) -> list[str]:
    """The binding that a Python outside /usr needs: the installation folder above its bin."""
    if interpreter.startswith("/usr/"):
        return []
    prefix = Path(interpreter).resolve().parent.parent
    closed = [folder for folder in (prefix, *prefix.parents) if not folder.stat().st_mode & stat.S_IXOTH]
    if slot.uid is not None and closed:
        slot.release()
        raise SandboxUnavailable(
            f"the sandbox user may not enter {closed[-1]}, where the only Python is ({interpreter}); "
            "run `sudo apt-get install -y python3`, which puts one into /usr"
        )
    return ["--ro-bind", str(prefix), str(prefix)]


class BwrapSandbox(Sandbox):
    """A workspace folder of the host, bound to /box; each command is one bubblewrap."""

    def __init__(
        self, limits: SandboxLimits, readable: Sequence[str] = (), devices: Sequence[str] = (), *, cgroups: bool = True
    ) -> None:
        self.limits = limits
        self._readable, self._devices = readable, devices
        self._slot = Slot()
        try:
            self.holding = Holding(self._slot.uid, limits, groups_for(cgroups))
        except BaseException:
            self._slot.release()
            raise

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """One command in a fresh set of namespaces over the same workspace; see `Sandbox.exec`."""
        held, grouped = self.holding, self.holding.group is not None
        held.begin()
        inside = f"/box/{held.folder(cwd)}".rstrip("/")
        own = self._slot.uid is not None
        # Another user's count of processes is not the sandbox's until it is inside the user namespace.
        inner = [] if own else ["/usr/bin/prlimit", f"--nproc={self.limits.processes}", "--"]
        filter_fd = sealed_file("filter", seccomp.filter_bytes())
        status, status_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        order = Order(
            [
                *(_bwrap(), *self._arguments(env or {}), "--chdir", inside),
                *("--seccomp", "3", "--json-status-fd", "4", "--", *inner, *argv),
            ],
            held.mark,
            groups=held.group_files,
            uid=self._slot.uid,
            limits=rlimits(self.limits, grouped=grouped, processes=self.limits.processes + OWN if own else None),
        )
        try:
            captured = await capture(
                order,
                stdin=stdin,
                timeout_s=timeout_s,
                output_bytes=self.limits.output_bytes,
                descriptors=[filter_fd, status_end],
                watch=held.watch(),
                sweep=lambda: None,
            )
            with contextlib.suppress(BlockingIOError):
                # bubblewrap writes the exit status only when the command was really started.
                if captured.why or b"exit-code" in os.read(status, 4096):
                    return captured.result()
        finally:
            for number in (filter_fd, status, status_end):
                os.close(number)
        return _never_ran(captured, argv[0])

    def _arguments(self, env: Mapping[str, str]) -> list[str]:
        size = str(self.limits.tmp_bytes)
        variables = [part for name, value in env.items() for part in ("--setenv", name, value)]
        return [
            *(*_NAMESPACES, "--setenv", "HOME", "/box", *variables, *_system()),
            *("--proc", "/proc", "--dev", "/dev", *self._devices, "--size", size, "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/dev", "--size", size, "--tmpfs", "/tmp", *self._readable),
            *("--bind", str(self.holding.workspace.path), "/box", "--remount-ro", "/"),
        ]

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """See `Sandbox.read`."""
        return self.holding.workspace.read(path, max_bytes)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox.write`."""
        self.holding.workspace.write(path, data, mode)

    async def stop(self) -> None:
        """Remove the workspace and give the user id back."""
        try:
            self.holding.end()
        finally:
            self._slot.release()


def _never_ran(captured: Captured, program: str) -> ExecResult:
    """The result of a command that bubblewrap could not start. Raises SandboxDied when bubblewrap itself failed.

    Raises FileNotFoundError when it was to run in a folder that is not there.
    """
    complaint = captured.stderr.decode("utf-8", "replace")
    if complaint.startswith(f"bwrap: execvp {program}: "):
        code = 126 if "Permission denied" in complaint else 127
        return dataclasses.replace(captured.result(), returncode=code)
    if complaint.startswith("bwrap: Can't chdir"):
        raise FileNotFoundError(errno.ENOENT, "no such folder in the workspace", complaint[19:].partition(": ")[0])
    raise SandboxDied(refusal(complaint or f"exit status {captured.returncode}"))
