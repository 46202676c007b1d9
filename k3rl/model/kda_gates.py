"""The log decay of KDA from its logits (k3.md 2.2): bound sigmoid(exp(A_log) z), or without a bound -exp(A_log)
softplus(z), with z the gate's logit and its bias together.

Letters as in `kda_chunks`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rl.kernels.kda.operator import least_log_decay
from k3rl.model.layout import CHUNK


def log_decay(logit: Tensor, rate: Tensor, bound: float | None) -> Tensor:
    """z [..., h, D] and exp(A_log) [h, 1] -> log decay, at most 0; z is overwritten.

    Without a bound it ends where its exp is 0, so that differences of its sums stay finite.
    """
    if bound is not None:
        return logit.mul_(rate).sigmoid_().mul_(bound)
    return nn.functional.softplus(logit).mul_(-rate).clamp_(min=least_log_decay(logit.dtype))


def gates(
    z: Tensor, a_log: Tensor, dt_bias: Tensor, single: Tensor, padding: Tensor, kind: torch.dtype, bound: float | None
) -> tuple[Tensor, Tensor]:
    """Gate logits of all slots -> sigmoid(exp(A_log) (z + dt_bias)), or without a bound the log decay itself,
    [M, C, D], zero in padding; and z + dt_bias."""
    h = a_log.shape[0]
    width = dt_bias.shape[0] // h
    shifted = z.reshape(-1, width).index_select(0, single).to(kind).view(-1, h, CHUNK, width)
    shifted += dt_bias.to(kind).view(h, 1, width)
    rate = a_log.to(kind).exp().view(h, 1, 1)
    gate = log_decay(shifted, rate, None) if bound is None else (shifted * rate).sigmoid_()
    gate.view(-1, width).index_fill_(0, padding, 0.0)
    return gate.view(-1, CHUNK, width), shifted.view(-1, CHUNK, width)


def gates_backward(
    d_gate: Tensor, gate: Tensor, shifted: Tensor, a_log: Tensor, padding: Tensor, back: Tensor, bound: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `gates`' first result -> gradients of z [n, hD], A_log [h] and dt_bias [hD]."""
    h, width = a_log.shape[0], gate.shape[-1]
    slots = gate.shape[0] * CHUNK
    buffer = torch.empty(slots + 1, width, dtype=gate.dtype, device=gate.device)
    buffer[-1] = 0.0
    by_head = (-1, h, CHUNK, width)
    rate = a_log.to(gate.dtype).exp().view(h, 1, 1)
    d_shifted = buffer[:-1].view(gate.shape)
    if bound is None:
        # Where the decay is 0 nothing depends on it, up to the roundings of what came back from later rows.
        d_gate = d_gate.masked_fill(gate <= least_log_decay(gate.dtype), 0.0)
        d_rate = d_gate * gate
        torch.sigmoid(shifted, out=d_shifted).mul_(d_gate).view(by_head).mul_(-rate)
        buffer.index_fill_(0, padding, 0.0)
    else:
        torch.addcmul(gate, gate, gate, value=-1, out=d_shifted).mul_(d_gate).view(by_head).mul_(rate)
        d_rate = d_shifted * shifted
    grad_a_log = d_rate.view(by_head).sum((0, 2, 3))
    grad_dt_bias = d_shifted.view(by_head).sum((0, 2)).view(-1)
    grad_z = buffer.index_select(0, back).view(-1, h * width)
    return grad_z, grad_a_log.to(a_log.dtype), grad_dt_bias.to(a_log.dtype)
