"""A rank of a learner that is killed in the middle of a step costs the steps since the last state, and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from k3rl.checkpoint import save_checkpoint
from k3rl.checkpoint.train_state import TrainState, latest_train_state
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.tokens import Tokenizer

pytestmark = pytest.mark.timeout(400)  # a fixture is several runs of the command

STEPS = 4
WORDS = (
    *("--steps", str(STEPS), "--batch-size", "4", "--save-every", "1", "--max-staleness", "1"),
    *("--evaluation.n", "4", "--evaluation.n-family", "0", "--sampling.max-tokens", "12"),
    *("--cluster.learner-actors", "2", "--cluster.rollout-actors", "1"),
    *("--cluster.environment-actors", "1", "--cluster.reward-actors", "1"),
)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A small distillation between two models of random weights: every sampled token trains."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
        model.init_weights(seed)
        save_checkpoint(model, folder / name, tokenizer=Tokenizer.builtin())
    return "distill", "--model.start", str(folder / "student"), "--teachers.*", str(folder / "teacher"), *WORDS


@pytest.fixture(scope="module")
def straight(joined, words) -> Path:
    run = joined.folder / "undisturbed"
    joined.run(*words, "--out", str(run))
    return run


def _in_a_step(pids: set[int]) -> int | None:
    """A learner's process that takes a step right now; Ray names a process by what it does."""
    for pid in pids:
        try:
            if b"LearnerActor.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            continue
    return None


@pytest.fixture(scope="module")
def killed(head, joined, words) -> tuple[Path, str]:
    """(run directory, standard error) of the same run, one of whose ranks got SIGKILL after the second state."""
    run = joined.folder / "disturbed"
    process = joined.start(*words, "--out", str(run))
    latest, deadline = run / "checkpoints" / "distill" / "latest", time.monotonic() + 100
    try:
        while not latest.is_file() or latest.read_text() == "step_1":
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        while (learner := _in_a_step(head.processes())) is None:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
        os.kill(learner, signal.SIGKILL)
        out, error = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, out + error
    return run, error


def test_the_run_says_what_it_lost_and_ends_well(killed):
    run, error = killed
    assert "all actors start again and go on from the last state (1 restarts left)" in error
    assert re.search(r"the actor of learner\.train of rank [01] died", error)
    info = json.loads((run / "run.json").read_text())
    assert (info["status"], info["attempt"]) == ("finished", 2)
    assert (run / "configs" / "attempt_2" / "resolved.json").is_file()


def test_it_ends_with_the_bits_of_a_run_that_nothing_happened_to(killed, straight):
    ends = [latest_train_state(run / "checkpoints" / "distill") for run in (killed[0], straight)]
    assert [end.name for end in ends] == [f"step_{STEPS}"] * 2
    one, two = (TrainState(end).tensors() for end in ends)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_batches_are_one_update_behind_and_each_publication_is_told_once(killed, straight):
    """The first batch is sampled by the weights that it trains; the last step publishes nothing."""
    for run, again in ((straight, None), (killed[0], "attempt 2")):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = {row["step"]: row for row in rows if row["source"] == "distill"}
        assert [steps[n]["staleness/mean"] for n in range(STEPS)] == [0.0, 1.0, 1.0, 1.0], again
        assert [n for n in range(STEPS) if "publish/bytes" in steps[n]] == list(range(STEPS - 1)), again


def test_only_states_that_are_kept_have_their_rollouts(killed):
    folder = killed[0] / "checkpoints" / "distill"
    names = {path.name for path in folder.iterdir()}
    states = {name for name in names if name.startswith("step_")}
    assert states == {f"step_{STEPS - 1}", f"step_{STEPS}"}
    assert {name.split("-")[1] for name in names if name.startswith("in_flight-")} <= states
