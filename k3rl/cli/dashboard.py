"""`k3rl dashboard`: the runs of a folder in a browser."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import webbrowser
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from k3rl.cli.output import print_json
from k3rl.cli.parser import Parser
from k3rl.config import ConfigError, MissingResource

TOKEN_VARIABLE = "K3RL_DASHBOARD_TOKEN"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_NEEDS = "the dashboard needs the package {}; install k3rl[dashboard]"


def dashboard(words: Sequence[str]) -> int:
    """The `k3rl dashboard` command."""
    parser = Parser(
        "dashboard",
        "Shows the runs in a folder, live, finished or crashed, in a browser. It only reads. The address that it "
        f"prints has a token, which is ${TOKEN_VARIABLE} where that is set and a fresh one otherwise.",
    )
    parser.add_argument("runs", type=Path, nargs="?", help="a run directory, or the folder that runs are in")
    parser.add_argument("--demo", action="store_true", help="a small recorded run that is part of the package")
    parser.add_argument("--host", default="127.0.0.1", help="loopback by default")
    parser.add_argument("--port", type=_port, default=7860, help="0 takes a free one")
    parser.add_argument("--name", action="append", default=[], help="another name that a browser may call it by")
    parser.add_argument("--json", action="store_true", help="print the address as one JSON object")
    parser.add_argument("--no-browser", action="store_true", help="open no browser")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input does, as its starter ends")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    if (arguments.runs is None) != arguments.demo:
        raise ConfigError("name a folder of runs, or give --demo, and not both", key="runs")
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None and arguments.host not in _LOOPBACK:
        message = f"--host {arguments.host} can be reached by others; set {TOKEN_VARIABLE} to a secret first"
        raise ConfigError(message, key="--host")
    try:
        from k3rl.dashboard import DEMO, DashboardOptions, serve_dashboard
    except ModuleNotFoundError as error:
        raise MissingResource(_NEEDS.format(error.name)) from error
    token = token or secrets.token_urlsafe(32)
    options = DashboardOptions(arguments.host, arguments.port, token, tuple(arguments.name))

    def ready(port: int) -> None:
        shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        url = f"http://{shown}:{port}/?token={token}"
        if arguments.json:
            print_json({"url": url, "host": arguments.host, "port": port, "token": token})
        else:
            print(f"dashboard: {url}", file=sys.stderr, flush=True)
        if arguments.until_eof:
            threading.Thread(target=_end_with_input, daemon=True).start()
        if not arguments.no_browser and sys.stdout.isatty():
            webbrowser.open(url)

    with _unpacked(DEMO) if arguments.demo else _as_it_is(arguments.runs) as root:
        try:
            serve_dashboard(root, options, ready)
        except OSError as error:
            remedy = "name another with --port, or 0 for a free one"
            raise ConfigError(f"{arguments.host}:{arguments.port}: {error.strerror}; {remedy}", key="--port") from None
    return 0


@contextmanager
def beside_run(out: Path) -> Iterator[None]:
    """A dashboard over the folder that the run `out` is in, in a process of its own, as long as the block runs.

    It prints its address, and gives way to the run: it has the lowest priority. Raises MissingResource without its
    packages.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingResource(_NEEDS.format(error.name)) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    flags = ("--port", "0", "--no-browser", "--until-eof")
    command = [sys.executable, "-P", "-m", "k3rl", "dashboard", str(out.parent), *flags]
    # Its input ends with this process, however that ends.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, preexec_fn=_lowest)
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGINT)


def _lowest() -> None:
    os.nice(19)


@contextmanager
def _as_it_is(root: Path) -> Iterator[Path]:
    yield root


@contextmanager
def _unpacked(archive: Path) -> Iterator[Path]:
    """A copy of the packaged run in a folder of its own: packages may lie where nothing can be locked."""
    with tempfile.TemporaryDirectory(prefix="k3rl-demo-") as folder:
        yield Path(shutil.copytree(archive, Path(folder) / "demo"))


def _port(word: str) -> int:
    if not word.isascii() or not word.isdecimal() or int(word) > 65535:
        raise ArgumentTypeError(f"got {word}, wants a whole number from 0 to 65535")
    return int(word)
