"""`k3rl env`: what is there, and what an answer is worth, judged in the real sandbox."""

from __future__ import annotations

import io
import json

import pytest

from k3rl.cli import main
from k3rl.cli_env import result_of
from k3rl.envs import make
from k3rl.types import Failed, Invalid, Scored


@pytest.fixture(scope="module")
def task():
    return make("coding-lists").source.get("heldout", 3, 0)


def graded(capsys, *words) -> tuple[int, dict]:
    code = main(["env", "grade", "coding-lists", *words, "--task", "3", "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_list_names_the_quickstart_environment_and_its_splits(capsys):
    assert main(["env", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["environments"]
    about = next(one for one in found if one["name"] == "coding-lists")
    assert about["splits"]["heldout"] >= 256
    assert main(["env", "list"]) == 0
    assert "coding-lists" in capsys.readouterr().out


def test_a_right_program_is_worth_one(capsys, tmp_path, task):
    file = tmp_path / "answer.py"
    file.write_text(task.hidden["program"])
    code, result = graded(capsys, str(file))
    assert (code, result["status"], result["reward"], result["task"]) == (0, "scored", 1.0, task.id)


def test_a_wrong_program_is_worth_nothing_and_is_read_from_standard_input_too(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(xs):\n    return None\n"))
    code, result = graded(capsys, "-")
    assert (code, result["status"], result["reward"]) == (0, "scored", 0.0)
    assert result.keys() >= {"status", "reward", "parts", "evidence"}


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (Scored(0.5, {"a": 1.0}), ("scored", 0.5, {"a": 1.0}, None, None)),
        (Invalid("hard-coded", "if xs == [1]"), ("invalid", None, {}, "if xs == [1]", "hard-coded")),
        (Failed("sandbox died"), ("failed", None, {}, "sandbox died", None)),
    ],
)
def test_each_state_of_a_score_has_its_keys(score, expected):
    result = result_of(score)
    assert tuple(result[key] for key in ("status", "reward", "parts", "evidence", "hack")) == expected


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["env", "lst"], 2, "nearest: list"),
        (["env", "grade", "coding-list", "x", "--task", "0"], 2, "coding-lists"),
        (["env", "grade", "coding-lists", "nowhere.py", "--task", "0"], 3, "nowhere.py"),
        (["env", "grade", "coding-lists", "x", "--task", "999999"], 2, "wants 0 to"),
        (["env", "grade", "coding-lists", "x", "--task", "0", "--split", "heldot"], 2, "nearest: heldout"),
        (["env", "grade", "coding-lists", "x"], 2, "--task"),
    ],
)
def test_mistakes_are_explained(words, code, said, capsys):
    assert main(words) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_machine_without_a_sandbox_exits_3_and_does_not_run_the_program(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("k3rl.envs.sandbox.bwrap.shutil.which", lambda *_, **__: None)
    trace = tmp_path / "ran"
    file = tmp_path / "answer.py"
    file.write_text(f"open({str(trace)!r}, 'w')\ndef f(xs):\n    return xs\n")
    assert main(["env", "grade", "coding-lists", str(file), "--task", "0"]) == 3
    assert "bubblewrap" in capsys.readouterr().err
    assert not trace.exists()
