"""Kimi Delta Attention (k3.md 2): short convolutions, gates, the chunked recurrence, and the one-token step.

The chunked form works on chunks of 16 tokens with two factors. With G the cumulative log decay inside a chunk, m its
middle value and a = exp(G - m), every causal product exp(G_i - G_j) is (a_i) (1 / a_j), both within exp(+-40). The
middle goes into the state: S^ = exp(m) S, so per chunk

    R = V - K+ S^,  V~ = T R,  O = Q+ S^ + A V~,  S_end = a_last (S^ + K-' V~)

with K+ = a K, K- = K / a, Q+ = a Q / sqrt(D), T = (I + L)^-1 diag(beta), L = beta_i (K+ K-')_ij below the diagonal and
A = Q+ K-' on and below it. The backward is written out; the middle is a change of variables and needs no gradient.

Letters: N rows, S segments, h heads, K = V = D head width, C = 16, M = chunks * h.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from k3rl.model.blocks import row_blocks
from k3rl.model.cache import Cache
from k3rl.model.config import K3Config
from k3rl.model.fused import Fused, Weight
from k3rl.model.layout import CHUNK, HISTORY, ChunkPlan, Layout
from k3rl.model.norm import inverse_rms, wide

L2_EPS = 1e-6  # added to the sum of squares, not to the mean
MIDDLE = CHUNK // 2 - 1


class _ToExtended(torch.autograd.Function):
    """Rows [N, C] -> extended rows [N + 3S, C], histories zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extended: Tensor, n_extended: int) -> Tensor:
        ctx.save_for_backward(extended)
        return x.new_zeros(n_extended, x.shape[1]).index_copy_(0, extended, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def _convolve(x: Tensor, taps: Tensor) -> Tensor:
    """Extended rows [n, C], taps [4, C] -> sums [n, C], row i over rows i - 3 .. i; the first three rows are zero."""
    out = torch.empty_like(x)
    out[:HISTORY] = 0.0
    for rows in row_blocks(x[HISTORY:]):
        body = torch.mul(x[HISTORY:][rows], taps[HISTORY], out=out[HISTORY:][rows])
        for tap in range(HISTORY):
            body.addcmul_(x[tap : tap - HISTORY][rows], taps[tap])
    return out


class _ShortConv(torch.autograd.Function):
    """SiLU of the causal depthwise convolution over extended rows. Gradients of history rows are taken as zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fused: Fused, *parameters: Tensor) -> Tensor:
        taps = fused.tensor().t().contiguous()
        pre = _convolve(x.to(wide(x.dtype)), taps)
        ctx.save_for_backward(x, pre, taps)
        ctx.fused = fused
        return nn.functional.silu(pre).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, pre, taps = ctx.saved_tensors
        x_wide, n = x.to(pre.dtype), x.shape[0]
        grad_pre = torch.ops.aten.silu_backward(grad.to(pre.dtype), pre)
        grad_x, grad_taps = torch.empty_like(grad_pre), torch.zeros_like(taps)
        grad_x[-HISTORY:] = 0.0
        for rows in row_blocks(pre[HISTORY:]):
            torch.mul(grad_pre[:-HISTORY][rows], taps[HISTORY], out=grad_x[:-HISTORY][rows])
            product = torch.empty_like(grad_pre[HISTORY:][rows])
            for tap in range(HISTORY + 1):
                later = slice(HISTORY - tap, n - tap)
                if tap < HISTORY:
                    grad_x[:-HISTORY][rows].addcmul_(grad_pre[later][rows], taps[tap])
                torch.mul(grad_pre[HISTORY:][rows], x_wide[tap : n - HISTORY + tap][rows], out=product)
                grad_taps[tap] += product.sum(0)
        for back in range(1, HISTORY + 1):  # the last rows have fewer rows after them
            tail = grad_x[n - back]
            for ahead in range(back):
                tail.addcmul_(grad_pre[n - back + ahead], taps[HISTORY - ahead])
        return (grad_x.to(x.dtype), None, *ctx.fused.split(grad_taps.t().contiguous()))


def _masks(like: Tensor) -> tuple[Tensor, Tensor]:
    """[C, C] ones on and below, and strictly below, the diagonal."""
    ones = torch.ones(CHUNK, CHUNK, dtype=like.dtype, device=like.device)
    return ones.tril(), ones.tril(-1)


class _KDAChunks(torch.autograd.Function):
    """The chunked recurrence over extended rows, from raw (post-convolution) q, k, v and raw gate logits.

    qkv [n, 3hD], z [n, hD] before dt_bias, b [n, h] before sigmoid, A_log [h], dt_bias [hD], state [S, h, D, D] or
    None -> o [N, hD] in qkv's dtype and final state [S, h, D, D], float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor | None,
        plan: ChunkPlan,
        bound: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        h, kind = a_log.shape[0], wide(qkv.dtype)
        width = dt_bias.shape[0] // h
        index = plan.by_head(h)
        gathered = qkv.reshape(-1, width).index_select(0, index.qkv).view(3, -1, CHUNK, width).to(kind)
        norm = torch.linalg.vector_norm(gathered[:2], dim=-1, keepdim=True).square_().add_(L2_EPS).rsqrt_()
        unit = gathered[:2] * norm
        v = gathered[2]
        sigma, shifted = _gate(z, a_log, dt_bias, index.single, index.padding, kind)
        beta = b.reshape(-1).index_select(0, index.single).to(kind).sigmoid_()
        beta = beta.index_fill_(0, index.padding, 0.0).view(-1, CHUNK, 1)
        causal, strict = _masks(v)
        g_sum = torch.matmul(causal * bound, sigma)
        middle = g_sum[:, MIDDLE : MIDDLE + 1]
        scale = width**-0.5
        a = (g_sum - middle).exp_()
        k_plus, k_minus, q_plus = unit[1] * a, unit[1] / a, (unit[0] * a).mul_(scale)
        entry = middle.exp().squeeze(1)  # [M, D]
        pairs = torch.bmm(k_plus, k_minus.mT).mul_(strict)
        eye = torch.eye(CHUNK, dtype=kind, device=v.device).expand_as(pairs)
        inverse = torch.linalg.solve_triangular(pairs * beta, eye, upper=False, unitriangular=True)
        attention = torch.bmm(q_plus, k_minus.mT).mul_(causal)
        states, rest, solved, final = _scan(plan, h, state, v, k_plus, k_minus, inverse * beta.mT, a[:, -1], entry)
        out = torch.bmm(q_plus, states).baddbmm_(attention, solved)
        ctx.save_for_backward(
            unit, norm, sigma, shifted, beta, a, k_plus, k_minus, q_plus, entry, pairs, inverse, attention, states,
            rest, solved, final, a_log,
        )  # fmt: skip
        ctx.plan, ctx.bound, ctx.dtypes = plan, bound, (qkv.dtype, z.dtype, b.dtype)
        ctx.has_state = state is not None
        rows = out.view(-1, width).index_select(0, index.out).view(-1, h * width)
        return rows.to(qkv.dtype), final.index_select(0, plan.rank)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        (
            unit, norm, sigma, shifted, beta, a, k_plus, k_minus, q_plus, entry, pairs, inverse, attention, states,
            rest, solved, final, a_log,
        ) = ctx.saved_tensors  # fmt: skip
        plan: ChunkPlan = ctx.plan
        h, width, kind = a_log.shape[0], a.shape[-1], a.dtype
        index = plan.by_head(h)
        causal, strict = _masks(a)
        d_out = torch.zeros_like(rest)
        if grad_o is not None:
            d_out.view(-1, width).index_copy_(0, index.out, grad_o.reshape(-1, width).to(kind))
        if grad_final is not None:
            grad_final = grad_final.index_select(0, plan.order).to(kind)
        transform = inverse * beta.mT
        d_ends, d_solved, d_rest, d_log_end, d_initial = _scan_backward(
            plan, h, d_out, grad_final, attention, q_plus, k_plus, k_minus, transform, a[:, -1], entry, states, final
        )
        d_transform = torch.bmm(d_solved, rest.mT)
        d_beta = torch.linalg.vecdot(d_transform, inverse, dim=1)
        d_inverse = d_transform.mul_(beta.mT)
        d_lower = torch.bmm(torch.bmm(inverse.mT, d_inverse), inverse.mT).neg_().mul_(strict)
        d_beta += torch.linalg.vecdot(d_lower, pairs)
        d_pairs = d_lower.mul_(beta)
        d_attention = torch.bmm(d_out, solved.mT).mul_(causal)
        d_q_plus = torch.bmm(d_out, states.mT).baddbmm_(d_attention, k_minus)
        d_k_minus = torch.bmm(solved, d_ends.mT).baddbmm_(d_attention.mT, q_plus).baddbmm_(d_pairs.mT, k_plus)
        d_k_plus = torch.bmm(d_pairs, k_minus).baddbmm_(d_rest, states.mT, alpha=-1)
        d_g = torch.addcmul(d_k_plus * k_plus, d_k_minus, k_minus, value=-1).addcmul_(d_q_plus, q_plus)
        d_g[:, -1] += d_log_end
        d_sigma = torch.matmul(causal.mT * ctx.bound, d_g)

        slots = a.shape[0] * CHUNK
        buffer = torch.empty(3 * slots + 1, width, dtype=kind, device=a.device)
        buffer[-1] = 0.0
        d_unit = buffer[: 2 * slots].view(2, -1, CHUNK, width)
        torch.mul(d_q_plus, a, out=d_unit[0]).mul_(width**-0.5)
        torch.mul(d_k_plus, a, out=d_unit[1]).addcdiv_(d_k_minus, a)
        d_unit.addcmul_(unit, torch.linalg.vecdot(d_unit, unit).unsqueeze(-1), value=-1).mul_(norm)
        buffer[2 * slots : -1] = d_rest.view(-1, width)
        grad_qkv = buffer.index_select(0, index.back_qkv).view(plan.n_extended, -1)
        grad_z, grad_a_log, grad_dt_bias = _gate_backward(d_sigma, sigma, shifted, a_log, index.back_single)
        beta_rows = beta.squeeze(-1)
        logits = d_beta.mul_(beta_rows).addcmul_(d_beta, beta_rows, value=-1).view(-1)
        grad_b = torch.cat([logits, logits.new_zeros(1)]).index_select(0, index.back_single).view(-1, h)
        kinds = ctx.dtypes
        return (
            grad_qkv.to(kinds[0]), grad_z.to(kinds[1]), grad_b.to(kinds[2]), grad_a_log, grad_dt_bias,
            d_initial if ctx.has_state else None, None, None,
        )  # fmt: skip


def _gate(
    z: Tensor, a_log: Tensor, dt_bias: Tensor, single: Tensor, padding: Tensor, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gate logits of all slots -> sigmoid(exp(A_log) (z + dt_bias)) [M, C, D], zero in padding, and z + dt_bias."""
    h = a_log.shape[0]
    width = dt_bias.shape[0] // h
    shifted = z.reshape(-1, width).index_select(0, single).to(kind).view(-1, h, CHUNK, width)
    shifted += dt_bias.to(kind).view(h, 1, width)
    sigma = (shifted * a_log.to(kind).exp().view(h, 1, 1)).sigmoid_()
    sigma.view(-1, width).index_fill_(0, padding, 0.0)
    return sigma.view(-1, CHUNK, width), shifted.view(-1, CHUNK, width)


def _gate_backward(
    d_sigma: Tensor, sigma: Tensor, shifted: Tensor, a_log: Tensor, back: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `_gate`'s first result -> gradients of z [n, hD], A_log [h] and dt_bias [hD]."""
    h, width = a_log.shape[0], sigma.shape[-1]
    slots = sigma.shape[0] * CHUNK
    buffer = torch.empty(slots + 1, width, dtype=sigma.dtype, device=sigma.device)
    buffer[-1] = 0.0
    d_logit = torch.addcmul(sigma, sigma, sigma, value=-1, out=buffer[:-1].view_as(sigma)).mul_(d_sigma)
    d_shifted = d_logit.view(-1, h, CHUNK, width).mul_(a_log.to(sigma.dtype).exp().view(h, 1, 1))
    grad_dt_bias = d_shifted.sum((0, 2)).view(-1)
    grad_a_log = (d_shifted * shifted.view_as(d_shifted)).sum((0, 2, 3))
    grad_z = buffer.index_select(0, back).view(-1, h * width)
    return grad_z, grad_a_log.to(a_log.dtype), grad_dt_bias.to(a_log.dtype)


def _steps(plan: ChunkPlan, h: int) -> list[tuple[int, int]]:
    """(first, last) of the M axis for each chunk step."""
    ends = [0]
    for count in plan.active:
        ends.append(ends[-1] + count * h)
    return list(pairwise(ends))


def _scan(
    plan: ChunkPlan,
    h: int,
    state: Tensor | None,
    v: Tensor,
    k_plus: Tensor,
    k_minus: Tensor,
    transform: Tensor,
    end: Tensor,
    entry: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The only part that is sequential in T / 16.

    -> states S^ [M, D, D], R [M, C, D], V~ [M, C, D], final state [S, h, D, D] in `plan.order`.
    """
    width = v.shape[-1]
    states = torch.empty(v.shape[0], width, width, dtype=v.dtype, device=v.device)
    rest, solved = torch.empty_like(v), torch.empty_like(v)
    final = torch.empty(plan.active[0] * h, width, width, dtype=v.dtype, device=v.device)
    steps = _steps(plan, h)
    for number, (first, last) in enumerate(steps):
        here = slice(first, last)
        if number == 0:
            if state is None:
                states[here] = 0.0
            else:
                initial = state.index_select(0, plan.order).view(-1, width, width)
                torch.mul(initial, entry[here].unsqueeze(-1), out=states[here])
        torch.baddbmm(v[here], k_plus[here], states[here], alpha=-1, out=rest[here])
        torch.bmm(transform[here], rest[here], out=solved[here])
        ended = torch.baddbmm(states[here], k_minus[here].mT, solved[here]).mul_(end[here].unsqueeze(-1))
        following = 0
        if number + 1 < len(steps):
            after = slice(*steps[number + 1])
            following = after.stop - after.start
            torch.mul(ended[:following], entry[after].unsqueeze(-1), out=states[after])
        final[following : last - first] = ended[following:]
    return states, rest, solved, final.view(-1, h, width, width)


def _scan_backward(
    plan: ChunkPlan,
    h: int,
    d_out: Tensor,
    d_final: Tensor | None,
    attention: Tensor,
    q_plus: Tensor,
    k_plus: Tensor,
    k_minus: Tensor,
    transform: Tensor,
    end: Tensor,
    entry: Tensor,
    states: Tensor,
    final: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of S^ + K-' V~, of V~, of R, of log a_last [M, D], and of the initial state [S, h, D, D]."""
    width = d_out.shape[-1]
    d_solved = torch.bmm(attention.mT, d_out)
    d_states = torch.bmm(q_plus.mT, d_out)
    d_rest, d_ends = torch.empty_like(d_out), torch.empty_like(states)
    d_log_end = torch.zeros_like(end)
    steps = _steps(plan, h)
    for number in range(len(steps) - 1, -1, -1):
        first, last = steps[number]
        here, following = slice(first, last), 0
        if number + 1 < len(steps):
            after = slice(*steps[number + 1])
            following = after.stop - after.start
            torch.mul(d_states[after], entry[after].unsqueeze(-1), out=d_ends[first : first + following])
            torch.linalg.vecdot(states[after], d_states[after], out=d_log_end[first : first + following])
        tail, cut = slice(first + following, last), slice(following, last - first)
        if d_final is None:
            d_ends[tail] = 0.0
        else:
            d_ends[tail] = d_final.view(-1, width, width)[cut]
            torch.linalg.vecdot(final.view(-1, width, width)[cut], d_ends[tail], out=d_log_end[tail])
        d_ends[here].mul_(end[here].unsqueeze(-1))
        d_solved[here].baddbmm_(k_minus[here], d_ends[here])
        torch.bmm(transform[here].mT, d_solved[here], out=d_rest[here])
        d_states[here].add_(d_ends[here]).baddbmm_(k_plus[here].mT, d_rest[here], alpha=-1)
    start = slice(*steps[0])
    d_initial = (d_states[start] * entry[start].unsqueeze(-1)).view(-1, h, width, width)
    return d_ends, d_solved, d_rest, d_log_end, d_initial.index_select(0, plan.rank)


def chunked_kda(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    state: Tensor | None = None,
    bound: float = -5.0,
) -> tuple[Tensor, Tensor]:
    """KDA of packed segments from raw (post-convolution) streams and raw gate logits; all gradients written out.

    Over the extended rows of `layout` (n = N + 3S): qkv [n, 3hD] as q|k|v, z [n, hD] before dt_bias, b [n, h] before
    sigmoid. A_log [h], dt_bias [hD], initial state [S, h, D, D] key first, or None for zero.
    -> o [N, hD] in qkv's dtype, before norm and output gate, and final state [S, h, D, D], float32 or wider.
    """
    return _KDAChunks.apply(qkv, z, b, a_log, dt_bias, state, layout.chunks, bound)  # type: ignore[no-any-return]


class _GatedNorm(torch.autograd.Function):
    """o [N, h, D], gate logits [N, h, D], weight [D] -> RMSNorm(o) * weight * sigmoid(gate), norm first."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        kind = wide(o.dtype)
        r = inverse_rms(o.to(kind), eps)
        sigma = torch.sigmoid(gate.to(kind))
        ctx.save_for_backward(o, sigma, weight, r)
        return (o * r).mul_(weight).mul_(sigma).to(o.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        o, sigma, weight, r = ctx.saved_tensors
        hat = o.to(r.dtype) * r
        through = grad.to(r.dtype) * sigma
        grad_weight = (through * hat).sum((0, 1)).to(weight.dtype)
        through.mul_(weight)
        along = through * hat
        mean = along.mean(-1, keepdim=True)
        grad_gate = along.addcmul_(along, sigma, value=-1)
        grad_o = through.addcmul_(hat, mean, value=-1).mul_(r)
        return grad_o.to(o.dtype), grad_gate.to(grad.dtype), grad_weight, None


class KimiDeltaAttention(nn.Module):
    """One KDA layer. Its parameters carry the official names under `self_attn`."""

    def __init__(self, config: K3Config, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        linear = config.linear_attn_config
        self.layer, self.heads, self.width = layer, linear.num_heads, linear.head_dim
        self.bound, self.eps = linear.gate_lower_bound, config.rms_norm_eps
        hidden, inner, kind = config.hidden_size, linear.num_heads * linear.head_dim, wide(dtype)
        taps = linear.short_conv_kernel_size
        self.q_proj = Weight(inner, hidden, dtype=dtype, device=device)
        self.k_proj = Weight(inner, hidden, dtype=dtype, device=device)
        self.v_proj = Weight(inner, hidden, dtype=dtype, device=device)
        self.g_proj = Weight(inner, hidden, dtype=dtype, device=device)
        self.q_conv1d = Weight(inner, 1, taps, dtype=kind, device=device)
        self.k_conv1d = Weight(inner, 1, taps, dtype=kind, device=device)
        self.v_conv1d = Weight(inner, 1, taps, dtype=kind, device=device)
        self.f_a_proj = Weight(self.width, hidden, dtype=dtype, device=device)
        self.f_b_proj = Weight(inner, self.width, dtype=dtype, device=device)
        self.b_proj = Weight(self.heads, hidden, dtype=dtype, device=device)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=kind, device=device))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=kind, device=device))
        self.o_norm = Weight(self.width, dtype=kind, device=device)
        self.o_proj = Weight(hidden, inner, dtype=dtype, device=device)
        self._split = [3 * inner, self.width, self.heads]
        self._inputs = Fused(
            [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight, self.f_a_proj.weight, self.b_proj.weight]
        )
        self._taps = Fused([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])

    def forward(self, x: Tensor, layout: Layout, cache: Cache | None) -> Tensor:
        """Normed hidden rows [N, H] -> [N, H]; with a cache every segment continues its row of it."""
        if cache is not None and layout.longest == 1:
            return self._step(x, cache)
        extended = _ToExtended.apply(x, layout.extended, layout.n_extended)
        qkv, f_a, b = self._inputs.linear(extended).split(self._split, dim=-1)
        state = None
        if cache is not None:
            state = cache.recurrent(self.layer)
            qkv = qkv.index_copy(0, layout.history, cache.conv(self.layer).view(-1, qkv.shape[-1]))
            tails = qkv.detach().index_select(0, layout.tails)
            cache.store_conv(self.layer, tails.view(layout.n_segments, HISTORY, -1))
        z = nn.functional.linear(f_a, self.f_b_proj.weight)
        mixed = _ShortConv.apply(qkv, self._taps, *self._taps.parameters)
        o, final = chunked_kda(mixed, z, b, self.A_log, self.dt_bias, layout, state=state, bound=self.bound)
        if cache is not None:
            cache.store_recurrent(self.layer, final.detach())
        gate = nn.functional.linear(x, self.g_proj.weight)
        return self._output(o, gate)

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        shape = (-1, self.heads, self.width)
        gated = _GatedNorm.apply(o.view(shape), gate.view(shape), self.o_norm.weight, self.eps)
        return nn.functional.linear(gated.view(o.shape), self.o_proj.weight)

    def _step(self, x: Tensor, cache: Cache) -> Tensor:
        """One token for every row [R, H] -> [R, H]; reads and writes each state once."""
        h, width, rows = self.heads, self.width, x.shape[0]
        raw, f_a, b = self._inputs.linear(x).split(self._split, dim=-1)
        past = cache.conv(self.layer)
        window = torch.cat([past, raw.unsqueeze(1)], dim=1)
        cache.store_conv(self.layer, window[:, 1:])
        kind = wide(x.dtype)
        taps = self._taps.tensor()
        mixed = nn.functional.silu((window.to(kind) * taps.t()).sum(1)).to(x.dtype)
        streams = mixed.to(kind).view(rows, 3, h, width)
        qk, v = streams[:, :2], streams[:, 2]
        unit = qk * torch.linalg.vector_norm(qk, dim=-1, keepdim=True).square_().add_(L2_EPS).rsqrt_()
        z = nn.functional.linear(f_a, self.f_b_proj.weight).to(kind)
        logit = (z + self.dt_bias).view(rows, h, width) * self.A_log.exp().view(h, 1)
        alpha = logit.sigmoid_().mul_(self.bound).exp_()
        beta = torch.sigmoid(b.to(kind)).unsqueeze(-1)
        state = cache.recurrent(self.layer).mul_(alpha.unsqueeze(-1))
        read = torch.matmul(unit.transpose(1, 2), state)  # q' S and k' S
        change = (v - read[:, :, 1]).mul_(beta)
        overlap = torch.linalg.vecdot(unit[:, 0], unit[:, 1]).unsqueeze(-1)
        o = torch.addcmul(read[:, :, 0], overlap, change).mul_(width**-0.5)
        flat = state.view(rows * h, width, width)
        flat.baddbmm_(unit[:, 1].reshape(-1, width, 1), change.reshape(-1, 1, width))
        cache.store_recurrent(self.layer, state)
        return self._output(o.reshape(rows, -1).to(x.dtype), nn.functional.linear(x, self.g_proj.weight))
