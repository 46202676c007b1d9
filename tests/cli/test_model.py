"""`k3rl inspect`, `k3rl export` and what `k3rl eval` hands on, on a real k3-nano."""

from __future__ import annotations

import json

import pytest
import torch

from k3rl import pipelines
from k3rl.checkpoint import load_checkpoint, official_tensors, save_checkpoint
from k3rl.cli import main
from k3rl.cli.export import find_checkpoint
from k3rl.config import ConfigError, MissingResource
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.tokens import Tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A saved k3-nano with fresh weights."""
    model = K3ForCausalLM(K3Config.named("k3-nano"), dtype=torch.float32)
    model.init_weights(seed=0)
    folder = tmp_path_factory.mktemp("model") / "nano"
    save_checkpoint(model, folder, tokenizer=Tokenizer.builtin())
    return folder


def last_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_inspect_of_a_name_and_of_its_checkpoint_agree(checkpoint, capsys):
    assert main(["inspect", "k3-nano", "--json"]) == 0
    named = last_json(capsys)
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    stored = last_json(capsys)
    assert {"parameters", "active_parameters", "bytes", "parts"} <= named.keys()
    assert [named[key] for key in ("parameters", "bytes")] == [stored[key] for key in ("parameters", "bytes")]
    assert main(["inspect", "k3-nano"]) == 0
    assert f"parameters: {named['parameters']:,}" in capsys.readouterr().out


def test_an_export_of_a_run_reads_back_equal_to_its_source(checkpoint, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    (run / "export" / "rl").symlink_to(checkpoint)
    assert main(["export", str(run), str(tmp_path / "out"), "--json"]) == 0
    result = last_json(capsys)
    before = dict(official_tensors(load_checkpoint(checkpoint)))
    after = dict(official_tensors(load_checkpoint(tmp_path / "out")))
    assert result["tensors"] == len(before) == len(after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert Tokenizer.load(tmp_path / "out").hash == Tokenizer.builtin().hash


def test_a_run_with_several_checkpoints_asks_which(tmp_path):
    for name in ("sft", "rl"):
        (tmp_path / "export" / name).mkdir(parents=True)
        (tmp_path / "export" / name / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="--stage: rl, sft"):
        find_checkpoint(tmp_path, None)
    with pytest.raises(ConfigError, match="it has rl, sft"):
        find_checkpoint(tmp_path, "distil")
    assert find_checkpoint(tmp_path, "rl") == tmp_path / "export" / "rl"


def test_a_folder_without_a_checkpoint_is_missing(tmp_path):
    with pytest.raises(MissingResource):
        find_checkpoint(tmp_path, None)


def test_an_export_onto_itself_is_refused(checkpoint, capsys):
    assert main(["export", str(checkpoint), str(checkpoint)]) == 2
    assert "itself" in capsys.readouterr().err


def test_eval_hands_its_words_on_and_prints_what_was_measured(monkeypatch, checkpoint, capsys):
    calls = []

    def evaluate(path, env, **options):
        calls.append((path, env, options))
        return {"pass_at_1": 0.5, "ci95": [0.4, 0.6], "greedy": 0.75, "n": 7, "by_family": {"list": 0.5}}

    monkeypatch.setattr(pipelines, "evaluate", evaluate)
    words = ["eval", str(checkpoint), "coding-lists", "--n", "7", "--seed", "3", "--env-args.declare_tools"]
    assert main([*words, "--cluster.rollout-threads", "1", "--json"]) == 0
    assert last_json(capsys)["ci95"] == [0.4, 0.6]
    path, env, options = calls[0]
    assert (path, env, options["env_args"]) == (str(checkpoint), "coding-lists", {"declare_tools": True})
    assert (options["evaluation"].n, options["evaluation"].seed) == (7, 3)
    assert options["cluster_config"].rollout_threads == 1
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "pass@1 0.5000   95% interval 0.4000 to 0.6000   7 tasks" in printed
    assert "greedy 0.7500" in printed


@pytest.mark.parametrize(
    ("flags", "said"), [(["--n", "0"], "greater than or equal to 1"), (["--sed", "1"], "nearest: seed")]
)
def test_mistakes_in_an_evaluation_are_explained(flags, said, checkpoint, capsys):
    assert main(["eval", str(checkpoint), "coding-lists", *flags]) == 2
    assert said in capsys.readouterr().err
