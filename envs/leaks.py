"""What a piece of work leaves behind on this machine: processes, mounts, files, cgroups, open descriptors."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from k3rl.envs.sandbox.cgroups import MOUNT, owner

SETTLE_S = 5.0  # how long what was told to end may take to be gone


@dataclass(frozen=True, slots=True)
class Census:
    """What exists now, by kind; what is counted is what this process, or a child of it, could have made."""

    kinds: Mapping[str, Mapping[str, str]]

    @classmethod
    def take(cls, folder: Path) -> Census:
        """folder: where temporary files go."""
        return cls(
            {
                "process": _descendants(str(folder)),
                "mount": _mounts(),
                "file": {str(path.relative_to(folder)): "" for path in sorted(folder.rglob("*"))},
                "cgroup": _cgroups(owner(folder)),
                "descriptor": _descriptors(),
            }
        )

    def more_than(self, before: Census) -> list[str]:
        """What is here and was not there, in words."""
        return [
            f"{kind} {key} {text}".strip()
            for kind, found in self.kinds.items()
            for key, text in found.items()
            if key not in before.kinds[kind] or before.kinds[kind][key] != text
        ]


class Watch:
    """A span of work and the folder of its temporary files, made by `watched`. `leaks` says what it left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before = Census.take(folder)

    def leaks(self) -> list[str]:
        """What is new and does not go away by itself."""
        deadline = time.monotonic() + SETTLE_S
        while (found := Census.take(self.folder).more_than(self._before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Work inside it has a folder for temporary files of its own, by which its orphans are known too.

    For one caller at a time: the folder is set for the whole process.
    """
    folder = Path(tempfile.mkdtemp(prefix="k3rl-watch-"))
    folder.chmod(0o711)  # sandboxes run as other users, who must be able to pass
    variable, default = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield Watch(folder)
    finally:
        tempfile.tempdir = default
        os.environ.pop("TMPDIR")
        if variable is not None:
            os.environ["TMPDIR"] = variable
        shutil.rmtree(folder, ignore_errors=True)


def _descendants(mark: str) -> dict[str, str]:
    """Living processes below this one, or with `mark` in their environment: "pid/start time" -> command."""
    parents: dict[int, int] = {}
    about: dict[int, tuple[str, str]] = {}
    level = {os.getpid()}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            head, _, tail = (entry / "stat").read_text().rpartition(")")
            environment = (entry / "environ").read_bytes()
        except PermissionError:
            environment = b""  # of another user: known by its parent only
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = tail.split()
        if fields[0] not in "ZX":
            parents[int(entry.name)] = int(fields[1])
            about[int(entry.name)] = fields[19], head.partition("(")[2]
            if mark.encode() in environment:
                level.add(int(entry.name))
    found: set[int] = set()
    while level:
        found |= level
        level = {pid for pid, parent in parents.items() if parent in level} - found
    return {f"{pid}/{about[pid][0]}": about[pid][1] for pid in found if pid != os.getpid()}


def _mounts() -> dict[str, str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[0]: line.split()[4] for line in lines}


def _cgroups(mark: str) -> dict[str, str]:
    return {
        os.path.join(folder, name): "" for folder, names, _ in os.walk(MOUNT) for name in names if name.startswith(mark)
    }


def _descriptors() -> dict[str, str]:
    """Open descriptors of this process: number -> what it is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found
