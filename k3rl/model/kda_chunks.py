"""The chunked KDA recurrence with a written-out backward (k3.md 2.2).

The chunked form works on chunks of 16 tokens. With S^ the state at a chunk's start (bounded gates: times the decay to
the chunk's middle), K+ and Q+ its keys and queries times the decay up to them, Q+ scaled by D^-1/2, per chunk

    R = V - K+ S^,  V~ = T R,  O = Q+ S^ + A V~

with T = (I + L)^-1 diag(beta), L = beta_i k_i . k_j exp(G_i - G_j) below the diagonal and A = q_i . k_j exp(G_i - G_j)
on and below it; `kda_tiles` forms these products, and the state at the chunk's end, for gates with and without a bound.
Padding slots have beta = 0 and log decay 0, which leaves the state alone and makes their gradients exactly zero.

Letters: N rows, S segments, h heads, K = V = D head width, C = 16, M = chunks * h.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from k3rl.model.kda_context import incoming_gradient, incoming_state
from k3rl.model.kda_gates import gates, gates_backward
from k3rl.model.kda_tiles import Anchored, Halved, StateGradients, Tiles, masks
from k3rl.model.layout import CHUNK, ChunkPlan, Layout
from k3rl.model.norm import wide
from k3rl.types import ContextCommunicator

L2_EPS = 1e-6  # added to the sum of squares, not to the mean


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
        bound: float | None,
        context: ContextCommunicator | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        h, kind = a_log.shape[0], wide(qkv.dtype)
        width = dt_bias.shape[0] // h
        index = plan.by_head(h)
        gathered = qkv.reshape(-1, width).index_select(0, index.qkv).view(3, -1, CHUNK, width).to(kind)
        norm = torch.linalg.vector_norm(gathered[:2], dim=-1, keepdim=True).square_().add_(L2_EPS).rsqrt_()
        unit = gathered[:2] * norm
        v = gathered[2]
        gate, shifted = gates(z, a_log, dt_bias, index.single, index.padding, kind, bound)
        beta = b.reshape(-1).index_select(0, index.single).to(kind).sigmoid_()
        beta = beta.index_fill_(0, index.padding, 0.0).view(-1, CHUNK, 1)
        tiles = Halved.of(unit, gate) if bound is None else Anchored.of(unit, gate, bound)
        eye = torch.eye(CHUNK, dtype=kind, device=v.device).expand_as(tiles.pairs)
        inverse = torch.linalg.solve_triangular(tiles.pairs * beta, eye, upper=False, unitriangular=True)
        ctx.has_state, transform, through = state is not None, inverse * beta.mT, None
        if context is not None:
            state, through = incoming_state(context, plan, h, v, tiles, transform)
        states, rest, solved, final = _scan(plan, h, state, v, tiles, transform)
        out = torch.bmm(tiles.q_in, states).baddbmm_(tiles.attention, solved)
        ctx.save_for_backward(
            unit, norm, gate, shifted, beta, inverse, states, rest, solved, final, a_log, through, *tiles.tensors()
        )
        ctx.plan, ctx.bound, ctx.dtypes, ctx.context = plan, bound, (qkv.dtype, z.dtype, b.dtype), context
        rows = out.view(-1, width).index_select(0, index.out).view(-1, h * width)
        return rows.to(qkv.dtype), final.index_select(0, plan.rank)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        (
            unit, norm, gate, shifted, beta, inverse, states, rest, solved, final, a_log, through, *saved,
        ) = ctx.saved_tensors  # fmt: skip
        tiles: Tiles = Halved(*saved) if ctx.bound is None else Anchored(*saved, bound=ctx.bound)
        plan: ChunkPlan = ctx.plan
        h, width, kind = a_log.shape[0], unit.shape[-1], unit.dtype
        index = plan.by_head(h)
        causal, strict = masks(unit)
        d_out = torch.zeros_like(rest)
        if grad_o is not None:
            d_out.view(-1, width).index_copy_(0, index.out, grad_o.reshape(-1, width).to(kind))
        if grad_final is not None:
            grad_final = grad_final.index_select(0, plan.order).to(kind)
        transform = inverse * beta.mT
        if ctx.context is not None:
            grad_final = incoming_gradient(ctx.context, plan, h, d_out, tiles, transform, through)
        d_ends, d_solved, d_rest, d_log_end, d_initial = _scan_backward(
            plan, h, d_out, grad_final, tiles, transform, states, final
        )
        d_transform = torch.bmm(d_solved, rest.mT)
        d_beta = torch.linalg.vecdot(d_transform, inverse, dim=1)
        d_inverse = d_transform.mul_(beta.mT)
        d_lower = torch.bmm(torch.bmm(inverse.mT, d_inverse), inverse.mT).neg_().mul_(strict)
        d_beta += torch.linalg.vecdot(d_lower, tiles.pairs)
        d_pairs = d_lower.mul_(beta)
        d_attention = torch.bmm(d_out, solved.mT).mul_(causal)

        slots = d_out.shape[0] * CHUNK
        buffer = torch.empty(3 * slots + 1, width, dtype=kind, device=unit.device)
        buffer[-1] = 0.0
        d_unit = buffer[: 2 * slots].view(2, -1, CHUNK, width)
        grads = StateGradients(d_out, d_ends, d_rest, states, solved, d_log_end)
        d_gate = tiles.gradients(unit, grads, d_attention, d_pairs, d_unit)
        d_unit.addcmul_(unit, torch.linalg.vecdot(d_unit, unit).unsqueeze(-1), value=-1).mul_(norm)
        buffer[2 * slots : -1] = d_rest.view(-1, width)
        grad_qkv = buffer.index_select(0, index.back_qkv).view(plan.n_extended, -1)
        grad_z, grad_a_log, grad_dt_bias = gates_backward(
            d_gate, gate, shifted, a_log, index.padding, index.back_single, ctx.bound
        )
        beta_rows = beta.squeeze(-1)
        logits = d_beta.mul_(beta_rows).addcmul_(d_beta, beta_rows, value=-1).view(-1)
        grad_b = torch.cat([logits, logits.new_zeros(1)]).index_select(0, index.back_single).view(-1, h)
        kinds = ctx.dtypes
        return (
            grad_qkv.to(kinds[0]), grad_z.to(kinds[1]), grad_b.to(kinds[2]), grad_a_log, grad_dt_bias,
            d_initial if ctx.has_state else None, None, None, None,
        )  # fmt: skip


def _steps(plan: ChunkPlan, h: int) -> list[tuple[int, int]]:
    """(first, last) of the M axis for each chunk step."""
    ends = [0]
    for count in plan.active:
        ends.append(ends[-1] + count * h)
    return list(pairwise(ends))


def _scan(
    plan: ChunkPlan, h: int, state: Tensor | None, v: Tensor, tiles: Tiles, transform: Tensor
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
                torch.mul(initial, tiles.entry[here].unsqueeze(-1), out=states[here])
        torch.baddbmm(v[here], tiles.k_in[here], states[here], alpha=-1, out=rest[here])
        torch.bmm(transform[here], rest[here], out=solved[here])
        ended = tiles.leave(here, states[here], solved[here])
        following = 0
        if number + 1 < len(steps):
            after = slice(*steps[number + 1])
            following = after.stop - after.start
            torch.mul(ended[:following], tiles.entry[after].unsqueeze(-1), out=states[after])
        final[following : last - first] = ended[following:]
    return states, rest, solved, final.view(-1, h, width, width)


def _scan_backward(
    plan: ChunkPlan,
    h: int,
    d_out: Tensor,
    d_final: Tensor | None,
    tiles: Tiles,
    transform: Tensor,
    states: Tensor,
    final: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of what k_out' V~ is added to, of V~, of R, of the log of what states end with [M, D], and of the
    initial state [S, h, D, D]."""
    width = d_out.shape[-1]
    d_solved = torch.bmm(tiles.attention.mT, d_out)
    d_states = torch.bmm(tiles.q_in.mT, d_out)
    d_rest, d_ends = torch.empty_like(d_out), torch.empty_like(states)
    d_log_end = torch.zeros_like(tiles.end)
    steps = _steps(plan, h)
    for number in range(len(steps) - 1, -1, -1):
        first, last = steps[number]
        here, following = slice(first, last), 0
        if number + 1 < len(steps):
            after = slice(*steps[number + 1])
            following = after.stop - after.start
            torch.mul(d_states[after], tiles.entry[after].unsqueeze(-1), out=d_ends[first : first + following])
            torch.linalg.vecdot(states[after], d_states[after], out=d_log_end[first : first + following])
        tail, cut = slice(first + following, last), slice(following, last - first)
        if d_final is None:
            d_ends[tail] = 0.0
        else:
            d_ends[tail] = d_final.view(-1, width, width)[cut]
            torch.linalg.vecdot(final.view(-1, width, width)[cut], d_ends[tail], out=d_log_end[tail])
        through = tiles.leave_backward(here, d_ends[here], d_solved[here])
        torch.bmm(transform[here].mT, d_solved[here], out=d_rest[here])
        d_states[here].add_(through).baddbmm_(tiles.k_in[here].mT, d_rest[here], alpha=-1)
    start = slice(*steps[0])
    d_initial = (d_states[start] * tiles.entry[start].unsqueeze(-1)).view(-1, h, width, width)
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
    bound: float | None = -5.0,
) -> tuple[Tensor, Tensor]:
    """KDA of packed segments from raw (post-convolution) streams and raw gate logits; all gradients written out.

    Over the extended rows of `layout` (n = N + 3S): qkv [n, 3hD] as q|k|v, z [n, hD] before dt_bias, b [n, h] before
    sigmoid. A_log [h], dt_bias [hD], initial state [S, h, D, D] key first, or None for zero. bound of the log
    decay, None for none.
    -> o [N, hD] in qkv's dtype, before norm and output gate, and final state [S, h, D, D], float32 or wider.

    With a context in the layout `state` must be None: the first segment's comes from the rank to the left. The final
    state then has no gradient of its own.
    """
    return _KDAChunks.apply(qkv, z, b, a_log, dt_bias, state, layout.chunks, bound, layout.context)
