"""Kimi Linear's flat `config.json` (`model_type` "kimi_linear"), and which of K3's parts such a model has.

A part of K3 that a file does not speak of is off here, never K3's default: decays have no bound, the output gate of KDA
goes through `head_dim` channels, MLA has no output gate and no low rank of queries, experts are SwiGLU of the hidden
width, the residual stream is a sum. A file that is read and not changed is written back as it was.

The keys of our own are `k3rl_quantization`, where experts are quantized; `mla_latent_norm_eps`, where that is not 1e-6;
and, between processes, `k3rl_float32`, the names of the tensors that a checkpoint stores in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3rl.model.ablation import AblationConfig, ModelConfigError
from k3rl.model.config_parts import (
    PLAIN,
    LinearAttnConfig,
    pick,
    plain,
    read_quantization,
    refuse_foreign_keys,
    refuse_other_models,
)
from k3rl.model.dialect_k3 import QUANTIZATION_CONFIG

if TYPE_CHECKING:
    from k3rl.model.config import K3Config

MODEL_TYPE = "kimi_linear"
NAME = "the flat dialect of Kimi Linear"
PARTS = AblationConfig(experts="full_width", residual="sum", activation="swiglu")
QUANTIZATION, FLOAT32 = "k3rl_quantization", "k3rl_float32"

# Keys with one supported value: the model would be another one with any other.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_FOREIGN = (
    "text_config", "vision_config", "k3rl_ablation", "attn_res_block_size", "routed_expert_hidden_size",
    "latent_moe_use_norm", "activation_situ_beta", "activation_situ_linear_beta", "mla_use_output_gate",
    "media_placeholder_token_id", "gate_lower_bound", "use_full_rank_gate",
)  # fmt: skip
_FOREIGN_LINEAR = ("gate_lower_bound", "use_full_rank_gate")
# Either name is read; the second one is written.
_ALIASES = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "max_position_embeddings": "model_max_length",
}
# Hub key -> field of `K3Config`, where both are called alike or not; without a default the key must be there.
_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "num_experts",
    "num_experts_per_token", "num_shared_experts", "routed_scaling_factor", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
_OPTIONAL = (
    "q_lora_rank", "moe_renormalize", "rms_norm_eps", "initializer_range", "mla_latent_norm_eps", "num_expert_group",
    "topk_group",
)  # fmt: skip
_KIND = {"linear_attention": "kda_layers", "full_attention": "full_attn_layers"}
# Derived, or written by others for their own use: not carried over where the sizes they belong to changed.
_DERIVED = (
    "layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "qk_head_dim",
    "head_dim", *_ALIASES,
)  # fmt: skip


def read(given: Mapping[str, Any], cls: type[K3Config]) -> dict[str, Any]:
    """The fields of a `K3Config`. Raises ModelConfigError for what is missing, or means a model that is not there."""
    return fields_of(given) | {"other_keys": dict(given)}


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """`read` without what is kept for writing back."""
    keys = _one_name_each(given)
    refuse_foreign_keys(keys, _FOREIGN, "", NAME)
    refuse_other_models(keys, _FIXED, "")
    for key in _REQUIRED:
        if key not in keys:
            raise ModelConfigError(f"the key {key} is missing")
        wanted = (int, float) if key == "routed_scaling_factor" else int
        if not isinstance(keys[key], wanted) or isinstance(keys[key], bool):
            raise ModelConfigError(f"{key} is {keys[key]!r}; wanted a number, one of them")
    heads = keys["num_attention_heads"]
    if keys.get("num_key_value_heads") not in (None, heads):
        raise ModelConfigError(f"num_key_value_heads is {keys['num_key_value_heads']}; it must equal {heads}")
    values = {key: keys[key] for key in _REQUIRED}
    values |= {key: keys[key] for key in _OPTIONAL if key in keys}
    values.setdefault("q_lora_rank", None)
    if "model_max_length" in keys:
        values["max_position_embeddings"] = keys["model_max_length"]
    float32 = keys.get(FLOAT32)
    return values | {
        "model_type": MODEL_TYPE,
        "linear_attn_config": _linear(keys),
        "first_k_dense_replace": _dense_layers(keys),
        "mla_use_output_gate": False,
        "routed_expert_hidden_size": keys["hidden_size"],
        "attn_res_block_size": keys["num_hidden_layers"],
        "media_placeholder_token_id": -1,  # no id
        "quantization": read_quantization(keys.get(QUANTIZATION), keys.get("quantization_config")),
        "ablation": PARTS,
        "stored_float32": None if float32 is None else frozenset(float32),
    }


def _one_name_each(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys under one name each. Raises ModelConfigError where two names have two values."""
    keys = dict(given)
    for other, name in _ALIASES.items():
        if other not in keys:
            continue
        value = keys.pop(other)
        if keys.setdefault(name, value) != value:
            raise ModelConfigError(f"{other} is {value!r} and {name} {keys[name]!r}; both name one thing, give one")
    return keys


def _linear(keys: Mapping[str, Any]) -> LinearAttnConfig:
    """The KDA layers, from `linear_attn_config` or from `layer_types` and the linear_* keys."""
    nested = keys.get("linear_attn_config")
    refuse_foreign_keys(nested or {}, _FOREIGN_LINEAR, "linear_attn_config.", NAME)
    listed = _listed(keys.get("layer_types"), keys["num_hidden_layers"])
    if nested is None:
        if listed is None:
            raise ModelConfigError("neither linear_attn_config nor layer_types says which layers are KDA")
        names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim",
                 "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip
        nested = {field: keys[key] for field, key in names.items() if key in keys} | listed
    elif listed is not None:
        for key, layers in listed.items():
            if sorted(nested.get(key, layers)) != layers:
                raise ModelConfigError(
                    f"layer_types says that {key} is {layers}, linear_attn_config that it is {nested[key]}; some "
                    "programs read one of them and some the other, remove the wrong one"
                )
        nested = {**listed, **nested}
    off = {"use_full_rank_gate": False, "gate_lower_bound": None}
    return LinearAttnConfig(**pick(LinearAttnConfig, {**nested, **off}, "linear_attn_config"))


def _listed(kinds: Any, layers: int) -> dict[str, list[int]] | None:
    """`layer_types` as lists of layers, counted from 1."""
    if kinds is None:
        return None
    unknown = [kind for kind in kinds if kind not in _KIND]
    if unknown or len(kinds) != layers:
        found = f"has {unknown[0]!r}" if unknown else f"names {len(kinds)} layers"
        raise ModelConfigError(f"layer_types {found}; wanted {layers} of {', '.join(_KIND)}")
    return {key: [n + 1 for n, kind in enumerate(kinds) if _KIND[kind] == key] for key in _KIND.values()}


def _dense_layers(keys: Mapping[str, Any]) -> int:
    """How many layers, from the first, have no experts."""
    kinds, given = keys.get("mlp_layer_types"), keys.get("first_k_dense_replace")
    if kinds is None:
        return 1 if given is None else int(given)
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * dense + ["sparse"] * (keys["num_hidden_layers"] - dense) or given not in (None, dense):
        raise ModelConfigError(
            f"mlp_layer_types is {kinds} and first_k_dense_replace {given}; wanted dense layers first, as many as "
            "first_k_dense_replace says"
        )
    return dense


def write(config: K3Config) -> dict[str, Any]:
    """The flat layout, ready for `config.json`: the keys that were read where they still say what the config is."""
    given = {key: value for key, value in config.other_keys.items() if key not in (QUANTIZATION, FLOAT32)}
    if given:
        was = fields_of(given)
        if all(getattr(config, key) == was[key] for key in was if key not in ("quantization", "stored_float32")):
            return _with_ours(given, config)
        given = {key: value for key, value in given.items() if key not in _DERIVED}
    return _with_ours({**given, **_canonical(config)}, config)


def _canonical(config: K3Config) -> dict[str, Any]:
    """Every key that the released file has, from the fields."""
    linear = plain(config.linear_attn_config)
    linear = {key: value for key, value in linear.items() if key not in _FOREIGN_LINEAR}
    same = (*_REQUIRED, "q_lora_rank", "moe_renormalize", "rms_norm_eps", "initializer_range", "num_expert_group",
            "topk_group", "first_k_dense_replace")  # fmt: skip
    eps = {} if config.mla_latent_norm_eps == 1e-6 else {"mla_latent_norm_eps": config.mla_latent_norm_eps}
    keys = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        **_FIXED,
        **{key: getattr(config, key) for key in same},
        **eps,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "linear_attn_config": linear,
        "model_max_length": config.max_position_embeddings,
        "num_key_value_heads": config.num_attention_heads,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_cache": True,
        "use_grouped_topk": True,
    }
    del keys["attention_bias"]  # which the released file leaves out
    return dict(sorted(keys.items()))


def _with_ours(keys: dict[str, Any], config: K3Config) -> dict[str, Any]:
    keys = dict(keys)
    if config.quantization != PLAIN:
        keys[QUANTIZATION] = plain(config.quantization)
    if config.quantization.weights == "mxfp4":
        keys["quantization_config"] = QUANTIZATION_CONFIG
    else:
        keys.pop("quantization_config", None)
    if config.stored_float32 is not None:
        keys[FLOAT32] = sorted(config.stored_float32)
    return keys
