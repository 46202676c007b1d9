"""Causal attention of packed segments by torch's flash kernel, which needs no grids, no masks and no copies of logits.

On a GPU in bf16 the MLA layers take it; `reference` is its definition. Products are of bf16 values with float32 sums;
probabilities are rounded to bf16 before they meet the values.

Letters: N query rows, P key rows, S segments, h heads, D key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rl.kernels import largest_logits as kernel
from k3rl.model.layout import Layout
from k3rl.model.norm import wide

_WIDEST = 256  # heads that the kernel takes


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
    """`attention` in plain torch, all rows against all: no shape depends on the lengths."""
    kind = wide(q.dtype)
    before = (keys.lengths_tensor - queries.lengths_tensor).index_select(0, queries.segment)
    own, last = queries.segment.unsqueeze(1), (queries.position + before).unsqueeze(1)
    hidden = (own != keys.segment) | (keys.position > last)
    logits = torch.einsum("nhd,phd->hnp", q.to(kind), k.to(kind)) * scale
    p = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hnp,phv->nhv", p, v.to(kind)).to(q.dtype)


@torch.no_grad()
def largest_logits(q: Tensor, k: Tensor, layout: Layout, scale: float) -> Tensor:
    """The largest logit of each head [h] over all segments, float32 or wider, scale above 0. Padding has none."""
    first = layout.starts.index_select(0, layout.segment)
    if layout.padding is not None:
        behind = torch.arange(1, len(q) + 1, device=q.device)
        first = torch.where(layout.padding, behind, first)
    return kernel.largest_logits(q, k, first.to(torch.int32), layout.longest) * scale
