"""Causal attention of packed segments by torch's flash kernel, which needs no grids, no masks and no copies of logits.

On a GPU in bf16 the MLA layers take it; `reference` is its definition. Products are of bf16 values with float32 sums;
probabilities are rounded to bf16 before they meet the values.

Letters: N query rows, P key rows, S segments, h heads, D key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3rl.kernels import limits
from k3rl.kernels.mla import heads
from k3rl.kernels.mla import max_logits as kernel
from k3rl.model.layout import Layout
from k3rl.model.norm import wide

_WIDEST = 256  # heads that the kernel takes
forward_op = torch.ops.aten._flash_attention_forward
backward_op = torch.ops.aten._flash_attention_backward


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
    out = forward_op(
        q, k.contiguous(), padded, queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest, 0.0, True, False,
        scale=scale,
    )[0]  # fmt: skip
    return out[..., : v.shape[-1]]


class _OverOwnRows(torch.autograd.Function):
    """q [N, h, D], kv [N, h, n + V], k_r [N, D - n] -> attention [N, h * V], and the largest logits [h] or None.

    Keys and values are put together, and their gradients taken apart, in one pass each.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, k_r: Tensor, nope: int, layout: Layout, scale: float, watch: bool
    ) -> tuple[Tensor, Tensor | None]:
        value, ends, longest = kv.shape[2] - nope, layout.cu_seqlens, layout.longest
        k, v = heads.spread(kv, k_r, nope)
        out, lse, seed, unused, _ = forward_op(q, k, v, ends, ends, longest, longest, 0.0, True, False, scale=scale)
        largest = largest_logits(q, k, layout, scale) if watch else None
        ctx.save_for_backward(q, k, v, out, lse, seed, unused)
        ctx.ends, ctx.settings = ends, (nope, value, longest, scale)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return heads.resized(out, value).view(len(q), -1), largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        q, k, v, out, lse, seed, unused = ctx.saved_tensors
        nope, value, longest, scale = ctx.settings
        wide = heads.resized(grad.reshape(len(q), -1, value), q.shape[2])
        d_q, d_k, d_v = backward_op(
            wide, q, k, v, out, lse, ctx.ends, ctx.ends, longest, longest, 0.0, True, seed, unused, scale=scale
        )
        return d_q, *heads.collect(d_k, d_v, nope, value), None, None, None, None


def takes_own_rows(q: Tensor, value: int, k_r: Tensor) -> bool:
    """Whether `over_own_rows` computes attention of such queries, values of that width and k_r; never on a CPU."""
    return takes(q) and value <= q.shape[2] and limits.MLA_HEADS.takes(q, k_r)


def over_own_rows(
    q: Tensor, kv: Tensor, k_r: Tensor, nope: int, layout: Layout, scale: float, watch: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`attention` of q [N, h, D] where keys and values are still kv [N, h, nope + V] and k_r [N, D - nope], [N, h * V].

    watch: also `largest_logits`.
    """
    return _OverOwnRows.apply(q, kv, k_r, nope, layout, scale, watch)


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
def largest_logits(q: Tensor, k: Tensor, layout: Layout, scale: float, keys: Layout | None = None) -> Tensor:
    """The largest logit of each head [h] over all segments, float32 or wider, scale above 0. Padding has none.

    keys: where k has rows before those of the first segment that are no queries, the layout of all of them.
    """
    if keys is not None and len(k) > len(q):
        # The first query stands for the rows before it: it sees all that they see, so no logit is new.
        q = torch.cat([q[:1].expand(len(k) - len(q), -1, -1), q])
        return kernel.largest_logits(q, k, keys.first_row, keys.longest) * scale
    first = layout.first_row
    if layout.padding is not None:
        behind = torch.arange(1, len(q) + 1, dtype=torch.int32, device=q.device)
        first = torch.where(layout.padding, behind, first)
    return kernel.largest_logits(q, k, first, layout.longest) * scale
