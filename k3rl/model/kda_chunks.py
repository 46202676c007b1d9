"""The chunked KDA recurrence with a written-out backward (k3.md 2.2).

The chunked form works on chunks of 16 tokens with two factors. With G the cumulative log decay inside a chunk, m its
middle value and a = exp(G - m), every causal product exp(G_i - G_j) is (a_i) (1 / a_j), both within exp(+-40). The
middle goes into the state: S^ = exp(m) S, so per chunk

    R = V - K+ S^,  V~ = T R,  O = Q+ S^ + A V~,  S_end = a_last (S^ + K-' V~)

with K+ = a K, K- = K / a, Q+ = a Q / sqrt(D), T = (I + L)^-1 diag(beta), L = beta_i (K+ K-')_ij below the diagonal and
A = Q+ K-' on and below it. The middle is a change of variables and needs no gradient. Padding slots have beta = 0 and
log decay 0, which leaves the state alone and makes their gradients exactly zero.

Letters: N rows, S segments, h heads, K = V = D head width, C = 16, M = chunks * h.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from k3rl.model.kda_context import incoming_gradient, incoming_state
from k3rl.model.layout import CHUNK, ChunkPlan, Layout
from k3rl.model.norm import wide
from k3rl.types import ContextCommunicator

L2_EPS = 1e-6  # added to the sum of squares, not to the mean
MIDDLE = CHUNK // 2 - 1


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
        ctx.has_state, transform, through = state is not None, inverse * beta.mT, None
        if context is not None:
            state, through = incoming_state(context, plan, h, v, k_plus, k_minus, transform, a[:, -1], entry)
        states, rest, solved, final = _scan(plan, h, state, v, k_plus, k_minus, transform, a[:, -1], entry)
        out = torch.bmm(q_plus, states).baddbmm_(attention, solved)
        ctx.save_for_backward(
            unit, norm, sigma, shifted, beta, a, k_plus, k_minus, q_plus, entry, pairs, inverse, attention, states,
            rest, solved, final, a_log, through,
        )  # fmt: skip
        ctx.plan, ctx.bound, ctx.dtypes, ctx.context = plan, bound, (qkv.dtype, z.dtype, b.dtype), context
        rows = out.view(-1, width).index_select(0, index.out).view(-1, h * width)
        return rows.to(qkv.dtype), final.index_select(0, plan.rank)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        (
            unit, norm, sigma, shifted, beta, a, k_plus, k_minus, q_plus, entry, pairs, inverse, attention, states,
            rest, solved, final, a_log, through,
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
        if ctx.context is not None:
            grad_final = incoming_gradient(
                ctx.context, plan, h, d_out, attention, q_plus, k_plus, k_minus, transform, a[:, -1], entry, through
            )
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
            d_initial if ctx.has_state else None, None, None, None,
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

    With a context in the layout `state` must be None: the first segment's comes from the rank to the left. The final
    state then has no gradient of its own.
    """
    return _KDAChunks.apply(qkv, z, b, a_log, dt_bias, state, layout.chunks, bound, layout.context)
