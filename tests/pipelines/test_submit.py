"""A run ends the same whether it is a job on a cluster that is up or is stopped by Ctrl-C and continued.

`k3rl submit` runs the same words as a Ray job, with token authentication; Ctrl-C leaves a run that can be read, and no
Ray behind.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3rl.checkpoint.train_state import TrainState, latest_train_state
from k3rl.cli import main
from k3rl.config import MissingResource
from k3rl.pipelines import submit as pipelines_submit

pytestmark = pytest.mark.timeout(400)  # a fixture is several runs of the command


@pytest.fixture(scope="module")
def submit(head) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`k3rl submit` with words, in a folder, and with other environment variables."""

    def run(folder: Path, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "k3rl", "submit", *words, "--address", head.dashboard]
        chosen = {"env": {**head.environment, **changes}, "cwd": folder, "timeout": 300}
        return subprocess.run(command, capture_output=True, text=True, check=False, **chosen)

    return run


@pytest.fixture(scope="module")
def submitted(submit, small_sft, tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """(how the command ended, the run directory) of the short SFT run as a job."""
    folder = tmp_path_factory.mktemp("submitted")
    return submit(folder, *small_sft, "--json", "--out", str(folder / "run")), folder / "run"


def test_the_job_runs_to_its_end_and_its_output_is_followed(submitted):
    done, run = submitted
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert report["steps"] == 8


def test_the_token_is_nowhere_in_the_run(submitted, head):
    _, run = submitted
    token = head.environment["RAY_AUTH_TOKEN"].encode()
    assert [path for path in run.rglob("*") if path.is_file() and token in path.read_bytes()] == []


def test_a_wrong_token_is_a_clear_refusal_and_bad_words_are_refused_before_they_leave(submit, head, tmp_path, capsys):
    done = submit(tmp_path, "sft", "--max-steps", "2", RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert done.returncode == 3, done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr
    assert main(["submit", "sft", "--max-stepz", "2", "--address", head.dashboard]) == 2
    error = capsys.readouterr().err
    assert "max-steps" in error or "max_steps" in error


@pytest.fixture(scope="module")
def interrupted(command, small_sft, descendants):
    """(run directory, processes that lived during the run) of an SFT run that got SIGTERM after its second step."""
    process = command.start(*small_sft, "--out", "stopped")
    run = command.folder / "stopped"
    deadline = time.monotonic() + 100
    while not (run / "metrics.jsonl").is_file() or (run / "metrics.jsonl").read_text().count('"sft"') < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    return run, family


def test_the_run_is_readable_and_its_last_whole_step_is_saved(interrupted):
    run, _ = interrupted
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    latest = (run / "checkpoints" / "sft" / "latest").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert latest == f"step_{rows[-1]['step'] + 1}"


def test_no_process_of_ray_is_left(interrupted):
    _, family = interrupted
    assert family
    deadline = time.monotonic() + 20
    left = {pid for pid in family if Path(f"/proc/{pid}/cmdline").is_file()}
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left = {pid for pid in left if Path(f"/proc/{pid}/cmdline").is_file()}
    assert not left


@pytest.fixture(scope="module")
def resumed(interrupted, joined, small_sft):
    """The interrupted run, continued to its end."""
    joined.run(*small_sft, "--out", str(interrupted[0]), "--resume")
    return interrupted[0]


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(resumed, submitted):
    """The other one is the job on a cluster that was up."""
    done, straight = submitted
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    one, two = (TrainState(latest_train_state(run / "checkpoints" / "sft")).tensors() for run in (resumed, straight))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_a_job_waits_for_the_agent_that_starts_it_and_says_when_none_comes(monkeypatch):
    answers = iter(["Request failed with status code 500: No available agent to submit job"] * 2)

    class Client:
        def submit_job(self, **given):
            if (refused := next(answers, None)) is not None:
                raise RuntimeError(refused)
            return given["entrypoint"]

    monkeypatch.setattr(pipelines_submit.time, "sleep", lambda seconds: None)
    assert pipelines_submit._submitted(Client(), "http://head:8265", "k3rl sft", {}) == "k3rl sft"
    answers = iter(["No available agent"])
    monkeypatch.setattr(pipelines_submit, "_AGENT_S", -1.0)
    with pytest.raises(MissingResource, match="no agent of the cluster"):
        pipelines_submit._submitted(Client(), "http://head:8265", "k3rl sft", {})
    answers = iter(["Request failed with status code 400"])
    with pytest.raises(RuntimeError, match="400"):
        pipelines_submit._submitted(Client(), "http://head:8265", "k3rl sft", {})
