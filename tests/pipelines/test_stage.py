"""A stage's steps and its time: what was begun for a step is used, and who ran out of time is told."""

from __future__ import annotations

import io
import json
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console

from k3rl.actors import ClusterConfig
from k3rl.checkpoint.train_state import commit, write_shard
from k3rl.config import ConfigError
from k3rl.pipelines import DistillConfig, RLConfig, SFTConfig, policy, sft
from k3rl.pipelines.interrupts import Interrupts
from k3rl.pipelines.stage import Stage, StageResult, cut_notes, memory_note
from k3rl.run.progress import Progress


def session_of(tmp_path):
    """A session that has what a stage's clock and files need, and no actors."""
    info = SimpleNamespace(config_hash="none")
    return SimpleNamespace(
        run=SimpleNamespace(root=tmp_path, checkpoints_dir=tmp_path / "checkpoints", info=info),
        interrupts=Interrupts(),
        cluster=ClusterConfig(),
        progress=Progress(Console(file=io.StringIO())),
        resume=False,
        recorded=lambda: None,
    )


def stage_of(tmp_path, config, steps):
    return Stage(session_of(tmp_path), "rl", config, steps)


def test_a_promised_step_comes_though_the_time_ends_before_it(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stage = stage_of(tmp_path, RLConfig(max_seconds=0.2), 100)
    promised, done = {0}, []
    for step in stage.steps():
        done.append(step)
        if stage.more():
            promised.add(step + 1)
        now[0] += 0.15  # the limit falls into the second of these, after the third step was promised
        stage.step += 1
    assert done == [0, 1, 2]
    assert promised == set(done)


class Idle:
    """Stands where a learner or rollout workers stand: takes every call and does nothing."""

    def __getattr__(self, name):
        return lambda *_: None


class Restored(Idle):
    """A learner whose training state is of a given step."""

    def __init__(self, step: int) -> None:
        self.notes: list[str] = []
        self.step = step

    loop: ClassVar[dict] = {"pass_rates": {}}

    def load_state(self, directory):
        totals = {"trained_tokens": 0.0, "sampled_tokens": 0.0}
        return {"step": self.step, "seconds": 0.0, "totals": totals, "in_flight": None, "loop": self.loop}


@pytest.mark.parametrize(("name", "config"), [("rl", RLConfig()), ("distill", DistillConfig())])
def test_no_rollouts_are_begun_when_no_step_is_left(tmp_path, name, config):
    """As when a run is resumed that was interrupted in its last step: engines must be free for what comes next."""
    if name == "distill":
        (tmp_path / "config.json").write_text("{}")
        config = config.replace(teachers={"*": str(tmp_path)})
    _save(tmp_path, config.steps, name)
    session = session_of(tmp_path)
    session.resume, session.restarts = True, 0
    # no fleet.publish: publishing, and so sampling, would fail
    session.fleet = SimpleNamespace(learner=Restored(config.steps), rollouts=Idle())
    assert policy.train(session, config).steps == config.steps


def test_sft_that_has_taken_its_last_step_takes_no_more_when_it_is_resumed(tmp_path, monkeypatch):
    """As when a run is ended between its last state and its result."""
    config = SFTConfig(decay_steps=3)
    _save(tmp_path, 12, "sft")
    session = session_of(tmp_path)
    learner = Restored(12)
    learner.loop = {"plateau": {"patience": 2, "min_gain": 0.1}, "flat_at": 9, "losses": [[12, 0.5]], "data": {}}
    session.resume, session.restarts, session.fleet = True, 0, SimpleNamespace(learner=learner)
    monkeypatch.setattr(sft, "chat_data", lambda *_: (Idle(), None))
    assert sft.train(session, config).steps == 12  # the learner has nothing that could take a step


def test_the_time_left_bounds_what_is_said_to_remain(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bar = Progress(Console(file=io.StringIO())).stage("sft", 1000, left_s=50)
    now += 10  # ten seconds for one step: 1000 would take hours
    bar.step(1)
    assert bar.columns()[-1] == "eta 40s"


def test_a_stage_that_ran_out_of_time_is_named_with_its_steps():
    cut = StageResult("sft", "c", 20, 1.0, 0.0, 110.0, cut_at=260)
    whole = StageResult("rl", "c", 40, 1.0, 1.0, 90.0)
    (note,) = cut_notes([cut, whole])
    assert note.startswith("max_seconds ended sft after 20 of 260 steps:")
    assert cut_notes([whole]) == []


def _resumed(tmp_path, wanted: str, restarts: int) -> Stage:
    """The stage of a resumed run, whose learner says which state it was given."""
    stage = stage_of(tmp_path, SFTConfig(resume_from=wanted), 9)
    stage.session.resume, stage.session.restarts = True, restarts
    said = {"seconds": 0.0, "totals": {}, "in_flight": None, "loop": {}}
    learner = SimpleNamespace(load_state=lambda path: said | {"step": int(path.rpartition("_")[2])})
    stage.session.fleet = SimpleNamespace(learner=learner)
    return stage


def _save(tmp_path, step: int, name: str = "rl") -> None:
    folder = tmp_path / "checkpoints" / name / f"step_{step}"
    write_shard(folder, 0, {}, {}, save_id="a")
    commit(folder, 1, save_id="a", timeout_s=5)


def test_a_run_that_went_back_and_lost_its_actors_goes_on_from_what_it_has_got_to(tmp_path):
    for step in (2, 4, 6):
        _save(tmp_path, step)
    for wanted, restarts in (("step_2", 0), ("step_2", 1), ("latest", 0)):  # lost before the next state, in two ways
        stage = _resumed(tmp_path, wanted, restarts)
        stage.restore()
        assert stage.step == 2
    _save(tmp_path, 3)
    for wanted, restarts, step in (("step_2", 1, 3), ("latest", 0, 3), ("step_2", 0, 2)):
        stage = _resumed(tmp_path, wanted, restarts)
        stage.restore()
        assert stage.step == step


def test_a_stage_that_has_ended_does_not_pass_over_a_state_that_was_asked_for(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "rl.json").write_text(json.dumps(asdict(StageResult("rl", "c", 8, 1.0, 1.0, 9.0))))
    assert _resumed(tmp_path, "latest", 0).finished().steps == 8
    with pytest.raises(ConfigError, match=r"rl ended after step 8, so nothing goes on from step_6; .*rl\.json"):
        _resumed(tmp_path, "step_6", 0).finished()


def test_a_stage_says_its_peak_and_what_it_was_made_of():
    held = {"weights": 3 * 2**30, "optimizer": 5 * 2**20, "peak": 13.04 * 2**30}
    assert memory_note(held).endswith(": peak 13.0 GiB, of which weights 3.0 GiB, optimizer 5.0 MiB")
    assert memory_note({"weights": 0.0}).endswith("rank: weights 0.0 MiB")


def test_limits_are_those_of_the_config(tmp_path):
    assert not stage_of(tmp_path, SFTConfig(), 5).out_of_time()
    assert stage_of(tmp_path, SFTConfig(max_seconds=1e-9), 5).out_of_time()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"name": "rl", "made": 1}'])
def test_a_result_that_is_none_is_named_without_a_traceback(tmp_path, text):
    session = session_of(tmp_path)
    session.resume, session.restarts = True, 0
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "rl.json").write_text(text)
    with pytest.raises(ConfigError, match=r"rl\.json is damaged .*; delete it, and --resume takes"):
        Stage(session, "rl", RLConfig(), 10).finished()
