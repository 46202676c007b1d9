"""What the chunked recurrence of KDA is made of, chunk by chunk, for gates with and without a bound.

With G the cumulative log decay inside a chunk, every pair i >= j of its rows needs exp(G_i - G_j).

Bounded gates, `Anchored`: with m the middle value and a = exp(G - m), it is (a_i) (1 / a_j), both within exp(+-40). The
middle goes into the state: S^ = exp(m) S. It is a change of variables and needs no gradient.

Gates without a bound, `Halved`: 1 / a would overflow. A chunk is split in halves, these in halves, down to single rows;
each pair is separated by one split, and with m the value of the last row before it both exp(G_i - m) and exp(m - G_j)
are at most 1. Rows write into the state with exp(G_end - G_j), summed as the gates after j: taken as a difference, the
last row's would have two gradients that cancel, and beside them those of strong decays would lose their digits.

Letters as in `kda_chunks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from k3rl.model.layout import CHUNK

MIDDLE = CHUNK // 2 - 1


def masks(like: Tensor) -> tuple[Tensor, Tensor]:
    """[C, C] ones on and below, and strictly below, the diagonal."""
    ones = torch.ones(CHUNK, CHUNK, dtype=like.dtype, device=like.device)
    return ones.tril(), ones.tril(-1)


@dataclasses.dataclass
class Tiles:
    """Of M chunks: q_in, k_in [M, C, D] read the state at the chunk's start, which is entry [M, D] times the one kept
    between chunks; k_out [M, C, D] write into it, end [M, D] is its decay; attention, pairs [M, C, C] the products of
    queries and of keys with keys, on and below, and below the diagonal. Queries carry the scale D^-1/2."""

    q_in: Tensor
    k_in: Tensor
    k_out: Tensor
    end: Tensor
    entry: Tensor
    attention: Tensor
    pairs: Tensor

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order in which the class takes them."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [value for value in values if isinstance(value, Tensor)]

    def leave(self, here: slice, states: Tensor, solved: Tensor) -> Tensor:
        """States [m, D, .] at the start of the chunks `here` and V~ [m, C, .] -> states at their end."""
        raise NotImplementedError

    def leave_backward(self, here: slice, d_ends: Tensor, d_solved: Tensor) -> Tensor:
        """The gradient that `leave` gives its states; adds that of V~ to d_solved. d_ends may be overwritten."""
        raise NotImplementedError

    def gradients(
        self, unit: Tensor, grads: StateGradients, d_attention: Tensor, d_pairs: Tensor, d_unit: Tensor
    ) -> Tensor:
        """Fills d_unit, the gradient of unit [2, M, C, D]; returns that of what the tiles were made of beside it."""
        raise NotImplementedError


@dataclasses.dataclass
class StateGradients:
    """What the scan's backward leaves: gradients of outputs, of what `leave` wrote, of R, with the states and V~ that
    they belong to, and of the log of the chunk's decay [M, D] where the scan sums it."""

    d_out: Tensor
    d_ends: Tensor
    d_rest: Tensor
    states: Tensor
    solved: Tensor
    d_log_end: Tensor


@dataclasses.dataclass
class Anchored(Tiles):
    """Chunks of bounded gates: S_end = end (S^ + k_out' V~)."""

    a: Tensor
    bound: float = dataclasses.field(kw_only=True)

    @classmethod
    def of(cls, unit: Tensor, sigma: Tensor, bound: float) -> Anchored:
        """unit [2, M, C, D]: normalised queries and keys; sigma [M, C, D]: gates over their bound."""
        causal, strict = masks(sigma)
        g_sum = torch.matmul(causal * bound, sigma)
        middle = g_sum[:, MIDDLE : MIDDLE + 1]
        scale = sigma.shape[-1] ** -0.5
        a = (g_sum - middle).exp_()
        k_plus, k_minus, q_plus = unit[1] * a, unit[1] / a, (unit[0] * a).mul_(scale)
        entry = middle.exp().squeeze(1)  # [M, D]
        pairs = torch.bmm(k_plus, k_minus.mT).mul_(strict)
        attention = torch.bmm(q_plus, k_minus.mT).mul_(causal)
        return cls(q_plus, k_plus, k_minus, a[:, -1], entry, attention, pairs, a, bound=bound)

    def leave(self, here: slice, states: Tensor, solved: Tensor) -> Tensor:
        return torch.baddbmm(states, self.k_out[here].mT, solved).mul_(self.end[here].unsqueeze(-1))

    def leave_backward(self, here: slice, d_ends: Tensor, d_solved: Tensor) -> Tensor:
        d_ends.mul_(self.end[here].unsqueeze(-1))
        d_solved.baddbmm_(self.k_out[here], d_ends)
        return d_ends

    def gradients(
        self, unit: Tensor, grads: StateGradients, d_attention: Tensor, d_pairs: Tensor, d_unit: Tensor
    ) -> Tensor:
        causal, _ = masks(self.a)
        d_q_in = torch.bmm(grads.d_out, grads.states.mT).baddbmm_(d_attention, self.k_out)
        d_k_out = torch.bmm(grads.solved, grads.d_ends.mT)
        d_k_out.baddbmm_(d_attention.mT, self.q_in).baddbmm_(d_pairs.mT, self.k_in)
        d_k_in = torch.bmm(d_pairs, self.k_out).baddbmm_(grads.d_rest, grads.states.mT, alpha=-1)
        d_g = torch.addcmul(d_k_in * self.k_in, d_k_out, self.k_out, value=-1).addcmul_(d_q_in, self.q_in)
        d_g[:, -1] += grads.d_log_end
        torch.mul(d_q_in, self.a, out=d_unit[0]).mul_(unit.shape[-1] ** -0.5)
        torch.mul(d_k_in, self.a, out=d_unit[1]).addcdiv_(d_k_out, self.a)
        return torch.matmul(causal.mT * self.bound, d_g)


def _halves(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """Rows [M, C, D] before and behind the splits of 2 size rows each, both [M, C / (2 size), size, D], as views."""
    return x.view(x.shape[0], -1, 2, size, x.shape[-1]).unbind(2)


def _separated(pairs: Tensor, size: int) -> Tensor:
    """The pairs [M, C, C] that those splits separate, [M, C / (2 size), size, size], as a view."""
    blocks = pairs.view(pairs.shape[0], CHUNK // (2 * size), 2, size, CHUNK // (2 * size), 2, size)
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _splits(g_sum: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Rows on either side of a split, and the decay from it to the rows behind it and to it from those before it."""
    for size in (8, 4, 2, 1):
        first, second = _halves(g_sum, size)
        middle = first[:, :, -1:]
        yield size, (second - middle).exp_(), (middle - first).exp_()


@dataclasses.dataclass
class Halved(Tiles):
    """Chunks of gates without a bound: S_end = end S + k_out' V~; entry is 1."""

    g: Tensor

    @classmethod
    def of(cls, unit: Tensor, g: Tensor) -> Halved:
        """unit [2, M, C, D]: normalised queries and keys; g [M, C, D]: log decay of each row."""
        causal, strict = masks(g)
        g_sum = torch.matmul(causal, g)
        q, k = unit[0] * g.shape[-1] ** -0.5, unit[1]
        attention = g.new_zeros(g.shape[0], CHUNK, CHUNK)
        pairs = torch.zeros_like(attention)
        attention.diagonal(dim1=1, dim2=2).copy_(torch.linalg.vecdot(q, k))
        for size, rise, fall in _splits(g_sum):
            (before, behind), (_, queries) = _halves(k, size), _halves(q, size)
            column = (before * fall).mT
            _separated(attention, size).copy_((queries * rise) @ column)
            _separated(pairs, size).copy_((behind * rise) @ column)
        rise = g_sum.exp_()
        k_out = torch.matmul(strict.mT, g).exp_().mul_(k)
        return cls(q * rise, k * rise, k_out, rise[:, -1], torch.ones_like(rise[:, -1]), attention, pairs, g)

    def leave(self, here: slice, states: Tensor, solved: Tensor) -> Tensor:
        return torch.baddbmm(states * self.end[here].unsqueeze(-1), self.k_out[here].mT, solved)

    def leave_backward(self, here: slice, d_ends: Tensor, d_solved: Tensor) -> Tensor:
        d_solved.baddbmm_(self.k_out[here], d_ends)
        return d_ends * self.end[here].unsqueeze(-1)

    def gradients(
        self, unit: Tensor, grads: StateGradients, d_attention: Tensor, d_pairs: Tensor, d_unit: Tensor
    ) -> Tensor:
        causal, strict = masks(self.g)
        g_sum, to_end = torch.matmul(causal, self.g), torch.matmul(strict.mT, self.g)
        scale = unit.shape[-1] ** -0.5
        q, k = unit[0] * scale, unit[1]
        d_q, d_k = torch.bmm(grads.d_out, grads.states.mT), torch.bmm(grads.d_rest, grads.states.mT).neg_()
        d_sum = (d_q * self.q_in).addcmul_(d_k, self.k_in)
        d_sum[:, -1].addcmul_(torch.linalg.vecdot(grads.states, grads.d_ends), self.end)
        rise = g_sum.exp()
        d_k_out = torch.bmm(grads.solved, grads.d_ends.mT)
        d_q.mul_(rise)
        d_k.mul_(rise).addcmul_(d_k_out, to_end.exp_())
        for size, rise, fall in _splits(g_sum):
            d_scores, d_overlaps = _separated(d_attention, size), _separated(d_pairs, size)
            (before, behind), (_, queries) = _halves(k, size), _halves(q, size)
            column, row_q, row_k = before * fall, queries * rise, behind * rise
            d_row_q, d_row_k = d_scores @ column, d_overlaps @ column
            d_column = d_scores.mT @ row_q + d_overlaps.mT @ row_k
            (d_before, d_behind), (_, d_queries), (sum_before, sum_behind) = (
                _halves(x, size) for x in (d_k, d_q, d_sum)
            )
            d_queries.addcmul_(d_row_q, rise)
            d_behind.addcmul_(d_row_k, rise)
            d_before.addcmul_(d_column, fall)
            sum_behind.addcmul_(d_row_q, row_q).addcmul_(d_row_k, row_k)
            sum_before.addcmul_(d_column, column, value=-1)
        itself = d_attention.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        torch.mul(d_q.addcmul_(itself, k), scale, out=d_unit[0])
        torch.addcmul(d_k, itself, q, out=d_unit[1])
        return torch.matmul(causal.mT, d_sum) + torch.matmul(strict, d_k_out.mul_(self.k_out))
