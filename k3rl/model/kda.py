"""One Kimi Delta Attention layer (k3.md 2): short convolutions, gates, recurrence, gated output norm.

Training and prefill run the chunked recurrence of `kda_chunks.py`; one new token for every row runs the recurrence
itself. Rows of a segment are preceded by three history rows ("extended rows"), zero or from a cache, so that the
convolution needs no masks. Where the first segment began on another rank, its history is the last rows there, so that
their projections are computed here once more.

Where `k3rl.kernels.dispatch` says so the same layer runs on the kernels, which take packed rows as they are: one launch
for the convolutions, the chunked recurrence, the gated norm; and one for a whole decode step over a pool of slots.

Letters: N rows, S segments, h heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3rl.kernels import limits
from k3rl.kernels.gemm import PartialSums
from k3rl.kernels.kda import kda, kda_decode, short_conv
from k3rl.kernels.norm import gated_norm
from k3rl.model.blocks import blockwise
from k3rl.model.cache import Cache, ChunkCache, Slots, StepCache
from k3rl.model.config import K3Config
from k3rl.model.joined import JoinedParameters, Weight
from k3rl.model.kda_chunks import L2_EPS, chunked_kda
from k3rl.model.kda_gates import log_decay
from k3rl.model.layout import HISTORY, Layout
from k3rl.model.norm import inverse_rms, wide
from k3rl.model.side_stream import on_side_stream


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
    tap = taps.unbind()
    for body, now, *before in blockwise(out[HISTORY:], x[HISTORY:], x[:-3], x[1:-2], x[2:-1]):
        torch.mul(now, tap[HISTORY], out=body)
        for past, weight in zip(before, tap[:HISTORY], strict=True):
            body.addcmul_(past, weight)
    return out


class ShortConvFunction(torch.autograd.Function):
    """SiLU of the causal depthwise convolution over extended rows. Nothing reads what it gives for history rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: JoinedParameters, *parameters: Tensor) -> Tensor:
        taps = joined.tensor().t().contiguous()
        pre = _convolve(x.to(wide(x.dtype)), taps)
        ctx.save_for_backward(x, pre, taps)
        ctx.joined, ctx.dtype = joined, x.dtype
        return nn.functional.silu(pre).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, pre, taps = ctx.saved_tensors
        x, n = x.to(pre.dtype), x.shape[0]
        d = torch.empty(n + HISTORY, x.shape[1], dtype=pre.dtype, device=x.device)  # zero rows behind the last
        d[n:] = 0.0
        torch.ops.aten.silu_backward.grad_input(grad.to(pre.dtype), pre, grad_input=d[:n])
        grad_x = torch.empty_like(pre)
        tap = taps.unbind()
        for out, *after in blockwise(grad_x, d[3:], d[2:-1], d[1:-2], d[:-3]):
            torch.mul(after[HISTORY], tap[HISTORY], out=out)
            for later, weight in zip(after[:HISTORY], tap[:HISTORY], strict=True):
                out.addcmul_(later, weight)
        if not any(ctx.needs_input_grad[2:]):
            return (grad_x.to(ctx.dtype), None, *(None for _ in ctx.joined.parameters))
        grad_taps = torch.zeros_like(taps)
        for here, *before in blockwise(d[HISTORY:n], x[:-3], x[1:-2], x[2:-1], x[3:]):
            product = torch.empty_like(here)
            for past, sums in zip(before, grad_taps.unbind(), strict=True):
                sums += torch.mul(here, past, out=product).sum(0)
        return (grad_x.to(ctx.dtype), None, *ctx.joined.split(grad_taps.t().contiguous()))


class GatedNormFunction(torch.autograd.Function):
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
        self.q_conv1d = Weight(inner, 1, taps, dtype=kind, device=device)
        self.k_conv1d = Weight(inner, 1, taps, dtype=kind, device=device)
        self.v_conv1d = Weight(inner, 1, taps, dtype=kind, device=device)
        self.f_a_proj = Weight(self.width, hidden, dtype=dtype, device=device)
        self.f_b_proj = Weight(inner, self.width, dtype=dtype, device=device)
        self.b_proj = Weight(self.heads, hidden, dtype=dtype, device=device)
        shape = (1, 1, self.heads, 1) if config.flat else (self.heads,)  # as it is stored
        self.A_log = nn.Parameter(torch.empty(shape, dtype=kind, device=device))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=kind, device=device))
        self.o_norm = Weight(self.width, dtype=kind, device=device)
        self.o_proj = Weight(hidden, inner, dtype=dtype, device=device)
        self.gate_rank = 0 if linear.use_full_rank_gate else self.width
        first = [self.q_proj, self.k_proj, self.v_proj, self.f_a_proj]
        if self.gate_rank:
            self.g_a_proj = Weight(self.gate_rank, hidden, dtype=dtype, device=device)
            self.g_b_proj = Weight(inner, self.gate_rank, dtype=dtype, device=device)
            first.append(self.g_a_proj)
        else:
            self.g_proj = Weight(inner, hidden, dtype=dtype, device=device)
        self._split = [3 * inner, self.width, self.gate_rank, self.heads]
        self._inputs = JoinedParameters.of(*first, self.b_proj)
        self._taps = JoinedParameters([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])

    @property
    def log_rate(self) -> Tensor:
        """A_log [h]."""
        return self.A_log.view(-1)

    def gate(self, x: Tensor, low: Tensor) -> Tensor:
        """Logits [N, hD] of the output gate of rows x [N, H], or of what g_a_proj made of them, low [N, rank]."""
        return self.g_b_proj.linear(low) if self.gate_rank else self.g_proj.linear(x)

    def step(self, x: Tensor, cache: StepCache) -> Tensor | PartialSums:
        """`forward` of one new token for every row, for the residual stream."""
        return self.o_proj.summand(self._step_on_slots(x, cache.slots(self.layer)))

    def takes_kernels(self, x: Tensor) -> bool:
        """Whether the kernels compute this layer for rows like x; never on a CPU."""
        return limits.KDA.takes_layer(x, self.width)

    def forward(self, x: Tensor, layout: Layout, cache: Cache | StepCache | ChunkCache | None) -> Tensor:
        """Normed hidden rows [N, H] -> [N, H]; with a cache every segment continues its row of it.

        With a context the first segment continues the state and the rows of the ranks to the left.
        """
        if isinstance(cache, ChunkCache):
            return self._on_kernels(x, layout, cache)
        if isinstance(cache, StepCache):
            return self.o_proj.linear(self._step_on_slots(x, cache.slots(self.layer)))
        if layout.fixed or self.takes_kernels(x):
            if cache is not None and layout.longest == 1:
                return self.o_proj.linear(self._step_on_slots(x, cache.slots(self.layer)))
            return self._on_kernels(x, layout, cache)
        if cache is not None and layout.longest == 1:
            return self._step(x, cache)
        extended = _ToExtended.apply(x, layout.extended, layout.n_extended)
        if layout.context is not None:
            halo = layout.context.rows_before(x, HISTORY)
            extended.index_copy_(0, layout.history[HISTORY - halo.shape[0] : HISTORY], halo)
        qkv, f_a, g_a, b = self._inputs.linear(extended).split(self._split, dim=-1)
        state = None
        if cache is not None:
            state = cache.recurrent(self.layer)
            qkv = qkv.index_copy(0, layout.history, cache.conv(self.layer).view(-1, qkv.shape[-1]))
            tails = qkv.detach().index_select(0, layout.tails)
            cache.store_conv(self.layer, tails.view(layout.n_segments, HISTORY, -1))
        z = self.f_b_proj.linear(f_a)
        mixed = ShortConvFunction.apply(qkv, self._taps, *self._taps.parameters)
        o, final = chunked_kda(mixed, z, b, self.log_rate, self.dt_bias, layout, state=state, bound=self.bound)
        if cache is not None:
            cache.store_recurrent(self.layer, final.detach())
        if self.gate_rank:
            g_a = g_a.index_select(0, layout.extended)
        return self._output(o, self.gate(x, g_a))

    def _convolutions(self) -> list[Tensor]:
        """The taps of q, k and v, [hD, 4] each."""
        return [part.weight.view(-1, HISTORY + 1) for part in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]

    def _on_kernels(self, x: Tensor, layout: Layout, cache: Cache | ChunkCache | None) -> Tensor:
        """Packed rows [N, H] -> [N, H]; differentiable, without a copy of rows into chunks."""
        heads, inner = (1, x.shape[0], self.heads, self.width), self.heads * self.width
        ends, halo, extended = layout.cu_seqlens, 0, x
        if layout.context is not None:  # the convolution sees rows that other ranks hold as rows of its own
            before = layout.context.rows_before(x, HISTORY)
            halo = before.shape[0]
            extended = torch.cat([before, x])  # of none too: its gradient's way back is that of the others' rows
        # One split, so that its gradient is put together once.
        *qkv, f_a, g_a, b = self._inputs.linear(extended).split([inner] * 3 + self._split[1:], dim=-1)
        streams = [rows.unsqueeze(0) for rows in qkv]
        history, state = (None, None) if cache is None else (cache.conv(self.layer), cache.recurrent(self.layer))
        mixed, tails = short_conv(
            streams, self._convolutions(), history=history, cu_seqlens=layout.ends_after(halo)
        )  # fmt: skip
        q, k, v = (rows[:, halo:].view(heads) for rows in mixed)
        z = self.f_b_proj.linear(f_a[halo:]).view(heads)
        o, final = kda(
            q, k, v, z, b[halo:].unsqueeze(0), self.log_rate, self.dt_bias,
            gate_lower_bound=self.bound, initial_state=state, cu_seqlens=ends, context=layout.context,
        )  # fmt: skip
        if cache is not None:
            cache.store_conv(self.layer, tails)
            cache.store_recurrent(self.layer, final.detach())
        gate = self.gate(x, g_a[halo:]).view(heads)
        gated = gated_norm(o, gate, self.o_norm.weight, self.eps)
        return self.o_proj.linear(gated.view(-1, inner))

    def _step_on_slots(self, x: Tensor, slots: Slots) -> Tensor:
        """One token for every row [R, H] -> gated values [R, hD], on the pool itself; the host reads nothing."""
        shape = (x.shape[0], self.heads, self.width)
        beside = None if self.gate_rank else on_side_stream(lambda: self.g_proj.linear(x))
        raw, f_a, g_a, b = self._inputs.linear(x).split(self._split, dim=-1)
        gated = beside or on_side_stream(lambda: self.g_b_proj.linear(g_a))
        q, k, v = (rows.view(shape) for rows in raw.split(self.heads * self.width, dim=-1))
        z, gate = self.f_b_proj.linear(f_a).view(shape), gated().view(shape)
        y = kda_decode(
            q, k, v, z, b, gate, self._convolutions(), self.log_rate, self.dt_bias, self.o_norm.weight,
            slots.conv, slots.recurrent, slots.rows, slots.rows, gate_lower_bound=self.bound, norm_eps=self.eps,
            pending=slots.pending,
        )  # fmt: skip
        return y.view(x.shape[0], -1)

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        shape = (-1, self.heads, self.width)
        gated = GatedNormFunction.apply(o.view(shape), gate.view(shape), self.o_norm.weight, self.eps)
        return self.o_proj.linear(gated.view(o.shape))

    def _step_convolution(self, raw: Tensor, cache: Cache, kind: torch.dtype) -> Tensor:
        """New projections [R, 3hD] after the cached ones -> SiLU of their convolution; moves the history on by one."""
        past, taps = cache.conv(self.layer), self._taps.tensor().t().contiguous()
        pre = raw.to(kind) * taps[HISTORY]
        for tap in range(HISTORY):
            pre.addcmul_(past[:, tap].to(kind), taps[tap])
        for tap in range(HISTORY - 1):
            past[:, tap] = past[:, tap + 1]
        past[:, HISTORY - 1] = raw
        cache.store_conv(self.layer, past)
        return nn.functional.silu(pre, inplace=True).to(raw.dtype)

    def _step(self, x: Tensor, cache: Cache) -> Tensor:
        """One token for every row [R, H] -> [R, H]; reads and writes each state once."""
        h, width, rows = self.heads, self.width, x.shape[0]
        raw, f_a, g_a, b = self._inputs.linear(x).split(self._split, dim=-1)
        kind = wide(x.dtype)
        mixed = self._step_convolution(raw, cache, kind)
        streams = mixed.to(kind).view(rows, 3, h, width)
        qk, v = streams[:, :2], streams[:, 2]
        unit = qk * torch.linalg.vector_norm(qk, dim=-1, keepdim=True).square_().add_(L2_EPS).rsqrt_()
        z = self.f_b_proj.linear(f_a).to(kind)
        alpha = log_decay((z + self.dt_bias).view(rows, h, width), self.A_log.exp().view(h, 1), self.bound).exp_()
        beta = torch.sigmoid(b.to(kind)).unsqueeze(-1)
        state = cache.recurrent(self.layer).mul_(alpha.unsqueeze(-1))
        read = torch.matmul(unit.transpose(1, 2), state)  # q' S and k' S
        change = (v - read[:, :, 1]).mul_(beta)
        overlap = torch.linalg.vecdot(unit[:, 0], unit[:, 1]).unsqueeze(-1)
        o = torch.addcmul(read[:, :, 0], overlap, change).mul_(width**-0.5)
        flat = state.view(rows * h, width, width)
        flat.baddbmm_(unit[:, 1].reshape(-1, width, 1), change.reshape(-1, 1, width))
        cache.store_recurrent(self.layer, state)
        return self._output(o.reshape(rows, -1).to(x.dtype), self.gate(x, g_a))
