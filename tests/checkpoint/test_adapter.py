"""Adapters in PEFT's format: there and back, refused where they mean something else, beside their checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3rl.checkpoint import (
    CheckpointError,
    load_adapter,
    load_checkpoint,
    official_tensors,
    read_card,
    save_adapter,
    save_checkpoint,
)
from k3rl.cli import main
from k3rl.model import Adapter, LoraConfig

CONFIG = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "kv_b_proj", "down_proj", "w1", "w2"))


@pytest.fixture
def base(nano, tmp_path):
    """A checkpoint, and an adapter of it with B that is not zero, saved beside it."""
    model = nano(0)
    save_checkpoint(model, tmp_path / "base")
    adapter = Adapter(model, CONFIG)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(adapter.parameters()):
            parameter.add_((number % 7 - 3) / 64)
    save_adapter(dict(adapter.stored_tensors()), CONFIG, tmp_path / "adapter", base=tmp_path / "base", card={"a": 1})
    return tmp_path, adapter


def test_the_files_are_peft_s(base):
    folder, adapter = base
    content = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert content["peft_type"] == "LORA"
    assert (content["r"], content["lora_alpha"], content["bias"]) == (4, 8, "none")
    assert set(content["target_modules"]) == set(CONFIG.targets)
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.language_model.model.layers."
    assert tensors[f"{prefix}0.self_attn.q_proj.lora_A.weight"].shape[0] == 4
    assert tensors[f"{prefix}1.block_sparse_moe.experts.3.w2.lora_B.weight"].shape[1] == 4
    assert {name.removeprefix("base_model.model.") for name in tensors} == {n for n, _ in adapter.parameters()}
    assert read_card(folder / "adapter")["a"] == "1"


def test_an_adapter_reads_back_to_the_bit_with_the_model_that_it_belongs_to(base):
    folder, adapter = base
    model = load_checkpoint(folder / "adapter", dtype=torch.float32)
    assert model.adapter is not None
    assert model.adapter.config == CONFIG
    found = dict(model.adapter.parameters())
    for name, tensor in adapter.stored_tensors():
        assert torch.equal(found[name].to(torch.bfloat16), tensor), name
    alone = load_checkpoint(folder / "base", dtype=torch.float32)
    assert all(torch.equal(p, dict(alone.official_parameters())[n]) for n, p in model.official_parameters())
    with pytest.raises(CheckpointError, match="adapter"):
        save_checkpoint(model, folder / "whole")


def test_inputs_of_experts_are_rounded_as_in_training_whatever_the_base_says(base):
    folder, adapter = base
    assert load_checkpoint(folder / "base").config.quantization.activations == "mxfp8"
    assert load_checkpoint(folder / "base", activations="none").config.quantization.activations == "none"
    tensors = dict(adapter.stored_tensors())
    save_adapter(tensors, CONFIG, folder / "plain", base=folder / "base", activations="none")
    assert load_checkpoint(folder / "plain").config.quantization.activations == "none"
    assert load_checkpoint(folder / "plain", activations="mxfp8").config.quantization.activations == "mxfp8"


def test_the_base_may_stand_beside_the_adapter(base):
    folder, _ = base
    moved = folder / "elsewhere"
    moved.mkdir()
    for name in ("base", "adapter"):
        (folder / name).rename(moved / name)
    assert load_checkpoint(moved / "adapter").adapter is not None
    (moved / "base").rename(moved / "lost")
    with pytest.raises(CheckpointError, match="beside the adapter"):
        load_checkpoint(moved / "adapter")


def test_weights_that_were_replaced_are_refused_and_the_same_in_another_place_are_not(base, nano, capsys):
    folder, _ = base
    (folder / "base").rename(folder / "kept")
    save_checkpoint(nano(1), folder / "base")
    with pytest.raises(CheckpointError, match=r"beside other weights than .*base holds now"):
        load_checkpoint(folder / "adapter")
    assert main(["export", str(folder / "adapter"), str(folder / "copy")]) == 3
    assert "beside other weights" in capsys.readouterr().err
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(folder / "kept")}))
    assert load_checkpoint(folder / "adapter").adapter is not None


def test_what_k3rl_does_not_compute_is_refused_by_its_key(base):
    folder, _ = base
    file = folder / "adapter" / "adapter_config.json"
    good = json.loads(file.read_text())
    for key, value, words in (
        ("use_dora", True, "use_dora"),
        ("use_rslora", True, "use_rslora"),
        ("bias", "all", "bias"),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("peft_type", "IA3", "peft_type"),
        ("target_modules", "all-linear", "target_modules"),
        ("target_modules", ["embed_tokens"], "targets"),
        ("r", 0, "rank"),
        ("r", None, "rank"),
    ):
        file.write_text(json.dumps(good | {key: value}))
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(folder / "adapter")


def test_a_torn_or_foreign_adapter_is_refused(base, nano):
    folder, _ = base
    file = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, file)
    with pytest.raises(CheckpointError, match=r"lora_A\.weight is missing"):
        load_adapter(folder / "adapter", nano(0))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="whole safetensors"):
        load_adapter(folder / "adapter", nano(0))
    (folder / "adapter" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"mine\.txt"):
        save_adapter(tensors, CONFIG, folder / "adapter", base=folder / "base")


def test_an_export_is_the_adapter_alone_or_one_checkpoint(base, capsys):
    folder, adapter = base
    assert main(["export", str(folder / "adapter"), str(folder / "alone"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tensors"] == len(list(adapter.parameters()))
    one, other = (load_file(folder / name / "adapter_model.safetensors") for name in ("adapter", "alone"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert main(["export", str(folder / "adapter"), str(folder / "merged"), "--merge", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])["merged"]
    assert report["bf16"]["error"] < report["mxfp4"]["error"]
    stored, merged = (dict(official_tensors(load_checkpoint(folder / name))) for name in ("base", "merged"))
    changed = {name for name in stored if not torch.equal(stored[name], merged[name])}
    assert changed
    assert all(any(f".{target}." in name for target in CONFIG.targets) for name in changed)
    assert main(["export", str(folder / "merged"), str(folder / "again"), "--merge"]) == 2
