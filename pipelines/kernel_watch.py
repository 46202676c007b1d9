"""What a run on GPUs waits for at its start: kernels are compiled ahead beside it, and it says how far that is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from k3rl.kernels import compile_cache, dispatch

_LOOK_S, _SAY_S = 1.0, 5.0


class KernelWatch:
    """Compiles what earlier runs launched and the cache lacks, in processes of its own, and says what is compiled.

    Use as a context manager; `end` falls silent, once the first step is done. The learner and the engines of this
    machine use the same cache: what one of them compiles meanwhile is counted too.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._ended = say, threading.Event()
        self._before, self._begun = compile_cache.compiled(), time.monotonic()
        self._ahead: subprocess.Popen[str] | None = None
        self._done = self._total = 0  # of what is made ahead
        self._seen = self._before

    @property
    def compiled(self) -> int:
        """Kernels that were compiled since the start."""
        return max(0, compile_cache.compiled() - self._before)

    def end(self) -> None:
        """Falls silent."""
        self._ended.set()

    def __enter__(self) -> KernelWatch:
        if dispatch.have_triton():
            self._ahead = subprocess.Popen(
                [sys.executable, "-m", "k3rl.kernels.compile_cache"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self._read, args=(self._ahead,), name="kernels-ahead", daemon=True).start()
            threading.Thread(target=self._watch, name="kernel-watch", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()
        if self._ahead is not None:
            self._ahead.terminate()
            self._ahead.wait()

    def _read(self, ahead: subprocess.Popen[str]) -> None:
        assert ahead.stdout is not None
        for line in ahead.stdout:
            self._done, self._total = map(int, line.split()[:2])

    def _watch(self) -> None:
        said = self._begun
        while not self._ended.wait(_LOOK_S):
            if time.monotonic() - said < _SAY_S:
                continue
            said = time.monotonic()
            if text := self.progress():
                self._say(text)

    def progress(self) -> str:
        """How far the compilation is; empty when nothing was compiled since the last call."""
        found = compile_cache.compiled()
        if found == self._seen:
            return ""
        self._seen, passed_s = found, time.monotonic() - self._begun
        ahead = f", {self._done} of {self._total} of earlier runs looked at" if self._done < self._total else ""
        return f"compiling kernels: {found - self._before} so far{ahead}, {passed_s:.0f} s"
