"""Runs of the real command, small: a real Ray, real sandboxes, real files.

A `command` starts a process and a Ray of its own, as a user does. A `joined` one joins a cluster that several files
share, in a copy of a process that has imported everything: half of what a short run costs is starting.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.forked import ForkedCommand, ForkServer

SMALL = """
[metrics]
tensorboard = true
[cluster]
object_store_mb = 200
rollout_actors = 1
environment_actors = 1
reward_actors = 1
[sft]
max_steps = 6
check_every = 2
decay_steps = 2
batch_size = 16
demonstrations = 400
heldout_examples = 16
save_every = 2
[rl]
steps = 2
batch_size = 8
group_size = 4
[rl.trainer]
expert_parallel = 2
[distill]
steps = 2
batch_size = 8
[distill.trainer]
shard_frozen = 2
[distill.trainer.lora]
rank = 4
[evaluation]
n = 6
n_family = 2
"""

SMALL_SFT = (
    *("sft", "--max-steps", "8", "--decay-steps", "0", "--batch-size", "16", "--demonstrations", "200"),
    *("--cluster.rollout-actors", "1", "--cluster.environment-actors", "1", "--cluster.reward-actors", "1"),
    *("--heldout-examples", "8", "--check-every", "4", "--evaluation.n", "4", "--evaluation.n-family", "0"),
    *("--cluster.learner-actors", "1"),
)


ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT.pop("RAY_ADDRESS", None)


class Command:
    """The `k3rl` command in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *words: str) -> subprocess.Popen[str] | ForkedCommand:
        return subprocess.Popen(
            [sys.executable, "-m", "k3rl", *words],
            cwd=self.folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0, timeout: float = 240) -> tuple[str, str]:
        """(standard output, standard error) of a command that must end with `code`."""
        process = self.start(*words)
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == code, f"exit {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
        return out, err

    def json(self, *words: str) -> dict:
        out, _ = self.run(*words, "--json")
        return json.loads(out.splitlines()[-1])


class JoinedCommand(Command):
    """The same on a cluster that is up, whose actors are in another folder: give it whole paths."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        super().__init__(folder)
        self._server = server
        self._started = 0

    def start(self, *words: str) -> ForkedCommand:
        self._started += 1
        return ForkedCommand(self._server, words, self.folder, self.folder / f"command-{self._started}")


class Head:
    """A cluster started with `ray start --head`, with token authentication.

    environment: of a process that may join it. dashboard: its address, for jobs.
    """

    def __init__(self, folder: Path) -> None:
        log = folder / "ray.log"
        for _ in range(4):  # Ray gives up where a node takes more than 30 s to come up, as on a busy machine
            self._start(log)
            deadline = time.monotonic() + 100
            while self._process.poll() is None and time.monotonic() < deadline:
                if b"Ray runtime started" in log.read_bytes() and _answers(self.dashboard):
                    return
                time.sleep(0.3)
            self.end()
        raise AssertionError(log.read_text())

    def _start(self, log: Path) -> None:
        port, dashboard = _free_port(), _free_port()
        self.environment = ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # A node that refuses connections is dead after five looks; a busy one does not refuse.
        self.environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_health_check_period_ms": "1000"}
        self.address, self.dashboard = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
        words = f"start --head --block --port {port} --dashboard-port {dashboard} --num-cpus 4"
        ray = Path(sys.executable).with_name("ray")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(ray), *words.split(), "--object-store-memory", "209715200"],
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def processes(self) -> set[int]:
        """Ids of its daemons, and of the actors on it."""
        return _descendants(self._process.pid)

    def node(self, folder: Path, cpus: int) -> Node:
        """One more node of the cluster, on this machine."""
        words = f"start --address {self.address} --block --num-cpus {cpus} --object-store-memory 100000000"
        with (folder / "node.log").open("ab") as output:
            return Node(
                subprocess.Popen(
                    [str(Path(sys.executable).with_name("ray")), *words.split()],
                    env=self.environment,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def end(self) -> None:
        # The daemons are in sessions of their own, and `ray stop` would end every Ray of this machine.
        for pid in self.processes() | {self._process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(30)


class Node:
    """A node beside the head."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def processes(self) -> set[int]:
        """Ids of its daemons, and of the actors on it."""
        return _descendants(self._process.pid)

    def end(self) -> None:
        """SIGKILL to its daemon, whose actors go with it, and to what is left."""
        for pid in sorted(self.processes(), key=lambda pid: b"raylet/raylet" not in _command_of(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(30)


def _command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/api/version", timeout=2)
    except urllib.error.HTTPError:
        return True  # it refuses us without a token, so it is up
    except OSError:
        return False
    return True


JOINING = ("test_lost_engines.py", "test_restart.py", "test_rollout_modes.py", "test_submit.py")
"""Files that share the cluster."""
_up = ExitStack()
_shared: dict[str, Any] = {}


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Head:
    if "head" not in _shared:
        _shared["head"] = Head(tmp_path_factory.mktemp("head"))
        _up.callback(_shared["head"].end)
    return _shared["head"]


@pytest.fixture(scope="module")
def joined(head, tmp_path_factory) -> JoinedCommand:
    if "server" not in _shared:
        _shared["server"] = ForkServer(head.environment | {"RAY_ADDRESS": head.address})
        _up.callback(_shared["server"].close)
    return JoinedCommand(tmp_path_factory.mktemp("joined"), _shared["server"])


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The cluster ends with the last file that uses it, not with the session: one that waits takes a core's tenth."""
    if nextitem is None or nextitem.path.name not in JOINING or nextitem.path.parent != Path(__file__).parent:
        _up.close()
        _shared.clear()


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A TOML file that makes the quickstart small."""
    path = tmp_path_factory.mktemp("config") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="session")
def command(tmp_path_factory) -> Command:
    return Command(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def small_sft() -> tuple[str, ...]:
    """The words of a short SFT run."""
    return SMALL_SFT


def _descendants(parent: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                    int(entry.name)
                )
            except OSError:
                continue
    found: set[int] = set()
    waiting = [parent]
    while waiting:
        fresh = set(children.get(waiting.pop(), ())) - found
        found |= fresh
        waiting += fresh
    return found


@pytest.fixture(scope="session")
def descendants() -> Callable[[int], set[int]]:
    """A function from a process id to the ids of all processes below it."""
    return _descendants
