"""Run directories: attempts, refusals, the lock, and what a crash leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import Field

from k3rl.config import NOT_HASHED, Config, ConfigError, MissingResource, config_hash
from k3rl.run import RunDirectory, RunOptions


class Settings(Config):
    lr: float = 0.1
    steps: int = 3
    where: str = Field("here", json_schema_extra=NOT_HASHED)


def options(**changes) -> RunOptions:
    return RunOptions(argv=("k3rl", "rl", "--lr", "0.1"), **changes)


def finished(root, **changes) -> RunDirectory:
    with RunDirectory.create(root, Settings(), "rl", options(**changes)) as run:
        (run.root / "metrics.jsonl").write_text("{}\n")
    return run


def test_an_attempt_leaves_what_it_was_started_with(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("lr = 0.5  # mine\n")
    root = tmp_path / "a" / "run"
    with RunDirectory.create(root, Settings(lr=0.5), "rl", options(files=(file,), preset="fast")) as run:
        assert json.loads((root / "run.json").read_text())["status"] == "running"
    about = json.loads((root / "run.json").read_text())
    assert (about["status"], about["attempt"], about["pipeline"], about["name"]) == ("finished", 1, "rl", "run")
    assert about["config_hash"] == config_hash(Settings(lr=0.5))
    assert about["ended"] >= about["started"]
    assert {"python", "torch", "ray", "k3rl"} <= about["versions"].keys()
    folder = root / "configs" / "latest"
    assert os.readlink(folder) == "attempt_1"
    assert Settings(**json.loads((folder / "resolved.json").read_text())) == Settings(lr=0.5)
    assert "lr = 0.5  # mine" in (folder / "launch.toml").read_text()
    assert (folder / "command.txt").read_text() == "k3rl rl --lr 0.1\n"
    assert json.loads((folder / "launch.json").read_text())["preset"] == "fast"
    assert run.resolved() == json.loads((folder / "resolved.json").read_text())


def test_a_used_name_is_refused_with_the_ways_out_and_left_alone(tmp_path):
    finished(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=r"--resume.*--clean.*--out") as caught:
        RunDirectory.create(tmp_path / "run", Settings(), "rl", options())
    assert caught.value.exit_code == 2
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_resume_starts_another_attempt_beside_the_first_and_names_what_changed(tmp_path):
    first = finished(tmp_path / "run")
    kept = (tmp_path / "run" / "configs" / "attempt_1" / "resolved.json").read_bytes()
    run = RunDirectory.create(tmp_path / "run", Settings(steps=9), "rl", options(resume=True))
    assert (run.info.id, run.info.attempt, run.changed) == (first.info.id, 2, ("steps",))
    assert os.readlink(tmp_path / "run" / "configs" / "latest") == "attempt_2"
    assert os.readlink(tmp_path / "run" / "logs" / "latest") == "attempt_2"
    assert (tmp_path / "run" / "configs" / "attempt_1" / "resolved.json").read_bytes() == kept
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    run.finish("finished")


def test_a_run_of_another_kind_is_not_resumed_and_left_alone(tmp_path):
    class Whole(Config):
        first: Settings = Settings()
        second: Settings = Settings()

    finished(tmp_path / "run")
    before = sorted((path, path.read_bytes()) for path in (tmp_path / "run").rglob("*") if path.is_file())
    for config, pipeline in ((Settings(), "sft"), (Whole(), "rl")):
        with pytest.raises(ConfigError, match=r"another kind, started by `k3rl rl --lr 0.1`"):
            RunDirectory.create(tmp_path / "run", config, pipeline, options(resume=True))
    assert sorted((path, path.read_bytes()) for path in (tmp_path / "run").rglob("*") if path.is_file()) == before


def test_clean_deletes_the_old_run(tmp_path):
    first = finished(tmp_path / "run")
    again = finished(tmp_path / "run", clean=True)
    assert again.info.id != first.info.id
    assert again.info.attempt == 1
    assert not (tmp_path / "run" / "configs" / "attempt_2").exists()


def test_clean_and_resume_on_new_names(tmp_path):
    assert finished(tmp_path / "new", clean=True).info.attempt == 1
    with pytest.raises(ConfigError, match="no run"):
        RunDirectory.create(tmp_path / "newer", Settings(), "rl", options(resume=True))


def test_resume_and_clean_together_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="one of them"):
        RunDirectory.create(tmp_path / "run", Settings(), "rl", options(resume=True, clean=True))


@pytest.mark.parametrize("how", [{}, {"clean": True}, {"resume": True}])
def test_a_folder_with_other_files_is_never_touched(tmp_path, how):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run"):
        RunDirectory.create(tmp_path, Settings(), "rl", options(**how))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(KeyboardInterrupt(), "interrupted", None), (ValueError("boom"), "failed", "ValueError: boom")],
)
def test_how_an_attempt_ended_is_written(tmp_path, error, status, said):
    with (
        pytest.raises(type(error)),
        RunDirectory.create(tmp_path / "run", Settings(), "rl", options()),
    ):
        raise error
    info = RunDirectory.open(tmp_path / "run").info
    assert (info.status, info.error) == (status, said)


@pytest.mark.parametrize("how", [{"resume": True}, {"clean": True}])
def test_a_live_run_cannot_be_resumed_or_deleted(tmp_path, how):
    with RunDirectory.create(tmp_path / "run", Settings(), "rl", options()) as run:
        assert RunDirectory.open(tmp_path / "run").is_alive()
        with pytest.raises(ConfigError, match="another process"):
            RunDirectory.create(tmp_path / "run", Settings(), "rl", options(**how))
        assert (run.root / "run.json").exists()
    assert not RunDirectory.open(tmp_path / "run").is_alive()


def test_a_killed_process_leaves_a_readable_run_that_resumes(tmp_path):
    program = (
        "import sys, time; from k3rl.config import Config; from k3rl.run import RunDirectory; from pathlib import Path;"
        "run = RunDirectory.create(Path(sys.argv[1]), Config(), 'rl'); print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    run = RunDirectory.open(tmp_path / "run")
    assert (run.info.status, run.is_alive()) == ("running", False)
    assert finished(tmp_path / "run", resume=True).info.attempt == 2


def test_opening_what_is_no_run_is_a_missing_resource(tmp_path):
    with pytest.raises(MissingResource, match=r"run\.json") as caught:
        RunDirectory.open(tmp_path / "nothing")
    assert caught.value.exit_code == 3


def test_a_damaged_run_file_is_named_and_can_be_cleaned(tmp_path):
    finished(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        RunDirectory.create(tmp_path / "run", Settings(), "rl", options(resume=True))
    assert finished(tmp_path / "run", clean=True).info.attempt == 1


def test_advice_on_a_damaged_run_file_keeps_the_states_and_following_it_goes_on(tmp_path):
    first = finished(tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "rl" / "step_1"
    state.mkdir(parents=True)
    path = tmp_path / "run" / "run.json"
    for text in ("{", "[]", '{"schema": 1}', path.read_text().replace('"attempt": 1', '"attempt": "x"'), "\x00"):
        path.write_text(text)
        for reader in (lambda: RunDirectory.open(tmp_path / "run"), lambda: finished(tmp_path / "run", resume=True)):
            with pytest.raises(ConfigError, match="damaged") as caught:
                reader()
            assert "--clean" not in str(caught.value)
            assert "rename this file" in str(caught.value)
    path.rename(path.with_suffix(".damaged"))
    again = finished(tmp_path / "run", resume=True)
    assert (again.info.attempt, again.info.id, again.info.pipeline) == (2, first.info.id, first.info.pipeline)
    assert state.is_dir()


def test_a_damaged_configuration_of_the_attempt_before_is_said_without_a_traceback(tmp_path):
    finished(tmp_path / "run")
    resolved = tmp_path / "run" / "configs" / "attempt_1" / "resolved.json"
    resolved.write_text("{")
    with pytest.raises(ConfigError, match="delete this file"):
        finished(tmp_path / "run", resume=True)
    resolved.unlink()
    assert finished(tmp_path / "run", resume=True).info.attempt == 2


def test_no_secret_reaches_any_file_of_the_run(tmp_path, monkeypatch):
    canary = "canary-5f3c9b"
    monkeypatch.setenv("HUB_TOKEN", canary)
    file = tmp_path / "my.toml"
    file.write_text(f"# {canary}\nlr = 0.5\n")
    argv = ("k3rl", "rl", "--hub.api-key", canary, f"--password={canary}", "--url", f"https://me:{canary}@host/x")
    with (
        pytest.raises(ValueError, match="canary"),
        RunDirectory.create(tmp_path / "run", Settings(), "rl", RunOptions(argv=argv, files=(file,))),
    ):
        raise ValueError(f"cannot log in with {canary}")
    texts = {path: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not [path for path, text in texts.items() if canary in text]
    command = (tmp_path / "run" / "configs" / "latest" / "command.txt").read_text()
    assert "--hub.api-key" in command
    assert "https://***@host/x" in command


def test_default_directories_are_below_outputs(tmp_path):
    assert str(RunOptions().directory("quickstart")) == "outputs/quickstart"
    assert RunOptions(out=tmp_path).directory("quickstart") == tmp_path


def test_a_reader_of_liveness_does_not_lock_a_resume_out(tmp_path):
    finished(tmp_path / "run")
    reader = RunDirectory.open(tmp_path / "run")
    for _ in range(20):
        reader.is_alive()
    begun = time.monotonic()
    finished(tmp_path / "run", resume=True)
    assert time.monotonic() - begun < 5


def test_a_relative_folder_is_the_same_one_for_who_has_another_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunDirectory.create(Path("run"), Settings(), "rl", options()) as run:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert run.checkpoints_dir.parent == tmp_path / "run"
        run.add_note("said from elsewhere")
    assert "said from elsewhere" in (tmp_path / "run" / "run.json").read_text()
