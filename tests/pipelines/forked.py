"""Commands in copies of a process that has imported what they need: whole processes, without the seconds of a start.

This file run as a script is that process. Each line that it reads is an order in JSON, each line that it writes the
answer: {"words", "folder", "out", "err"} starts a command and gives its process id; {"pid"} gives how that one ended,
null while it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

IMPORTED = ("k3rl.cli.pipeline", "k3rl.pipelines.launch", "k3rl.pipelines.presets", "ray", "torch")


class ForkServer:
    """The process that has imported everything, and how to give it orders."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **order: object) -> int | None:
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


class ForkedCommand:
    """A command that runs, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: ForkServer, words: tuple[str, ...], folder: Path, files: Path) -> None:
        """files: a path to which the suffixes of standard output and error are added."""
        self._server = server
        self._files = [files.with_suffix(suffix) for suffix in (".out", ".err")]
        out, err = map(str, self._files)
        self.pid = server.ask(words=words, folder=str(folder), out=out, err=err)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(pid=self.pid)
        return self.returncode

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("k3rl", timeout)
            time.sleep(0.05)
        out, err = (file.read_text() for file in self._files)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)


def serve() -> int:
    """Answers orders to the end of the input, 0; in a copy, the exit code of its command."""
    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        if "pid" in order:
            pid, status = os.waitpid(order["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            return command(**order)
        print(json.dumps(answer), flush=True)
    return 0


def command(words: list[str], folder: str, out: str, err: str) -> int:
    from k3rl.cli import main

    os.chdir(folder)
    for number, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.argv = ["k3rl", *words]
    return main(words)


if __name__ == "__main__":
    sys.exit(serve())
