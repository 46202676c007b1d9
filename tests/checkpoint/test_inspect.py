"""What a model consists of. K3's totals are those of the released index and report."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from k3rl.checkpoint import CheckpointError, inspect_model, save_checkpoint
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.model.table import tensor_table


def test_k3_has_exactly_the_released_totals() -> None:
    found = inspect_model("k3")
    assert found["parameters"] == 2_779_931_834_976
    assert found["bytes"] == 1_560_860_324_864
    assert found["tensors"] == 497_220
    assert 104.1e9 < found["active_parameters"] < 104.3e9
    for key in ("parameters", "bytes", "tensors"):
        assert sum(part[key] for part in found["parts"].values()) == found[key]
    assert found["parts"]["vision_tower"]["parameters"] == 401_214_464
    assert (found["model"], found["differences"]) == ("k3", {})


@pytest.mark.parametrize("name", ["k3-nano", "k3-mini"])
def test_the_table_lists_the_parameters_that_the_model_has(name) -> None:
    config = K3Config.named(name)
    model = K3ForCausalLM(config, device="meta")
    listed = {}
    for entry in tensor_table(config):
        names = [entry.name.replace(".experts.0.", f".experts.{e}.") for e in range(entry.copies)]
        listed |= dict.fromkeys(names, entry.shape)
    assert listed == {n: tuple(p.shape) for n, p in model.official_parameters()}


def test_named_sizes_are_as_large_as_they_say() -> None:
    sizes = {name: inspect_model(name)["parameters"] for name in ("k3-nano", "k3-mini", "k3-small")}
    assert 1.0e6 < sizes["k3-nano"] < 1.3e6
    assert 10e6 < sizes["k3-mini"] < 30e6
    assert 0.35e9 < sizes["k3-small"] < 0.45e9


@pytest.mark.parametrize("case", ["a", "d", "v"])
def test_a_directory_is_counted_as_its_files_are(golden_dir, case) -> None:
    from safetensors.torch import load_file

    tensors = load_file(golden_dir(case) / "model.safetensors")
    found = inspect_model(golden_dir(case))
    assert found["bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert found["tensors"] == len(tensors)
    padding = sum(t.numel() - 2 for n, t in tensors.items() if n.endswith("A_log"))
    packed = sum(2 * t.numel() for n, t in tensors.items() if n.endswith("_packed"))
    plain = sum(t.numel() for n, t in tensors.items() if not n.endswith(("_packed", "_scale")))
    assert found["parameters"] == packed + plain - padding


def test_differences_to_the_nearest_named_size_are_listed(tmp_path) -> None:
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4), dtype=torch.float32)
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "ck")
    found = inspect_model(tmp_path / "ck")
    assert found["model"] == "k3-nano"
    assert found["differences"] == {"text_config.num_experts": [4, 16]}


def test_files_that_disagree_with_the_configuration_are_refused(golden_dir, tmp_path) -> None:
    shutil.copytree(golden_dir("a"), tmp_path / "ck")
    shutil.copy(golden_dir("v") / "config.json", tmp_path / "ck")
    with pytest.raises(CheckpointError, match="disagree"):
        inspect_model(tmp_path / "ck")


def test_something_else_is_refused() -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint directory nor one of k3-nano"):
        inspect_model("k3-giant")


def index_only(directory, config: K3Config, total: int | None = None) -> None:
    """What a user has who downloaded no weights: config.json and the index."""
    names: dict[str, str] = {}
    size = 0
    for entry in tensor_table(config):
        size += entry.bytes
        for copy in range(entry.copies):
            name = entry.name.replace(".experts.0.", f".experts.{copy}.") if entry.copies > 1 else entry.name
            kinds = ("_packed", "_scale") if entry.stored == "mxfp4" else ("",)
            names |= {f"{name}{kind}": "model-00001-of-000096.safetensors" for kind in kinds}
    index = {"metadata": {"total_size": size if total is None else total}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config.to_dict()))


def test_an_index_without_weights_arrives_at_the_released_totals(tmp_path) -> None:
    index_only(tmp_path, K3Config.named("k3"))
    found = inspect_model(tmp_path)
    assert (found["tensors"], found["parameters"]) == (497_220, 2_779_931_834_976)
    assert found["bytes"] == 1_560_860_324_864
    assert (found["model"], found["differences"]) == ("k3", {})


def test_an_index_that_does_not_fit_its_configuration_is_refused(tmp_path) -> None:
    index_only(tmp_path, K3Config.named("k3-nano"), total=1)
    with pytest.raises(CheckpointError, match="the index says 1 bytes"):
        inspect_model(tmp_path)
    index_only(tmp_path, K3Config.named("k3-nano"))
    (tmp_path / "config.json").write_text(json.dumps(K3Config.named("k3-mini").to_dict()))
    with pytest.raises(CheckpointError, match=r"is not stored|belongs to no parameter"):
        inspect_model(tmp_path)


def test_a_tensor_of_another_size_is_named(tmp_path) -> None:
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4), dtype=torch.float32)
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "ck")
    changed = model.config.replace(intermediate_size=256)
    (tmp_path / "ck" / "config.json").write_text(json.dumps(changed.to_dict()))
    with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj.weight has 16384 bytes, wanted 32768"):
        inspect_model(tmp_path / "ck")


def test_formats_are_counted_by_part_as_they_are_stored(golden_dir, tmp_path) -> None:
    parts = inspect_model("k3")["parts"]
    assert set(parts["routed_experts"]["dtypes"]) == {"mxfp4"}
    assert set(parts["kda"]["dtypes"]) == {"bf16", "fp32"}
    assert inspect_model("k3")["quantized"] == ["routed_experts"]
    for part in parts.values():
        assert sum(part["dtypes"].values()) == part["parameters"]
    plain = json.loads((golden_dir("a") / "config.json").read_text())
    del plain["text_config"]["quantization_config"]  # what is stored decides, not what the configuration says
    shutil.copytree(golden_dir("a"), tmp_path / "ck")
    (tmp_path / "ck" / "config.json").write_text(json.dumps(plain))
    assert inspect_model(tmp_path / "ck")["quantized"] == ["routed_experts"]
    assert inspect_model(tmp_path / "ck")["bytes"] == inspect_model(golden_dir("a"))["bytes"]
