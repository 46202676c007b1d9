"""One user id per live sandbox, so that limits per user are limits per sandbox (only root can give them)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from k3rl.envs.sandbox.base import SandboxUnavailable

FIRST_UID = 60_600  # a range that distributions leave unused
SLOTS = 480


class Slot:
    """A user id that no other sandbox of this machine has; None when this process may not give ids.

    The claim is an abstract socket, which the kernel drops when the process ends however it ends.
    """

    def __init__(self) -> None:
        self.uid: int | None = None
        self._claim: socket.socket | None = None
        if os.geteuid() != 0 or not _mapped(FIRST_UID + SLOTS):
            return
        for uid in range(FIRST_UID, FIRST_UID + SLOTS):
            if (claim := _claim(uid)) is not None:
                self.uid, self._claim = uid, claim
                return
        raise SandboxUnavailable(f"all {SLOTS} sandbox user ids are in use; stop the sandboxes of other runs first")

    def popen_arguments(self) -> dict[str, object]:
        """Keyword arguments of `subprocess.Popen` that start a process as this user."""
        if self.uid is None:
            return {}
        return {"user": self.uid, "group": self.uid, "extra_groups": []}

    def release(self) -> None:
        """Give the id back. Idempotent."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None


@contextlib.contextmanager
def claimed(uid: int | None) -> Iterator[bool]:
    """Whether this user id of ours was free; while it is held here, no sandbox gets it."""
    claim = _claim(uid) if uid is not None and FIRST_UID <= uid < FIRST_UID + SLOTS else None
    try:
        yield claim is not None
    finally:
        if claim is not None:
            claim.close()


def _claim(uid: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0k3rl-sandbox-uid-{uid}")
    except OSError:
        claim.close()
        return None
    return claim


def _mapped(uid: int) -> bool:
    """Whether this user namespace has the id at all (a container may map only a few)."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= uid < first + count for first, _, count in ranges)
