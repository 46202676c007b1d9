"""The processes that compile constraints (`compile_grammars.py`), with limits of time and memory.

A pattern of a few characters can take a compiler hours or all memory. It is then refused, and the process that samples
never waits for it.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3rl.engine.sampling.json_schema import SchemaError

_SCRIPT = Path(__file__).with_name("compile_grammars.py")
_START_S = 120.0  # importing the compiler, on a busy machine
_BEHIND_S = 10.0  # behind the time of a constraint, until its process says so on a busy machine
_AT_ONCE = 2  # so that one slow constraint does not keep the others waiting


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """seconds and bytes of memory of one constraint; text_bytes: of the compiled grammar, serialized."""

    seconds: float = 15.0
    memory_bytes: int = 2 << 30
    text_bytes: int = 64 << 20


class GrammarProcesses:
    """Up to two processes for one vocabulary, started when they are first needed. Threads may share it.

    texts: the bytes of each token, by id; vocab_size: of the model; stop_ids: that end a text.
    """

    def __init__(
        self,
        texts: Sequence[bytes],
        vocab_size: int,
        stop_ids: Sequence[int],
        limits: CompileLimits | None = None,
    ) -> None:
        self.limits = limits or CompileLimits()
        self._about = {
            "texts": [base64.b64encode(text).decode() for text in texts],
            "vocab_size": vocab_size,
            "stop_ids": list(stop_ids),
            "memory_bytes": self.limits.memory_bytes,
        }
        self._free = threading.Semaphore(_AT_ONCE)
        self._lock = threading.Lock()  # of the lists
        self._idle: list[_Process] = []
        self._busy: list[_Process] = []
        self.closed = False
        atexit.register(self.close)

    def compile(self, form: dict[str, Any]) -> str:
        """The serialized grammar of an xgrammar format.

        Raises SchemaError for one that cannot be compiled, or not within the limits.
        """
        with self._free:
            process = self._take()
            try:
                said = process.ask({"form": form, "seconds": self.limits.seconds}, self.limits.seconds + _BEHIND_S)
            except (EOFError, OSError, ValueError) as error:  # a closed pipe is a ValueError
                process.end()
                raise SchemaError(self._why(error)) from error
            finally:
                self._give(process)
        if "error" in said:
            raise SchemaError(said["error"])
        if len(said["grammar"]) > self.limits.text_bytes:
            raise SchemaError(f"its grammar is larger than {self.limits.text_bytes >> 20} MiB; ask for less")
        return str(said["grammar"])

    def close(self) -> None:
        """Ends the processes at once; what waits for one is refused."""
        with self._lock:
            self.closed = True
            for process in (*self._idle, *self._busy):
                process.end()
            self._idle.clear()
        atexit.unregister(self.close)

    def _take(self) -> _Process:
        with self._lock:
            if self.closed:
                raise SchemaError("the compiler of constraints has ended with its engine")
            process = self._idle.pop() if self._idle else _Process()
            self._busy.append(process)
        try:
            process.start(self._about)
        except (EOFError, OSError, ValueError) as error:  # a closed pipe is a ValueError
            process.end()
            self._give(process)
            raise SchemaError(f"the compiler of constraints does not start: {process.complaint() or error}") from error
        return process

    def _give(self, process: _Process) -> None:
        with self._lock:
            self._busy.remove(process)
            if process.alive and not self.closed:
                self._idle.append(process)
            else:
                process.end()

    def _why(self, error: Exception) -> str:
        if self.closed:
            return "the compiler of constraints has ended with its engine"
        return f"the compiler of constraints was ended ({type(error).__name__}); ask again"


class _Process:
    """One process, started once, and what it says."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process; a pipe that nobody reads would fill)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, about: dict[str, Any]) -> None:
        """Starts the process and waits until it is ready; nothing where it is running."""
        if self._process is not None:
            return
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C in a terminal is for whoever started us
        )
        self.ask(about, _START_S)

    def ask(self, said: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Sends one object and returns the answer. Raises EOFError, OSError or TimeoutError."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(said).encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + seconds))
        return answer

    def _line(self, until: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        pieces = [self._read]
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in pieces[-1]:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise EOFError("it ended")
                pieces.append(piece)
        line, _, self._read = b"".join(pieces).partition(b"\n")
        return line

    def complaint(self) -> str:
        """The last line that a process which has ended said on standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def end(self) -> None:
        """Kills the process and a fork of it."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
