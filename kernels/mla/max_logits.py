"""The largest logit of each attention head over packed rows, which QK-clip reads: products and maxima, nothing kept.

    m_h = max over rows i and keys j, first_i <= j <= i, of q_ih . k_jh

`largest_logits_reference` is the definition; `largest_logits` runs the Triton kernel on a GPU that it supports.
"""

from __future__ import annotations

import torch

from k3rl.kernels import limits

_RUN = 1024  # queries whose logits the reference looks at together
_ALIGNED = 64  # rows that its runs of keys begin at, so that its products are aligned


def largest_logits(q: torch.Tensor, k: torch.Tensor, first: torch.Tensor, longest: int) -> torch.Tensor:
    """q, k [N, h, D], first int32 [N], rising: the first key of each row -> [h], float32 or wider, -inf without rows.

    longest: no row has more keys; a row whose first key comes after it has none. The host waits for nothing and shapes
    depend on N and `longest` alone. Raises ValueError if shapes do not fit.
    """
    if q.shape != k.shape or first.shape != q.shape[:1]:
        raise ValueError(f"largest_logits: q {tuple(q.shape)}, k {tuple(k.shape)} and first {tuple(first.shape)} do "
                         "not fit")  # fmt: skip
    if limits.MAX_LOGITS.takes(q, k):
        from k3rl.kernels.mla import max_logits_kernels

        return max_logits_kernels.largest_logits(q, k, first, *(limits.MAX_LOGITS.split(q.shape[-1]) or (0, 0)))
    return largest_logits_reference(q, k, first, longest)


@torch.no_grad()
def largest_logits_reference(q: torch.Tensor, k: torch.Tensor, first: torch.Tensor, longest: int) -> torch.Tensor:
    """`largest_logits` in plain torch, with logits in q's dtype."""
    n, kind = len(q), torch.promote_types(q.dtype, torch.float32)
    row = torch.arange(n, dtype=torch.int32, device=q.device)
    largest = torch.full((q.shape[1],), float("-inf"), dtype=kind, device=q.device)
    for start in range(0, n, _RUN):
        stop = min(start + _RUN, n)
        here, seen = slice(start, stop), slice(max(0, start + 1 - longest) // _ALIGNED * _ALIGNED, stop)
        logits = torch.bmm(q[here].transpose(0, 1), k[seen].permute(1, 2, 0))
        hidden = (row[seen] < first[here].unsqueeze(1)) | (row[seen] > row[here].unsqueeze(1))
        largest = torch.maximum(largest, logits.masked_fill_(hidden, float("-inf")).amax((1, 2)).to(kind))
    return largest
