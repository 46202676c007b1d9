"""Attention of several new tokens of some rows over latents in pages, read where they lie (MLA prefill behind a cache).

Queries have absorbed the key half of the up-projection, so that they meet latents as they are cached, and the result is
a sum of latents, which the value half has yet to expand. `attend` makes its table, attends and, where there are
so few queries that what they attend to is split, adds up: a launch each on a GPU that the kernel supports.
`attend_reference` in plain torch is its definition. What comes before is of any length; the kernels need nothing
that the host would have to read. Source: k3 architecture section 3.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from k3rl.kernels import limits

_LOGITS = 1 << 24  # that the reference makes at once


def attend(
    absorbed: torch.Tensor,
    q_r: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    past: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """absorbed [h, N, Z] and q_r [N, h, r], queries of N packed tokens of S segments -> [h, N, Z] in their dtype.

    Any strides with contiguous channels. pages [P, page, Z + r]: latents and shared key parts. table int64 [S, n]:
    pages of each segment in order. past int64 [N]: a token attends to the tokens 0 .. past of its segment; it rises
    inside a segment. ends int32 [S + 1]: where segments begin, and N; some may be empty. Softmax in float32 or wider.
    Raises ValueError where shapes do not fit. Without the kernel the host reads the ends.
    """
    (h, rows, z), r, segments = absorbed.shape, q_r.shape[-1], ends.numel() - 1
    fits = q_r.shape == (rows, h, r) and pages.shape[-1] == z + r and past.shape == (rows,)
    if not fits or table.shape[0] != segments or ends.dtype != torch.int32:
        raise ValueError(
            f"attend: q_r {tuple(q_r.shape)}, pages {tuple(pages.shape)}, table {tuple(table.shape)}, past "
            f"{tuple(past.shape)} and ends {ends.dtype} {tuple(ends.shape)} do not fit absorbed {tuple(absorbed.shape)}"
        )
    if limits.PAGED_LATENTS.takes(pages, r):
        from k3rl.kernels.mla import chunked_prefill_kernels

        return chunked_prefill_kernels.attend(absorbed, q_r, pages, table, past, ends, scale)
    return attend_reference(absorbed, q_r, pages, table, past, ends, scale)


def attend_reference(
    absorbed: torch.Tensor,
    q_r: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    past: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`attend` in plain torch, segment by segment over the pages that it has."""
    (h, _, z), page = absorbed.shape, pages.shape[1]
    wide = torch.promote_types(absorbed.dtype, torch.float32)
    out = torch.empty_like(absorbed)
    for segment, (first, last) in enumerate(pairwise(ends.tolist())):
        if first == last:
            continue
        seen = int(past[last - 1]) + 1
        latent = pages.index_select(0, table[segment, : -(-seen // page)]).view(-1, pages.shape[2])[:seen].to(wide)
        run = max(1, _LOGITS // (h * seen))
        for start in range(first, last, run):
            here = slice(start, min(start + run, last))
            query = torch.cat([absorbed[:, here], q_r[here].transpose(0, 1)], dim=-1).to(wide)
            behind = torch.arange(seen, device=past.device) > past[here].unsqueeze(1)
            logits = torch.matmul(query, latent.t()).mul_(scale).masked_fill_(behind, float("-inf"))
            out[:, here] = torch.matmul(logits.softmax(-1), latent[:, :z]).to(out.dtype)
    return out
