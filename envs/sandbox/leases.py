"""Leases: what each live sandbox holds on this machine, on disk, so that a later process can clear up after a dead one.

A lease names its owner (process id, start time, boot), a deadline, and what it holds: a folder, control groups, a user
id. The owner removes it when the sandbox stops. `reap` removes what belongs to owners that are gone and what is past
its deadline; the first sandbox of a process does it, and `k3rl doctor --reap`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3rl.envs.sandbox.base import SandboxError
from k3rl.envs.sandbox.cgroups import PREFIX, Cgroup
from k3rl.envs.sandbox.slots import claimed

VARIABLE = "K3RL_RUNTIME_DIR"
MARK = "K3RL_SANDBOX"  # in the environment of every process that a local sandbox starts; its value is the lease's name
LEASE_S = 24 * 3600.0  # how long a sandbox may lie unused; each use renews it
LOCK_S = 60.0
SWEEP_S = 20.0  # for processes that fork as fast as they are killed
FORM = 1


class Lease:
    """One sandbox's entry. `release` when everything it names is gone."""

    def __init__(
        self,
        *,
        folder: Path | None = None,
        group: Cgroup | None = None,
        uid: int | None = None,
        seconds: float = LEASE_S,
    ) -> None:
        self.name = uuid.uuid4().hex
        self._seconds = seconds
        self._deadline = 0.0
        self._path = runtime_folder() / f"{self.name}.json"
        self._text: dict[str, Any] = {
            "form": FORM,
            "owner": owner_now(),
            "folder": str(folder) if folder else None,
            "group": None if group is None else {key: str(path) for key, path in group.folders.items()},
            "group_version": None if group is None else group.version,
            "uid": uid,
        }
        self.renew()

    def renew(self) -> None:
        """Move the deadline when half of the time is over."""
        now = time.time()
        if now + self._seconds / 2 > self._deadline:
            self._deadline = now + self._seconds
            scratch = self._path.with_suffix(".new")
            scratch.write_text(json.dumps({**self._text, "deadline": self._deadline}))
            scratch.replace(self._path)

    def release(self) -> None:
        """Idempotent."""
        self._path.unlink(missing_ok=True)


class _Busy(SandboxError):
    """Another process is clearing up."""


@functools.cache
def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise SandboxError(f"{path} is not a folder of this user alone; name another one in {VARIABLE}")
    return path


def runtime_folder() -> Path:
    """Where leases lie: K3RL_RUNTIME_DIR, else the user's runtime folder, else one in /tmp."""
    if given := os.environ.get(VARIABLE):
        return _made(Path(given))
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return _made(Path(given, "k3rl"))
    return _made(Path("/run/k3rl") if os.geteuid() == 0 else Path(f"/tmp/k3rl-{os.geteuid()}"))


def owner_now() -> dict[str, Any]:
    """This process, so that no later one is taken for it."""
    pid = os.getpid()
    return {"pid": pid, "start": start_time(pid), "boot": boot(), "namespace": os.readlink("/proc/self/ns/pid")}


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, None when there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@functools.cache
def boot() -> str:
    """A word that changes with every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_over(lease: Mapping[str, Any], now: float) -> bool:
    """Whether what a lease names may be removed. One of another pid namespace is judged by its deadline only."""
    owner = lease["owner"]
    if owner["boot"] != boot() or now > lease["deadline"]:
        return True
    if owner["namespace"] != os.readlink("/proc/self/ns/pid"):
        return False
    return bool(start_time(owner["pid"]) != owner["start"])


def reap(folder: Path | None = None, *, wait_s: float = LOCK_S) -> list[str]:
    """Remove what dead owners left behind; says what it removed, and what it could not, in words.

    One process at a time does it. Raises SandboxError when another one has been at it for `wait_s`.
    """
    folder = folder or runtime_folder()
    removed: list[str] = []
    with _alone(folder, wait_s):
        for path in sorted(folder.glob("*.json")):
            try:
                lease = json.loads(path.read_text())
                if lease["form"] != FORM or not is_over(lease, time.time()):
                    continue
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue  # just released, or of another version of this program
            try:
                removed += _clear(path.stem, lease)
            except (OSError, SandboxError) as error:  # the lease stays for the next time; other sandboxes may start
                removed.append(f"could not clear up after process {lease['owner']['pid']}: {error}")
                continue
            path.unlink(missing_ok=True)
        for path in folder.glob("*.new"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > LOCK_S:
                    path.unlink()
    return removed


@functools.cache
def reap_once() -> None:
    """`reap`, the first time in this process, unless another process is at it."""
    with contextlib.suppress(_Busy):
        reap(wait_s=0.0)


@contextlib.contextmanager
def _alone(folder: Path, wait_s: float) -> Iterator[None]:
    with open(folder / "reaper.lock", "a") as file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _Busy(f"another reaper has held {file.name} for {wait_s:.0f} s") from None
                time.sleep(0.02)
        yield


def _clear(name: str, lease: Mapping[str, Any]) -> list[str]:
    """Remove what one lease names."""
    removed = []
    same_boot = lease["owner"]["boot"] == boot()
    if lease["group"] and same_boot:
        group = Cgroup(lease["group_version"], {key: Path(path) for key, path in lease["group"].items()})
        if all(path.name.startswith(PREFIX) for path in group.all_folders()) and any(
            path.exists() for path in group.all_folders()
        ):
            group.remove()
            removed.append(f"control group {group.all_folders()[0].name}")
    if same_boot:
        removed += end_processes(f"{MARK}={name}", lease["uid"])
    if lease["folder"] and os.path.lexists(lease["folder"]):
        _unmount(lease["folder"])
        shutil.rmtree(lease["folder"], onerror=unlock)
        removed.append(f"folder {lease['folder']}")
    return removed


def end_processes(mark: str, uid: int | None = None) -> list[str]:
    """Kill what carries a mark in its environment and what runs as a user, unless another sandbox has that user."""
    ended = []
    with claimed(uid) as ours:
        deadline = time.monotonic() + SWEEP_S
        while time.monotonic() < deadline:  # what they fork meanwhile is found in the next round
            found = [*marked(mark), *([pid for pid in _processes() if _user_of(pid) == uid] if ours else [])]
            if not found:
                break
            for ask in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that fewer are born meanwhile
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, ask)
            ended += [f"process {pid}" for pid in found]
            time.sleep(0.002)
    return sorted(set(ended))


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and start_time(int(name)) is not None]


def marked(mark: str) -> list[int]:
    """The living processes that have this NAME=VALUE in their environment."""
    word, found = mark.encode(), []
    for pid in (entry for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if word in file.read().split(b"\0"):
                found.append(int(pid))
    return found


def _user_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _unmount(folder: str) -> None:
    """Take away what is mounted in a folder, the innermost first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points: Sequence[str] = [line.split()[4] for line in lines]
    for point in sorted((one for one in points if Path(one).is_relative_to(folder)), key=len, reverse=True):
        import ctypes

        ctypes.CDLL(None).umount2(point.encode(), 2)  # MNT_DETACH


def unlock(function: Any, path: str, _: Any) -> None:
    """Retry a removal after giving back the permissions that a command took away."""
    if not os.path.lexists(path):
        return
    os.chmod(os.path.dirname(path), 0o700)
    if not os.path.islink(path):
        os.chmod(path, 0o700)
    function(path)
