"""What a model consists of. K3's totals are those of the released index and report."""

from __future__ import annotations

import shutil

import pytest
import torch

from k3rl.checkpoint import CheckpointError, save_checkpoint
from k3rl.checkpoint.inspect import inspect, tensor_table
from k3rl.model import K3Config, K3ForCausalLM


def test_k3_has_exactly_the_released_totals() -> None:
    found = inspect("k3")
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
    sizes = {name: inspect(name)["parameters"] for name in ("k3-nano", "k3-mini", "k3-small")}
    assert 1.0e6 < sizes["k3-nano"] < 1.3e6
    assert 10e6 < sizes["k3-mini"] < 30e6
    assert 0.35e9 < sizes["k3-small"] < 0.45e9


@pytest.mark.parametrize("case", ["a", "d", "v"])
def test_a_directory_is_counted_as_its_files_are(golden_dir, case) -> None:
    from safetensors.torch import load_file

    tensors = load_file(golden_dir(case) / "model.safetensors")
    found = inspect(golden_dir(case))
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
    found = inspect(tmp_path / "ck")
    assert found["model"] == "k3-nano"
    assert found["differences"] == {"text_config.num_experts": [4, 16]}


def test_files_that_disagree_with_the_configuration_are_refused(golden_dir, tmp_path) -> None:
    shutil.copytree(golden_dir("a"), tmp_path / "ck")
    shutil.copy(golden_dir("v") / "config.json", tmp_path / "ck")
    with pytest.raises(CheckpointError, match="disagree"):
        inspect(tmp_path / "ck")


def test_something_else_is_refused() -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint directory nor one of k3-nano"):
        inspect("k3-giant")
