"""Which parts of K3 a model has replaced by the common choice, so that a claim about a part can be measured.

Written into `config.json` under one extra key, `k3rl_ablation`; absent means K3. Names of parameters stay official as
far as they exist: a part that is left out has no tensors, and a checkpoint that has them is refused by name. Where an
official key says the same thing (`hidden_act`, `latent_moe_use_norm`, `mla_use_nope`), it is written too.

How weights are trained and balanced is no part of a model: see `optimizer` and `balance_by` of `TrainerConfig`. What is
quantized, and when, is `k3rl_quantization`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3rl.config import K3Error


class ModelConfigError(K3Error, ValueError):
    """A model configuration that this program cannot compute; the message says what to change."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class AblationConfig:
    """One switch for each part that K3 replaced; the defaults are K3 (k3.md 2 to 4, 6, 7).

    attention: "hybrid", KDA and MLA as the layer lists say (3:1); "mla", MLA in every layer, still without positions,
        so that the causal mask alone tells order; "mla_rope", the same with the last qk_rope_head_dim channels of
        queries and keys rotated by the token's position, which is what MLA models without KDA do.
    experts: "latent_norm", in the latent, RMSNorm on the weighted sum; "latent", without that norm; "full_width",
        experts read and write the hidden width, without projections and norm.
    residual: "attn_res", block attention residuals; "sum", one running sum.
    activation: "situ", bounded by beta * linear_beta; "swiglu", silu(gate) * up, not bounded.

    Raises ModelConfigError for any other value.
    """

    attention: str = "hybrid"
    experts: str = "latent_norm"
    residual: str = "attn_res"
    activation: str = "situ"

    def __post_init__(self) -> None:
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise ModelConfigError(
                    f"k3rl_ablation.{key} is {getattr(self, key)!r}; it must be one of {', '.join(allowed)}"
                )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> AblationConfig:
        """From the JSON object under `k3rl_ablation`; keys left out are K3's. Raises ModelConfigError."""
        unknown = sorted(set(given) - set(CHOICES))
        if unknown:
            raise ModelConfigError(f"k3rl_ablation has the unknown key {unknown[0]!r}; it has {', '.join(CHOICES)}")
        return cls(**given)

    def to_dict(self) -> dict[str, str]:
        """What differs from K3; empty for K3 itself."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value != CHOICES[key][0]}

    def official_keys(self) -> dict[str, Any]:
        """Official keys of text_config whose value says what is replaced here."""
        keys: dict[str, Any] = {}
        if self.activation == "swiglu":
            keys["hidden_act"] = "silu"
        if self.experts == "latent":
            keys["latent_moe_use_norm"] = False
        if self.attention == "mla_rope":
            keys["mla_use_nope"] = False
        return keys


# Every switch with its values, K3's first.
CHOICES: dict[str, tuple[str, ...]] = {
    "attention": ("hybrid", "mla", "mla_rope"),
    "experts": ("latent_norm", "latent", "full_width"),
    "residual": ("attn_res", "sum"),
    "activation": ("situ", "swiglu"),
}

K3_PARTS = AblationConfig()
