"""Kimi Linear's checkpoints in the hub's layout: read, trained, written back, opened by transformers; and bad ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3rl.checkpoint import (
    CheckpointError,
    copy_checkpoint,
    inspect_model,
    load_checkpoint,
    official_tensors,
    save_checkpoint,
)
from k3rl.cli import main
from k3rl.data import TrainBatch, TrainSequence
from k3rl.losses import CrossEntropy
from k3rl.model import K3Config, K3ForCausalLM, ModelConfigError
from k3rl.numerics import mx
from k3rl.parallel import Trainer, TrainerConfig
from tests.model.kimi_golden import CASES, FOLDER

REMOTE = {
    "modeling_kimi.py": b"# remote code\n",
    "chat_template.jinja": b"{{ messages }}\n",
    "tokenizer_config.json": b'{"auto_map": {}}\n',
    "LICENSE": b"MIT\n",
}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("model*.safetensors") for name, value in load_file(file).items()}


def same(one: Tensor, other: Tensor) -> bool:
    equal = one.dtype == other.dtype and one.shape == other.shape
    return equal and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def batch(vocabulary: int) -> TrainBatch:
    ids, nothing = np.random.default_rng(0).integers(1, vocabulary, 40), np.zeros(40, np.float32)
    return TrainBatch.pack([TrainSequence("s", ids, np.arange(40) > 0, nothing, nothing)])


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """case_c in two shards that cut a layer's experts, with an index and remote code."""
    folder = tmp_path / "hub"
    folder.mkdir()
    shutil.copy(FOLDER / "case_c" / "config.json", folder)
    tensors = load_file(FOLDER / "case_c" / "model.safetensors")
    names, where = sorted(tensors), {}
    for number, part in enumerate((names[:70], names[70:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in REMOTE.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_an_untouched_checkpoint_is_written_back_byte_for_byte(case, dtype, tmp_path) -> None:
    folder = FOLDER / f"case_{case}"
    save_checkpoint(load_checkpoint(folder, dtype), tmp_path / "out")
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same(before[name], after[name]) for name in before)
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_shards_index_and_remote_code_are_those_that_came(sharded, tmp_path) -> None:
    copy_checkpoint(sharded, tmp_path / "out")
    copy_checkpoint(sharded, tmp_path / "out")  # over an older export
    came = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == came
    assert index["metadata"]["total_size"] == inspect_model(sharded)["bytes"]
    for name, content in REMOTE.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    for file in sharded.glob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "out" / file.name)
        assert before.keys() == after.keys()
        assert all(same(before[name], after[name]) for name in before)


def test_training_changes_what_it_trains_and_keeps_dtypes_and_the_rest(sharded, tmp_path) -> None:
    model = load_checkpoint(sharded, torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".self_attn." in name)
    Trainer(model, TrainerConfig(balance="freeze")).train(batch(90), CrossEntropy())
    save_checkpoint(model, tmp_path / "out")
    before, after = tensors_of(sharded), tensors_of(tmp_path / "out")
    changed = {name for name in before if not same(before[name], after[name])}
    assert changed
    assert all(".self_attn." in name for name in changed)
    assert any(name.endswith("A_log") for name in changed)
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    for name, value in official_tensors(load_checkpoint(tmp_path / "out", torch.float32)):
        assert same(value, after[name]), name


def test_an_export_of_a_file_in_float32_keeps_the_digits_of_what_did_not_change(tmp_path) -> None:
    model = load_checkpoint(FOLDER / "case_a", torch.bfloat16)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").add_(1.0)
        model.get_parameter("lm_head.weight")[3] = 7.0
    save_checkpoint(model, tmp_path / "out")
    before, after = tensors_of(FOLDER / "case_a"), tensors_of(tmp_path / "out")
    changed = {name for name in before if not same(before[name], after[name])}
    assert changed == {"model.norm.weight", "lm_head.weight"}
    rows = (before["lm_head.weight"] != after["lm_head.weight"]).any(1)
    assert rows.nonzero().tolist() == [[3]]
    assert {value.dtype for value in after.values()} == {torch.float32}


@pytest.mark.parametrize("case", ["c"])
def test_transformers_opens_an_export_and_gives_the_same_logits(case, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    save_checkpoint(load_checkpoint(FOLDER / f"case_{case}", torch.float32), tmp_path / "out")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(transformers.AutoConfig.from_pretrained(tmp_path / "out")).__name__ == "KimiLinearConfig"
    ids = torch.arange(3, 40).view(1, -1)
    with torch.no_grad():
        mine = load_checkpoint(tmp_path / "out", torch.float32)(ids).logits
        assert torch.allclose(other(ids).logits, mine, atol=1e-3)  # float32 noise of both
    other.save_pretrained(tmp_path / "theirs")  # which spells the dense layer as if it had experts
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in tensors_of(tmp_path / "theirs")
    back = load_checkpoint(tmp_path / "theirs", torch.float32)
    with torch.no_grad():
        assert torch.equal(back(ids).logits, mine)
    save_checkpoint(back, tmp_path / "again")
    assert tensors_of(tmp_path / "again").keys() == tensors_of(FOLDER / f"case_{case}").keys()


def test_a_fresh_model_is_opened_by_transformers(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    model = K3ForCausalLM(K3Config.named("kimi-linear-nano"), dtype=torch.float32)
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "out")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(3, 40).view(1, -1)
    with torch.no_grad():
        assert torch.allclose(other(ids).logits, model(ids).logits, atol=1e-3)


def wide_experts(folder: Path) -> Path:
    """A seed-made checkpoint whose experts are whole blocks."""
    model = K3ForCausalLM(K3Config.named("kimi-linear-nano").replace(num_experts=4), dtype=torch.float32)
    model.init_weights(0)
    save_checkpoint(model, folder)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_experts_are_quantized_at_load_on_request_and_the_loss_is_said(packed, tmp_path) -> None:
    plain = tensors_of(wide_experts(tmp_path / "plain"))
    model = load_checkpoint(tmp_path / "plain", torch.float32, packed=packed, quantization={"weights": "mxfp4"})
    values = dict(model.official_parameters())
    change = square = 0.0
    worst = 0.0
    for name, value in plain.items():
        if ".experts." not in name:
            assert torch.equal(values[name], value.float()), name
            continue
        wanted = mx.dequantize_mxfp4(*mx.quantize_mxfp4(value.float()), torch.float32)
        assert torch.equal(values[name], wanted), name
        own, all_ = float((wanted - value).double().square().sum()), float(value.double().square().sum())
        change, square, worst = change + own, square + all_, max(worst, (own / all_) ** 0.5)
    loss = model.quantization_loss
    assert loss is not None
    assert loss.matrices == 4 * 4 * 3
    assert loss.relative == pytest.approx((change / square) ** 0.5, rel=1e-5)
    assert loss.worst == pytest.approx(worst, rel=1e-5)
    assert 0.05 < loss.relative < 0.2
    assert "48 matrices of experts became MXFP4: relative error 0.1" in str(loss)
    save_checkpoint(model, tmp_path / "out")
    again = load_checkpoint(tmp_path / "out", torch.float32)
    assert again.config.quantization.weights == "mxfp4"
    assert again.quantization_loss is None
    for (name, one), (_, other) in zip(official_tensors(model), official_tensors(again), strict=True):
        assert same(one, other), name
    assert load_checkpoint(tmp_path / "plain", torch.float32).config.quantization.weights == "none"


def test_the_released_model_is_counted_to_the_number() -> None:
    found = inspect_model("kimi-linear-48b")
    assert found["parameters"] == 49_122_681_728
    assert round(found["active_parameters"] / 1e9, 2) == 3.11
    assert found["tensors"] == 20_493
    assert found["model"] == "kimi-linear-48b"
    assert not found["differences"]


@pytest.mark.parametrize("case", CASES)
def test_a_directory_is_inspected_against_its_own_files(case) -> None:
    found = inspect_model(FOLDER / f"case_{case}")
    stored = tensors_of(FOLDER / f"case_{case}").values()
    assert found["parameters"] == sum(tensor.numel() for tensor in stored)
    assert found["bytes"] == sum(tensor.nbytes for tensor in stored)


# ------------------------------------------------------------------------------------------------- bad input


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """case_a with another configuration."""
    shutil.copytree(FOLDER / "case_a", folder, ignore=shutil.ignore_patterns("golden*"))
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


CONFIGURATIONS = {
    "neither": (lambda c: c.update(model_type="llama"), r"model_type is 'llama'; wanted 'kimi_k3' .* or 'kimi_linear'"),
    "no type": (lambda c: c.pop("model_type"), "model_type is None"),
    "K3's key": (lambda c: c.update(attn_res_block_size=4), "attn_res_block_size is 4, a key that the flat dialect"),
    "K3's nested key": (
        lambda c: c["linear_attn_config"].update(gate_lower_bound=-5.0),
        r"linear_attn_config.gate_lower_bound is -5.0, a key that the flat dialect of Kimi Linear does not have",
    ),
    "a missing size": (lambda c: c.pop("kv_lora_rank"), "the key kv_lora_rank is missing"),
    "a size that is none": (lambda c: c.update(hidden_size="64"), "hidden_size is '64'; wanted a number"),
    "two names": (lambda c: c.update(n_group=2), "n_group is 2 and num_expert_group 1"),
    "another activation": (lambda c: c.update(hidden_act="gelu"), "hidden_act is 'gelu'; this program computes only"),
    "stale layers": (
        lambda c: c.update(layer_types=["linear_attention"] * 4 + ["full_attention"]),
        "layer_types says that kda_layers is",
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_that_is_not_computed_is_one_line_with_its_file_and_exit_3(name, tmp_path, capsys) -> None:
    change, message = CONFIGURATIONS[name]
    folder = edited(tmp_path / "ck", change)
    with pytest.raises(ModelConfigError, match=message) as caught:
        load_checkpoint(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert main(["inspect", str(folder)]) == 3
    assert str(folder / "config.json") in capsys.readouterr().err


def test_a_key_of_the_flat_dialect_in_k3s_is_refused() -> None:
    content = K3Config.named("k3-nano").to_dict()
    content["text_config"]["layer_types"] = ["full_attention"] * 5
    with pytest.raises(ModelConfigError, match=r"text_config.layer_types is .* the nested dialect of Kimi K3 does not"):
        K3Config.from_dict(content)
    content = K3Config.named("k3-nano").to_dict() | {"hidden_size": 64}
    with pytest.raises(ModelConfigError, match="hidden_size is 64, a key that the nested dialect"):
        K3Config.from_dict(content)


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.self_attn.f_b_proj.weight"]


def _reshape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.A_log"] = tensors["model.layers.1.self_attn.A_log"].flatten()


def _integers(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


def _halves(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()


def _extra(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary"] = torch.zeros(2)


def _twice(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name.replace("mlp", "block_sparse_moe")] = tensors[name].clone()


def _broken(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * torch.nan


STORED = {
    "missing": (_drop, r"model.layers.1.self_attn.f_b_proj.weight among them; found 196 tensors, wanted each of 197"),
    "another shape": (_reshape, r"A_log has shape \(2,\); this model needs \(1, 1, 2, 1\)"),
    "integers": (_integers, "model.norm.weight is I32; wanted BF16 or F32"),
    "another float": (_halves, "model.norm.weight is F16; wanted BF16 or F32"),
    "unknown": (_extra, "model.layers.0.self_attn.rotary among them"),
    "under two names": (_twice, "is stored under model.layers.0.mlp.gate_proj.weight too"),
    "not finite": (_broken, "model.norm.weight holds NaN"),
}


@pytest.mark.parametrize("name", STORED)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(name, tmp_path) -> None:
    change, message = STORED[name]
    folder = edited(tmp_path / "ck", lambda _: None)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder)
    assert str(folder / "model.safetensors") in str(caught.value)
    assert caught.value.exit_code == 3
