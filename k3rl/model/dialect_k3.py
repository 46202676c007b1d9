"""Kimi K3's `config.json`: a language model nested under `text_config`, beside it a vision tower (k3.md 1.1, 1.2, 11).

The keys of our own are `k3rl_quantization` and, where a part of K3 is replaced, `k3rl_ablation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3rl.model.ablation import AblationConfig, ModelConfigError
from k3rl.model.config_parts import (
    MX_BLOCK,
    LinearAttnConfig,
    VisionConfig,
    pick,
    plain,
    read_quantization,
    refuse_foreign_keys,
    refuse_other_models,
)

if TYPE_CHECKING:
    from k3rl.model.config import K3Config

MODEL_TYPE = "kimi_k3"
NAME = "the nested dialect of Kimi K3"

# Keys with one supported value: the model would be another one with any other.
_FIXED_TEXT: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
_FIXED_VISION: dict[str, Any] = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
# Official keys that change nothing here, written as the official file has them.
_CONSTANT_TEXT: dict[str, Any] = {
    **_FIXED_TEXT,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "use_grouped_topk": True,
    "use_cache": True,
    "transformers_version": "4.56.2",
}
_CONSTANT_TOP: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "ignore_index": -100,
    "image_placeholder": "<|kimi_image_placeholder|>",
    "tie_word_embeddings": False,
    "auto_map": {
        "AutoConfig": "configuration_kimi_k3.KimiK3Config",
        "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    },
}
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "group",
                "group_size": MX_BLOCK,
                "scale_dtype": "torch.uint8",
                "dynamic": False,
                "observer": "minmax",
                "observer_kwargs": {},
                "actorder": None,
                "block_structure": None,
                "zp_dtype": None,
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}
# Keys of the flat dialect alone, and what stands at its top.
_FOREIGN_TEXT = (
    "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "layer_types", "mlp_layer_types",
    "num_local_experts", "num_experts_per_tok", "n_group", "n_shared_experts", "norm_topk_prob", "model_max_length",
)  # fmt: skip
_FOREIGN_TOP = (
    *_FOREIGN_TEXT, "hidden_size", "num_hidden_layers", "num_attention_heads", "linear_attn_config", "kv_lora_rank",
    "num_experts", "moe_intermediate_size",
)  # fmt: skip
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOT_IN_TEXT = (
    "model_type", "vision_config", "quantization", "ablation", "other_keys", "stored_float32",
    "media_placeholder_token_id", "mla_latent_norm_eps",
)  # fmt: skip


def read(given: Mapping[str, Any], cls: type[K3Config]) -> dict[str, Any]:
    """The fields of a `K3Config`. Raises ModelConfigError for what is missing, or means a model that is not there."""
    text = dict(given["text_config"])
    refuse_foreign_keys(given, _FOREIGN_TOP, "", NAME)
    refuse_foreign_keys(text, _FOREIGN_TEXT, "text_config.", NAME)
    ablation = AblationConfig.from_dict(given.get("k3rl_ablation", {}))
    refuse_other_models(text, {**_FIXED_TEXT, **ablation.official_keys()}, "text_config.")
    if "num_key_value_heads" in text and text["num_key_value_heads"] != text.get("num_attention_heads"):
        raise ModelConfigError(
            f"num_key_value_heads is {text['num_key_value_heads']}; it must equal num_attention_heads"
        )
    linear = LinearAttnConfig(**pick(LinearAttnConfig, text.get("linear_attn_config", {}), "linear_attn_config"))
    ids = {key: given[key] for key in (*_TOKEN_IDS, "media_placeholder_token_id") if key in given}
    values = pick(cls, {**text, **ids, "linear_attn_config": linear}, "text_config", without=("model_type",))
    vision = given.get("vision_config")
    if vision is not None:
        refuse_other_models(vision, _FIXED_VISION, "vision_config.")
        values["vision_config"] = VisionConfig(**pick(VisionConfig, vision, "vision_config"))
    official = text.get("quantization_config") or given.get("quantization_config")
    values["quantization"] = read_quantization(given.get("k3rl_quantization"), official)
    values["ablation"] = ablation
    known = {entry.name for entry in dataclasses.fields(cls)} | set(_CONSTANT_TEXT)
    known |= {"num_key_value_heads", "quantization_config"}
    values["other_keys"] = {key: value for key, value in text.items() if key not in known}
    return values


def write(config: K3Config) -> dict[str, Any]:
    """The official nested layout, ready for `config.json`; `read` reads it back to an equal config."""
    text: dict[str, Any] = {**config.other_keys, **_CONSTANT_TEXT, **config.ablation.official_keys()}
    for entry in dataclasses.fields(config):
        if entry.name not in _NOT_IN_TEXT:
            text[entry.name] = getattr(config, entry.name)
    text["num_key_value_heads"] = config.num_attention_heads
    text["linear_attn_config"] = plain(config.linear_attn_config)
    if config.mla_latent_norm_eps != 1e-6:
        text["mla_latent_norm_eps"] = config.mla_latent_norm_eps
    if config.quantization.weights == "mxfp4":
        text["quantization_config"] = QUANTIZATION_CONFIG
    top: dict[str, Any] = {**_CONSTANT_TOP, "text_config": text}
    for key in (*_TOKEN_IDS, "media_placeholder_token_id"):
        top[key] = getattr(config, key)
    if config.vision_config is not None:
        top["vision_config"] = plain(config.vision_config)
    top["k3rl_quantization"] = plain(config.quantization)
    if replaced := config.ablation.to_dict():
        top["k3rl_ablation"] = replaced
    return top
