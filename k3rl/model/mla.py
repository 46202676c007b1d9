"""Gated multi-head latent attention without positions (k3.md 3).

Training and prefill expand the latents to keys and values on a padded grid; one-token decode works in latent space
(the K half of kv_b_proj goes into the query, the V half onto the output). Both read the same cache: per token the
normed latent and the shared key part, which is never rotated.

Letters: N rows, h heads, n and r the two parts of a key (nope, rope), D = n + r, V value width, Z latent width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3rl.model.cache import Cache
from k3rl.model.config import K3Config
from k3rl.model.fused import Fused, Weight
from k3rl.model.layout import Grid, Layout
from k3rl.model.norm import RMSNorm, wide
from k3rl.types import ForwardObserver


def _to_grid(x: Tensor, grid: Grid, heads: int) -> Tensor:
    """Rows [N, h, D] -> [b * h, t, D]; padding cells hold row 0."""
    b, t = grid.rows.shape
    index = (grid.rows.view(b, 1, t) * heads + torch.arange(heads, device=x.device).view(1, -1, 1)).view(-1)
    return x.reshape(-1, x.shape[-1]).index_select(0, index).view(b * heads, t, -1)


def _from_grid(x: Tensor, grid: Grid, heads: int, out: Tensor) -> None:
    """[b * h, t, D] -> its rows of out [N, h, D]."""
    b, t = grid.rows.shape
    by_cell = x.view(b, heads, t, -1).transpose(1, 2).reshape(b * t, heads, -1)
    out.index_copy_(0, grid.members, by_cell.index_select(0, grid.cells))


def _causal_bias(grid: Grid, heads: int, dtype: torch.dtype) -> Tensor:
    """[t, t]: 0 on and below the diagonal, -inf above. Padding comes last in a segment, so rows never see it."""
    t = grid.rows.shape[1]
    return torch.full((t, t), float("-inf"), dtype=dtype, device=grid.rows.device).triu_(1)


class _CausalAttention(torch.autograd.Function):
    """q, k [N, h, D], v [N, h, V] -> softmax(q k' scale) v [N, h, V] inside each segment, and the largest logit [h].

    Saves the probabilities of each grid; softmax in float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, grids: list[Grid], scale: float, watch: bool
    ) -> tuple[Tensor, Tensor]:
        h, kind = q.shape[1], wide(q.dtype)
        out = torch.empty_like(v)
        saved: list[Tensor] = []
        largest = torch.full((h,), float("-inf"), dtype=kind, device=q.device)
        for grid in grids:
            qg, kg, vg = (_to_grid(x, grid, h).to(kind) for x in (q, k, v))
            logits = torch.baddbmm(_causal_bias(grid, h, kind), qg, kg.mT, alpha=scale)
            if watch:
                b, t = grid.rows.shape
                rows = logits.view(b, h, t, t).amax(-1).masked_fill_(~grid.valid.view(b, 1, t), float("-inf"))
                largest = torch.maximum(largest, rows.amax((0, 2)))
            p = torch.softmax(logits, -1)
            _from_grid(torch.bmm(p, vg).to(out.dtype), grid, h, out)
            saved += [qg, kg, vg, p]
        ctx.save_for_backward(out, *saved)
        ctx.grids, ctx.scale = grids, scale
        ctx.mark_non_differentiable(largest)
        return out, largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        out, *saved = ctx.saved_tensors
        h, kind = out.shape[1], wide(out.dtype)
        n, width = out.shape[0], saved[0].shape[-1]
        grad_q = torch.empty(n, h, width, dtype=out.dtype, device=out.device)
        grad_k, grad_v = torch.empty_like(grad_q), torch.empty_like(out)
        for number, grid in enumerate(ctx.grids):
            qg, kg, vg, p = saved[4 * number : 4 * number + 4]
            d_out = _to_grid(grad, grid, h).to(kind)
            b, t = grid.rows.shape
            d_out.view(b, h, t, -1).masked_fill_(~grid.valid.view(b, 1, t, 1), 0.0)
            _from_grid(torch.bmm(p.mT, d_out).to(out.dtype), grid, h, grad_v)
            d_p = torch.bmm(d_out, vg.mT)
            d_logits = torch.ops.aten._softmax_backward_data(d_p, p, -1, kind).mul_(ctx.scale)
            _from_grid(torch.bmm(d_logits, kg).to(out.dtype), grid, h, grad_q)
            _from_grid(torch.bmm(d_logits.mT, qg).to(out.dtype), grid, h, grad_k)
        return grad_q, grad_k, grad_v, None, None, None


class GatedMLA(nn.Module):
    """One MLA layer. Its parameters carry the official names under `self_attn`."""

    def __init__(self, config: K3Config, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.num_attention_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.scale = (self.nope + self.rope) ** -0.5
        h, hidden, q_rank = self.heads, config.hidden_size, config.q_lora_rank
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.q_a_proj = Weight(q_rank, hidden, **kind)
        self.q_a_layernorm = RMSNorm(q_rank, config.mla_latent_norm_eps, **kind)
        self.q_b_proj = Weight(h * (self.nope + self.rope), q_rank, **kind)
        self.kv_a_proj_with_mqa = Weight(self.latent + self.rope, hidden, **kind)
        self.kv_a_layernorm = RMSNorm(self.latent, config.mla_latent_norm_eps, **kind)
        self.kv_b_proj = Weight(h * (self.nope + self.value), self.latent, **kind)
        self.g_proj = Weight(h * self.value, hidden, **kind)
        self.o_proj = Weight(hidden, h * self.value, **kind)
        self._split = [q_rank, self.latent, self.rope, h * self.value]
        self._inputs = Fused([self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight, self.g_proj.weight])

    def forward(self, x: Tensor, layout: Layout, cache: Cache | None, observer: ForwardObserver | None) -> Tensor:
        """Normed hidden rows [N, H] -> [N, H]; with a cache every segment continues its row of it."""
        q_a, c, k_r, gate = self._inputs.linear(x).split(self._split, dim=-1)
        q = nn.functional.linear(self.q_a_layernorm(q_a), self.q_b_proj.weight)
        q = q.view(-1, self.heads, self.nope + self.rope)
        c = self.kv_a_layernorm(c)
        if cache is not None:
            past = cache.lengths.to(x.device)
            position = past.index_select(0, layout.segment) + layout.position
            cache.append_latent(self.layer, layout.segment, position, torch.cat([c, k_r], dim=-1))
            if layout.longest == 1:
                return self._output(self._decode(q, cache), gate)
            if int(past.max()) > 0:
                return self._output(self._continue(q, layout, cache, past), gate)
        k, v = self._expand(c, k_r)
        watch = observer is not None and torch.is_grad_enabled()
        o, largest = _CausalAttention.apply(q, k, v, layout.grids, self.scale, watch)
        if watch and observer is not None:
            observer.attention_logits(self.layer, largest.detach())
        return self._output(o.reshape(-1, self.heads * self.value), gate)

    def _expand(self, c: Tensor, k_r: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [..., Z], shared keys [..., r] -> keys [..., h, D], values [..., h, V]."""
        kv = nn.functional.linear(c, self.kv_b_proj.weight).view(*c.shape[:-1], self.heads, self.nope + self.value)
        k_n, v = kv.split([self.nope, self.value], dim=-1)
        return torch.cat([k_n, k_r.unsqueeze(-2).expand(*k_n.shape[:-1], self.rope)], dim=-1), v

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        return nn.functional.linear(o * torch.sigmoid(gate), self.o_proj.weight)

    def _decode(self, q: Tensor, cache: Cache) -> Tensor:
        """One new token for every row: q [R, h, D] -> [R, h * V], from latents that include the new token."""
        lengths = cache.lengths + 1
        width = int(lengths.max())
        latent = cache.latent(self.layer, width)
        kind = wide(q.dtype)
        kv_b = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        q_n, q_r = q.split([self.nope, self.rope], dim=-1)
        absorbed = torch.bmm(q_n.transpose(0, 1), kv_b[:, : self.nope]).transpose(0, 1)
        query = torch.cat([absorbed, q_r], dim=-1).to(kind)
        bias = torch.zeros(len(lengths), 1, width, dtype=kind)
        bias.masked_fill_(torch.arange(width) >= lengths.view(-1, 1, 1), float("-inf"))
        wide_latent = latent.to(kind)
        p = torch.baddbmm(bias.to(q.device), query, wide_latent.mT, alpha=self.scale).softmax(-1)
        context = torch.bmm(p, wide_latent[..., : self.latent]).to(q.dtype)
        o = torch.bmm(context.transpose(0, 1), kv_b[:, self.nope :].mT)
        return o.transpose(0, 1).reshape(-1, self.heads * self.value)

    def _continue(self, q: Tensor, layout: Layout, cache: Cache, past: Tensor) -> Tensor:
        """Several new tokens after cached ones: q [N, h, D] -> [N, h * V]."""
        kind = wide(q.dtype)
        out = torch.empty(q.shape[0], self.heads, self.value, dtype=q.dtype, device=q.device)
        total = past + layout.lengths_tensor
        latent = cache.latent(self.layer, int(total.max()))
        for grid in layout.grids:
            width = int(total[grid.segments].max())
            piece = latent[grid.segments, :width]
            k, v = self._expand(piece[..., : self.latent], piece[..., self.latent :])
            b, t = grid.rows.shape
            seen = past[grid.segments].view(-1, 1, 1) + torch.arange(t, device=q.device).view(1, -1, 1)
            hidden = torch.arange(width, device=q.device) > seen
            queries = _to_grid(q, grid, self.heads).view(b, self.heads, t, -1).to(kind)
            logits = torch.matmul(queries, k.to(kind).permute(0, 2, 3, 1)).mul_(self.scale)
            p = logits.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1)
            o = torch.matmul(p, v.to(kind).transpose(1, 2)).to(q.dtype)
            _from_grid(o.reshape(b * self.heads, t, -1), grid, self.heads, out)
        return out.view(-1, self.heads * self.value)
