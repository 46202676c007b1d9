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

WORDS = ("--max-steps", "8", "--decay-steps", "0", "--batch-size", "16", "--demonstrations", "200")
ACTORS = ("--cluster.rollout-actors", "1", "--cluster.environment-actors", "1", "--cluster.reward-actors", "1")
MORE = (*ACTORS, "--heldout-examples", "8", "--check-every", "4", "--evaluation.n", "4", "--evaluation.n-family", "0")


@pytest.fixture(scope="module")
def interrupted(command, descendants):
    """(run directory, processes that lived during the run) of an SFT run that got SIGINT after its second step."""
    process = command.start("sft", *WORDS, *MORE, "--out", "stopped")
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
def resumed(interrupted, command):
    """The interrupted run, continued to its end."""
    command.run("sft", *WORDS, *MORE, "--out", "stopped", "--resume")
    return interrupted[0]


@pytest.fixture(scope="module")
def straight(command):
    """The same run without an interruption."""
    command.run("sft", *WORDS, *MORE, "--out", "straight")
    return command.folder / "straight"


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(resumed, straight):
    one, two = (TrainState(latest_train_state(run / "checkpoints" / "sft")).tensors() for run in (resumed, straight))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
