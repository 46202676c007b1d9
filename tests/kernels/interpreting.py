"""Runs a script under Triton's interpreter, in a process of its own (`interpreter_server.py`)."""

from __future__ import annotations

import atexit
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def interpret(script: Path, *arguments: str, timeout_s: float = 110) -> None:
    """Fails with what the script wrote unless it ends with status 0 in time."""
    server = _server()
    print(json.dumps([str(script), *arguments]), file=server.stdin, flush=True)
    with selectors.DefaultSelector() as answers:
        answers.register(server.stdout, selectors.EVENT_READ)
        if not answers.select(timeout_s):
            _end(server)
            raise AssertionError(f"{script.name} {arguments} took more than {timeout_s:g} s")
    line = server.stdout.readline()
    assert line, f"the server ended with status {server.wait(10)}"
    status, written = json.loads(line)
    assert status == 0, written


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One for this process; it imports once what all scripts need."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE.parents[1]}:{HERE}",
    }
    server = subprocess.Popen(
        [sys.executable, HERE / "interpreter_server.py"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """Ends the server and what it runs."""
    _server.cache_clear()
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)
