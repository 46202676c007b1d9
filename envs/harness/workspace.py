"""The sandbox in which an agent works: a task's files go in, declared artifacts come out, and it can be paused.

What an agent ran does not go on when its command ends, so a snapshot is the files and nothing else.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from k3rl.envs.sandbox import ExecResult, Sandbox, SandboxError, SandboxLimits, SandboxProvider

MAX_ARTIFACTS = 200
MAX_ARTIFACT_BYTES = 1 * 2**20  # all of them together
SNAPSHOT = ".k3rl-snapshot.tgz"
_HOUSEKEEPING_S = 120.0


class WorkspaceError(SandboxError):
    """A workspace could not be made, read or paused: the machine's fault, never the agent's."""


@dataclass(frozen=True, slots=True)
class WorkspaceSpec:
    """What a task's workspace holds.

    files: text by path. artifacts: patterns of the files that are the answer (`*` matches slashes too); everything
    else is thrown away. setup: commands that are run once, before the agent comes. changes_only: files that still are
    as they were are no part of the answer.
    """

    files: Mapping[str, str]
    artifacts: tuple[str, ...]
    setup: tuple[tuple[str, ...], ...] = ()
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    changes_only: bool = False


class Workspace:
    """One sandbox with a task's files. `close` always, it is idempotent. Raises WorkspaceError."""

    def __init__(self, sandbox: Sandbox, spec: WorkspaceSpec) -> None:
        self._sandbox = sandbox
        self._spec = spec

    @property
    def sandbox(self) -> Sandbox:
        """Where it all happens."""
        return self._sandbox

    @classmethod
    async def open(cls, provider: SandboxProvider, spec: WorkspaceSpec, snapshot: bytes | None = None) -> Workspace:
        """A fresh sandbox with the task's files, or with those of a snapshot."""
        workspace = cls(await provider.create(spec.limits), spec)
        try:
            if snapshot is None:
                for path, text in spec.files.items():
                    await workspace.write(path, text)
                for command in spec.setup:
                    await workspace._must(command)
            else:
                await workspace._sandbox.write(SNAPSHOT, snapshot)
                await workspace._must(["tar", "-xzf", SNAPSHOT])
                await workspace._must(["rm", "-f", SNAPSHOT])
        except BaseException:
            await workspace.close()
            raise
        return workspace

    async def run(self, command: str, timeout_s: float) -> ExecResult:
        """One line of bash in the workspace; a pipeline fails when a part of it does."""
        return await self._sandbox.exec(["bash", "-o", "pipefail", "-c", command], timeout_s=timeout_s)

    async def read(self, path: str, max_bytes: int) -> bytes:
        """At most `max_bytes` of a plain file. Raises OSError or ValueError for what is none."""
        return await self._sandbox.read(path, max_bytes)

    async def write(self, path: str, text: str) -> None:
        """Make or replace a file. Raises OSError or ValueError."""
        await self._sandbox.write(path, text.encode("utf-8", "surrogateescape"))

    async def artifacts(self) -> dict[str, str]:
        """The declared files as they are now: plain UTF-8 files only, at most MAX_ARTIFACTS and MAX_ARTIFACT_BYTES.

        No link is followed. What does not fit or is no text is left out, as if the agent had not written it.
        """
        listing = await self._must(["find", ".", "-type", "f", "-not", "-path", "./.git/*", "-print0"])
        paths = sorted(name.decode("utf-8", "replace").removeprefix("./") for name in listing.stdout.split(b"\0"))
        found: dict[str, str] = {}
        room = MAX_ARTIFACT_BYTES
        for path in paths:
            if len(found) == MAX_ARTIFACTS or not is_artifact(path, self._spec.artifacts):
                continue
            try:
                data = await self._sandbox.read(path, room + 1)
                text = data.decode("utf-8")
            except (OSError, ValueError):
                continue
            if self._spec.changes_only and self._spec.files.get(path) == text:
                continue
            if len(data) <= room:
                room -= len(data)
                found[path] = text
        return found

    async def snapshot(self) -> bytes:
        """All files as a compressed tar."""
        # By way of /tmp: tar complains when the folder that it reads changes.
        packed = f"tar -czf /tmp/packed --exclude=./{SNAPSHOT} . && cp /tmp/packed {SNAPSHOT}"
        await self._must(["bash", "-c", packed])
        data = await self._sandbox.read(SNAPSHOT, self._spec.limits.file_bytes)
        await self._must(["rm", "-f", SNAPSHOT])
        return data

    async def close(self) -> None:
        """Remove the sandbox."""
        await self._sandbox.stop()

    async def _must(self, argv: Sequence[str]) -> ExecResult:
        done = await self._sandbox.exec(argv, timeout_s=_HOUSEKEEPING_S)
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise WorkspaceError(f"`{' '.join(argv)}` failed in the workspace ({done.returncode}): {said}")
        return done


def is_artifact(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path is one of the declared ones; `..`, absolute and empty paths never are."""
    parts = path.split("/")
    return not {"", ".", ".."} & set(parts) and any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def answer_from(files: Mapping[str, str]) -> str:
    """Files as the text of an answer."""
    return json.dumps({"files": dict(sorted(files.items()))})


def files_from(answer: str) -> dict[str, str] | None:
    """The files of an answer, None when it is no JSON object {"files": {path: text}}."""
    try:
        given = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    files = given.get("files") if isinstance(given, dict) else None
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        return None
    return files
