"""Which optimizer trains what, for every name of the official layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from k3rl.model.config import K3Config
from k3rl.optim import ClassifyError, ParamInfo, classify

K3 = K3Config.named("k3")
NANO = K3Config.named("k3-nano")
AT = "language_model.model.layers.7.self_attn."
MOE = "language_model.model.layers.7.block_sparse_moe."


@pytest.mark.parametrize(
    ("name", "shape", "heads", "segments"),
    [
        ("q_proj", (12288, 7168), 96, (128,)),
        ("k_proj", (12288, 7168), 96, (128,)),
        ("v_proj", (12288, 7168), 96, (128,)),
        ("q_b_proj", (18432, 1536), 96, (192,)),
        ("kv_b_proj", (24576, 512), 96, (128, 128)),
        ("o_proj", (7168, 12288), 1, (7168,)),
        ("g_proj", (12288, 7168), 1, (12288,)),
        ("f_a_proj", (128, 7168), 1, (128,)),
        ("f_b_proj", (12288, 128), 1, (12288,)),
        ("q_a_proj", (1536, 7168), 1, (1536,)),
        ("kv_a_proj_with_mqa", (576, 7168), 1, (576,)),
    ],
)
def test_only_query_key_and_value_projections_are_cut_per_head(
    name: str, shape: tuple[int, int], heads: int, segments: tuple[int, ...]
) -> None:
    info = classify(f"{AT}{name}.weight", shape, K3)
    assert info == ParamInfo("muon", decay=True, heads=heads, segments=segments)
    assert sum(info.row_blocks) == shape[0]
    assert len(info.row_blocks) == heads * len(segments)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{MOE}experts.895.w1.weight", (3072, 3584)),
        (f"{MOE}experts.0.w2.weight", (3584, 3072)),
        (f"{MOE}experts.13.w3.weight", (3072, 3584)),
        (f"{MOE}gate.weight", (896, 7168)),
        (f"{MOE}routed_expert_down_proj.weight", (3584, 7168)),
        (f"{MOE}routed_expert_up_proj.weight", (7168, 3584)),
        (f"{MOE}shared_experts.gate_proj.weight", (6144, 7168)),
        (f"{MOE}shared_experts.down_proj.weight", (7168, 6144)),
        ("language_model.model.layers.0.mlp.up_proj.weight", (33792, 7168)),
    ],
)
def test_feed_forward_matrices_are_one_block_each(name: str, shape: tuple[int, int]) -> None:
    assert classify(name, shape, K3) == ParamInfo("muon", decay=True, heads=1, segments=(shape[0],))


@pytest.mark.parametrize(
    ("name", "shape", "decay"),
    [
        ("language_model.model.embed_tokens.weight", (163840, 7168), True),
        ("language_model.lm_head.weight", (163840, 7168), True),
        (f"{AT}b_proj.weight", (96, 7168), True),
        (f"{AT}q_conv1d.weight", (12288, 1, 4), True),
        (f"{AT}A_log", (96,), False),
        (f"{AT}dt_bias", (12288,), False),
        (f"{AT}o_norm.weight", (128,), False),
        (f"{AT}kv_a_layernorm.weight", (512,), False),
        (f"{MOE}routed_expert_norm.weight", (3584,), False),
        ("language_model.model.norm.weight", (7168,), False),
        ("language_model.model.output_attn_res_norm.weight", (7168,), False),
        ("language_model.model.output_attn_res_proj.weight", (1, 7168), False),
        ("language_model.model.layers.3.mlp_res_proj.weight", (1, 7168), False),
        ("vision_tower.encoder.blocks.0.wqkv.weight", (4608, 1024), True),
        ("vision_tower.encoder.blocks.0.norm0.weight", (1024,), False),
        ("mm_projector.proj.0.weight", (4096, 4096), True),
        (f"{AT}q_proj.lora_A.weight", (1, 7168), True),
        (f"{AT}q_proj.lora_B.weight", (12288, 1), True),
    ],
)
def test_everything_that_is_no_hidden_matrix_goes_to_adamw(name: str, shape: tuple[int, ...], decay: bool) -> None:
    assert classify(name, shape, K3) == ParamInfo("adamw", decay=decay)


def test_the_balancing_bias_is_trained_by_no_gradient() -> None:
    assert classify(f"{MOE}gate.e_score_correction_bias", (896,), K3).group == "balanced"


@pytest.mark.parametrize("case", ["case_a", "case_d", "case_v"])
def test_every_tensor_of_an_official_checkpoint_has_a_class(case: str) -> None:
    folder = Path(__file__).parents[1] / "golden" / "k3" / case
    config = K3Config.from_json(folder)
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    heads = config.linear_attn_config.num_heads
    outside = re.compile(r"^(vision_tower|mm_projector)|\.(embed_tokens|lm_head|b_proj|\w*_res_proj)\.weight$")
    balanced = 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for stored in names:
            if stored.endswith("weight_scale"):
                continue
            shape = list(file.get_slice(stored).get_shape())
            name = stored.removesuffix("_packed")
            if name != stored:
                shape[1] *= 2  # two values a byte
            if name.endswith("A_log"):
                shape = [heads]
            group = classify(name, shape, config).group
            balanced += group == "balanced"
            assert (group == "muon") == (len(shape) == 2 and not outside.search(name))
    assert balanced == len(config.moe_layers)


def test_unknown_names_and_misfit_rows_are_refused_by_name() -> None:
    with pytest.raises(ClassifyError, match=r"extra_proj\.weight"):
        classify(f"{AT}extra_proj.weight", (8, 8), NANO)
    with pytest.raises(ClassifyError, match=r"65 rows; the config wants 2 heads of 32 rows"):
        classify(f"{AT}q_proj.weight", (65, 64), NANO)
    with pytest.raises(ClassifyError, match=r"2 heads of 32 \+ 32 rows"):
        classify(f"{AT}kv_b_proj.weight", (96, 64), NANO)
    with pytest.raises(ClassifyError, match="matrices"):
        classify(f"{AT}o_proj.weight", (64,), NANO)
