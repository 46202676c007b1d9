"""What others meet in an exported folder: files that they may read, and no name of a file that is not there."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from k3rl.checkpoint import CheckpointError, check_export, load_checkpoint, save_checkpoint
from k3rl.checkpoint.hf import without_absent_code
from k3rl.checkpoint.shards import INDEX, open_shard
from k3rl.cli import main
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.tokens import Tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An untrained k3-nano in the official layout, written under the umask 022."""
    folder = tmp_path_factory.mktemp("export") / "nano"
    model = K3ForCausalLM(K3Config.named("k3-nano"))
    model.init_weights(0)
    before = os.umask(0o022)
    try:
        save_checkpoint(model, folder, tokenizer=Tokenizer.builtin())
    finally:
        os.umask(before)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_weights_may_be_read_by_whom_the_umask_says(saved):
    assert {stat.S_IMODE(file.stat().st_mode) for file in saved.iterdir()} == {0o644}


def test_a_fresh_export_names_no_file_that_is_not_there_and_has_no_problem(saved, capsys):
    assert "auto_map" not in json.loads((saved / "config.json").read_text())
    found = check_export(saved)
    assert found.problems == []
    assert found.tensors == len(json.loads((saved / INDEX).read_text())["weight_map"])
    assert main(["export", str(saved), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["problems"] == []


def test_code_and_template_of_the_start_are_carried_over_with_what_names_them(copied, tmp_path):
    (copied / "configuration_kimi_k3.py").write_text("x = 1\n")
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    (copied / "LICENSE").write_text("free")
    config = json.loads((copied / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_kimi_k3.KimiK3Config", "AutoModel": "modeling_kimi_k3.M"}
    (copied / "config.json").write_text(json.dumps(config))
    save_checkpoint(load_checkpoint(copied), tmp_path / "out", tokenizer=Tokenizer.builtin())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["auto_map"] == {"AutoConfig": "configuration_kimi_k3.KimiK3Config"}
    for name in ("configuration_kimi_k3.py", "chat_template.jinja", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (copied / name).read_bytes()
    assert check_export(tmp_path / "out").problems == []


def test_names_of_code_elsewhere_stay_and_lists_go_as_a_whole(tmp_path):
    (tmp_path / "a.py").write_text("")
    named = {"A": "a.A", "B": "owner/name--b.B", "C": ["a.C", None], "D": ["a.D", "missing.D"]}
    assert without_absent_code({"auto_map": named, "x": 1}, tmp_path) == {
        "auto_map": {"A": "a.A", "B": "owner/name--b.B", "C": ["a.C", None]},
        "x": 1,
    }


def edited(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def null_file(index):
    index["weight_map"][min(index["weight_map"])] = None


def one_less(index):
    index["weight_map"].pop(min(index["weight_map"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: edited(folder, null_file), "is null; wanted a file's name"),
        (lambda folder: edited(folder, lambda index: index.update(metadata=None)), None),
        (lambda folder: edited(folder, lambda index: index.update(weight_map=None)), "no readable weight_map"),
        (lambda folder: edited(folder, lambda index: index["metadata"].update(total_size="x")), "number of bytes"),
        (lambda folder: edited(folder, lambda index: index["metadata"].update(total_size=1)), "says 1 bytes"),
        (lambda folder: edited(folder, one_less), "disagree about"),
        (lambda folder: (folder / INDEX).write_bytes(b"\xff"), "no readable weight_map"),
        (lambda folder: min(folder.glob("model-*")).unlink(), "is missing; the index names it"),
        (lambda folder: min(folder.glob("model-*")).chmod(0o600), "may not be read by all"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), "is no JSON"),
    ],
)
def test_what_others_would_trip_over_is_a_problem_and_no_traceback(copied, capsys, change, said):
    change(copied)
    problems = check_export(copied).problems
    assert problems == [] if said is None else any(said in problem for problem in problems)
    assert main(["export", str(copied), "--check"]) == (0 if said is None else 2)
    assert said is None or said in capsys.readouterr().out


def test_a_file_that_may_not_be_read_is_not_called_missing(copied, monkeypatch):
    file = min(copied.glob("model-*"))

    def refused(path, framework):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("k3rl.checkpoint.shards.safe_open", refused)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may read all
    with pytest.raises(CheckpointError, match="is there and may not be read by this user"):
        open_shard(file)
