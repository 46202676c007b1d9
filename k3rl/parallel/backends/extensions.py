"""Builds DeepSpeed's C++ extension once, in a folder of k3rl's own, without ever waiting for ever.

torch guards such a build with a file that says "somebody builds". A process that is killed leaves it, and every later
process then waits for a builder that does not exist. Here a lock of the operating system stands in front, which ends
with its process; whoever holds it knows that a file of torch's is a leftover.
"""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from k3rl.config import K3Error, MissingResource

BUILD = (
    "from deepspeed.accelerator import get_accelerator\n"
    "get_accelerator().create_op_builder('ShareMemCommBuilder').load()\n"
)
_POLL_S = 0.1


class BuildFailed(K3Error):
    """DeepSpeed's extension did not compile, or not in time."""

    exit_code = 3


def cache_folder() -> Path:
    """Where extensions are kept: TORCH_EXTENSIONS_DIR, or a folder for these versions under the user's cache."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "k3rl" / "extensions" / _versions()


def _versions() -> str:
    versions = [f"{name}-{metadata.version(name)}" for name in ("deepspeed", "torch")]
    return "-".join([*versions, f"py{sys.version_info[0]}{sys.version_info[1]}"])


@functools.cache  # a process needs it once
def prepare(timeout_s: float) -> None:
    """Makes DeepSpeed importable and its collective extension loaded in this process.

    The first call on a machine compiles for about half a minute, in a process of its own that is ended after
    `timeout_s`. Raises MissingResource without DeepSpeed, BuildFailed with the compiler's last words.
    """
    try:
        metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise MissingResource(
            "learner.backend is deepspeed, which is not installed: pip install 'k3rl[deepspeed]'"
        ) from None
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if _has_gpu() else "cpu")
    with lock_folder(folder, timeout_s) as lock:
        for leftover in folder.glob("*/lock"):
            leftover.unlink()
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops import __compatible_ops__

        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is None or not __compatible_ops__.get(builder.NAME, False):
            return  # a GPU, or no compiler: DeepSpeed then takes torch's own collectives
        built = folder / builder.NAME / "k3rl.built"  # goes with what was built
        if not built.is_file() or built.read_text(encoding="utf-8") != _versions():
            compile_extension(timeout_s, folder, lock)
            built.write_text(_versions(), encoding="utf-8")
        builder.load()  # it is there; from now on DeepSpeed finds it without looking at the folder


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def compile_extension(timeout_s: float, folder: Path, lock: int) -> None:
    """Compiles in a process group of its own, which is ended whole when it takes too long."""
    log = folder / "build.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", BUILD],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),  # should this process be killed, the builder goes on and still keeps others out
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise BuildFailed(
                f"DeepSpeed's C++ extension was not built within {timeout_s:g} s (output in {log}); raise "
                "--learner.deepspeed.build-timeout-s, or build it on a quiet machine first"
            ) from None
    if status != 0:
        tail = log.read_text(errors="replace")[-1500:]
        raise BuildFailed(f"DeepSpeed's C++ extension did not compile (all output in {log}):\n{tail}")


@contextmanager
def lock_folder(folder: Path, timeout_s: float) -> Iterator[int]:
    """Holds the folder for this process; yields the lock's descriptor.

    Raises BuildFailed when another process does not give it back in time.
    """
    deadline = time.monotonic() + timeout_s
    with open(folder / "k3rl.lock", "ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildFailed(
                        f"another process has been building in {folder} for {timeout_s:g} s; wait for it or end it"
                    ) from None
                time.sleep(_POLL_S)
        yield lock.fileno()
