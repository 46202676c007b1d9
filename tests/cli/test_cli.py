"""The command line: what reaches a pipeline, what a mistake prints, which code it exits with."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from k3rl import cli, pipelines
from k3rl.cli import COMMANDS, main
from k3rl.config import ConfigError, K3Error, MissingResource, config_hash
from k3rl.run import RunDirectory, Signalled


def command(*words: object, **options) -> subprocess.CompletedProcess:
    line = [sys.executable, "-P", "-m", "k3rl", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, **options)


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


# --- the front ----------------------------------------------------------------------------------------------


def test_help_names_every_command_and_takes_less_than_a_second():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)
    # Processor time: what passes on the clock also depends on who shares the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_the_module_is_the_command_of_the_console():
    script = Path(sys.executable).with_name("k3rl")
    said = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert command("--help").stdout == said.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_and_loads_no_torch_or_ray_for_it(name):
    program = (
        "import sys; from k3rl.cli import main; code = main(sys.argv[1:]);"
        "print({'torch', 'ray'} & sys.modules.keys() or 'light'); sys.exit(code)"
    )
    line = [sys.executable, "-P", "-c", program, name, "--help"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert done.stdout.splitlines()[-1] == "light"


def test_an_unknown_command_lists_the_valid_ones(capsys):
    assert main(["distil"]) == 2
    error = capsys.readouterr().err
    assert "nearest: distill" in error
    assert all(name in error for name in COMMANDS)
    assert "Traceback" not in error


def test_no_words_print_the_help(capsys):
    assert main([]) == 0
    assert "usage: k3rl" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"k3rl {version('k3rl')}\n"


# --- what reaches a pipeline --------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", ["sft", "rl", "distill"])
def test_preset_file_flags_and_options_reach_the_pipeline(launched, tmp_path, pipeline):
    file = tmp_path / "a.toml"
    file.write_text("steps = 9\n[optim]\nlr = 1\n")
    words = [pipeline, "mine:small", "--out", str(tmp_path / "run"), "@", str(file), "--optim.lr", "0.5", "--seed", "3"]
    assert main([*words, "--resume"]) == 0
    name, config, options = launched[0]
    assert name == pipeline
    assert (config.steps, config.optim.lr, config.seed) == (9, 0.5, 3)
    assert (options.out, options.seed, options.resume, options.clean) == (tmp_path / "run", 3, True, False)
    assert (options.preset, options.files) == ("mine:small", (file,))
    assert options.argv == ("k3rl", *words, "--resume")


def test_options_may_stand_anywhere_and_take_an_equals_sign(launched):
    assert main(["rl", "--clean", "--out=there", "mine:small", "--seed=4"]) == 0
    _, config, options = launched[0]
    assert (options.clean, options.out, config.seed, config.steps) == (True, Path("there"), 4, 7)


def test_json_is_one_object_on_the_last_line_even_with_numbers_that_are_none(launched, capsys):
    assert main(["rl", "mine:small", "--json"]) == 0
    assert last_json(capsys.readouterr().out) == {"reward_after": 0.5, "missing": "NaN"}


def test_without_json_nothing_is_added_to_the_output(launched, capsys):
    assert main(["rl", "mine:small"]) == 0
    assert capsys.readouterr().out == ""


def test_a_dry_run_prints_the_configuration_and_starts_nothing(launched, capsys):
    assert main(["rl", "mine:small", "--optim.lr", "2", "--dry-run"]) == 0
    assert "optim.lr = 2.0" in capsys.readouterr().out
    assert main(["rl", "mine:small", "--dry-run", "--json"]) == 0
    about = last_json(capsys.readouterr().out)
    assert about["config"]["steps"] == 7
    assert launched == []


def test_a_dry_run_of_a_bad_configuration_exits_2(launched):
    assert main(["rl", "mine:small", "--optim.lrr", "2", "--dry-run"]) == 2


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rl", "mine:small", "--optim.lrr", "1"], "nearest: optim.lr"),
        (["rl", "mine:small", "--steps", "many"], '"many"'),
        (["rl", "mine:small", "--seed", "-1"], "--seed"),
        (["rl", "mine:small", "--out"], "--out"),
        (["rl", "mine:broken"], "stepz"),
        (["rl", "mine:absent"], "mine:absent"),
        (["rl", "nowhere.at.all:x"], "nowhere"),
        (["rl", "mine:small", "extra"], "extra"),
        (["rl", "mine:small", "@", "missing.toml"], "missing.toml"),
        (["submit", "rl", "mine:small"], "--address"),
        (["submit", "rl", "mine:small", "--address", "ftp://x"], "ftp://x"),
        (["submit", "rll", "--address", "http://x"], "nearest: rl"),
        (["submit", "rl", "mine:small", "--optim.lrr", "1", "--address", "http://x"], "nearest: optim.lr"),
        (["tail"], "the following arguments are required: run"),
        (["tail", "x", "--bogus"], "--bogus"),
        (["config", "shw"], "nearest: show"),
        (["config", "show", "rll"], "nearest: rl"),
        (["config", "diff", "a", "b"], "neither a run directory"),
        (["eval", "onlyone"], "usage: k3rl eval"),
    ],
)
def test_a_mistake_exits_2_with_a_message_and_no_traceback(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("k3rl: configuration error\n")
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "words",
    [
        ["tail", "nowhere"],
        ["export", "nowhere", "there"],
        ["eval", "nowhere", "coding-lists"],
        ["serve", "nowhere"],
        ["inspect", "nowhere"],
        ["replay", "nowhere", "rl-0-0-0"],
    ],
)
def test_what_is_missing_exits_3(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 3
    error = capsys.readouterr().err
    assert error.startswith("k3rl: missing\n")
    assert "nowhere" in error


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [
        (ConfigError("bad"), 2, False),
        (MissingResource("no GPU"), 3, False),
        (K3Error("too many failures"), 1, False),
        (KeyboardInterrupt(), 130, False),
        (Signalled(signal.SIGTERM), 143, False),
        (ZeroDivisionError("a bug"), 1, True),
        (FileNotFoundError(errno.ENOENT, "a bug"), 1, True),
    ],
)
def test_what_a_pipeline_raises_decides_the_exit_code(monkeypatch, capsys, error, code, traceback):
    def run(*_):
        raise error

    monkeypatch.setattr(pipelines, "run", run)
    assert main(["rl", "mine:small"]) == code
    said = capsys.readouterr().err
    assert ("Traceback" in said) is traceback
    assert str(error) in said


@pytest.mark.parametrize("kind", [ConfigError, ZeroDivisionError])
def test_what_code_of_others_says_in_an_error_cannot_steer_the_terminal(monkeypatch, capsys, kind):
    def run(*_):
        raise kind("\x1b]0;owned\x07\x1b[2J\u202edetrever\r")

    monkeypatch.setattr(pipelines, "run", run)
    main(["rl", "mine:small"])
    said = capsys.readouterr().err
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(said)
    assert "\u241b]0;owned" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EROFS, "", "/there/run"), "/there/run: Read-only file system; name a place"),
        (OSError(errno.ENOSPC, ""), "No space left on device; free some room"),
        (Exception("while serializing: No space left on device (os error 28)"), "No space left on device; free"),
    ],
)
def test_what_the_system_refuses_is_one_message_and_no_traceback(monkeypatch, capsys, error, said):
    def run(*_):
        raise error

    monkeypatch.setattr(pipelines, "run", run)
    assert main(["rl", "mine:small"]) == 3
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed


def test_an_error_that_ray_wrapped_shows_its_own_message(monkeypatch, capsys):
    class Wrapped(MissingResource):
        cause = MissingResource("no GPU")

    def run(*_):
        raise Wrapped("remote traceback ... no GPU")

    monkeypatch.setattr(pipelines, "run", run)
    assert main(["rl", "mine:small"]) == 3
    assert capsys.readouterr().err == "k3rl: missing\nno GPU\n"


def test_sigterm_ends_a_run_like_ctrl_c_with_a_status_of_its_own(tmp_path):
    program = (
        "import sys, time, types; from pathlib import Path\n"
        "from k3rl import pipelines, cli; from k3rl.config import Config; from k3rl.run import RunDirectory\n"
        "module = types.ModuleType('mine'); module.small = Config; sys.modules['mine'] = module\n"
        "def run(pipeline, config, options):\n"
        "    with RunDirectory.create(options.out, config, pipeline, options):\n"
        "        print('up', flush=True); time.sleep(60)\n"
        "pipelines.run = run\n"
        "sys.exit(cli.main(['rl', 'mine:small', '--out', sys.argv[1]]))\n"
    )
    line = [sys.executable, "-P", "-c", program, str(tmp_path / "run")]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "--resume" in error
    assert RunDirectory.open(tmp_path / "run").info.status == "interrupted"


def test_a_reader_that_goes_away_is_no_error():
    program = (
        "import sys, types; from k3rl import cli, config\n"
        "sys.modules['mine'] = types.ModuleType('mine'); sys.modules['mine'].small = config.Config\n"
        "sys.exit(cli.main(['config', 'schema', 'rl', 'mine:small']))\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        line = [sys.executable, "-P", "-c", program]
        done = subprocess.run(line, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""


# --- submit, config, tail -----------------------------------------------------------------------------------


def test_submit_hands_over_the_words_without_the_address(monkeypatch):
    calls = []
    monkeypatch.setattr("k3rl.pipelines.submit.submit", lambda words, address: calls.append((words, address)) or 7)
    assert main(["submit", "rl", "mine:small", "--address", "http://host:8265", "--optim.lr", "1", "--out", "x"]) == 7
    assert calls == [(["rl", "mine:small", "--optim.lr", "1", "--out", "x"], "http://host:8265")]


def test_submit_takes_the_address_from_rays_variable(monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://there:1")
    monkeypatch.setattr("k3rl.pipelines.submit.submit", lambda words, address: int(address != "http://there:1"))
    assert main(["submit", "rl", "mine:small"]) == 0


def test_config_show_prints_keys_values_meanings_and_the_hash(capsys, user_presets):
    assert main(["config", "show", "rl", "mine:small", "--optim.lr", "0.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split("#")[0].strip() == "optim.lr = 0.25" and "Learning rate." in line for line in lines)
    expected = user_presets.small().replace(optim={"lr": 0.25})
    assert lines[-1] == f"# config_hash {config_hash(expected)}"
    assert main(["config", "show", "rl", "mine:small", "--json"]) == 0
    assert last_json(capsys.readouterr().out)["config_hash"] == config_hash(user_presets.small())


def test_config_diff_compares_runs_and_presets(capsys, tmp_path, user_presets):
    for name, steps in (("a", 7), ("b", 9)):
        RunDirectory.create(tmp_path / name, user_presets.small().replace(steps=steps), "rl").finish("finished")
    assert main(["config", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "steps: 7 -> 9\n"
    resolved = tmp_path / "b" / "configs" / "latest" / "resolved.json"
    assert main(["config", "diff", "rl:mine:small", str(resolved), "--json"]) == 0
    assert last_json(capsys.readouterr().out) == {"changed": {"steps": {"a": 7, "b": 9}}}
    assert main(["config", "diff", str(tmp_path / "a"), "rl:mine:small"]) == 0
    assert capsys.readouterr().out == "equal\n"


def test_config_show_of_a_run_prints_its_last_attempt(capsys, tmp_path, user_presets):
    RunDirectory.create(tmp_path / "a", user_presets.small(), "rl").finish("finished")
    assert main(["config", "show", str(tmp_path / "a")]) == 0
    assert "steps = 7" in capsys.readouterr().out


def test_config_schema_is_a_json_schema_with_help(capsys):
    assert main(["config", "schema", "rl", "mine:small"]) == 0
    schema = last_json(capsys.readouterr().out)
    assert schema["properties"]["steps"]["description"] == "Steps of the run."


def test_tail_prints_what_is_there(capsys, tmp_path, user_presets):
    RunDirectory.create(tmp_path / "a", user_presets.small(), "rl").finish("finished")
    assert main(["tail", str(tmp_path / "a")]) == 0
    assert "finished" in capsys.readouterr().out


# --- the real presets ---------------------------------------------------------------------------------------


def test_the_quickstart_preset_loads_and_survives_its_own_json(capsys):
    assert main(["config", "show", "rl", "quickstart", "--json"]) == 0
    shown = last_json(capsys.readouterr().out)
    assert main(["config", "show", "rl", "quickstart", "--seed", "5", "--json"]) == 0
    other = last_json(capsys.readouterr().out)
    assert other["config"]["seed"] == 5
    assert other["config_hash"] != shown["config_hash"]


@pytest.mark.parametrize("pipeline", ["sft", "rl", "distill"])
def test_every_pipeline_has_a_default_preset(pipeline, capsys):
    assert main(["config", "show", pipeline]) == 0
    assert "config_hash" in capsys.readouterr().out


def test_an_unknown_preset_lists_the_valid_ones(capsys):
    assert main(["rl", "quikstart"]) == 2
    assert "nearest: quickstart" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--group-size", "7"], "does not divide"),
        (["--objective.type", "grop"], "nearest: grpo"),
        (["--trainer.muon-lrr", "1"], "nearest: trainer.muon_lr"),
        (["--env.famlies.list", "1"], "nearest: env.families"),
    ],
)
def test_mistakes_in_a_real_configuration_are_explained(flags, said, capsys):
    assert main(["rl", "default", *flags]) == 2
    assert said in capsys.readouterr().err


def test_every_command_of_the_table_exists():
    from importlib import import_module

    for target, _ in cli.COMMANDS.values():
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function))
