"""Gated multi-head latent attention without positions (k3.md 3).

Training and prefill expand the latents to keys and values on a padded grid; one-token decode works in latent space
(the K half of kv_b_proj goes into the query, the V half onto the output). Both read the same cache: per token the
normed latent and the shared key part. K3 rotates neither; `AblationConfig.attention` "mla_rope" rotates the shared key
part and its queries by the token's position before they are used or cached.

Letters: N rows, h heads, n and r the two parts of a key (nope, rope), D = n + r, V value width, Z latent width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3rl.kernels import limits
from k3rl.kernels.gemm import PartialSums
from k3rl.kernels.mla import decode_attention, decode_step
from k3rl.model import flash
from k3rl.model.cache import Cache, ChunkCache, StepCache
from k3rl.model.config import K3Config
from k3rl.model.fuse import fused
from k3rl.model.joined import JoinedParameters, Weight
from k3rl.model.layout import Grid, Layout
from k3rl.model.norm import RMSNorm, wide
from k3rl.model.side_stream import on_side_stream
from k3rl.types import ForwardObserver

ROPE_BASE = 10000.0
SAVED_PROBABILITIES = 1 << 24  # of one grid; more (64 MiB in float32) are made again in the backward
LEAST_RUN = 64  # queries
FEW_QUERIES = 32  # of a segment: up to here latents are not expanded to keys and values for them


def _to_grid(x: Tensor, grid: Grid) -> Tensor:
    """Rows [N, h, D] -> [b * h, t, D], in float32 or wider; padding cells hold the sequence's first row."""
    (b, t), h = grid.rows.shape, x.shape[1]
    cells = x.reshape(-1, x.shape[-1]).index_select(0, grid.by_head(h).gather)
    return cells.view(b * h, t, -1).to(wide(x.dtype))


def _from_grids(results: list[Tensor], grids: list[Grid], like: Tensor) -> Tensor:
    """[b * h, t, D] of every grid -> rows [N, h, D] in the dtype of `like` [., h, .]; N rows are in the grids."""
    n, h = sum(len(grid.members) for grid in grids), like.shape[1]
    pieces = [
        x.reshape(-1, x.shape[-1]).index_select(0, grid.by_head(h).cells).view(-1, h, x.shape[-1])
        for x, grid in zip(results, grids, strict=True)
    ]
    if len(pieces) == 1:
        return pieces[0].to(like.dtype)
    out = torch.empty(n, h, pieces[0].shape[-1], dtype=like.dtype, device=like.device)
    for piece, grid in zip(pieces, grids, strict=True):
        out.index_copy_(0, grid.members, piece.to(like.dtype))
    return out


def _largest(logits: Tensor, grid: Grid, heads: int, run: slice) -> Tensor:
    """Logits [b * h, t, s] of a run of a grid's columns -> the largest of each head [h], padding left out."""
    valid = grid.valid[:, run]
    b, t = valid.shape
    rows = logits.view(b, heads, t, -1).amax(-1).masked_fill(~valid.view(b, 1, t), float("-inf"))
    return rows.amax((0, 2))


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """x [N, ..., r] turned by position [N] int64, in x's dtype: channels (2i, 2i + 1) by position * 10000^(-2i / r)."""
    kind, r = wide(x.dtype), x.shape[-1]
    frequency = ROPE_BASE ** (-torch.arange(0, r, 2, dtype=kind, device=x.device) / r)
    angle = (position.to(kind).unsqueeze(-1) * frequency).view(len(position), *[1] * (x.dim() - 2), r // 2)
    real, imaginary = x.to(kind).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(-2).to(x.dtype)


class _CausalAttention(torch.autograd.Function):
    """q [N, h, D], k [P, h, D], v [P, h, V] -> softmax(q k' scale) v [N, h, V] in each segment, largest logit [h].

    P = N, or N and the rows before them on other ranks. Saves the probabilities of each grid where they are few, else
    the log of each row's normalizer, and then makes them again by runs of queries; softmax in float32 or wider. Padding
    comes last in a sequence of a grid, so the causal mask hides it from every token; queries are the last rows of what
    they attend to.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, grids: list[Grid], scale: float, watch: bool
    ) -> tuple[Tensor, Tensor]:
        h, kind = q.shape[1], wide(q.dtype)
        results, saved = [], []
        largest = torch.full((h,), float("-inf"), dtype=kind, device=q.device)
        for grid in grids:
            qg, kg, vg = _to_grid(q, grid), _to_grid(k, grid.keys), _to_grid(v, grid.keys)
            runs = _runs(qg, kg)
            kept, pieces = [], []
            for start, stop, seen in runs:
                logits = _masked(qg[:, start:stop], kg[:, :seen], scale)
                if watch:
                    largest = torch.maximum(largest, _largest(logits, grid, h, slice(start, stop)))
                if len(runs) > 1:
                    kept.append(torch.logsumexp(logits, -1, keepdim=True))
                    p = logits.sub_(kept[-1]).exp_()
                else:
                    p = torch.softmax(logits, -1)
                    kept.append(p)
                pieces.append(torch.bmm(p, vg[:, :seen]))
            results.append(torch.cat(pieces, 1) if len(runs) > 1 else pieces[0])
            saved += [qg, kg, vg, torch.cat(kept, 1) if len(runs) > 1 else kept[0]]
        ctx.save_for_backward(*saved)
        ctx.grids, ctx.scale = grids, scale
        ctx.mark_non_differentiable(largest)
        return _from_grids(results, grids, v), largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_q: list[Tensor] = []
        grad_k: list[Tensor] = []
        grad_v: list[Tensor] = []
        saved = ctx.saved_tensors  # read once: recomputation makes them anew at each reading
        for number, grid in enumerate(ctx.grids):
            qg, kg, vg, kept = saved[4 * number : 4 * number + 4]
            d_out = _to_grid(grad, grid)
            d_out.view(-1, d_out.shape[-1]).index_fill_(0, grid.by_head(grad.shape[1]).padding, 0.0)
            parts = _grid_backward(qg, kg, vg, kept, d_out, ctx.scale)
            for gathered, part in zip((grad_q, grad_k, grad_v), parts, strict=True):
                gathered.append(part)
        keys = [grid.keys for grid in ctx.grids]
        rows = (_from_grids(grad_q, ctx.grids, grad), *(_from_grids(x, keys, grad) for x in (grad_k, grad_v)))
        return (*rows, None, None, None)


def _runs(q: Tensor, k: Tensor) -> list[tuple[int, int, int]]:
    """Runs of queries (first, end, keys they may see) of a grid q [bh, t, D], k [bh, s, D]; one if logits are few."""
    t, seen = q.shape[1], k.shape[1]
    rows = t
    if q.shape[0] * t * seen > SAVED_PROBABILITIES:
        rows = min(t, max(LEAST_RUN, SAVED_PROBABILITIES // (q.shape[0] * seen)))
    return [(start, min(start + rows, t), seen - t + min(start + rows, t)) for start in range(0, t, rows)]


def _masked(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Logits [bh, t, s] of queries that are the last t of s rows; -inf for what comes after a query."""
    t, seen = q.shape[1], k.shape[1]
    future = torch.full((t, seen), float("-inf"), dtype=q.dtype, device=q.device).triu_(1 + seen - t)
    return torch.baddbmm(future, q, k.mT, alpha=scale)


def _grid_backward(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, d_out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values of one grid. kept: probabilities, or log normalizers [bh, t, 1]."""
    runs = _runs(q, k)
    if len(runs) == 1:
        grad_v = torch.bmm(kept.mT, d_out)
        d_logits = torch.ops.aten._softmax_backward_data(torch.bmm(d_out, v.mT), kept, -1, kept.dtype)
        return torch.bmm(d_logits, k).mul_(scale), torch.bmm(d_logits.mT, q).mul_(scale), grad_v
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop, seen in runs:
        here = slice(start, stop)
        p = _masked(q[:, here], k[:, :seen], scale).sub_(kept[:, here]).exp_()
        grad_v[:, :seen].baddbmm_(p.mT, d_out[:, here])
        d_p = torch.bmm(d_out[:, here], v[:, :seen].mT)
        d_logits = torch.ops.aten._softmax_backward_data(d_p, p, -1, p.dtype)
        torch.bmm(d_logits, k[:, :seen], out=grad_q[:, here]).mul_(scale)
        grad_k[:, :seen].baddbmm_(d_logits.mT, q[:, here], alpha=scale)
    return grad_q, grad_k, grad_v


@fused
def gated(o: Tensor, gate: Tensor) -> Tensor:
    """o times the sigmoid of its gate, [N, h * V] each."""
    return o * torch.sigmoid(gate)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a [R, n, k] times b [R, k, m] in float32 or wider; on a GPU the inputs of bf16 products stay bf16."""
    kind = wide(a.dtype)
    if a.device.type == "cuda" and a.dtype != kind:
        return torch.bmm(a, b, out_dtype=kind)
    return torch.bmm(a.to(kind), b.to(kind))


class GatedMLA(nn.Module):
    """One MLA layer. Its parameters carry the official names under `self_attn`."""

    def __init__(self, config: K3Config, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.num_attention_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.scale = (self.nope + self.rope) ** -0.5
        self.rotates = config.ablation.attention == "mla_rope"
        h, hidden, q_rank = self.heads, config.hidden_size, config.q_lora_rank
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.q_rank, queries = q_rank, h * (self.nope + self.rope)
        if q_rank is None:
            self.q_proj = Weight(queries, hidden, **kind)
        else:
            self.q_a_proj = Weight(q_rank, hidden, **kind)
            self.q_a_layernorm = RMSNorm(q_rank, config.mla_latent_norm_eps, **kind)
            self.q_b_proj = Weight(queries, q_rank, **kind)
        self.kv_a_proj_with_mqa = Weight(self.latent + self.rope, hidden, **kind)
        self.kv_a_layernorm = RMSNorm(self.latent, config.mla_latent_norm_eps, **kind)
        self.kv_b_proj = Weight(h * (self.nope + self.value), self.latent, **kind)
        self.o_proj = Weight(hidden, h * self.value, **kind)
        first = [self.q_proj if q_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa]
        self.gates = config.mla_use_output_gate
        if self.gates:
            self.g_proj = Weight(h * self.value, hidden, **kind)
            first.append(self.g_proj)
        width = queries if q_rank is None else q_rank
        self._split = [width, self.latent, self.rope, h * self.value if self.gates else 0]
        self._inputs = JoinedParameters.of(*first)

    def queries(self, first: Tensor) -> Tensor:
        """What the first product gives for queries [N, .] -> queries [N, h, D]."""
        q = first if self.q_rank is None else self.q_b_proj.linear(self.q_a_layernorm(first))
        return q.reshape(-1, self.heads, self.nope + self.rope)

    def step(self, x: Tensor, cache: StepCache) -> Tensor | PartialSums:
        """`forward` of one new token for every row, for the residual stream."""
        q_a, c, k_r, gate = self._inputs.linear(x).split(self._split, dim=-1)
        return self.o_proj.summand(self._step(q_a, c, k_r, gate, cache))

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        cache: Cache | StepCache | ChunkCache | None,
        observer: ForwardObserver | None,
    ) -> Tensor:
        """Normed hidden rows [N, H] -> [N, H]; with a cache every segment continues its row of it.

        With a context the latents of the first segment's rows before these come from the ranks that hold them.
        """
        q_a, c, k_r, gate = self._inputs.linear(x).split(self._split, dim=-1)
        if isinstance(cache, StepCache):
            return self.o_proj.linear(self._step(q_a, c, k_r, gate, cache))
        q = self.queries(q_a)
        c = self.kv_a_layernorm(c)
        if isinstance(cache, ChunkCache):
            return self._output(self._chunked_prefill(q, c, k_r, cache), gate)
        if self.rotates:
            position = layout.sequence_position if cache is None else layout.position_after(cache.lengths)
            q, k_r = self._rotated(q, k_r, position)
        if cache is not None:
            position = layout.position_after(cache.lengths)
            cache.append_latent(self.layer, layout.segment, position, torch.cat([c, k_r], dim=-1))
            if layout.longest == 1:
                return self._output(self._decode(q, cache), gate)
        watch = observer is not None and torch.is_grad_enabled()
        if layout.fixed or flash.takes(q):
            return self._output(self._packed(q, c, k_r, layout, cache, observer if watch else None), gate)
        if cache is not None and int(cache.lengths.max()) > 0:
            return self._output(self._continue(q, layout, cache), gate)
        if layout.context is not None:
            latent = torch.cat([c, k_r], dim=-1)
            latent = torch.cat([layout.context.rows_before(latent), latent])
            c, k_r = latent.split([self.latent, self.rope], dim=-1)
        k, v = self.expand(c, k_r)
        o, largest = _CausalAttention.apply(q, k, v, layout.grids, self.scale, watch)
        if watch and observer is not None:
            observer.attention_logits(self.layer, largest.detach())
        return self._output(o.reshape(-1, self.heads * self.value), gate)

    def _packed(
        self, q: Tensor, c: Tensor, k_r: Tensor, layout: Layout, cache: Cache | None, observer: ForwardObserver | None
    ) -> Tensor:
        """Queries [N, h, D] over their own rows, c [N, Z] and k_r [N, r], and those before them -> [N, h * V].

        Rows before are cached, or on ranks to the left.
        """
        keys = layout
        if layout.context is not None:
            latent = torch.cat([c, k_r], dim=-1)
            before = layout.context.rows_before(latent)
            c, k_r = torch.cat([before, latent]).split([self.latent, self.rope], dim=-1)
            if len(before):
                keys = layout.with_before(torch.tensor([len(before)] + [0] * (layout.n_segments - 1)))
        if keys is layout and cache is None and torch.is_grad_enabled() and flash.takes_own_rows(q, self.value, k_r):
            kv = self.kv_b_proj.linear(c).view(-1, self.heads, self.nope + self.value)
            o, largest = flash.over_own_rows(q, kv, k_r, self.nope, layout, self.scale, observer is not None)
            if observer is not None and largest is not None:
                observer.attention_logits(self.layer, largest)
            return o
        if cache is not None and int(cache.lengths.max()) > 0:
            keys = layout.with_before(cache.lengths)
            latent = cache.latent(self.layer, keys.longest)
            latent = latent.reshape(-1, latent.shape[2]).index_select(0, keys.segment * keys.longest + keys.position)
            if layout.longest <= FEW_QUERIES:
                return self._few_queries(q, latent, layout, keys)
            c, k_r = latent.split([self.latent, self.rope], dim=-1)
        k, v = self.expand(c, k_r)
        if observer is not None:
            largest = flash.largest_logits(q.detach(), k.detach(), layout, self.scale, keys)
            observer.attention_logits(self.layer, largest)
        o = flash.attention(q, k, v, layout, keys, self.scale)
        return o.reshape(-1, self.heads * self.value)

    def _chunked_prefill(self, q: Tensor, c: Tensor, k_r: Tensor, cache: ChunkCache) -> Tensor:
        """Queries [N, h, D] of packed tokens over the cached latents of their sequences and their own -> [N, h * V]."""
        if self.rotates:
            q, k_r = self._rotated(q, k_r, cache.past)
        cache.append_latent(self.layer, torch.cat([c, k_r], dim=-1))
        absorbed, q_r = self._in_latent_space(q).split([self.latent, self.rope], dim=-1)
        return self._values_of(cache.attend(self.layer, absorbed.transpose(0, 1), q_r, self.scale).transpose(0, 1))

    def _few_queries(self, q: Tensor, latent: Tensor, layout: Layout, keys: Layout) -> Tensor:
        """Few queries [N, h, D] a segment over many latents [P, Z + r] -> [N, h * V], without their keys and values."""
        results = []
        for own, seen in zip(self._in_latent_space(q).split(layout.lengths), latent.split(keys.lengths), strict=True):
            n, total = len(own), len(seen)
            logits = _wide_product(own.transpose(0, 1).reshape(1, -1, own.shape[2]), seen.t().unsqueeze(0))
            later = torch.ones(n, total, dtype=torch.bool, device=q.device).triu_(1 + total - n)
            p = logits.mul_(self.scale).view(self.heads, n, total).masked_fill_(later, float("-inf")).softmax(-1)
            context = torch.mm(p.view(-1, total).to(q.dtype), seen[:, : self.latent])
            results.append(context.view(self.heads, n, -1).transpose(0, 1))
        return self._values_of(torch.cat(results))

    def expand(self, c: Tensor, k_r: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [..., Z], shared keys [..., r] -> keys [..., h, D], values [..., h, V]."""
        kv = self.kv_b_proj.linear(c).view(*c.shape[:-1], self.heads, self.nope + self.value)
        k_n, v = kv.split([self.nope, self.value], dim=-1)
        return torch.cat([k_n, k_r.unsqueeze(-2).expand(*k_n.shape[:-1], self.rope)], dim=-1), v

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj.linear(self._gated(o, gate))

    def _gated(self, o: Tensor, gate: Tensor) -> Tensor:
        return gated(o, gate) if self.gates else o

    def _rotated(self, q: Tensor, k_r: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [N, h, D] and shared keys [N, r] with their rope parts turned by position [N]."""
        return torch.cat([q[..., : self.nope], rotate(q[..., self.nope :], position)], dim=-1), rotate(k_r, position)

    def _in_latent_space(self, q: Tensor) -> Tensor:
        """Queries [R, h, D] -> [R, h, Z + r], which meet latents as they are cached."""
        kv_b = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        q_n, q_r = q.split([self.nope, self.rope], dim=-1)
        absorbed = torch.bmm(q_n.transpose(0, 1), kv_b[:, : self.nope]).transpose(0, 1)
        pair = self.kv_b_proj.adapter
        if pair is not None:
            up = pair.up.view(self.heads, self.nope + self.value, -1)
            low = torch.bmm(q_n.transpose(0, 1), up[:, : self.nope]).transpose(0, 1)
            absorbed = absorbed + torch.matmul(low, pair.down) * pair.scale
        return torch.cat([absorbed, q_r], dim=-1)

    def _values_of(self, context: Tensor) -> Tensor:
        """Sums of latents [R, h, Z] -> [R, h * V]."""
        kv_b = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        o = torch.bmm(context.transpose(0, 1), kv_b[:, self.nope :].mT)
        pair = self.kv_b_proj.adapter
        if pair is not None:
            up = pair.up.view(self.heads, self.nope + self.value, -1)
            low = nn.functional.linear(context, pair.down).transpose(0, 1)
            o = o + torch.bmm(low, up[:, self.nope :].mT) * pair.scale
        return o.transpose(0, 1).reshape(-1, self.heads * self.value)

    def _step(self, q_a: Tensor, c: Tensor, k_r: Tensor, gate: Tensor, cache: StepCache) -> Tensor:
        """One new token for every row -> gated values [R, h * V].

        q_a [R, q_lora] (or queries), c [R, Z], k_r [R, r] and gate [R, h * V] (or nothing) as they are projected. The
        host need not know how many tokens there are, and there is no adapter.
        """
        kv_b = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        pages = cache.latent[self.layer]
        plain = not self.rotates and self.gates and self.q_rank is not None
        if plain and limits.MLA_DECODE_STEP.takes_queries(q_a, self.q_b_proj.weight, kv_b, self.nope, pages):
            q_norm, c_norm = (
                decode_step.Norm(norm.weight, norm.eps) for norm in (self.q_a_layernorm, self.kv_a_layernorm)
            )
            absorbed, q_r = decode_step.queries(
                q_a, c, k_r, q_norm, c_norm, self.q_b_proj.weight, kv_b, self.nope, pages, cache.place
            )
            where = (pages, cache.table, cache.past, self.scale)
            return decode_step.attend(absorbed, q_r, *where, kv_b, self.nope, gate)

        def append() -> None:
            key = rotate(k_r, cache.past) if self.rotates else k_r
            cache.append_latent(self.layer, torch.cat([self.kv_a_layernorm(c), key], dim=-1))

        appended = on_side_stream(append)
        q_n, q_r = self.queries(q_a).split([self.nope, self.rope], dim=-1)
        if self.rotates:
            q_r = rotate(q_r, cache.past)
        absorbed = torch.bmm(q_n.transpose(0, 1), kv_b[:, : self.nope])
        appended()
        context = decode_attention.attend(absorbed, q_r, pages, cache.table, cache.past, self.scale)
        o = torch.bmm(context, kv_b[:, self.nope :].mT)
        return self._gated(o.transpose(0, 1).reshape(-1, self.heads * self.value), gate)

    def _decode(self, q: Tensor, cache: Cache) -> Tensor:
        """One new token for every row: q [R, h, D] -> [R, h * V], from latents that include the new token."""
        lengths = cache.lengths + 1
        width = int(lengths.max())
        latent = cache.latent(self.layer, width)
        kind = wide(q.dtype)
        query = self._in_latent_space(q).to(kind)
        bias = torch.zeros(len(lengths), 1, width, dtype=kind)
        bias.masked_fill_(torch.arange(width) >= lengths.view(-1, 1, 1), float("-inf"))
        wide_latent = latent.to(kind)
        p = torch.baddbmm(bias.to(q.device), query, wide_latent.mT, alpha=self.scale).softmax(-1)
        return self._values_of(torch.bmm(p, wide_latent[..., : self.latent]).to(q.dtype))

    def _continue(self, q: Tensor, layout: Layout, cache: Cache) -> Tensor:
        """Several new tokens after cached ones: q [N, h, D] -> [N, h * V]."""
        kind = wide(q.dtype)
        results = []
        past, seen_by = layout.after(cache.lengths), cache.lengths.tolist()
        total = [before + more for before, more in zip(seen_by, layout.lengths, strict=True)]
        latent = cache.latent(self.layer, max(total))
        for grid in layout.grids:
            width = max(total[segment] for segment in grid.group)
            piece = latent[grid.segments, :width]
            k, v = self.expand(piece[..., : self.latent], piece[..., self.latent :])
            b, t = grid.rows.shape
            seen = past[grid.segments].view(-1, 1, 1) + torch.arange(t, device=q.device).view(1, -1, 1)
            hidden = torch.arange(width, device=q.device) > seen
            queries = _to_grid(q, grid).view(b, self.heads, t, -1)
            logits = torch.matmul(queries, k.to(kind).permute(0, 2, 3, 1)).mul_(self.scale)
            p = logits.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1)
            results.append(torch.matmul(p, v.to(kind).transpose(1, 2)))
        return _from_grids(results, layout.grids, q).view(-1, self.heads * self.value)
