"""Configurations: official files in and out, named sizes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3rl.model import K3Config, ModelConfigError, QuantizationConfig
from k3rl.tokens import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "k3"
NAMES = ["k3-nano", "k3-mini", "k3-small", "k3"]


@pytest.mark.parametrize("case", ["a", "d"])
def test_an_official_file_is_written_back_equal_but_for_our_one_key(case) -> None:
    file = GOLDEN / f"case_{case}" / "config.json"
    written = json.loads(json.dumps(K3Config.from_json(file).to_dict()))
    assert written.pop("k3rl_quantization") == {"weights": "mxfp4", "scale_rule": "ceil", "activations": "none"}
    assert written == json.loads(file.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_named_size_survives_its_own_file(name) -> None:
    config = K3Config.named(name)
    assert K3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_k3_has_the_released_layer_map() -> None:
    config = K3Config.named("k3")
    assert list(config.mla_layers) == sorted({*range(3, 92, 4), 92})
    assert len(config.kda_layers) == 69
    assert config.moe_layers == tuple(range(1, 93))
    assert [layer for layer in range(93) if layer % config.attn_res_block_size == 0] == [0, 12, 24, 36, 48, 60, 72, 84]


@pytest.mark.parametrize("name", NAMES[:3])
def test_small_sizes_speak_the_builtin_tokenizer_and_quantize_in_the_loop(name) -> None:
    config, tokenizer = K3Config.named(name), Tokenizer.builtin()
    assert config.vocab_size == tokenizer.vocab_size
    assert config.eos_token_id == tokenizer.special("end_of_msg")
    assert config.media_placeholder_token_id == tokenizer.special("media_pad")
    assert config.pad_token_id == tokenizer.special("pad")
    assert config.quantization == QuantizationConfig("mxfp4", "ceil", "mxfp8")
    assert config.routed_expert_hidden_size % 32 == config.moe_intermediate_size % 32 == 0


def test_without_any_quantization_key_weights_and_activations_are_plain() -> None:
    given = K3Config.named("k3-nano").to_dict()
    del given["k3rl_quantization"], given["text_config"]["quantization_config"]
    assert K3Config.from_dict(given).quantization == QuantizationConfig("none", "ceil", "none")


def test_unknown_text_keys_are_kept_for_writing_back() -> None:
    given = K3Config.named("k3-nano").to_dict()
    given["text_config"]["some_new_key"] = 7
    assert K3Config.from_dict(given).to_dict()["text_config"]["some_new_key"] == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ({"num_experts_per_token": 17}, "must be in 1..16"),
        ({"routed_expert_hidden_size": 48}, "multiple of 32"),
        ({"num_hidden_layers": 6}, "each of the layers 1..6 once"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_a_model_we_cannot_compute_is_refused_by_key(changes, message) -> None:
    given = K3Config.named("k3-nano").to_dict()
    for key, value in changes.items():
        if value is None:
            del given["text_config"][key]
        else:
            given["text_config"][key] = value
    with pytest.raises(ModelConfigError, match=message):
        K3Config.from_dict(given)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ModelConfigError, match="k3-nano, k3-mini"):
        K3Config.named("k4")


@pytest.mark.parametrize("text", ["{", '{"model_type": "llama"}'])
def test_a_file_that_is_no_k3_config_is_refused(tmp_path, text) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError):
        K3Config.from_json(tmp_path)
    with pytest.raises(ModelConfigError, match="does not exist"):
        K3Config.from_json(tmp_path / "nowhere.json")
