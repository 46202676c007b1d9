"""Attention residuals (k3.md 6): each sublayer reads a softmax mix of frozen block sums and the running sum.

mix = sum_i p_i V_i over the bank rows and the running prefix P, p = softmax_i(rms_norm(V_i) . (w_norm * w_proj)).
The values are un-normalised; there is no 1 / sqrt(d) and no temperature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3rl.model.blocks import row_blocks
from k3rl.model.norm import inverse_rms, wide


def _weights(sources: list[Tensor], inverses: list[Tensor], query: Tensor) -> Tensor:
    """Sources [N, H], their inverse RMS [N, 1], pseudo-query [H] -> softmax weights [sources, N, 1]."""
    scores = [torch.mv(source, query).unsqueeze(-1).mul_(r) for source, r in zip(sources, inverses, strict=True)]
    return torch.stack(scores).softmax(0)


def _weighted_sum(sources: list[Tensor], p: Tensor) -> Tensor:
    total = torch.empty_like(sources[0])
    for rows in row_blocks(total):
        here = torch.mul(sources[0][rows], p[0, rows], out=total[rows])
        for source, weight in zip(sources[1:], p[1:], strict=True):
            here.addcmul_(source[rows], weight[rows])
    return total


class _Mix(torch.autograd.Function):
    """(w_norm [H], w_proj [1, H], sources [N, H] each) -> mix [N, H] in float32 or wider.

    Per source, with x = V r the normed value and q the pseudo-query: d_score = p (g . V - sum_j p_j g . V_j), and
    dV = p g + d_score r (q - x (x . q) / H), where x . q is the score itself.
    """

    @staticmethod
    def forward(ctx: Any, norm: Tensor, proj: Tensor, inverses: list[Tensor], *sources: Tensor) -> Tensor:
        query = (norm * proj[0]).to(sources[0].dtype)
        values = list(sources)
        p = _weights(values, inverses, query)
        ctx.save_for_backward(norm, proj, p, *inverses, *values)
        return _weighted_sum(values, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        norm, proj, p, *rest = ctx.saved_tensors
        count = p.shape[0]
        inverses, sources = rest[:count], rest[count:]
        query = (norm * proj[0]).to(grad.dtype)
        grad_query = torch.zeros_like(query)
        grads = [torch.empty_like(source) for source in sources]
        for rows in row_blocks(grad):
            here, weights = grad[rows], p[:, rows]
            along = torch.stack([(here * source[rows]).sum(-1, keepdim=True) for source in sources])
            d_scores = weights * (along - (weights * along).sum(0))
            for index, source in enumerate(sources):
                value, r = source[rows], inverses[index][rows]
                pull = d_scores[index] * r
                grad_query += torch.mv(value.t(), pull.squeeze(-1))
                shrink = torch.mv(value, query).unsqueeze(-1).mul_(r).mul_(r).mul_(pull).div_(-value.shape[-1])
                torch.mul(here, weights[index], out=grads[index][rows])
                grads[index][rows].addcmul_(pull, query).addcmul_(value, shrink)
        return (grad_query * proj[0]).to(norm.dtype), (grad_query * norm).to(proj.dtype).unsqueeze(0), None, *grads


class ResidualStream:
    """The bank of block sums and the running prefix sum of one forward."""

    def __init__(self, embedding: Tensor, eps: float) -> None:
        self.prefix: Tensor | None = embedding
        self.eps = eps
        self._bank: list[Tensor] = []
        self._inverses: list[Tensor] = []
        self._dtype = embedding.dtype

    def read(self, norm: Tensor, proj: Tensor) -> Tensor:
        """What a sublayer sees [N, H]. norm [H] and proj [1, H] act as one pseudo-query."""
        prefix = self._running()
        if not self._bank:
            return prefix
        last = prefix.to(wide(prefix.dtype))
        sources = [*self._bank, last]
        inverses = [*self._inverses, inverse_rms(last.detach(), self.eps)]
        if torch.is_grad_enabled():
            mixed = _Mix.apply(norm, proj, inverses, *sources)
        else:
            mixed = _weighted_sum(sources, _weights(sources, inverses, (norm * proj[0]).to(last.dtype)))
        return mixed.to(self._dtype)

    def push(self) -> None:
        """Ends a block: the running sum becomes a bank row and a new one starts."""
        row = self._running()
        row = row.to(wide(row.dtype))
        self._bank.append(row)
        self._inverses.append(inverse_rms(row.detach(), self.eps))
        self.prefix = None

    def add(self, output: Tensor) -> None:
        """Adds a sublayer's output [N, H] to the running sum."""
        self.prefix = output if self.prefix is None else self.prefix + output

    def _running(self) -> Tensor:
        if self.prefix is None:
            raise RuntimeError("a block has no running sum before its first sublayer")
        return self.prefix
