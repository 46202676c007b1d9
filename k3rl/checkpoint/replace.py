"""Putting a directory in the place of another at once, so that a kill leaves the old one or the new one, whole.

On Linux the two names are exchanged by one system call. File systems that cannot do that get two renames; a kill
between them leaves the old directory under its waiting name, and `recover` puts it back. Processes that want to write
one directory at the same time would write into one another's files, so each takes it for itself first (`locked`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from k3rl.config import K3Error

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class BusyDirectory(K3Error):
    """Another process writes the directory now."""

    exit_code = 3


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes from writing `path` meanwhile, by a lock of the system that ends with its process.

    What a kill left between two renames is put back first. Raises BusyDirectory at once where another process writes
    it. File systems without locks go without.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f".{path.name}.lock")
    with open(name, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = name.exists() and os.path.samestat(os.fstat(file.fileno()), name.stat())
        except BlockingIOError:
            held = False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            held = True
        if not held:  # or whoever held it has just ended and taken the file away
            raise BusyDirectory(f"another process writes {path} now; wait until it has, or name another directory")
        try:
            _recover(path)
            yield
        finally:
            name.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def by_umask(path: Path) -> None:
    """Lets a file be read by whom the umask says: safetensors writes its files for their owner alone."""
    mask = 0o077
    with suppress(OSError, ValueError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        mask = next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    path.chmod(0o666 & ~mask)


def _waiting(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def scratch_name(path: Path) -> Path:
    """Where `scratch_beside` puts its directory."""
    return path.with_name(f".{path.name}.writing")


def scratch_beside(path: Path) -> Path:
    """An empty directory beside `path` to write into; what a killed writer left there is removed."""
    scratch = scratch_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if scratch.exists():
        shutil.rmtree(scratch)
    scratch.mkdir()
    return scratch


def put_in_place(scratch: Path, path: Path) -> None:
    """Makes the written directory `scratch` appear as `path`, replacing a directory of that name."""
    for file in scratch.rglob("*.safetensors"):
        by_umask(file)
    flush(scratch)
    if not path.exists():
        os.rename(scratch, path)
    elif exchange(scratch, path):
        shutil.rmtree(scratch)
    else:
        os.rename(path, _waiting(path))
        os.rename(scratch, path)
        shutil.rmtree(_waiting(path))
    flush(path.parent)


def recover(path: Path) -> None:
    """Puts back a directory that a kill caught between two renames; removes one that is no longer needed.

    One that a process is about to replace is left to it.
    """
    if _waiting(path).exists():
        with suppress(BusyDirectory), locked(path):
            pass


def _recover(path: Path) -> None:
    waiting = _waiting(path)
    if not waiting.exists():
        return
    if path.exists():
        shutil.rmtree(waiting)
    else:
        os.rename(waiting, path)


def exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step; False where the system or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    done = libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
