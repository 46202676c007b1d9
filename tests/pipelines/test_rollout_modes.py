"""Each mode of rollouts in a real run: stopped in the middle and resumed, and true to its bound."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from k3rl.actors import Mode
from k3rl.checkpoint import save_checkpoint
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.pipelines import RLConfig
from k3rl.pipelines.configs import RolloutsConfig
from k3rl.pipelines.layout import schedule_of
from k3rl.tokens import Tokenizer

STEPS = 5
WORDS = (
    *("--steps", str(STEPS), "--batch-size", "8", "--group-size", "2", "--save-every", "1"),
    *("--evaluation.n", "4", "--evaluation.n-family", "0", "--sampling.max-tokens", "12"),
    *("--evaluation.every", "2", "--evaluation.every-n", "3", "--evaluation.max-tokens", "12"),
    *("--cluster.learner-actors", "1", "--cluster.rollout-actors", "1"),
    *("--cluster.environment-actors", "1", "--cluster.reward-actors", "1"),
)
MODES = {
    "asynchronous": (
        *("--rollouts.mode", "asynchronous", "--rollouts.max-off-policy-steps", "2"),
        *("--sampling.replay-routes", "true", "--rollouts.in-flight", "3"),
    ),
    "partial": (
        *("--rollouts.mode", "partial", "--rollouts.fraction", "0.5", "--cluster.engine.in-flight", "carry"),
        *("--evaluation.max-running", "3"),  # so that episodes end one after the other
    ),
}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A small distillation between two models of random weights: every sampled token trains."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
        model.init_weights(seed)
        save_checkpoint(model, folder / name, tokenizer=Tokenizer.builtin())
    return "distill", "--model.start", str(folder / "student"), "--teachers.*", str(folder / "teacher"), *WORDS


def _rows(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["source"] == "distill"]


@pytest.fixture(scope="module", params=MODES)
def stopped_and_resumed(joined, words, request) -> tuple[str, int, list[dict]]:
    """(mode, steps before it was stopped, rows of all steps) of a run that is stopped in the middle of episodes."""
    mode = request.param
    run = joined.folder / mode
    process = joined.start(*words, *MODES[mode], "--out", str(run))
    latest, deadline = run / "checkpoints" / "distill" / "latest", time.monotonic() + 120
    try:
        while not latest.is_file():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    finally:
        process.kill()
    before = len(_rows(run))
    joined.run(*words, *MODES[mode], "--out", str(run), "--resume")
    return mode, before, _rows(run)


@pytest.mark.timeout(400)
def test_a_run_that_is_stopped_in_the_middle_of_episodes_goes_on_and_keeps_its_bound(stopped_and_resumed):
    mode, before, rows = stopped_and_resumed
    assert before < STEPS
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert sum(row.get("rollout/replayed_episodes", 0) for row in rows[:before]) == 0
    assert rows[before]["rollout/replayed_episodes"] >= 2, "groups that were begun are played again"
    assert all(row["staleness/max"] <= 2 for row in rows)
    assert all("rollout/dropped_tokens" in row and "rollout/aborted_tokens" in row for row in rows)
    assert {row["routes/replayed"] for row in rows} == {float(mode == "asynchronous")}, "where it is asked for"
    assert all(row["engine/prompt_tokens_computed"] >= 0 and row["engine/decode_steps"] > 0 for row in rows[:before])
    most = max(row["rollout/most_running"] for row in rows)
    assert most == {"asynchronous": 3, "partial": 8}[mode], "bounded by rollouts.in_flight, or by the batch"
    if mode == "asynchronous":
        assert max(row["staleness/max"] for row in rows) >= 1, "episodes ran while the learner trained"


def test_weights_are_measured_while_the_run_goes_on(stopped_and_resumed):
    _, _, rows = stopped_and_resumed
    found = [row for row in rows if "eval/coding-lists/mean" in row]
    assert [row["eval/coding-lists/step"] for row in found] == [2, 4], "each once, whenever the run was stopped"
    for row in found:
        assert row["counts"]["eval/coding-lists/mean"] + row["eval/coding-lists/missing"] == 3
        assert row["eval/coding-lists/ci_low"] <= row["eval/coding-lists/mean"] <= row["eval/coding-lists/ci_high"]
        assert row["eval/coding-lists/best_step"] == 2, "random weights solve nothing, so no later one is better"
        assert row["step"] + 1 >= row["eval/coding-lists/step"]


def test_a_schedule_follows_from_the_configuration():
    config = RLConfig(batch_size=32, group_size=8)
    assert schedule_of(config).mode is Mode.SYNCHRONOUS
    chosen = config.replace(rollouts=RolloutsConfig(mode="asynchronous", in_flight=7))
    assert (schedule_of(chosen).groups, schedule_of(chosen).max_off_policy_steps) == (4, 1)
    assert schedule_of(chosen).in_flight == 7
    partial = schedule_of(config.replace(rollouts=RolloutsConfig(mode="partial", fraction=0.3)))
    assert (partial.fraction, partial.max_off_policy_steps) == (0.3, None)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_staleness": 1, "rollouts": {"mode": "asynchronous"}}, "set max_staleness to 0"),
        ({"rollouts": {"max_off_policy_steps": 2}}, "max_off_policy_steps is of the modes partial and asynchronous"),
        ({"rollouts": {"mode": "asynchronous", "fraction": 0.5}}, "fraction is of the modes partial"),
        ({"rollouts": {"in_flight": 4}}, "in_flight is of the modes"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(wrong, says):
    with pytest.raises(ValidationError, match=says):
        RLConfig(**wrong)
