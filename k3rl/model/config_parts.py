"""What a `K3Config` has beside its own fields: KDA layers, vision tower, quantization. And what readers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from k3rl.model.ablation import ModelConfigError

MX_BLOCK = 32  # elements that share one scale


class ModelFileError(ModelConfigError):
    """A `config.json` that is missing, or of no model that this program computes; the message begins with the file."""

    exit_code = 3


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


PLAIN = QuantizationConfig(weights="none")


def pick(cls: type, given: Mapping[str, Any], where: str, without: Collection[str] = ()) -> dict[str, Any]:
    """The entries of `given` that are fields of dataclass `cls`, lists as tuples; required ones must be there.

    without: fields that are not read here.
    """
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(cls):
        if entry.name in without:
            continue
        if entry.name in given:
            value = given[entry.name]
            values[entry.name] = tuple(value) if isinstance(value, list) else value
        elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            raise ModelConfigError(f"{where}: the key {entry.name} is missing")
    return values


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON types, tuples as lists."""
    return {key: list(item) if isinstance(item, tuple) else item for key, item in dataclasses.asdict(value).items()}


def refuse_other_models(given: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    """Raises ModelConfigError for a key of `fixed` that is there with another value: the model would be another one."""
    for key, wanted in fixed.items():
        if key in given and given[key] != wanted:
            raise ModelConfigError(f"{where}{key} is {given[key]!r}; this program computes only {wanted!r}")


def refuse_foreign_keys(given: Mapping[str, Any], foreign: Collection[str], where: str, dialect: str) -> None:
    """Raises ModelConfigError for a key that only the other dialect has: the file would mean two things."""
    found = sorted(set(given) & set(foreign))
    if found:
        raise ModelConfigError(
            f"{where}{found[0]} is {given[found[0]]!r}, a key that {dialect} does not have; wanted a file of one "
            "dialect, without it"
        )


def read_quantization(ours: Mapping[str, Any] | None, official: Any) -> QuantizationConfig:
    """What `k3rl_quantization` says, or else whether there is an official `quantization_config`."""
    if ours is None:
        return QuantizationConfig(weights="none" if official is None else "mxfp4", activations="none")
    extra = sorted(set(ours) - {entry.name for entry in dataclasses.fields(QuantizationConfig)})
    if extra:
        raise ModelConfigError(f"k3rl_quantization has the unknown key {extra[0]!r}")
    return QuantizationConfig(**ours)
