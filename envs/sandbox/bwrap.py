"""Sandboxes by bubblewrap: own namespaces, read-only system, no network, system call filter, limits.

As root each sandbox runs as a user id of its own; as an ordinary user it works through user namespaces alone.
Limits per process are set by `prlimit` inside the user namespace, where the count of processes is the sandbox's.
"""

from __future__ import annotations

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
    SandboxLimits,
    SandboxProvider,
    SandboxUnavailable,
)
from k3rl.envs.sandbox.local import (
    PROGRAM_SERVER,
    Workspace,
    capture,
    control_sockets,
    find_interpreter,
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
    """The default provider. `interpreter`: the Python of program servers, by default one inside /usr."""

    name = "bwrap"
    safe = True

    def __init__(self, *, interpreter: str | None = None) -> None:
        self._interpreter = interpreter or find_interpreter()

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
        return BwrapSandbox(limits or SandboxLimits())

    def start_program_server(self) -> ProgramServerProcess:
        """A program server in a sandbox without a writable file, without /proc and without sockets."""
        slot = Slot()
        prefix = _prefix_of(self._interpreter, slot)
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
                **slot.popen_arguments(),  # type: ignore[call-overload]
            )
        except BaseException:
            ours.close()
            os.close(errors)
            slot.release()
            raise
        finally:
            theirs.close()
            for number in opened:
                os.close(number)
        return ProgramServerProcess(process, ours, errors, slot.release, refusal)


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

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._slot = Slot()
        self._workspace = Workspace(self._slot.uid)

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
        limits, size = self.limits, str(self.limits.tmp_bytes)
        filter_fd = sealed_file("filter", seccomp.filter_bytes())
        variables = [part for name, value in (env or {}).items() for part in ("--setenv", name, value)]
        command = [
            *(_bwrap(), *_NAMESPACES, "--setenv", "HOME", "/box", *variables, *_system()),
            *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--size", size, "--tmpfs", "/tmp"),
            *("--bind", str(self._workspace.path), "/box", "--remount-ro", "/"),
            *("--chdir", os.path.normpath(f"/box/{cwd}")),
            *("--seccomp", str(filter_fd), "--", "/usr/bin/prlimit", f"--as={limits.memory_bytes}"),
            *(f"--nproc={limits.processes}", f"--fsize={limits.file_bytes}", f"--nofile={limits.open_files}"),
            *(f"--cpu={limits.cpu_s}", "--core=0", "--", *argv),
        ]
        try:
            captured = await capture(
                command,
                stdin=stdin,
                timeout_s=timeout_s,
                output_bytes=limits.output_bytes,
                pass_fds=[filter_fd],
                popen=self._slot.popen_arguments(),
            )
        finally:
            os.close(filter_fd)
        return captured.result(workspace_exceeded=self._workspace.size() > limits.workspace_bytes)

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """See `Sandbox.read`."""
        return self._workspace.read(path, max_bytes)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox.write`."""
        self._workspace.write(path, data, mode)

    async def stop(self) -> None:
        """Remove the workspace and give the user id back."""
        self._workspace.remove()
        self._slot.release()
