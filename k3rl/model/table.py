"""Every parameter of a model from its configuration alone: name, part, shape, stored format.

Nothing is built, so the 2.78 T-parameter model takes a second. `k3rl inspect` and `k3rl plan` count from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from k3rl.model.config import K3Config, VisionConfig


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`copies` parameters of one shape. `name` is the official name of one of them.

    part: the key under `parts` of `inspect`. stored_elements: with padding (A_log), equal to the parameters elsewhere.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    stored: str
    copies: int = 1
    stored_elements: int | None = None

    @property
    def parameters(self) -> int:
        """Numbers in all copies."""
        return math.prod(self.shape) * self.copies

    @property
    def bytes(self) -> int:
        """As stored: MXFP4 is half a byte a number and one scale byte per 32."""
        elements = self.parameters if self.stored_elements is None else self.stored_elements * self.copies
        if self.stored == "mxfp4":
            return elements // 2 + elements // 32
        return elements * (4 if self.stored == "fp32" else 2)

    @property
    def tensors(self) -> int:
        """Names in the checkpoint."""
        return self.copies * (2 if self.stored == "mxfp4" else 1)


def tensor_table(config: K3Config) -> Iterator[TensorEntry]:
    """Every parameter of a model (k3.md 1.3); the experts of a layer are one entry per matrix."""
    h, v = config.hidden_size, config.vocab_size
    top, mixes = f"{config.prefix}model", config.ablation.residual == "attn_res"
    yield _entry(config, f"{top}.embed_tokens.weight", "embedding", (v, h))
    for layer in range(config.num_hidden_layers):
        prefix = f"{top}.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _entry(config, f"{prefix}.{norm}.weight", "norms", (h,))
        for site in ("self_attention", "mlp") if mixes else ():
            yield _entry(config, f"{prefix}.{site}_res_norm.weight", "attention_residuals", (h,))
            yield _entry(config, f"{prefix}.{site}_res_proj.weight", "attention_residuals", (1, h))
        yield from (_kda if layer in config.kda_layers else _mla)(config, f"{prefix}.self_attn")
        if layer in config.moe_layers:
            yield from _moe(config, f"{prefix}.block_sparse_moe")
        else:
            yield from _mlp(config, f"{prefix}.mlp", "dense_mlp", config.intermediate_size)
    yield _entry(config, f"{top}.norm.weight", "norms", (h,))
    if mixes:
        yield _entry(config, f"{top}.output_attn_res_norm.weight", "attention_residuals", (h,))
        yield _entry(config, f"{top}.output_attn_res_proj.weight", "attention_residuals", (1, h))
    yield _entry(config, f"{config.prefix}lm_head.weight", "lm_head", (v, h))
    if config.vision_config is not None:
        yield from _vision(config, config.vision_config)


def _entry(config: K3Config, name: str, part: str, shape: tuple[int, ...], **more: Any) -> TensorEntry:
    return TensorEntry(name, part, shape, config.stored(name, shipped=True), **more)


def _kda(config: K3Config, prefix: str) -> Iterator[TensorEntry]:
    linear = config.linear_attn_config
    heads, width, h = linear.num_heads, linear.head_dim, config.hidden_size
    inner = heads * width
    shapes: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (inner, h) for x in "qkv"}
    shapes |= {f"{x}_conv1d.weight": (inner, 1, linear.short_conv_kernel_size) for x in "qkv"}
    shapes |= {
        "f_a_proj.weight": (width, h),
        "f_b_proj.weight": (inner, width),
        "b_proj.weight": (heads, h),
        "dt_bias": (inner,),
        **(
            {"g_proj.weight": (inner, h)}
            if linear.use_full_rank_gate
            else {"g_a_proj.weight": (width, h), "g_b_proj.weight": (inner, width)}
        ),
        "o_norm.weight": (width,),
        "o_proj.weight": (h, inner),
    }
    for name, shape in shapes.items():
        yield _entry(config, f"{prefix}.{name}", "kda", shape)
    if config.flat:
        yield _entry(config, f"{prefix}.A_log", "kda", (1, 1, heads, 1))
    else:
        yield _entry(config, f"{prefix}.A_log", "kda", (heads,), stored_elements=max(heads, width))


def _mla(config: K3Config, prefix: str) -> Iterator[TensorEntry]:
    heads, h = config.num_attention_heads, config.hidden_size
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (heads * key, h)}
    if config.q_lora_rank is not None:
        shapes = {
            "q_a_proj": (config.q_lora_rank, h),
            "q_a_layernorm": (config.q_lora_rank,),
            "q_b_proj": (heads * key, config.q_lora_rank),
        }
    if config.mla_use_output_gate:
        shapes["g_proj"] = (heads * config.v_head_dim, h)
    shapes |= {
        "kv_a_proj_with_mqa": (config.kv_lora_rank + config.qk_rope_head_dim, h),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj": (h, heads * config.v_head_dim),
    }
    for name, shape in shapes.items():
        yield _entry(config, f"{prefix}.{name}.weight", "mla", shape)


def _mlp(config: K3Config, prefix: str, part: str, width: int) -> Iterator[TensorEntry]:
    for name, shape in (
        ("gate_proj", (width, config.hidden_size)),
        ("up_proj", (width, config.hidden_size)),
        ("down_proj", (config.hidden_size, width)),
    ):
        yield _entry(config, f"{prefix}.{name}.weight", part, shape)


def _moe(config: K3Config, prefix: str) -> Iterator[TensorEntry]:
    h, z, width, experts = (
        config.hidden_size,
        config.expert_hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
    )
    yield _entry(config, f"{prefix}.gate.weight", "router", (experts, h))
    yield _entry(config, f"{prefix}.gate.e_score_correction_bias", "router", (experts,))
    if config.ablation.experts != "full_width":
        yield _entry(config, f"{prefix}.routed_expert_down_proj.weight", "latent_projections", (z, h))
        yield _entry(config, f"{prefix}.routed_expert_up_proj.weight", "latent_projections", (h, z))
    if config.ablation.experts == "latent_norm":
        yield _entry(config, f"{prefix}.routed_expert_norm.weight", "norms", (z,))
    yield from _mlp(config, f"{prefix}.shared_experts", "shared_experts", config.num_shared_experts * width)
    for name, shape in (("w1", (width, z)), ("w3", (width, z)), ("w2", (z, width))):
        yield _entry(config, f"{prefix}.experts.0.{name}.weight", "routed_experts", shape, copies=experts)


def _vision(config: K3Config, vision: VisionConfig) -> Iterator[TensorEntry]:
    w, inner, mlp = vision.vt_hidden_size, vision.qkv_hidden_size, vision.vt_intermediate_size
    tower = "vision_tower"
    patch = (w, 3, vision.patch_size, vision.patch_size)
    table = (vision.init_pos_emb_height, vision.init_pos_emb_width, w)
    yield _entry(config, f"{tower}.patch_embed.proj.weight", tower, patch)
    yield _entry(config, f"{tower}.patch_embed.pos_emb.weight", tower, table)
    for block in range(vision.vt_num_hidden_layers):
        for name, shape in (
            ("wqkv", (3 * inner, w)),
            ("wo", (w, inner)),
            ("mlp.fc0", (mlp, w)),
            ("mlp.fc1", (w, mlp)),
            ("norm0", (w,)),
            ("norm1", (w,)),
        ):
            yield _entry(config, f"{tower}.encoder.blocks.{block}.{name}.weight", tower, shape)
    yield _entry(config, f"{tower}.encoder.final_layernorm.weight", tower, (w,))
    merged = vision.mm_hidden_size * math.prod(vision.merge_kernel_size)
    for name, shape in (
        ("proj.0", (merged, merged)),
        ("proj.2", (vision.text_hidden_size, merged)),
        ("post_norm", (vision.text_hidden_size,)),
    ):
        yield _entry(config, f"mm_projector.{name}.weight", "mm_projector", shape)


def active_parameters(config: K3Config, table: Sequence[TensorEntry]) -> int:
    """Parameters that take part in one text token: k of the routed experts, no input embedding, no vision."""
    total = 0
    for entry in table:
        if entry.part in ("embedding", "vision_tower", "mm_projector"):
            continue
        if entry.part == "routed_experts":
            total += entry.parameters // config.num_experts * config.num_experts_per_token
        else:
            total += entry.parameters
    return total
