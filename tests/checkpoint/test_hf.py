"""The official layout: byte equality out and back, strictness, and replacement that survives a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3rl.checkpoint import (
    CheckpointError,
    add_to_card,
    assign_official_tensors,
    load_checkpoint,
    official_tensors,
    read_card,
    save_checkpoint,
)
from k3rl.checkpoint.replace import BusyDirectory, locked
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.numerics import mx, project, stored_dtype
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.tokens import TOKENIZER_FILES, Tokenizer


def stored(model: K3ForCausalLM) -> dict[str, Tensor]:
    return dict(official_tensors(model))


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Same names, dtypes, shapes and bytes."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8))
        for n in a
    )


def files_of(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


# ------------------------------------------------------------------------------------------------ out and back


@pytest.mark.parametrize("case", ["a", "d", "v"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
def test_loaded_tensors_come_out_byte_for_byte(golden_dir, tmp_path, case, dtype) -> None:
    """The golden experts were not packed by our scale rule, so this needs the loaded bytes to be kept."""
    source = load_file(golden_dir(case) / "model.safetensors")
    model = load_checkpoint(golden_dir(case), dtype=dtype)
    assert equal(stored(model), source)
    save_checkpoint(model, tmp_path / "again")
    assert equal(files_of(tmp_path / "again"), source)
    assert equal(stored(load_checkpoint(tmp_path / "again", dtype=dtype)), source)


def test_only_changed_blocks_are_packed_again(golden_dir) -> None:
    source = load_file(golden_dir("a") / "model.safetensors")
    model = load_checkpoint(golden_dir("a"), dtype=torch.float32)
    name = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight"
    parameter = dict(model.official_parameters())[name]
    with torch.no_grad():
        parameter[5, 32:64] = project(torch.linspace(-1, 1, 32), "mxfp4")
    out = stored(model)
    packed, scale = out[f"{name}_packed"], out[f"{name}_scale"]
    assert torch.equal(mx.dequantize_mxfp4(packed, scale), parameter)
    differs = packed != source[f"{name}_packed"]
    assert differs[5, 16:].any()
    differs[5, 16:] = False
    assert not differs.any()
    assert equal({n: t for n, t in out.items() if name not in n}, {n: t for n, t in source.items() if name not in n})


def test_a_trained_looking_model_exports_its_own_values(nano) -> None:
    model, twin = nano(0), nano(1)
    with torch.no_grad():
        for name, parameter in model.official_parameters():
            parameter.copy_(project(parameter + 0.01 * torch.randn_like(parameter), stored_dtype(name)))
    assign_official_tensors(twin, stored(model))
    for (name, a), (_, b) in zip(model.official_parameters(), twin.official_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_exported_tensors_do_not_follow_the_model(nano) -> None:
    model = nano(0)
    out = stored(model)
    copies = {n: t.clone() for n, t in out.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert equal(out, copies)


def test_stored_formats_are_the_official_ones(golden_dir) -> None:
    kinds = {torch.uint8: "mxfp4", torch.bfloat16: "bf16", torch.float32: "fp32"}
    for name, tensor in load_file(golden_dir("v") / "model.safetensors").items():
        assert stored_dtype(name.removesuffix("_packed").removesuffix("_scale")) == kinds[tensor.dtype], name


def test_saved_directory_holds_what_other_programs_look_for(nano, tmp_path) -> None:
    model = nano(0)
    save_checkpoint(model, tmp_path / "ck", tokenizer=Tokenizer.builtin(), card={"title": "T", "steps": 3})
    index = json.loads((tmp_path / "ck" / "model.safetensors.index.json").read_text())
    tensors = files_of(tmp_path / "ck")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "ck" / file)
    layer = "language_model.model.layers.2.input_layernorm.weight"
    assert index["weight_map"][layer] == "model-00003-of-000006.safetensors"
    config = json.loads((tmp_path / "ck" / "config.json").read_text())
    assert config["k3rl_quantization"] == {"weights": "mxfp4", "scale_rule": "ceil", "activations": "mxfp8"}
    generation = json.loads((tmp_path / "ck" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == Tokenizer.builtin().special("end_of_msg")
    assert Tokenizer.load(tmp_path / "ck").hash == Tokenizer.builtin().hash
    card = (tmp_path / "ck" / "README.md").read_text()
    assert "# T\n" in card
    assert "| steps | 3 |" in card
    assert tensors["language_model.model.layers.0.self_attn.A_log"].shape == (32,)


def test_facts_can_be_added_to_a_card_after_saving(nano, tmp_path) -> None:
    save_checkpoint(nano(0), tmp_path / "ck", card={"title": "T", "config_hash": "abc", "note": "a | b"})
    before = files_of(tmp_path / "ck")
    add_to_card(tmp_path / "ck", {"pass@1 coding-lists": 0.625, "note": "c | d"})
    add_to_card(tmp_path / "ck", {"pass@1 coding-lists": 0.75})
    facts = read_card(tmp_path / "ck")
    assert (facts["config_hash"], facts["pass@1 coding-lists"], facts["note"]) == ("abc", "0.75", "c | d")
    text = (tmp_path / "ck" / "README.md").read_text()
    assert text.count("pass@1") == 1
    assert text.index("| note |") < text.index("| pass@1 coding-lists | 0.75 |") < text.index("```python")
    assert equal(before, files_of(tmp_path / "ck"))
    save_checkpoint(nano(0), tmp_path / "copy", card=read_card(tmp_path / "ck"))
    assert read_card(tmp_path / "copy") == facts
    with pytest.raises(CheckpointError, match="does not exist"):
        add_to_card(tmp_path, {"a": 1})


def test_the_loaded_configuration_keeps_quantization_in_the_loop(nano, tmp_path) -> None:
    save_checkpoint(nano(0), tmp_path / "ck")
    assert load_checkpoint(tmp_path / "ck").config == nano(0).config


# ------------------------------------------------------------------------------------------- what is accepted


def test_whether_experts_are_quantized_is_read_off_what_is_stored(golden_dir, tmp_path) -> None:
    """Plain experts under a configuration that says MXFP4 load as plain, and are saved as plain."""
    model = load_checkpoint(golden_dir("a"), dtype=torch.float32)
    plain = {name: p.detach().clone() for name, p in model.official_parameters()}
    save_file({n: t.to(torch.bfloat16 if stored_dtype(n) != "fp32" else t.dtype) for n, t in plain.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    shutil.copy(golden_dir("a") / "config.json", tmp_path)
    loaded = load_checkpoint(tmp_path, dtype=torch.float32)
    assert loaded.config.quantization.weights == "none"
    assert torch.equal(loaded(torch.arange(20)[None]).logits, model(torch.arange(20)[None]).logits)
    assert not any(name.endswith("_packed") for name, _ in official_tensors(loaded))


def test_convolutions_of_rank_two_and_unpadded_gates_are_accepted(nano) -> None:
    model, twin = nano(0), nano(1)
    tensors = stored(model)
    for name in tensors:
        if name.endswith("conv1d.weight"):
            tensors[name] = tensors[name].squeeze(1)
        if name.endswith("A_log"):
            tensors[name] = tensors[name][:2]
    assign_official_tensors(twin, tensors)
    assert equal(stored(twin), stored(model))


# -------------------------------------------------------------------------------------------- what is refused

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight"
NORM = "language_model.model.layers.3.input_layernorm.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"


def _nan_scale(t: dict[str, Tensor]) -> None:
    t[f"{EXPERT}_scale"][3, 1] = 255


def _gate_behind_heads(t: dict[str, Tensor]) -> None:
    t[A_LOG][7] = 1.0


def _not_finite(t: dict[str, Tensor]) -> None:
    t[NORM][0] = float("inf")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda t: t.pop(NORM), NORM),
        (lambda t: t.pop(f"{EXPERT}_scale"), EXPERT),
        (lambda t: t.update(extra=torch.zeros(1)), "extra"),
        (lambda t: t.update({NORM: t[NORM][:-1]}), NORM),
        (lambda t: t.update({NORM: t[NORM].int()}), NORM),
        (lambda t: t.update({f"{EXPERT}_packed": t[f"{EXPERT}_packed"].t().contiguous()[:1]}), f"{EXPERT}_packed"),
        (lambda t: t.update({f"{EXPERT}_packed": t[f"{EXPERT}_packed"].to(torch.int8)}), f"{EXPERT}_packed"),
        (lambda t: t.update({EXPERT: torch.zeros(64, 64)}), EXPERT),
        (_nan_scale, f"{EXPERT}_scale"),
        (_gate_behind_heads, A_LOG),
        (_not_finite, NORM),
    ],
    ids=[
        "missing", "scale-missing", "unknown", "shape", "integers", "packed-shape", "packed-dtype", "stored-twice",
        "nan-scale", "gate-per-channel", "infinite",
    ],
)  # fmt: skip
def test_a_damaged_set_is_refused_by_name_and_changes_nothing(nano, damage, name) -> None:
    model = nano(0)
    before = stored(model)
    tensors = stored(nano(1))
    damage(tensors)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        assign_official_tensors(model, tensors)
    assert equal(stored(model), before)


def test_directories_that_are_no_whole_checkpoint_are_refused(nano, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_checkpoint(tmp_path)
    path = tmp_path / "ck"
    save_checkpoint(nano(0), path)
    shard = path / "model-00002-of-000006.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=shard.name):
        load_checkpoint(path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load_checkpoint(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load_checkpoint(path)


def test_an_index_that_points_outside_its_directory_is_refused(nano, tmp_path) -> None:
    save_checkpoint(nano(0), tmp_path / "ck")
    index = tmp_path / "ck" / "model.safetensors.index.json"
    given = json.loads(index.read_text())
    given["weight_map"][NORM] = "../elsewhere.safetensors"
    index.write_text(json.dumps(given))
    with pytest.raises(CheckpointError, match="not a file name in this directory"):
        load_checkpoint(tmp_path / "ck")


def test_a_folder_with_anything_else_in_it_is_left_alone(nano, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        save_checkpoint(nano(0), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="is a file"):
        save_checkpoint(nano(0), tmp_path / "notes.txt")


# ---------------------------------------------------------------------------------------------- replacement


def test_a_new_checkpoint_replaces_an_older_one_completely(nano, tmp_path) -> None:
    path = tmp_path / "ck"
    save_checkpoint(nano(0), path, tokenizer=Tokenizer.builtin())
    deeper = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=8))
    deeper.init_weights(2)
    save_checkpoint(deeper, path)
    assert equal(stored(load_checkpoint(path, dtype=torch.float32)), stored(deeper))
    assert not [name for name in TOKENIZER_FILES if (path / name).exists()]
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]


def test_a_disk_that_returns_other_bytes_is_noticed_and_the_old_checkpoint_stays(nano, tmp_path, monkeypatch) -> None:
    from k3rl.checkpoint import shards

    path = tmp_path / "ck"
    save_checkpoint(nano(0), path)

    def flip(tensors: dict[str, Tensor], file: Path, **more: object) -> None:
        save_file({n: t + 1 for n, t in tensors.items()}, file)

    monkeypatch.setattr(shards, "save_file", flip)
    with pytest.raises(CheckpointError, match="does not read back"):
        save_checkpoint(nano(1), path)
    assert equal(stored(load_checkpoint(path, dtype=torch.float32)), stored(nano(0)))


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(nano, tmp_path, monkeypatch) -> None:
    from k3rl.checkpoint import hf

    path = tmp_path / "ck"
    save_checkpoint(nano(0), path)
    real = hf.fill

    def fill(model: K3ForCausalLM, files: Mapping[str, Tensor], **more: object) -> object:
        save_checkpoint(nano(1), path)
        return real(model, files, **more)

    with monkeypatch.context() as patch:
        patch.setattr(hf, "fill", fill)
        with pytest.raises(CheckpointError, match="replaced while it was read"):
            load_checkpoint(path, dtype=torch.float32)
    assert equal(stored(load_checkpoint(path, dtype=torch.float32)), stored(nano(1)))


def test_a_checkpoint_that_another_process_writes_is_left_to_it(nano, tmp_path) -> None:
    path = tmp_path / "ck"
    save_checkpoint(nano(0), path)
    with locked(path), pytest.raises(BusyDirectory, match="ck now"):
        save_checkpoint(nano(1), path)
    assert equal(stored(load_checkpoint(path, dtype=torch.float32)), stored(nano(0)))


SAVER = """
    import sys, torch
    from k3rl.checkpoint import save_checkpoint
    from k3rl.model import K3Config, K3ForCausalLM
    torch.set_num_threads(1)
    models = []
    for seed in (0, 1):
        model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
        model.init_weights(seed)
        models.append(model)
    save_checkpoint(models[0], sys.argv[1])
    print("ready", flush=True)
    while True:
        for model in models:
            save_checkpoint(model, sys.argv[1])
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(nano, tmp_path) -> None:
    """SIGKILL at different moments of a loop that saves two models over each other; what loads is one of them."""
    either = [stored(nano(0)), stored(nano(1))]
    path = tmp_path / "ck"
    for delay_s in (0.005, 0.018, 0.031):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVER), str(path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=os.getcwd(),
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        loaded = stored(load_checkpoint(path, dtype=torch.float32))
        assert any(equal(loaded, one) for one in either)
    save_checkpoint(nano(1), path)  # leftovers of the killed writers are cleared away
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize("case", ["a", "d", "v"])
def test_a_trainer_that_has_taken_no_step_changes_no_stored_byte(golden_dir, case) -> None:
    """The golden experts were packed by another rule, with negative zeros; masters must not re-quantize them."""
    model = load_checkpoint(golden_dir(case), dtype=torch.float32)
    Trainer(model, TrainerConfig())
    assert equal(stored(model), load_file(golden_dir(case) / "model.safetensors"))
