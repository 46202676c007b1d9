"""Triton's cache on disk with a lock for each kernel, so that of several processes one compiles and the others wait.

Triton loads it by name (TRITON_CACHE_MANAGER, which `compile_cache.use` sets). Needs Triton.
"""

from __future__ import annotations

import fcntl
import os
from typing import IO

from triton.runtime.cache import FileCacheManager

LOCK = "compiling"


class SharedCache(FileCacheManager):
    """The files of one kernel. Who finds none holds the lock until it has written them, or has failed or died."""

    _held: IO[bytes] | None = None

    def get_group(self, filename: str) -> dict[str, str] | None:
        found = super().get_group(filename)
        if found is not None or self.lock_path is None:
            return found
        self._held = open(os.path.join(self.cache_dir, LOCK), "ab")  # noqa: SIM115 (until `put_group`)
        fcntl.flock(self._held, fcntl.LOCK_EX)
        found = super().get_group(filename)  # another process may have compiled it meanwhile
        if found is not None:
            self._release()
        return found

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        try:
            return super().put_group(filename, group)
        finally:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()
