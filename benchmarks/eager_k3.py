"""A K3 decoder as one writes it first: plain operations, autograd through all of them, every logit materialized.

It reads the parameters of a `K3ForCausalLM` and computes the same function (`k3.md` 1-7), so that a benchmark compares
two ways to run one model. Sequences are of equal length; vision, ablations and caches are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rl.kernels.kda.operator import kda_reference
from k3rl.model import K3ForCausalLM
from k3rl.numerics import mx


class EagerK3:
    """Logits and the mean cross entropy of ids [B, T], from the leaf parameters of `model`."""

    def __init__(self, model: K3ForCausalLM) -> None:
        self.config = model.config
        self.weights = dict(model.official_parameters())

    def loss(self, ids: Tensor) -> Tensor:
        """Cross entropy of tokens 1 .. T - 1 of every sequence, over their number."""
        logits = self.logits(ids).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def logits(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]."""
        config, stem = self.config, "language_model.model"
        prefix: Tensor | None = nn.functional.embedding(ids, self.weights[f"{stem}.embed_tokens.weight"])
        bank: list[Tensor] = []
        for layer in range(config.num_hidden_layers):
            at = f"{stem}.layers.{layer}"
            seen = self._mix(f"{at}.self_attention_res", prefix, bank)
            if layer % config.attn_res_block_size == 0:
                bank.append(prefix)
                prefix = None
            normed = self._norm(f"{at}.input_layernorm", seen)
            attend = self._kda if layer in config.kda_layers else self._mla
            out = attend(f"{at}.self_attn", normed)
            prefix = out if prefix is None else prefix + out
            normed = self._norm(f"{at}.post_attention_layernorm", self._mix(f"{at}.mlp_res", prefix, bank))
            if layer in config.moe_layers:
                prefix = prefix + self._moe(f"{at}.block_sparse_moe", normed)
            else:
                prefix = prefix + self._mlp(f"{at}.mlp", normed)
        hidden = self._norm(f"{stem}.norm", self._mix(f"{stem}.output_attn_res", prefix, bank))
        return self._linear("language_model.lm_head", hidden)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return normed.to(x.dtype) * self.weights[f"{name}.weight"]

    def _mix(self, name: str, prefix: Tensor, bank: list[Tensor]) -> Tensor:
        if not bank:
            return prefix
        sources = torch.stack([*bank, prefix]).float()
        normed = sources * torch.rsqrt(sources.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        query = self.weights[f"{name}_norm.weight"] * self.weights[f"{name}_proj.weight"][0]
        p = torch.softmax((normed * query.float()).sum(-1, keepdim=True), 0)
        return (p * sources).sum(0).to(prefix.dtype)

    def _kda(self, name: str, x: Tensor) -> Tensor:
        linear, (batch, tokens, _) = self.config.linear_attn_config, x.shape
        heads = (batch, tokens, linear.num_heads, linear.head_dim)
        streams = []
        for letter in "qkv":
            taps = self.weights[f"{name}.{letter}_conv1d.weight"]
            raw = self._linear(f"{name}.{letter}_proj", x).mT.to(taps.dtype)
            mixed = nn.functional.conv1d(raw, taps, padding=taps.shape[-1] - 1, groups=taps.shape[0])[..., :tokens]
            streams.append(nn.functional.silu(mixed).mT.to(x.dtype).reshape(heads))
        gate = self._linear(f"{name}.f_b_proj", self._linear(f"{name}.f_a_proj", x)).view(heads)
        beta = self._linear(f"{name}.b_proj", x)
        o, _ = kda_reference(
            *streams, gate, beta, self.weights[f"{name}.A_log"], self.weights[f"{name}.dt_bias"],
            gate_lower_bound=linear.gate_lower_bound,
        )  # fmt: skip
        normed = self._norm(f"{name}.o_norm", o.float())
        out = normed * torch.sigmoid(self._linear(f"{name}.g_proj", x).view(heads).float())
        return self._linear(f"{name}.o_proj", out.to(x.dtype).flatten(2))

    def _mla(self, name: str, x: Tensor) -> Tensor:
        config, (batch, tokens, _) = self.config, x.shape
        h, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        low = self._norm(f"{name}.q_a_layernorm", self._linear(f"{name}.q_a_proj", x))
        q = self._linear(f"{name}.q_b_proj", low).view(batch, tokens, h, nope + rope)
        latent, shared = self._linear(f"{name}.kv_a_proj_with_mqa", x).split([config.kv_lora_rank, rope], -1)
        kv = self._linear(f"{name}.kv_b_proj", self._norm(f"{name}.kv_a_layernorm", latent))
        key, value = kv.view(batch, tokens, h, nope + config.v_head_dim).split([nope, config.v_head_dim], -1)
        key = torch.cat([key, shared.unsqueeze(2).expand(-1, -1, h, -1)], -1)
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), key.float()) * (nope + rope) ** -0.5
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        p = torch.softmax(scores.masked_fill(mask, float("-inf")), -1)
        out = torch.einsum("bhij,bjhd->bihd", p, value.float()).to(x.dtype).flatten(2)
        return self._linear(f"{name}.o_proj", out * torch.sigmoid(self._linear(f"{name}.g_proj", x)))

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, other = self.config.activation_situ_beta, self.config.activation_situ_linear_beta
        g, u = gate.float(), up.float()
        return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * other * torch.tanh(u / other)).to(gate.dtype)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        active = self._situ(self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x))
        return self._linear(f"{name}.down_proj", active)

    def _read(self, x: Tensor) -> Tensor:
        rounded = self.config.quantization.computed_activations == "mxfp8"
        return mx.fake_quantize_mxfp8(x, self.config.quantization.scale_rule) if rounded else x

    def _moe(self, name: str, x: Tensor) -> Tensor:
        config, rows = self.config, x.flatten(0, 1)
        scores = torch.sigmoid(nn.functional.linear(rows.float(), self.weights[f"{name}.gate.weight"].float()))
        bias = self.weights[f"{name}.gate.e_score_correction_bias"]
        ids = torch.topk(scores + bias, config.num_experts_per_token, dim=-1).indices
        chosen = scores.gather(1, ids)
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        z = self._read(self._linear(f"{name}.routed_expert_down_proj", rows))
        total = torch.zeros_like(z, dtype=torch.float32)
        for expert in range(config.num_experts):
            token, choice = torch.where(ids == expert)
            if len(token):
                at, given = f"{name}.experts.{expert}", z[token]
                active = self._situ(self._linear(f"{at}.w1", given), self._linear(f"{at}.w3", given))
                out = self._linear(f"{at}.w2", self._read(active))
                total = total.index_add(0, token, out.float() * chosen[token, choice, None])
        normed = self._norm(f"{name}.routed_expert_norm", total.to(x.dtype))
        routed = self._linear(f"{name}.routed_expert_up_proj", normed)
        return routed.view(x.shape) + self._mlp(f"{name}.shared_experts", x)
