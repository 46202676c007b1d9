"""Ctrl-C leaves a run that can be read and continued to the same end, and no Ray behind."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch

from k3rl.checkpoint.train_state import TrainState, latest_train_state

pytestmark = pytest.mark.timeout(400)  # a fixture is several runs of the command


@pytest.fixture(scope="module")
def interrupted(command, small_sft, descendants):
    """(run directory, processes that lived during the run) of an SFT run that got SIGINT after its second step."""
    process = command.start(*small_sft, "--out", "stopped")
    run = command.folder / "stopped"
    deadline = time.monotonic() + 100
    while not (run / "metrics.jsonl").is_file() or (run / "metrics.jsonl").read_text().count('"sft"') < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
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
def resumed(interrupted, command, small_sft):
    """The interrupted run, continued to its end."""
    command.run(*small_sft, "--out", "stopped", "--resume")
    return interrupted[0]


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(resumed, submitted):
    """The other one is a job on a cluster that was up (`test_submit.py`)."""
    done, straight = submitted
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    one, two = (TrainState(latest_train_state(run / "checkpoints" / "sft")).tensors() for run in (resumed, straight))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
