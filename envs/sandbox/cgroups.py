"""Control groups of sandboxes: one per sandbox, where this process may make them.

Version 2 (memory.max, pids.max, cpu.max, cgroup.kill) is looked for first, in the folder that K3RL_CGROUP names or in
this process's own; then version 1 (memory, pids and cpu hierarchies). Without one, `prlimit` and a watch over memory
do the work (`local.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from k3rl.envs.sandbox.base import SandboxError, SandboxLimits

MOUNT = Path("/sys/fs/cgroup")
VARIABLE = "K3RL_CGROUP"
PREFIX = "k3rl-"
PERIOD_US = 100_000
OWN = 2  # processes of bubblewrap beside those of a command
GONE_S = 5.0
_WANTED = ("memory", "pids")  # without both a group would promise what it does not keep
_FILES = {  # (controller, what is limited) -> file, in version 2 and in version 1
    2: {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"},
    1: {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpu": "cpu.cfs_quota_us"},
}


def owner(folder: str | Path) -> str:
    """How the names begin of all groups made while temporary files go to `folder`.

    A process hands that folder down to its children, so the name tells whose work made a group, on a machine where
    several work at once.
    """
    return f"{PREFIX}{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}-"


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where groups can be made: `parents` maps a controller to the folder for new groups (all one in version 2)."""

    version: int
    parents: Mapping[str, Path]

    def describe(self) -> str:
        """For a person."""
        return f"cgroup v{self.version} ({', '.join(sorted(self.parents))})"

    def named(self) -> Cgroup:
        """A group that does not exist yet, under a name of its own."""
        name = f"{owner(tempfile.gettempdir())}{uuid.uuid4().hex[:16]}"
        return Cgroup(self.version, {key: parent / name for key, parent in self.parents.items()})


class Cgroup:
    """One group: its folder for each controller."""

    def __init__(self, version: int, folders: Mapping[str, Path]) -> None:
        self.version = version
        self.folders = folders

    def all_folders(self) -> list[Path]:
        """Each folder once."""
        return sorted(set(self.folders.values()))

    def make(self, limits: SandboxLimits) -> None:
        """Make it with these limits. Raises SandboxError when the kernel refuses."""
        try:
            for folder in self.all_folders():
                folder.mkdir()
            self.set_limits(limits)
        except OSError as error:
            self.remove()
            raise SandboxError(f"no control group could be made: {error}") from error

    def set_limits(self, limits: SandboxLimits) -> None:
        """Write the limits. The sandbox's own two processes are counted beside those of the command."""
        files = _FILES[self.version]
        values = {"memory": str(limits.memory_bytes), "pids": str(limits.processes + OWN)}
        if limits.cpus is not None:
            quota = max(1000, round(limits.cpus * PERIOD_US))
            values["cpu"] = f"{quota} {PERIOD_US}" if self.version == 2 else str(quota)
        for controller, value in values.items():
            if controller in self.folders:
                (self.folders[controller] / files[controller]).write_text(value)
        if self.version == 2:
            for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                if (path := self.folders["memory"] / name).exists():
                    path.write_text(value)

    def oom_kills(self) -> int:
        """How often the kernel has killed in this group for want of memory."""
        if "memory" not in self.folders:
            return 0
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        try:
            lines = (self.folders["memory"] / name).read_text().splitlines()
        except FileNotFoundError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def members(self) -> list[int]:
        """Process ids in the group."""
        found: set[int] = set()
        for folder in self.all_folders():
            with contextlib.suppress(FileNotFoundError):
                found |= {int(word) for word in (folder / "cgroup.procs").read_text().split()}
        return sorted(found)

    def kill(self) -> None:
        """Kill every process in it; they are gone, or past help, when this returns."""
        deadline = time.monotonic() + GONE_S
        while self.members() and time.monotonic() < deadline:
            for folder in self.all_folders():
                if (path := folder / "cgroup.kill").exists():
                    path.write_text("1")
            for pid in self.members():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def remove(self) -> None:
        """Kill what is in it and delete it. Idempotent. Raises SandboxError when something stays."""
        deadline = time.monotonic() + GONE_S
        for folder in self.all_folders():
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise SandboxError(f"the control group {folder} does not go away: {error}") from error
                    self.kill()
                    time.sleep(0.002)


@functools.cache
def available() -> Cgroups | None:
    """The groups that this process can make, looked for once."""
    return find(MOUNT, Path("/proc/self/cgroup").read_text(), os.environ.get(VARIABLE))


def find(mount: Path, own: str, named: str | None = None) -> Cgroups | None:
    """Groups below `mount` for a process whose /proc/self/cgroup is `own`; `named`: an empty version 2 group."""
    paths = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller.removeprefix("name=")] = path.lstrip("/")
    candidates: list[Callable[[], Cgroups | None]] = []
    if named:
        candidates.append(lambda: _second(Path(named)))
    elif (mount / "cgroup.controllers").exists():
        candidates.append(lambda: _second(mount / paths.get("", "")))
    if not named and (mount / "memory").is_dir():
        candidates.append(lambda: _first(mount, paths))
    for candidate in candidates:
        with contextlib.suppress(OSError):
            if (found := candidate()) is not None:
                return found
    return None


def _second(base: Path) -> Cgroups | None:
    """Version 2 below `base`, whose controllers are handed down or can be."""
    offered = set((base / "cgroup.controllers").read_text().split())
    handed = set((base / "cgroup.subtree_control").read_text().split())
    wanted = [name for name in (*_WANTED, "cpu") if name in offered]
    if missing := [name for name in wanted if name not in handed]:
        (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))
    if not set(_WANTED) <= offered:
        return None
    return _tried(Cgroups(2, dict.fromkeys(wanted, base)))


def _first(mount: Path, paths: Mapping[str, str]) -> Cgroups | None:
    """Version 1: a group beside nothing, below this process's own in every hierarchy."""
    parents = {name: mount / name / paths[name] for name in (*_WANTED, "cpu") if name in paths}
    if not set(_WANTED) <= parents.keys():
        return None
    return _tried(Cgroups(1, parents))


def _tried(groups: Cgroups) -> Cgroups | None:
    """The groups, if one can be made, limited and removed."""
    try:
        group = groups.named()
        group.make(SandboxLimits())
        group.remove()
    except SandboxError:
        return None
    return groups
