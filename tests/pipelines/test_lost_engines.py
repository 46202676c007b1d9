"""All engines of a run are lost at once, and then their node: it says so, and goes on from its last state."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from k3rl.actors import ActorLost
from k3rl.checkpoint import save_checkpoint
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.pipelines.session import Session, with_restarts
from k3rl.tokens import Tokenizer

STEPS = 9
EPISODES = 16
WORDS = (
    *("--steps", str(STEPS), "--batch-size", str(EPISODES), "--save-every", "3"),
    *("--evaluation.n", "4", "--evaluation.n-family", "0", "--sampling.max-tokens", "100"),
    *("--cluster.learner-actors", "1", "--cluster.environment-actors", "1", "--cluster.reward-actors", "1"),
    *("--cluster.rollout-actors", "2", "--cluster.rollout-cpus", "8"),  # for which the head has no room
)


def rows_of(text: str) -> list[dict]:
    """Whole lines of metrics."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Followed:
    """A command whose standard error is read as it comes."""

    def __init__(self, process, run: Path) -> None:
        self.process = process
        self._latest = run / "checkpoints" / "distill" / "latest"
        self._log, self._metrics = run / "logs", run / "metrics.jsonl"

    def beyond(self, step: int) -> None:
        """Returns when there is a state of this step and the next one is trained, which no state has."""
        while int((self._read(self._latest) or "step_0").removeprefix("step_")) < step:
            self._go_on()
        while not any(row["source"] == "distill" and row["step"] == step for row in rows_of(self._read(self._metrics))):
            self._go_on()

    def said(self, text: str, attempt: int) -> None:
        """Returns when an attempt has said this."""
        while text not in self._read(self._log / f"attempt_{attempt}" / "driver.log"):
            self._go_on()

    def _read(self, path: Path) -> str:
        with contextlib.suppress(OSError):
            return path.read_text()
        return ""

    def _go_on(self) -> None:
        assert self.process.poll() is None, self.process.communicate()[1]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def disturbed(head, joined, tmp_path_factory):
    """(run directory, standard error, seconds from a loss to the word of it) of a run that lost its engines twice."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
        model.init_weights(seed)
        save_checkpoint(model, folder / name, tokenizer=Tokenizer.builtin())
    models = "--model.start", str(folder / "student"), "--teachers.*", str(folder / "teacher")
    run, took, nodes = joined.folder / "engines", [], [head.node(folder, 16)]
    process = joined.start("distill", *models, *WORDS, "--out", str(run))
    followed = Followed(process, run)
    try:
        followed.beyond(3)
        for pid in nodes[0].processes():
            with contextlib.suppress(OSError):
                if b"RolloutActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        lost = time.monotonic()
        followed.said("all actors start again", 1)
        took.append(time.monotonic() - lost)
        nodes.append(head.node(folder, 16))  # where they find room later
        followed.beyond(6)
        nodes[0].end()
        lost = time.monotonic()
        followed.said("all actors start again", 2)
        took.append(time.monotonic() - lost)
        out, error = process.communicate(timeout=100)
    finally:
        process.kill()
        for node in nodes:
            node.end()
    assert process.returncode == 0, out + error
    return run, error, took


@pytest.mark.timeout(300)  # a fixture is a run that starts three times, on two nodes
def test_a_run_that_loses_all_engines_at_once_and_then_their_node_ends_well(disturbed):
    run, error, took = disturbed
    first, second = re.findall(
        r"^(.*); all actors start again and go on from the last state \((\d)", error, re.MULTILINE
    )
    assert re.fullmatch(r"rollout actor [01] died|the actor of publishing weights died", first[0])
    assert re.fullmatch(r"node \S+, which had rollout 0, rollout 1, is gone", second[0])
    assert (first[1], second[1]) == ("1", "0")
    assert max(took) < 15  # seconds; Ray itself calls a node dead after some 20
    info = json.loads((run / "run.json").read_text())
    assert (info["status"], info["attempt"]) == ("finished", 3)


def test_episodes_that_lost_engines_had_begun_are_counted_as_played_again(disturbed):
    rows = [json.loads(line) for line in (disturbed[0] / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["source"] == "distill" and "rollout/replayed_episodes" in row]
    again = [sum(row["rollout/replayed_episodes"] for row in steps if row["attempt"] == attempt) for attempt in (2, 3)]
    assert all(count >= EPISODES and count % EPISODES == 0 for count in again)  # the step behind the state, at least
    assert all(row["rollout/replayed_episodes"] == 0 for row in steps if row["attempt"] == 1)


class Members:
    """A fleet whose first fresh actors are lost as they start."""

    def __init__(self, restarts: int, losses: int) -> None:
        self.restarts_left, self.losses, self.begun = restarts, losses, 3

    def lost_nodes(self) -> list[str]:
        return []

    def restart(self) -> None:
        self.restarts_left -= 1
        if self.losses:
            self.losses -= 1
            raise ActorLost("the actor of learner.join died:\nand so on")


def session_of(members: Members, said: list[str], run: Path) -> Session:
    parts = dict.fromkeys(Session.__dataclass_fields__)
    quiet = SimpleNamespace(log_to=lambda path: None, note=said.append)
    about = SimpleNamespace(next_attempt=lambda: None, logs_dir=run, traces_dir=run, info=SimpleNamespace(attempt=2))
    parts |= {"fleet": members, "progress": quiet, "run": about, "restarts": 0, "begun": 0}
    parts |= {"recording": SimpleNamespace(restart=lambda attempt: None), "tokenizer": Tokenizer.builtin()}
    return replace(Session(**parts), metrics=SimpleNamespace(attempt=1))


@pytest.mark.parametrize(("losses", "ends_well"), [(1, True), (2, False)])
def test_a_restart_that_meets_a_lost_actor_uses_the_restarts_that_are_left(tmp_path, losses, ends_well):
    members, said, tried = Members(2, losses), [], []

    def train(session: Session) -> int:
        tried.append(session.begun)
        if len(tried) == 1:
            raise ActorLost("rollout actor 0 died:\nand so on")
        return session.restarts

    if ends_well:
        assert with_restarts(session_of(members, said, tmp_path), train) == 1
        assert tried == [0, 3]
    else:
        with pytest.raises(ActorLost, match=r"learner\.join died"):
            with_restarts(session_of(members, said, tmp_path), train)
    assert [line.partition(";")[0] for line in said] == ["rollout actor 0 died", "the actor of learner.join died"]
