"""Drawing one token a row where top-p, top-k or min-p cut something, on the device of the logits.

`draw_cut` is some launches on a GPU that the kernels support, `cut_reference` in plain torch their definition: a sort.
Everything is computed in float64; the host reads nothing in between. Sums run in another order in both, so a set whose
mass is within 1e-15 of p may have one token more in one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from k3rl.kernels import limits


class Cuts(NamedTuple):
    """How rows are drawn and what they leave: temperature, uniform, top_p, min_p float64 [B], top_k int64 [B]; on the
    device. Temperature 0 cuts nothing."""

    temperature: Tensor
    uniform: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor


class CutDraws(NamedTuple):
    """drawn float64 [B, 3] as `draw` gives it; kept int64 [B]: how many ids were left; ids(kept): which, int32 [sum of
    kept], those of each row ascending, row after row. kept of the call: the same numbers, on the host."""

    drawn: Tensor
    kept: Tensor
    ids: Callable[[Tensor], Tensor]


def draw_cut(logits: Tensor, cuts: Cuts, *, by_rank: bool, by_mass: bool) -> CutDraws:
    """One token for each row of logits [B, V]: what min-p, then top-k, then top-p leave, among equal logits the lower
    ids, and a draw from that. by_rank, by_mass: whether any row has top-k, any has top-p."""
    if limits.DRAW_CUT.takes(logits):
        from k3rl.kernels.sampling import cut_kernels

        return cut_kernels.draw_cut(logits, cuts, by_rank=by_rank, by_mass=by_mass)
    drawn, keep = cut_reference(logits, cuts)

    def ids(counts: Tensor) -> Tensor:
        return (keep & (counts > 0).to(keep.device)[:, None]).nonzero()[:, 1].to(torch.int32)

    return CutDraws(drawn, keep.sum(-1), ids)


def cut_reference(logits: Tensor, cuts: Cuts) -> tuple[Tensor, Tensor]:
    """(drawn float64 [B, 3], kept bool [B, V]) of `draw_cut` in plain torch."""
    size = logits.shape[-1]
    heat, u, top_p, min_p = (column.unsqueeze(-1) for column in cuts[:4])
    z = logits.to(torch.float64, copy=True)
    finite = z.sum(-1, keepdim=True).isfinite()
    z.masked_fill_(~finite, 0.0)
    greedy = heat == 0
    order = z.sort(dim=-1, descending=True, stable=True).indices
    z -= z.amax(-1, keepdim=True)
    z /= heat.masked_fill(greedy, 1.0)
    mass = z.exp()
    ranked = mass.gather(-1, order)
    enough = (z.gather(-1, order) >= min_p.log()) | greedy
    limit = torch.where((cuts.top_k.unsqueeze(-1) > 0) & ~greedy, cuts.top_k.unsqueeze(-1), size)
    left = enough & (torch.arange(size, device=z.device) < limit)
    before = torch.cumsum(ranked * left, -1)
    total = before[:, -1:]
    before = before - ranked * left
    left &= (before < top_p * total) | (top_p >= 1) | greedy
    keep = torch.zeros_like(left).scatter_(-1, order, left)
    cumulative = (mass * keep).cumsum(-1)
    ids = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).clamp_(max=size - 1)
    ids = torch.where(greedy, z.argmax(-1, keepdim=True), ids)
    logprobs = z.gather(-1, ids) - cumulative[:, -1:].log()
    return torch.cat([ids.to(torch.float64), logprobs, finite.to(torch.float64)], 1), keep
