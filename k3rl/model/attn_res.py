"""Attention residuals (k3.md 6): each sublayer reads a softmax mix of frozen block sums and the running sum.

mix = sum_i p_i V_i over the bank rows and the running prefix P, p = softmax_i(rms_norm(V_i) . (w_norm * w_proj)).
The values are un-normalised; there is no 1 / sqrt(d) and no temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3rl.kernels import limits
from k3rl.kernels.gemm import PartialSums, skinny
from k3rl.kernels.norm import attn_res as kernel
from k3rl.model.blocks import blockwise
from k3rl.model.fuse import fused, widened
from k3rl.model.norm import RMSNorm, inverse_rms, wide


def _weights(sources: list[Tensor], inverses: list[Tensor], query: Tensor) -> Tensor:
    """Sources [N, H], their inverse RMS [N, 1], pseudo-query [H] -> softmax weights [sources, N, 1]."""
    column = query.unsqueeze(-1)
    scores = [torch.mm(source, column).mul_(r) for source, r in zip(sources, inverses, strict=True)]
    return torch.stack(scores).softmax(0)


def _weighted_sum(sources: list[Tensor], p: Tensor) -> Tensor:
    total = torch.empty_like(sources[0])
    count = len(sources)
    for here, *rest in blockwise(total, *sources, *p.unbind()):
        values, weights = rest[:count], rest[count:]
        torch.mul(values[0], weights[0], out=here)
        for value, weight in zip(values[1:], weights[1:], strict=True):
            here.addcmul_(value, weight)
    return total


@fused
def mixed(sources: list[Tensor], inverses: list[Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
    """What `_weighted_sum` and `_weights` give together: mix [N, H] and softmax weights [sources, N, 1]."""
    scores = [(source * query).sum(-1, keepdim=True) * r for source, r in zip(sources, inverses, strict=True)]
    p = torch.stack(scores).softmax(0)
    total = sources[0] * p[0]
    for number in range(1, len(sources)):
        total = total + sources[number] * p[number]
    return total, p


@fused
def mixed_read(
    prefix: Tensor, bank: list[Tensor], inverses: list[Tensor], norm: Tensor, proj: Tensor, eps: float
) -> Tensor:
    """`ResidualStream.read` without gradients in one piece: running sum [N, H], bank rows and their inverse RMS."""
    last = widened(prefix)
    query = widened(norm * proj[0])
    sources = [*bank, last]
    every = [*inverses, (last.square().mean(-1, keepdim=True) + eps).rsqrt()]
    scores = [(source * query).sum(-1, keepdim=True) * r for source, r in zip(sources, every, strict=True)]
    p = torch.stack(scores).softmax(0)
    total = sources[0] * p[0]
    for number in range(1, len(sources)):
        total = total + sources[number] * p[number]
    return total.to(prefix.dtype)


@fused
def mixed_backward(
    grad: Tensor, sources: list[Tensor], inverses: list[Tensor], p: Tensor, query: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the query [H] and of the sources [N, H] of `mixed`'s first result."""
    along = [(grad * source).sum(-1, keepdim=True) for source in sources]
    mean = p[0] * along[0]
    for number in range(1, len(sources)):
        mean = mean + p[number] * along[number]
    grad_query, grads = torch.zeros_like(query), []
    for number, (source, r) in enumerate(zip(sources, inverses, strict=True)):
        pull = (along[number] - mean) * p[number] * r
        shrink = (source * query).sum(-1, keepdim=True) * r * r * pull / -source.shape[-1]
        grad_query = grad_query + (source * pull).sum(0)
        grads.append(grad * p[number] + pull * query + source * shrink)
    return grad_query, grads


@fused
def inverse_rms_of(x: Tensor, eps: float) -> Tensor:
    """`inverse_rms` of rows [N, H]."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return inverse_rms(x, eps) if x.device.type == "cpu" else inverse_rms_of(x, eps)


class MixFunction(torch.autograd.Function):
    """(w_norm [H], w_proj [1, H], sources [N, H] each) -> mix [N, H] in float32 or wider.

    Per source, with x = V r the normed value and q the pseudo-query: d_score = p (g . V - sum_j p_j g . V_j), and
    dV = p g + d_score r (q - x (x . q) / H), where x . q is the score itself.
    """

    @staticmethod
    def forward(ctx: Any, norm: Tensor, proj: Tensor, inverses: list[Tensor], *sources: Tensor) -> Tensor:
        query = (norm * proj[0]).to(sources[0].dtype)
        values = list(sources)
        if query.device.type != "cpu":
            total, p = mixed(values, inverses, query)
            ctx.save_for_backward(norm, proj, p, *inverses, *values)
            return total
        p = _weights(values, inverses, query)
        ctx.save_for_backward(norm, proj, p, *inverses, *values)
        return _weighted_sum(values, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        norm, proj, p, *rest = ctx.saved_tensors
        count = p.shape[0]
        inverses, sources = rest[:count], rest[count:]
        query = (norm * proj[0]).to(grad.dtype)
        if grad.device.type != "cpu":
            grad_query, grads = mixed_backward(grad, list(sources), list(inverses), p, query)
            return (
                (grad_query * proj[0]).to(norm.dtype), (grad_query * norm).to(proj.dtype).unsqueeze(0), None, *grads
            )  # fmt: skip
        grad_query, column = torch.zeros_like(query), query.unsqueeze(-1)
        grads = [torch.empty_like(source) for source in sources]
        for g, *rest in blockwise(grad, *sources, *inverses, *p.unbind(), *grads):
            values, rs, weights, outs = (rest[n * count : (n + 1) * count] for n in range(4))
            along = [(g * value).sum(-1, keepdim=True) for value in values]
            mean = torch.mul(weights[0], along[0])
            for weight, dot in zip(weights[1:], along[1:], strict=True):
                mean.addcmul_(weight, dot)
            for value, r, weight, dot, out in zip(values, rs, weights, along, outs, strict=True):
                pull = dot.sub_(mean).mul_(weight).mul_(r)
                grad_query += torch.mv(value.t(), pull.squeeze(-1))
                shrink = torch.mm(value, column).mul_(r).mul_(r).mul_(pull).div_(-value.shape[-1])
                torch.mul(g, weight, out=out).addcmul_(pull, query).addcmul_(value, shrink)
        return (grad_query * proj[0]).to(norm.dtype), (grad_query * norm).to(proj.dtype).unsqueeze(0), None, *grads


class KernelMixFunction(torch.autograd.Function):
    """(w_norm [H], w_proj [1, H], running sum [N, H], block sums [N, H] in float32) -> mix [N, H] in the dtype of the
    running sum, and the running sum and block sums for whoever reads next.

    So the gradient of a source is handed from read to read and grows there, instead of being written by each read and
    added up afterwards.
    """

    @staticmethod
    def forward(ctx: Any, norm: Tensor, proj: Tensor, eps: float, last: Tensor, *bank: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        out, state = kernel.mix(last, bank, norm, proj, eps, save=True)
        ctx.save_for_backward(norm, proj, state, last, *bank)
        return (out, last, *bank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, added: Tensor | None, *more: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None, None, None, added, *more)
        norm, proj, state, last, *bank = ctx.saved_tensors
        given = None
        if any(rows is not None for rows in more):
            given = [torch.zeros_like(row) if rows is None else rows for row, rows in zip(bank, more, strict=True)]
        d_norm, d_proj, d_last, d_bank = kernel.mix_gradient(grad, last, bank, norm, proj, state, added, given)
        return (d_norm, d_proj, None, d_last, *d_bank)


def reads_by_kernel(x: Tensor) -> bool:
    """Whether reads of rows like these may be a kernel's."""
    return x.device.type != "cpu"


class ResidualStream:
    """The bank of block sums and the running prefix sum of one forward.

    Off a CPU and without gradients an output waits until the next read, whose kernel can add it, and block sums stay in
    their dtype.
    """

    def __init__(self, embedding: Tensor, eps: float) -> None:
        self.prefix: Tensor | None = embedding
        self._waits: Tensor | PartialSums | None = None
        self.eps = eps
        self._bank: list[Tensor] = []
        self._inverses: list[Tensor] = []
        self._dtype = embedding.dtype

    def apart(self) -> tuple[ResidualStream, list[Tensor]]:
        """A stream that reads what this one reads now, and the tensors with gradients that it reads: `sources`."""
        other = ResidualStream(self._running(), self.eps)
        other._inverses, other._dtype = list(self._inverses), self._dtype
        other._bank = list(self._bank)
        return other, [self._running(), *self._bank]

    def give(self, sources: Sequence[Tensor]) -> None:
        """Replaces what `apart` returned, in its order."""
        self.prefix, self._bank = sources[0], list(sources[1:])

    def read(self, norm: Tensor, proj: Tensor, then: RMSNorm | None = None) -> Tensor:
        """What a sublayer sees [N, H]. norm [H] and proj [1, H] act as one pseudo-query; then: normed by this."""
        if not self._bank:
            return self._running() if then is None else then(self._running())
        if reads_by_kernel(self._bank[0]):
            if torch.is_grad_enabled():
                self._widen()
            like = self.prefix
            if isinstance(self._waits, PartialSums) and like is None:
                like = self._bank[0].new_empty(self._bank[0].shape, dtype=self._waits.dtype)
            if like is not None and limits.ATTN_RES.takes(like, self._bank, norm, proj):
                return self._read_by_kernel(norm, proj, then)
        out = self._read(norm, proj)
        return out if then is None else then(out)

    def _read_by_kernel(self, norm: Tensor, proj: Tensor, then: RMSNorm | None) -> Tensor:
        if torch.is_grad_enabled():
            out, self.prefix, *self._bank = KernelMixFunction.apply(norm, proj, self.eps, self._running(), *self._bank)
            return out if then is None else then(out)
        inside: tuple[Tensor, float] | tuple[()] = ()
        if then is not None and then.weight.dtype == self._dtype and not then._forward_hooks | then._forward_pre_hooks:
            inside, then = (then.weight, then.eps), None
        if self._waits is None:
            out, _ = kernel.mix(self._running(), self._bank, norm, proj, self.eps, *inside)
        else:
            out, self.prefix = kernel.mix_sum(self.prefix, self._waits, self._bank, norm, proj, self.eps, *inside)
            self._waits = None
        return out if then is None else then(out)

    def _read(self, norm: Tensor, proj: Tensor) -> Tensor:
        self._widen()
        prefix = self._running()
        for row in self._bank[len(self._inverses) :]:
            self._inverses.append(_inverse_rms(row.detach(), self.eps))
        if prefix.device.type != "cpu" and not torch.is_grad_enabled():
            return mixed_read(prefix, self._bank, self._inverses, norm, proj, self.eps).to(self._dtype)
        last = prefix.to(wide(prefix.dtype))
        sources = [*self._bank, last]
        inverses = [*self._inverses, _inverse_rms(last.detach(), self.eps)]
        if torch.is_grad_enabled():
            out = MixFunction.apply(norm, proj, inverses, *sources)
        else:
            out = _weighted_sum(sources, _weights(sources, inverses, (norm * proj[0]).to(last.dtype)))
        return out.to(self._dtype)

    def push(self) -> None:
        """Ends a block: the running sum becomes a bank row and a new one starts."""
        row = self._running()
        if not reads_by_kernel(row) or torch.is_grad_enabled():
            row = row.to(wide(row.dtype))
        self._bank.append(row)
        if not reads_by_kernel(row):  # elsewhere at the first read that asks: kernels find it themselves
            self._inverses.append(_inverse_rms(row.detach(), self.eps))
        self.prefix = None

    def add(self, output: Tensor | PartialSums) -> None:
        """Adds a sublayer's output [N, H] to the running sum; partial sums were made without gradients."""
        if self.prefix is None and self._waits is None:
            if isinstance(output, PartialSums):
                self._waits = output
            else:
                self.prefix = output
            return
        before = self._running()
        if isinstance(output, PartialSums):
            self._waits = output
        elif not reads_by_kernel(output) or torch.is_grad_enabled() or output.dtype != before.dtype:
            self.prefix = before + output
        else:
            self._waits = output

    def total(self) -> Tensor:
        """The running sum [N, H]: all of the stream where nothing is ever pushed, as in a plain residual sum."""
        return self._running()

    def _widen(self) -> None:
        """Block sums as all but the kernel without gradients want them: float32 or wider."""
        self._bank = [row.to(wide(row.dtype)) for row in self._bank]

    def _running(self) -> Tensor:
        if self._waits is not None:
            waited, self._waits = skinny.as_tensor(self._waits), None
            self.prefix = waited if self.prefix is None else self.prefix + waited
        if self.prefix is None:
            raise RuntimeError("a block has no running sum before its first sublayer")
        return self.prefix
