"""Drawing one token a row from logits, where nothing is cut: by inverting the cumulative distribution in id order.

`draw` is one launch on a GPU that the kernel supports (five over more tokens than a program holds), `draw_reference` in
plain torch its definition. Everything is
computed in float64 whatever the logits are, and nothing is read by the host.
"""

from __future__ import annotations

import torch

from k3rl.kernels import limits


def draw(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """logits [B, V], temperature and uniform float64 [B] -> float64 [B, 3]: id, logprob, and 1 where logits are finite.

    Temperature 0 takes the largest logit, the lowest id among equals, with its logprob at temperature 1. uniform in
    [0, 1). A row whose logits are not finite gets an id that means nothing, and is one.
    """
    if limits.DRAW.takes(logits):
        from k3rl.kernels.sampling import draw_kernels

        return draw_kernels.draw(logits, temperature, uniform)
    if limits.DRAW_CUT.takes(logits):
        from k3rl.kernels.sampling import cut_kernels

        return cut_kernels.draw_wide(logits, temperature, uniform)
    return draw_reference(logits, temperature, uniform)


def draw_reference(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`draw` in plain torch."""
    heat, u = temperature.unsqueeze(-1), uniform.unsqueeze(-1)
    z = logits.to(torch.float64, copy=True)
    finite = z.sum(-1, keepdim=True).isfinite()
    z.masked_fill_(~finite, 0.0)
    z -= z.amax(-1, keepdim=True)
    greedy = heat == 0
    z /= heat.masked_fill(greedy, 1.0)
    cumulative = z.exp().cumsum(-1)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, u * total, right=True).clamp_(max=logits.shape[-1] - 1)
    ids = torch.where(greedy, z.argmax(-1, keepdim=True), ids)
    logprobs = z.gather(-1, ids) - total.log()
    return torch.cat([ids.to(torch.float64), logprobs, finite.to(torch.float64)], 1)
