"""K3Config: what a checkpoint's `config.json` says, under the official key names (k3.md 1.1, 1.2, 11).

The keys of `text_config` are fields of `K3Config` itself; `linear_attn_config` and `vision_config` are nested.
`to_dict` gives the official nested layout back. The keys of our own are `k3rl_quantization` and, where a part of K3
is replaced, `k3rl_ablation`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from k3rl.model.ablation import K3_PARTS, AblationConfig, ModelConfigError
from k3rl.tokens import K3_SPECIAL_IDS, SMALL_SPECIAL_IDS

MX_BLOCK = 32  # elements that share one scale


@dataclass(frozen=True, slots=True)
class LinearAttnConfig:
    """The KDA layers. `kda_layers` and `full_attn_layers` count from 1, as in the official file."""

    num_heads: int
    head_dim: int
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    short_conv_kernel_size: int = 4
    use_full_rank_gate: bool = True
    gate_lower_bound: float | None = -5.0  # None: -exp(A_log) softplus instead, without a bound


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """MoonViT-V2 and the projector. The defaults are the released model's."""

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"
    vt_num_attention_heads: int = 12
    vt_num_hidden_layers: int = 27
    vt_hidden_size: int = 1024
    vt_intermediate_size: int = 4096
    qkv_hidden_size: int = 1536
    mlp_type: str = "mlp2"
    activation_func: str = "gelu_pytorch_tanh"
    norm_type: str = "rmsnorm"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False
    merge_type: str = "sd2_tpool"
    merge_kernel_size: tuple[int, int] = (2, 2)
    mm_projector_type: str = "patchmergerv2"
    mm_hidden_size: int = 1024
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5
    text_hidden_size: int = 7168


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """What is quantized, and when. `scale_rule` is that of `numerics.mx` for weights and activations.

    weights: routed experts are MXFP4 in the loop ("mxfp4"), plain ("none"), or plain until a checkpoint is saved
    ("post_hoc"): the model then computes without any quantization, and what is saved has MXFP4 experts and says
    "mxfp4". activations: inputs of w1, w3 and w2 of the routed experts are MXFP8 ("mxfp8") or plain ("none"); with
    "post_hoc" weights this too holds for the saved model only.
    """

    weights: str = "mxfp4"
    scale_rule: str = "ceil"
    activations: str = "none"

    def __post_init__(self) -> None:
        for key, allowed in (
            ("weights", ("mxfp4", "post_hoc", "none")),
            ("scale_rule", ("ceil", "floor", "even")),
            ("activations", ("mxfp8", "none")),
        ):
            if getattr(self, key) not in allowed:
                raise ModelConfigError(
                    f"k3rl_quantization.{key} is {getattr(self, key)!r}; it must be one of {', '.join(allowed)}"
                )

    @property
    def computed_activations(self) -> str:
        """What this model does to expert inputs: "mxfp8" or "none"."""
        return "none" if self.weights == "post_hoc" else self.activations

    def shipped(self) -> QuantizationConfig:
        """What a saved checkpoint says: post-hoc quantization is done by saving."""
        if self.weights != "post_hoc":
            return self
        return dataclasses.replace(self, weights="mxfp4")


# Keys with one supported value: the model would be another one with any other.
_FIXED_TEXT: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
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
_QUANTIZATION_CONFIG: dict[str, Any] = {
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
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _pick(cls: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The entries of `given` that are fields of dataclass `cls`, lists as tuples; required ones must be there."""
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(cls):
        if entry.name in given:
            value = given[entry.name]
            values[entry.name] = tuple(value) if isinstance(value, list) else value
        elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            raise ModelConfigError(f"{where}: the key {entry.name} is missing")
    return values


def _refuse_other_models(given: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    for key, wanted in fixed.items():
        if key in given and given[key] != wanted:
            raise ModelConfigError(f"{where}.{key} is {given[key]!r}; this program computes only {wanted!r}")


_HASH = "_hash"


@dataclass(frozen=True)
class K3Config:
    """One model of the Kimi K3 architecture. Frozen; `replace` gives a changed copy.

    Raises ModelConfigError when the values describe a model that cannot be built.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    routed_expert_hidden_size: int
    attn_res_block_size: int
    linear_attn_config: LinearAttnConfig
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    media_placeholder_token_id: int
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    mla_latent_norm_eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm: official code 1e-6, vLLM 1e-5
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    max_position_embeddings: int = 1048576
    initializer_range: float = 0.02
    vision_config: VisionConfig | None = None
    quantization: QuantizationConfig = QuantizationConfig(weights="none")
    ablation: AblationConfig = K3_PARTS
    other_keys: Mapping[str, Any] = field(default_factory=dict, compare=False)  # text keys kept for writing back

    def __hash__(self) -> int:
        """Of what is compared, once: the planner looks figures up by it hundreds of thousands of times."""
        known: int | None = self.__dict__.get(_HASH)
        if known is None:
            compared = (each.name for each in dataclasses.fields(self) if each.compare and each.hash is not False)
            known = hash(tuple(getattr(self, name) for name in compared))
            object.__setattr__(self, _HASH, known)
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _HASH}  # another process hashes anew

    def __post_init__(self) -> None:
        self._check_layers()
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ModelConfigError(
                f"num_experts_per_token is {self.num_experts_per_token}; it must be in 1..{self.num_experts}"
            )
        if self.num_experts > 32767:
            raise ModelConfigError(f"num_experts is {self.num_experts}; routes are int16, so at most 32767")
        bound = self.linear_attn_config.gate_lower_bound
        if bound is not None and not -5 <= bound < 0:
            raise ModelConfigError(
                f"gate_lower_bound is {bound}; it must be in [-5, 0), or the chunked form of KDA overflows float32"
            )
        for key, wanted in (("use_full_rank_gate", True), ("short_conv_kernel_size", 4)):
            if getattr(self.linear_attn_config, key) != wanted:
                raise ModelConfigError(
                    f"linear_attn_config.{key} is {getattr(self.linear_attn_config, key)!r}; "
                    f"this program computes only {wanted!r}"
                )
        if self.quantization.weights != "none":
            inputs = "hidden_size" if self.ablation.experts == "full_width" else "routed_expert_hidden_size"
            for key in (inputs, "moe_intermediate_size"):
                if getattr(self, key) % MX_BLOCK:
                    raise ModelConfigError(
                        f"{key} is {getattr(self, key)}; MXFP4 experts need a multiple of {MX_BLOCK}"
                    )

    def _check_layers(self) -> None:
        """Every layer is in exactly one of kda_layers and full_attn_layers (both 1-based)."""
        linear = self.linear_attn_config
        listed = sorted((*linear.kda_layers, *linear.full_attn_layers))
        if listed != list(range(1, self.num_hidden_layers + 1)):
            raise ModelConfigError(
                "kda_layers and full_attn_layers together must name each of the layers 1.."
                f"{self.num_hidden_layers} once; got {list(linear.kda_layers)} and {list(linear.full_attn_layers)}"
            )
        if self.attn_res_block_size < 1:
            raise ModelConfigError(f"attn_res_block_size is {self.attn_res_block_size}; it must be at least 1")
        if self.ablation.attention == "mla_rope" and self.qk_rope_head_dim % 2:
            raise ModelConfigError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; rotation needs an even number")

    # -- layer maps, all 0-based --------------------------------------------------------------------------------

    @cached_property
    def kda_layers(self) -> tuple[int, ...]:
        """KDA layers, counted from 0."""
        if self.ablation.attention != "hybrid":
            return ()
        return tuple(layer - 1 for layer in sorted(self.linear_attn_config.kda_layers))

    @cached_property
    def mla_layers(self) -> tuple[int, ...]:
        """Gated MLA layers, counted from 0."""
        if self.ablation.attention != "hybrid":
            return tuple(range(self.num_hidden_layers))
        return tuple(layer - 1 for layer in sorted(self.linear_attn_config.full_attn_layers))

    @property
    def expert_hidden_size(self) -> int:
        """What a routed expert reads and writes: the latent's width, or the hidden width."""
        return self.hidden_size if self.ablation.experts == "full_width" else self.routed_expert_hidden_size

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with a LatentMoE, counted from 0; `routes` keeps them in this order."""
        return tuple(
            layer
            for layer in range(self.num_hidden_layers)
            if layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        )

    # -- reading and writing ------------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> K3Config:
        """Reads an official `config.json`, or the one in the directory `path`."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            given = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelConfigError(f"{file} does not exist; a checkpoint directory holds a config.json") from error
        except json.JSONDecodeError as error:
            raise ModelConfigError(f"{file} is not valid JSON: {error}") from error
        return cls.from_dict(given)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> K3Config:
        """From the official nested layout. Keys with an unsupported value raise ModelConfigError."""
        if "text_config" not in given:
            raise ModelConfigError("config.json has no text_config; the official layout nests the language model there")
        text = dict(given["text_config"])
        ablation = AblationConfig.from_dict(given.get("k3rl_ablation", {}))
        _refuse_other_models(text, {**_FIXED_TEXT, **ablation.official_keys()}, "text_config")
        if "num_key_value_heads" in text and text["num_key_value_heads"] != text.get("num_attention_heads"):
            raise ModelConfigError(
                f"num_key_value_heads is {text['num_key_value_heads']}; it must equal num_attention_heads"
            )
        linear = LinearAttnConfig(**_pick(LinearAttnConfig, text.get("linear_attn_config", {}), "linear_attn_config"))
        ids = {key: given[key] for key in (*_TOKEN_IDS, "media_placeholder_token_id") if key in given}
        values = _pick(cls, {**text, **ids, "linear_attn_config": linear}, "text_config")
        vision = given.get("vision_config")
        if vision is not None:
            _refuse_other_models(vision, _FIXED_VISION, "vision_config")
            values["vision_config"] = VisionConfig(**_pick(VisionConfig, vision, "vision_config"))
        values["quantization"], values["ablation"] = cls._quantization(given, text), ablation
        known = {entry.name for entry in dataclasses.fields(cls)} | set(_CONSTANT_TEXT)
        known |= {"num_key_value_heads", "quantization_config"}
        values["other_keys"] = {key: value for key, value in text.items() if key not in known}
        return cls(**values)

    @staticmethod
    def _quantization(given: Mapping[str, Any], text: Mapping[str, Any]) -> QuantizationConfig:
        ours = given.get("k3rl_quantization")
        if ours is not None:
            extra = set(ours) - {entry.name for entry in dataclasses.fields(QuantizationConfig)}
            if extra:
                raise ModelConfigError(f"k3rl_quantization has the unknown key {sorted(extra)[0]!r}")
            return QuantizationConfig(**ours)
        official = text.get("quantization_config") or given.get("quantization_config")
        return QuantizationConfig(weights="none" if official is None else "mxfp4", activations="none")

    def to_dict(self) -> dict[str, Any]:
        """The official nested layout, ready for `config.json`; `from_dict` reads it back to an equal config."""
        own = {"vision_config", "quantization", "ablation", "other_keys"}
        own |= {"media_placeholder_token_id", "mla_latent_norm_eps"}
        text: dict[str, Any] = {**self.other_keys, **_CONSTANT_TEXT, **self.ablation.official_keys()}
        for entry in dataclasses.fields(self):
            if entry.name not in own:
                text[entry.name] = getattr(self, entry.name)
        text["num_key_value_heads"] = self.num_attention_heads
        text["linear_attn_config"] = _plain(self.linear_attn_config)
        if self.mla_latent_norm_eps != 1e-6:
            text["mla_latent_norm_eps"] = self.mla_latent_norm_eps
        if self.quantization.weights == "mxfp4":
            text["quantization_config"] = _QUANTIZATION_CONFIG
        top: dict[str, Any] = {**_CONSTANT_TOP, "text_config": text}
        for key in (*_TOKEN_IDS, "media_placeholder_token_id"):
            top[key] = getattr(self, key)
        if self.vision_config is not None:
            top["vision_config"] = _plain(self.vision_config)
        top["k3rl_quantization"] = _plain(self.quantization)
        if replaced := self.ablation.to_dict():
            top["k3rl_ablation"] = replaced
        return top

    def replace(self, **changes: Any) -> K3Config:
        """A copy with the fields in `changes` replaced and everything checked again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def named(cls, name: str) -> K3Config:
        """One of the named sizes: "k3-nano" (1.1 M parameters), "k3-mini", "k3-small" (0.4 B) and "k3" (2.78 T)."""
        builders = {"k3-nano": _nano, "k3-mini": _mini, "k3-small": _small, "k3": _k3}
        if name not in builders:
            raise ModelConfigError(f"no model is named {name!r}; the names are {', '.join(builders)}")
        return builders[name]()


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON types, tuples as lists."""
    return {key: list(item) if isinstance(item, tuple) else item for key, item in dataclasses.asdict(value).items()}


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


def _nano() -> K3Config:
    return K3Config(
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


def _mini() -> K3Config:
    return K3Config(
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


def _small() -> K3Config:
    return K3Config(
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


def _k3() -> K3Config:
    """The released model; activations plain, as its `input_activations: null` says."""
    return K3Config(
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
