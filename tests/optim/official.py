"""Official parameter names and shapes of a K3 text model, written out from the checkpoint table (k3.md 1.3)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from k3rl.model.config import K3Config

ROOT = "language_model.model."


def parameter_shapes(config: K3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    yield "language_model.lm_head.weight", (config.vocab_size, hidden)
    yield f"{ROOT}embed_tokens.weight", (config.vocab_size, hidden)
    yield f"{ROOT}norm.weight", (hidden,)
    yield f"{ROOT}output_attn_res_norm.weight", (hidden,)
    yield f"{ROOT}output_attn_res_proj.weight", (1, hidden)
    for layer in range(config.num_hidden_layers):
        at = f"{ROOT}layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            yield f"{at}.{norm}.weight", (hidden,)
        for query in ("self_attention_res_proj", "mlp_res_proj"):
            yield f"{at}.{query}.weight", (1, hidden)
        yield from (_kda if layer in config.kda_layers else _mla)(f"{at}.self_attn", config)
        yield from (_moe if layer in config.moe_layers else _dense)(at, config)


def _kda(at: str, config: K3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, dim = config.hidden_size, config.linear_attn_config.num_heads, config.linear_attn_config.head_dim
    for letter in "qkvg":
        yield f"{at}.{letter}_proj.weight", (heads * dim, hidden)
    for letter in "qkv":
        yield f"{at}.{letter}_conv1d.weight", (heads * dim, 1, 4)
    yield f"{at}.o_proj.weight", (hidden, heads * dim)
    yield f"{at}.f_a_proj.weight", (dim, hidden)
    yield f"{at}.f_b_proj.weight", (heads * dim, dim)
    yield f"{at}.b_proj.weight", (heads, hidden)
    yield f"{at}.A_log", (heads,)
    yield f"{at}.dt_bias", (heads * dim,)
    yield f"{at}.o_norm.weight", (dim,)


def _mla(at: str, config: K3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, nope, rope = (
        config.hidden_size,
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
    )
    yield f"{at}.q_a_proj.weight", (config.q_lora_rank, hidden)
    yield f"{at}.q_a_layernorm.weight", (config.q_lora_rank,)
    yield f"{at}.q_b_proj.weight", (heads * (nope + rope), config.q_lora_rank)
    yield f"{at}.kv_a_proj_with_mqa.weight", (config.kv_lora_rank + rope, hidden)
    yield f"{at}.kv_a_layernorm.weight", (config.kv_lora_rank,)
    yield f"{at}.kv_b_proj.weight", (heads * (nope + config.v_head_dim), config.kv_lora_rank)
    yield f"{at}.g_proj.weight", (heads * config.v_head_dim, hidden)
    yield f"{at}.o_proj.weight", (hidden, heads * config.v_head_dim)


def _dense(at: str, config: K3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = config.hidden_size, config.intermediate_size
    yield f"{at}.mlp.gate_proj.weight", (width, hidden)
    yield f"{at}.mlp.up_proj.weight", (width, hidden)
    yield f"{at}.mlp.down_proj.weight", (hidden, width)


def _moe(at: str, config: K3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, latent, width = config.hidden_size, config.routed_expert_hidden_size, config.moe_intermediate_size
    at = f"{at}.block_sparse_moe"
    yield f"{at}.gate.weight", (config.num_experts, hidden)
    yield f"{at}.gate.e_score_correction_bias", (config.num_experts,)
    yield f"{at}.routed_expert_down_proj.weight", (latent, hidden)
    yield f"{at}.routed_expert_norm.weight", (latent,)
    yield f"{at}.routed_expert_up_proj.weight", (hidden, latent)
    shared = config.num_shared_experts * width
    yield f"{at}.shared_experts.gate_proj.weight", (shared, hidden)
    yield f"{at}.shared_experts.up_proj.weight", (shared, hidden)
    yield f"{at}.shared_experts.down_proj.weight", (hidden, shared)
    for expert in range(config.num_experts):
        yield f"{at}.experts.{expert}.w1.weight", (width, latent)
        yield f"{at}.experts.{expert}.w3.weight", (width, latent)
        yield f"{at}.experts.{expert}.w2.weight", (latent, width)


def parameters(config: K3Config, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    """Random leaf parameters for every official name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter((torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype))
        for name, shape in parameter_shapes(config)
    }


def set_gradients(params: dict[str, torch.nn.Parameter], seed: int, scale: float = 1e-2) -> None:
    """A random gradient for every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for param in params.values():
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)
