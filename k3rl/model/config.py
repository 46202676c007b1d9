"""K3Config: one model of the family, read from and written to its checkpoint's `config.json`.

Its fields carry the official key names (k3.md 1.1, 1.2, 11). Two dialects say the same things in two ways: Kimi K3's,
nested (`dialect_k3.py`), and Kimi Linear's, flat (`dialect_kimi_linear.py`). What differs between their models is a
field here or in `ablation`, each read by one part of the one model code.
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

from k3rl.model import dialect_k3, dialect_kimi_linear
from k3rl.model.ablation import K3_PARTS, AblationConfig, ModelConfigError
from k3rl.model.config_parts import MX_BLOCK, PLAIN, LinearAttnConfig, ModelFileError, QuantizationConfig, VisionConfig
from k3rl.model.sizes import SIZES
from k3rl.numerics import Stored, stored_dtype

_HASH = "_hash"


@dataclass(frozen=True)
class K3Config:
    """One model of the Kimi family: Kimi K3, or Kimi Linear. Frozen; `replace` gives a changed copy.

    Raises ModelConfigError when the values describe a model that cannot be built.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None  # None: queries are one product
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
    quantization: QuantizationConfig = PLAIN
    ablation: AblationConfig = K3_PARTS
    model_type: str = dialect_k3.MODEL_TYPE  # the dialect of `config.json`, and of the names of tensors
    mla_use_output_gate: bool = True
    num_expert_group: int = 1  # experts are chosen from the topk_group best groups alone
    topk_group: int = 1
    stored_float32: frozenset[str] | None = None  # of a checkpoint's tensors; None: by the rule of `stored_dtype`
    other_keys: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of the file, kept for writing back

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
        if self.linear_attn_config.short_conv_kernel_size != 4:
            raise ModelConfigError(
                f"linear_attn_config.short_conv_kernel_size is {self.linear_attn_config.short_conv_kernel_size!r}; "
                "this program computes only 4"
            )
        self._check_groups()
        if self.quantization.weights != "none":
            inputs = "hidden_size" if self.ablation.experts == "full_width" else "routed_expert_hidden_size"
            for key in (inputs, "moe_intermediate_size"):
                if getattr(self, key) % MX_BLOCK:
                    raise ModelConfigError(
                        f"{key} is {getattr(self, key)}; MXFP4 experts need a multiple of {MX_BLOCK}"
                    )

    def _check_groups(self) -> None:
        """A group is scored by its two best experts, and the chosen groups must have enough of them."""
        groups, chosen = self.num_expert_group, self.topk_group
        if groups == 1:
            return
        size, rest = divmod(self.num_experts, max(1, groups))
        if groups < 1 or rest or size < 2 or not 1 <= chosen <= groups or chosen * size < self.num_experts_per_token:
            raise ModelConfigError(
                f"num_expert_group is {groups} and topk_group {chosen}; wanted groups of two experts or more that "
                f"divide the {self.num_experts}, and among the chosen ones at least {self.num_experts_per_token}"
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

    # -- names and formats of tensors ---------------------------------------------------------------------------

    @property
    def flat(self) -> bool:
        """Whether this is a model of the flat dialect, Kimi Linear's."""
        return self.model_type == dialect_kimi_linear.MODEL_TYPE

    @property
    def prefix(self) -> str:
        """What stands before `model.` and `lm_head.` in the official names of tensors."""
        return "" if self.flat else "language_model."

    def stored(self, name: str, *, shipped: bool = False) -> Stored:
        """The format of the tensor with this official name; shipped: in an exported checkpoint."""
        quantization = self.quantization.shipped() if shipped else self.quantization
        form = stored_dtype(name, quantization.weights)
        if form == "mxfp4" or self.stored_float32 is None:
            return form
        return "fp32" if name in self.stored_float32 else "bf16"

    # -- reading and writing ------------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> K3Config:
        """Reads a `config.json` of either dialect, or the one in the directory `path`. Raises ModelFileError."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            given = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelFileError(f"{file} does not exist; a checkpoint directory holds a config.json") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{file} is not valid JSON: {error}") from error
        try:
            return cls.from_dict(given)
        except ModelConfigError as error:
            raise ModelFileError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> K3Config:
        """From the content of a `config.json`. Raises ModelConfigError for a model that is not computed here."""
        kind = given.get("model_type") if isinstance(given, Mapping) else None
        if isinstance(given, Mapping) and "text_config" in given and kind in (None, dialect_k3.MODEL_TYPE):
            return cls(**dialect_k3.read(given, cls))
        if kind == dialect_kimi_linear.MODEL_TYPE:
            return cls(**dialect_kimi_linear.read(given, cls))
        raise ModelConfigError(
            f"model_type is {kind!r}{'' if kind != dialect_k3.MODEL_TYPE else ' and there is no text_config'}; wanted "
            f"{dialect_k3.MODEL_TYPE!r} with a nested text_config (Kimi K3), or {dialect_kimi_linear.MODEL_TYPE!r} "
            "(Kimi Linear)"
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of a `config.json` in the model's dialect; `from_dict` reads it back to an equal config."""
        return (dialect_kimi_linear if self.flat else dialect_k3).write(self)

    def replace(self, **changes: Any) -> K3Config:
        """A copy with the fields in `changes` replaced and everything checked again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def named(cls, name: str) -> K3Config:
        """One of the named sizes.

        Of Kimi K3: "k3-nano" (1.1 M parameters), "k3-mini", "k3-small" (0.4 B) and "k3" (2.78 T). Of Kimi Linear:
        "kimi-linear-nano", "kimi-linear-small" and "kimi-linear-48b".
        """
        if name not in SIZES:
            raise ModelConfigError(f"no model is named {name!r}; the names are {', '.join(SIZES)}")
        return cls(**SIZES[name]())
