"""What may come out of a sandbox to be graded: declared, plain, small files. Everything else is refused, with a reason.

A path counts only by its name inside the workspace. Links, devices, pipes and sockets are never opened, and the reading
itself follows none, so that a listing that lies gains nothing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from k3rl.config import ConfigError
from k3rl.envs.sandbox.base import MEBIBYTE, Sandbox, SandboxError

LIST_S = 60.0
SPARSE_BYTES = 64 * 1024  # a smaller file may have holes
SPARSE_SHARE = 8  # a file is sparse when its blocks are less than this part of its size
_LISTING = "%y\t%n\t%s\t%b\t%P\\0"  # kind, hard links, bytes, blocks of 512 bytes, path


class Refusal(StrEnum):
    """Why a declared path is not taken."""

    SYMLINK = "symlink"
    HARDLINK = "hardlink"
    DEVICE = "device"
    PIPE = "pipe"
    SOCKET = "socket"
    PATH_ESCAPE = "path_escape"
    SPARSE = "sparse"
    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    UNREADABLE = "unreadable"


_KINDS = {"l": Refusal.SYMLINK, "b": Refusal.DEVICE, "c": Refusal.DEVICE, "p": Refusal.PIPE, "s": Refusal.SOCKET}


@dataclass(frozen=True, slots=True)
class ArtifactLimits:
    """How much may come out. Sizes in bytes."""

    files: int = 200
    file_bytes: int = MEBIBYTE
    total_bytes: int = MEBIBYTE


@dataclass(frozen=True, slots=True)
class Artifacts:
    """`files` by path, sorted; `refused`: why a declared path was left out."""

    files: dict[str, bytes]
    refused: dict[str, Refusal]


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises ConfigError for a declaration that is not inside the workspace."""
    for pattern in patterns:
        parts = pattern.split("/")
        if not pattern or pattern.startswith("/") or ".." in parts or "\0" in pattern:
            raise ConfigError(
                f"artifact {pattern!r} is not a path or pattern inside the workspace",
                key="artifacts",
                got=pattern,
                wanted="a relative path without `..`",
            )


def refusal_of(kind: str, links: int, size: int, blocks: int, path: str, limits: ArtifactLimits) -> Refusal | None:
    """Why a file is refused by what its listing says; kind is a letter of `find -printf %y`."""
    if path.startswith("/") or not path or {"", ".", ".."} & set(path.split("/")):
        return Refusal.PATH_ESCAPE
    if kind != "f":
        return _KINDS.get(kind, Refusal.UNREADABLE)
    if links != 1:
        return Refusal.HARDLINK
    if size > SPARSE_BYTES and blocks * 512 * SPARSE_SHARE < size:
        return Refusal.SPARSE
    return Refusal.TOO_LARGE if size > limits.file_bytes else None


async def collect(sandbox: Sandbox, patterns: Sequence[str], limits: ArtifactLimits | None = None) -> Artifacts:
    """The declared files of a workspace. `*` in a pattern matches slashes too; folders themselves are no artifacts.

    Raises ConfigError for a pattern that leaves the workspace, SandboxError when the workspace cannot be listed.
    """
    check_patterns(patterns)
    limits = limits or ArtifactLimits()
    listed = await sandbox.exec(["find", "-P", ".", "-mindepth", "1", "-printf", _LISTING], timeout_s=LIST_S)
    if listed.truncated:
        return Artifacts({}, dict.fromkeys(patterns, Refusal.TOO_MANY))
    if listed.returncode is None or not (listed.stdout or listed.returncode == 0):
        raise SandboxError(f"the workspace could not be listed: {listed.stderr.decode('utf-8', 'replace')[-300:]}")
    files: dict[str, bytes] = {}
    refused: dict[str, Refusal] = {}
    room = limits.total_bytes
    for entry in sorted(_entries(listed.stdout), key=lambda one: one[-1]):
        kind, links, size, blocks, path = entry
        if kind == "d" or not any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
            continue
        why = refusal_of(kind, links, size, blocks, path, limits)
        if why is None and len(files) >= limits.files:
            why = Refusal.TOO_MANY
        if why is None and size > room:
            why = Refusal.TOO_LARGE
        if why is None:
            try:
                data = await sandbox.read(path, room + 1)
            except (OSError, ValueError):
                why = Refusal.UNREADABLE
            else:
                if len(data) <= min(room, limits.file_bytes):
                    room -= len(data)
                    files[path] = data
                    continue
                why = Refusal.TOO_LARGE  # it has grown since it was listed
        refused[path] = why
    return Artifacts(files, refused)


def _entries(listing: bytes) -> list[tuple[str, int, int, int, str]]:
    """The lines of the listing; one whose path is no UTF-8 keeps its bytes as surrogates."""
    found = []
    for line in listing.split(b"\0"):
        kind, links, size, blocks, path = (line.decode("utf-8", "surrogateescape").split("\t", 4) + [""] * 5)[:5]
        if kind:
            found.append((kind, int(links), int(size), int(blocks), path))
    return found
