"""The named sizes: fields of a `K3Config` each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3rl.model.config_parts import LinearAttnConfig, QuantizationConfig, VisionConfig
from k3rl.model.dialect_kimi_linear import fields_of
from k3rl.tokens import K3_SPECIAL_IDS, SMALL_SPECIAL_IDS


def _layer_lists(layers: int, full: tuple[int, ...]) -> dict[str, Any]:
    """1-based lists for `layers` layers of which `full` (1-based) are MLA."""
    return {
        "kda_layers": tuple(layer for layer in range(1, layers + 1) if layer not in full),
        "full_attn_layers": full,
    }


def _small_ids() -> dict[str, Any]:
    """Special ids of the builtin 512-id tokenizer. eos is end_of_msg, the token that ends a turn."""
    return {
        "vocab_size": 512,
        "bos_token_id": SMALL_SPECIAL_IDS["bos"],
        "eos_token_id": SMALL_SPECIAL_IDS["end_of_msg"],
        "pad_token_id": SMALL_SPECIAL_IDS["pad"],
        "media_placeholder_token_id": SMALL_SPECIAL_IDS["media_pad"],
    }


_IN_THE_LOOP = QuantizationConfig(weights="mxfp4", scale_rule="ceil", activations="mxfp8")


def _nano() -> dict[str, Any]:
    return dict(
        **_small_ids(),
        hidden_size=64,
        num_hidden_layers=5,
        num_attention_heads=2,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_token=2,
        num_shared_experts=2,
        routed_expert_hidden_size=64,
        attn_res_block_size=2,
        linear_attn_config=LinearAttnConfig(num_heads=2, head_dim=32, **_layer_lists(5, (4, 5))),
        max_position_embeddings=4096,
        quantization=_IN_THE_LOOP,
    )


def _mini() -> dict[str, Any]:
    return dict(
        **_small_ids(),
        hidden_size=256,
        num_hidden_layers=9,
        num_attention_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        intermediate_size=768,
        moe_intermediate_size=128,
        num_experts=32,
        num_experts_per_token=4,
        num_shared_experts=2,
        routed_expert_hidden_size=128,
        attn_res_block_size=4,
        linear_attn_config=LinearAttnConfig(num_heads=4, head_dim=64, **_layer_lists(9, (4, 8, 9))),
        max_position_embeddings=16384,
        quantization=_IN_THE_LOOP,
    )


def _small() -> dict[str, Any]:
    return dict(
        **_small_ids(),
        hidden_size=1024,
        num_hidden_layers=13,
        num_attention_heads=8,
        q_lora_rank=384,
        kv_lora_rank=256,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=4096,
        moe_intermediate_size=256,
        num_experts=64,
        num_experts_per_token=8,
        num_shared_experts=2,
        routed_expert_hidden_size=512,
        attn_res_block_size=4,
        linear_attn_config=LinearAttnConfig(num_heads=8, head_dim=128, **_layer_lists(13, (4, 8, 12, 13))),
        max_position_embeddings=131072,
        quantization=_IN_THE_LOOP,
    )


def _k3() -> dict[str, Any]:
    """The released model; activations plain, as its `input_activations: null` says."""
    return dict(
        vocab_size=163840,
        bos_token_id=K3_SPECIAL_IDS["bos"],
        eos_token_id=K3_SPECIAL_IDS["end_of_msg"],
        pad_token_id=K3_SPECIAL_IDS["pad"],
        media_placeholder_token_id=K3_SPECIAL_IDS["media_pad"],
        hidden_size=7168,
        num_hidden_layers=93,
        num_attention_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=33792,
        moe_intermediate_size=3072,
        num_experts=896,
        num_experts_per_token=16,
        num_shared_experts=2,
        routed_expert_hidden_size=3584,
        attn_res_block_size=12,
        linear_attn_config=LinearAttnConfig(num_heads=96, head_dim=128, **_layer_lists(93, (*range(4, 93, 4), 93))),
        vision_config=VisionConfig(),
        quantization=QuantizationConfig(weights="mxfp4", activations="none"),
    )


def _kimi_linear(layers: int, full: tuple[int, ...], *, heads: int, head_dim: int, **sizes: Any) -> dict[str, Any]:
    lists = _layer_lists(layers, full)
    linear = {"num_heads": heads, "head_dim": head_dim, "short_conv_kernel_size": 4} | {
        key: list(numbers) for key, numbers in lists.items()
    }
    return fields_of({"num_hidden_layers": layers, "num_attention_heads": heads, "linear_attn_config": linear, **sizes})


def _kimi_linear_ids() -> dict[str, Any]:
    ids = _small_ids()
    del ids["media_placeholder_token_id"]
    return ids


def _kimi_linear_nano() -> dict[str, Any]:
    return _kimi_linear(
        5,
        (4,),
        heads=2,
        head_dim=32,
        **_kimi_linear_ids(),
        hidden_size=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=16,
        num_experts_per_token=2,
        num_shared_experts=1,
        routed_scaling_factor=2.446,
        model_max_length=4096,
    )


def _kimi_linear_small() -> dict[str, Any]:
    return _kimi_linear(
        13,
        (4, 8, 12, 13),
        heads=8,
        head_dim=128,
        **_kimi_linear_ids(),
        hidden_size=1024,
        kv_lora_rank=256,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=4096,
        moe_intermediate_size=256,
        num_experts=64,
        num_experts_per_token=8,
        num_shared_experts=1,
        routed_scaling_factor=2.446,
        model_max_length=131072,
    )


def _kimi_linear_48b() -> dict[str, Any]:
    """The released model."""
    return _kimi_linear(
        27,
        (4, 8, 12, 16, 20, 24, 27),
        heads=32,
        head_dim=128,
        vocab_size=163840,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
        hidden_size=2304,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=9216,
        moe_intermediate_size=1024,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        routed_scaling_factor=2.446,
        model_max_length=1048576,
    )


SIZES: dict[str, Callable[[], dict[str, Any]]] = {
    "k3-nano": _nano,
    "k3-mini": _mini,
    "k3-small": _small,
    "k3": _k3,
    "kimi-linear-nano": _kimi_linear_nano,
    "kimi-linear-small": _kimi_linear_small,
    "kimi-linear-48b": _kimi_linear_48b,
}
