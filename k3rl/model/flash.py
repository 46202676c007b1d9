"""Causal attention of packed segments by torch's flash kernel, which needs no grids, no masks and no copies of logits.

On a GPU in bf16 the MLA layers take it; `reference` is its definition. Products are of bf16 values with float32 sums;
probabilities are rounded to bf16 before they meet the values.

Letters: N query rows, P key rows, S segments, h heads, D key width, V value width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from k3rl.model.layout import Layout
from k3rl.model.norm import wide

_WIDEST = 256  # heads that the kernel takes
_RUN = 1024  # queries whose logits are looked at together for the largest one


def takes(q: Tensor) -> bool:
    """Whether the kernel computes attention of queries like q [N, h, D]; never on a CPU."""
    return q.device.type == "cuda" and q.dtype == torch.bfloat16 and q.shape[-1] <= _WIDEST and q.shape[-1] % 8 == 0


def attention(q: Tensor, k: Tensor, v: Tensor, queries: Layout, keys: Layout, scale: float) -> Tensor:
    """q [N, h, D], k [P, h, D], v [P, h, V] -> softmax(q k' scale) v [N, h, V] in each segment; differentiable.

    The queries of a segment are the last rows of its keys, and none sees a later row. V is at most D.
    """
    if q.device.type == "cpu":
        return reference(q, k, v, queries, keys, scale)
    padded = nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))  # the kernel wants one width
    out = torch.ops.aten._flash_attention_forward(
        q, k.contiguous(), padded, queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest, 0.0, True, False,
        scale=scale,
    )[0]  # fmt: skip
    return out[..., : v.shape[-1]]


def reference(q: Tensor, k: Tensor, v: Tensor, queries: Layout, keys: Layout, scale: float) -> Tensor:
    """`attention` in plain torch, one segment after the other."""
    kind, results = wide(q.dtype), []
    pieces = zip(q.split(queries.lengths), k.split(keys.lengths), v.split(keys.lengths), strict=True)
    for own, seen, values in pieces:
        n, total = len(own), len(seen)
        logits = torch.einsum("nhd,phd->hnp", own.to(kind), seen.to(kind)) * scale
        later = torch.ones(n, total, dtype=torch.bool, device=q.device).triu_(1 + total - n)
        p = logits.masked_fill(later, float("-inf")).softmax(-1)
        results.append(torch.einsum("hnp,phv->nhv", p, values.to(kind)).to(q.dtype))
    return torch.cat(results)


@torch.no_grad()
def largest_logits(q: Tensor, k: Tensor, layout: Layout, scale: float) -> Tensor:
    """The largest logit of each head [h] over all segments, float32 or wider; products in q's dtype."""
    largest = torch.full((q.shape[1],), float("-inf"), dtype=wide(q.dtype), device=q.device)
    ends = [0, *torch.tensor(layout.lengths).cumsum(0).tolist()]
    for first, last in pairwise(ends):
        keys = k[first:last].permute(1, 2, 0)
        for start in range(first, last, _RUN):
            stop = min(start + _RUN, last)
            logits = torch.bmm(q[start:stop].transpose(0, 1), keys[..., : stop - first])
            later = torch.ones(stop - start, stop - first, dtype=torch.bool, device=q.device).triu_(1 + start - first)
            found = logits.masked_fill_(later, float("-inf")).amax((1, 2))
            largest = torch.maximum(largest, found.to(largest.dtype) * scale)
    return largest
