"""`k3rl submit` runs the same words as a Ray job on a cluster that is up, with token authentication."""

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
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # a fixture is several runs of the command

WORDS = ("--max-steps", "2", "--decay-steps", "0", "--batch-size", "8", "--demonstrations", "50")
ACTORS = ("--cluster.rollout-actors", "1", "--cluster.environment-actors", "1", "--cluster.reward-actors", "1")
MORE = (
    *ACTORS,
    "--cluster.learner-actors",
    "1",
    "--heldout-examples",
    "8",
    "--evaluation.n",
    "4",
    "--evaluation.n-family",
    "0",
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def head(tmp_path_factory, descendants):
    """(dashboard address, environment with the cluster's token) of a cluster started with `ray start --head`."""
    ray = Path(sys.executable).with_name("ray")
    port, dashboard = _free_port(), _free_port()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment |= {
        "PYTHONSAFEPATH": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    words = (
        f"start --head --block --port {port} --dashboard-port {dashboard} --num-cpus 4 --object-store-memory 209715200"
    )
    log = tmp_path_factory.mktemp("head") / "ray.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(ray), *words.split()], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    address = f"http://127.0.0.1:{dashboard}"
    deadline = time.monotonic() + 60
    while not _answers(address):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.3)
    yield address, environment
    # The daemons are in sessions of their own, and `ray stop` would end every Ray of this machine.
    for pid in descendants(process.pid) | {process.pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/api/version", timeout=2)
    except urllib.error.HTTPError:
        return True  # it refuses us without a token, so it is up
    except OSError:
        return False
    return True


def _submit(head, folder: Path, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    address, environment = head
    command = [sys.executable, "-m", "k3rl.cli", "submit", *words, "--address", address]
    return subprocess.run(
        command, env={**environment, **changes}, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def submitted(head, tmp_path_factory):
    folder = tmp_path_factory.mktemp("submitted")
    return _submit(head, folder, "sft", *WORDS, *MORE, "--json", "--out", str(folder / "run")), folder / "run"


def test_the_job_runs_to_its_end_and_its_output_is_followed(submitted):
    done, run = submitted
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert report["steps"] == 2


def test_the_token_is_nowhere_in_the_run(submitted, head):
    _, run = submitted
    token = head[1]["RAY_AUTH_TOKEN"].encode()
    assert [path for path in run.rglob("*") if path.is_file() and token in path.read_bytes()] == []


def test_a_wrong_token_is_a_clear_refusal_and_bad_words_are_refused_before_they_leave(head, tmp_path):
    done = _submit(head, tmp_path, "sft", *WORDS, RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert done.returncode == 3, done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr
    done = _submit(head, tmp_path, "sft", "--max-stepz", "2")
    assert done.returncode == 2
    assert "max-steps" in done.stderr or "max_steps" in done.stderr
