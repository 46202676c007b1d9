"""`k3rl env`: what is there, what an answer is worth in the real sandbox, checks, new packages, acting by hand."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from importlib.metadata import EntryPoint

import pytest

from k3rl.cli import main
from k3rl.cli.env import answer_of, result_of, taken_options
from k3rl.config import ConfigError, MissingResource
from k3rl.envs import make, registry
from k3rl.envs.check import Report
from k3rl.envs.episode_state import EpisodeState
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


def test_an_installed_environment_that_cannot_be_made_hides_no_other(capsys, monkeypatch, tmp_path):
    (tmp_path / "half_written.py").write_text("import a_package_that_is_not_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("half", "half_written:environment", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert main(["env", "list"]) == 0
    said = capsys.readouterr().out
    assert "half   broken: 'half' cannot be made: ModuleNotFoundError" in said
    assert "coding-lists   " in said
    assert main(["env", "check", "half"]) == 2
    error = capsys.readouterr().err
    assert "half_written.py:1)" in error
    assert "Traceback" not in error


def test_a_right_program_is_worth_one(capsys, tmp_path, task):
    file = tmp_path / "answer.py"
    file.write_text(task.hidden["program"])
    code, result = graded(capsys, str(file))
    assert (code, result["status"], result["reward"], result["task"]) == (0, "scored", 1.0, task.id)


def test_name_and_options_come_from_the_file_of_a_run_and_from_the_line(capsys, monkeypatch, tmp_path, task):
    file = tmp_path / "run.toml"
    file.write_text('[env]\nname = "coding-lists"\n[env.args]\ndeclare_tools = true\n[rl]\nsteps = 3\n')
    monkeypatch.setattr("sys.stdin", io.StringIO(task.hidden["program"]))
    assert main(["env", "grade", "@", str(file), "-", "--task", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["reward"] == 1.0
    assert taken_options(["@", str(file), "x", "--env-args.a-b", "2", "--env-args.declare-tools=false", "--json"]) == (
        ["coding-lists", "x", "--json"],
        {"declare_tools": False, "a_b": 2},
    )
    (tmp_path / "none.toml").write_text("steps = 3\n")
    for words in (["@", str(tmp_path / "none.toml")], ["@"], ["coding-lists", "--env-args.declare-tool", "1"]):
        assert main(["env", "check", *words]) == 2
        assert "Traceback" not in capsys.readouterr().err


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


def test_a_folder_is_an_answer_of_files(tmp_path, monkeypatch):
    (tmp_path / "pkg" / "__pycache__").mkdir(parents=True)
    (tmp_path / "pkg" / "b.py").write_text("b = 'ü'\n")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "pkg" / "__pycache__" / "b.pyc").write_bytes(b"\xff")
    assert json.loads(answer_of(tmp_path)) == {"files": {"a.txt": "a", "pkg/b.py": "b = 'ü'\n"}}
    monkeypatch.setattr("k3rl.cli.env.MAX_FOLDER_BYTES", 4)
    with pytest.raises(ConfigError, match="more than 4 bytes"):
        answer_of(tmp_path)


@pytest.mark.parametrize("kind", ["link", "link to folder", "pipe", "bytes"])
def test_a_folder_with_more_than_text_files_is_refused(tmp_path, kind):
    place = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "bytes":
        place.write_bytes(b"\xff\xfe")
    else:
        place.symlink_to("/usr" if kind == "link to folder" else "/etc/passwd")
    with pytest.raises(ConfigError, match=r"plain file|not UTF-8"):
        answer_of(tmp_path)


def test_a_folder_is_graded_like_the_file_that_says_the_same(capsys, tmp_path):
    (tmp_path / "x.py").write_text("def f(a):\n    return a\n")
    code, result = graded(capsys, str(tmp_path))
    assert (code, result["status"], result["reward"]) == (0, "scored", 0.0)


@pytest.fixture
def written(tmp_path, capsys) -> str:
    folder = str(tmp_path / "word-turns")
    assert main(["env", "new", "word-turns", "--out", folder]) == 0
    assert f"next: k3rl env check {folder}" in capsys.readouterr().out
    return folder


def checked_apart(*words: str, **variables: str) -> str:
    """What `k3rl env check` prints in a process of its own: descriptors that other tests' threads open are not its."""
    run = subprocess.run(
        [sys.executable, "-m", "k3rl", "env", "check", *words],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_new_environment_passes_its_check_as_folder_and_as_module(written):
    row = json.loads(checked_apart(written, "--json").splitlines()[-1])
    assert (row["oracle"], row["oracle_expected"], row["null"], row["leaks"], row["ok"]) == (1.0, 1.0, 0.0, [], True)
    assert all({"status", "reward"} <= hack.keys() for hack in row["hacks"].values())
    by_module = checked_apart("word_turns:environment", PYTHONPATH=written)
    assert "word-turns   ok   oracle 1 (wants 1), null 0, 5 of 5 hacks refused" in by_module


def test_all_is_every_shipped_environment_and_what_is_missing_exits_3(monkeypatch, capsys):
    def checked(name, **_):
        if name == "chip":
            raise MissingResource("run `apt-get install yosys`")
        return Report(name, oracle=1.0, oracle_expected=1.0, null=0.0)

    monkeypatch.setattr("k3rl.cli.env.check", checked)
    assert main(["env", "check", "--all", "--json"]) == 3
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ok"] is False
    assert {"chip", "coding-lists", "compiler"} <= found["environments"].keys()
    assert "apt-get install yosys" in found["environments"]["chip"]["missing"]
    assert found["environments"]["compiler"]["ok"] is True


def test_a_failed_check_exits_1_and_says_why(monkeypatch, capsys):
    monkeypatch.setattr("k3rl.cli.env.check", lambda name, **_: Report(name, problems=["a hack paid"]))
    assert main(["env", "check", "coding-lists"]) == 1
    assert "FAILED" in (said := capsys.readouterr().out)
    assert "a hack paid" in said


@pytest.mark.parametrize(
    "words",
    [
        ["env", "check"],
        ["env", "check", "coding-lists", "--all"],
        ["env", "check", "nowhere/at/all"],
        ["env", "new", "Not A Name"],
        ["env", "new", "coding-lists"],
        ["env", "new", "class"],
        ["env", "new", "fine", "--out", "."],
    ],
)
def test_mistakes_of_check_and_new_exit_2(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "something").write_text("x")
    assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def played(capsys, monkeypatch, index: int, text: str) -> tuple[str, dict]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code = main(["env", "play", "coding-lists", "--task", str(index), "--json"])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert code == (1 if result["status"] == "failed" else 0)
    return "\n".join(lines[:-1]), result


def test_a_person_can_solve_a_task_by_hand(capsys, monkeypatch, task):
    shown, result = played(capsys, monkeypatch, 3, task.hidden["program"] + "\n.\n")
    assert task.messages[0].content in shown
    assert (result["status"], result["reward"], result["stop_reason"]) == ("scored", 1.0, "completed")


def test_a_person_can_call_a_tool_answer_from_a_file_and_is_told_of_mistakes(capsys, monkeypatch, tmp_path):
    probe = next(t for t in make("coding-lists").tasks("heldout") if t.family == "probe")
    index = int(probe.id.rpartition("/")[2])
    file = tmp_path / "answer.py"
    file.write_text(probe.hidden["program"])
    call = json.dumps({"code": probe.hidden["program"]})
    script = f"/run words\n/run {{broken\n/file {tmp_path}/nowhere\n/run {call}\n/file {file}\n"
    shown, result = played(capsys, monkeypatch, index, script)
    for mistake in ("'run' is not declared", "not JSON", "No such file"):
        assert mistake in shown
    assert "[tool]\n  ok" in shown
    assert (result["reward"], result["turns"]) == (1.0, 2)


@pytest.mark.parametrize("script", ["", "/quit\n"])
def test_a_person_can_give_up(capsys, monkeypatch, script):
    _, result = played(capsys, monkeypatch, 3, script)
    assert (result["status"], result["stop_reason"]) == ("failed", "cancelled")


REPAIR = ["env", "play", "coding-repair", "--task", "0", "--json", "--env-args.harness", '{"memory": 2}']


def repaired(tail: str) -> str:
    """What a person types who repairs the package, and then `tail`."""
    task = make("coding-repair").source.get("heldout", 0)
    calls = [json.dumps({"path": path, "content": text}) for path, text in task.hidden["files"].items()]
    return "".join(f"/write_file {call}\n" for call in calls) + tail


@pytest.fixture
def half_played(tmp_path):
    """The file of an episode whose player was killed after the repair, before it was handed in."""
    state = tmp_path / "episode"
    player = subprocess.Popen(
        [sys.executable, "-m", "k3rl", *REPAIR, "--state", str(state)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert player.stdin is not None
    player.stdin.write(repaired("/bash echo noted > note\n"))
    player.stdin.flush()
    deadline = time.monotonic() + 60
    while not (state.exists() and b"exit status 0" in state.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    player.kill()
    player.wait()
    player.stdin.close()
    return state


def by_hand(capsys, monkeypatch, state, text: str, *words: str) -> tuple[str, dict]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main([*REPAIR, "--state", str(state), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(lines[:-1]), json.loads(lines[-1])


def test_a_killed_episode_goes_on_with_its_workspace_and_what_it_has_spent(capsys, monkeypatch, half_played):
    shown, result = by_hand(capsys, monkeypatch, half_played, "/bash cat note\n")
    assert "noted" in shown
    assert (result["status"], result["stop_reason"], result["reward"]) == ("paused", "paused", None)
    assert result["turns"] == len(make("coding-repair").source.get("heldout", 0).hidden["files"]) + 2
    _, result = by_hand(capsys, monkeypatch, half_played, "/submit\n")
    assert (result["status"], result["reward"], result["stop_reason"]) == ("scored", 1.0, "completed")
    assert result["turns"] == len(make("coding-repair").source.get("heldout", 0).hidden["files"]) + 3
    assert not half_played.exists()


def test_the_clock_goes_on_where_it_stood_and_ends_the_episode_with_what_is_there(capsys, monkeypatch, half_played):
    head, _, body = half_played.read_bytes().partition(b"\n")
    late = dataclasses.replace(EpisodeState.from_bytes(body), wall_s=3600.0)
    half_played.write_bytes(head + b"\n" + late.to_bytes())
    _, result = by_hand(capsys, monkeypatch, half_played, "", "--clocks")
    assert (result["status"], result["reward"], result["stop_reason"]) == ("scored", 1.0, "wall_timeout")


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        (["coding-repair", "--task", "1"], None, "holds an episode of task"),
        (["coding-repair", "--task", "0"], b"{}\nnothing", "holds no episode"),
        (["coding-repair", "--task", "0"], b"", "holds no episode"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(capsys, tmp_path, words, content, said):
    state = tmp_path / "episode"
    task = make("coding-repair").source.get("heldout", 0)
    other = EpisodeState(task.id, (1,), (), (), (), {}, 0, 0, 0.0, b"")
    state.write_bytes(b'{"tools": []}\n' + other.to_bytes() if content is None else content)
    assert main(["env", "play", *words, "--state", str(state)]) == 2
    assert said in capsys.readouterr().err
    assert state.exists()


def test_an_episode_that_cannot_be_paused_says_so(capsys, monkeypatch, tmp_path):
    probe = next(t for t in make("coding-lists").tasks("heldout") if t.family == "probe")
    monkeypatch.setattr("sys.stdin", io.StringIO('/run {"code": ""}\nx\n.\n'))
    index = probe.id.rpartition("/")[2]
    assert main(["env", "play", "coding-lists", "--task", index, "--state", str(tmp_path / "e")]) == 2
    assert "play it without --state" in capsys.readouterr().err
