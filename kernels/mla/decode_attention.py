"""Attention of one new token for every row over latents in pages (MLA decode), read where they lie.

Queries have absorbed the key half of the up-projection, so that they meet latents as they are cached, and the result is
a sum of latents, which the value half has yet to expand. `attend` is one launch on a GPU that the kernel supports, two
where rows are so few that their tokens are split; `attend_reference` in plain torch is its definition. Rows are of any
length and nothing is read by the host. Source: k3 architecture section 3.
"""

from __future__ import annotations

import torch

from k3rl.kernels import limits


def attend(
    absorbed: torch.Tensor,
    q_r: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    past: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """absorbed [h, R, Z] and q_r [R, h, r]: queries; any strides with contiguous channels -> [h, R, Z] in their dtype.

    pages [P, page, Z + r]: latents and shared key parts. table int64 [R, n]: pages of each row in order. past int64
    [R]: a row attends to its tokens 0 .. past. Softmax in float32 or wider. Raises ValueError where shapes do not fit.
    """
    (h, rows, z), r = absorbed.shape, q_r.shape[-1]
    if q_r.shape != (rows, h, r) or pages.shape[-1] != z + r or table.shape[0] != rows or past.shape != (rows,):
        raise ValueError(
            f"attend: q_r {tuple(q_r.shape)}, pages {tuple(pages.shape)}, table {tuple(table.shape)} and past "
            f"{tuple(past.shape)} do not fit absorbed {tuple(absorbed.shape)}"
        )
    if limits.PAGED_LATENTS.takes(pages, r):
        from k3rl.kernels.mla import decode_attention_kernels

        return decode_attention_kernels.attend(absorbed, q_r, pages, table, past, scale)
    return attend_reference(absorbed, q_r, pages, table, past, scale)


def attend_reference(
    absorbed: torch.Tensor,
    q_r: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    past: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`attend` in plain torch, over all tokens that the pages of the table could hold, masked."""
    rows, z = table.shape[0], absorbed.shape[2]
    wide = torch.promote_types(absorbed.dtype, torch.float32)
    latent = pages.index_select(0, table.reshape(-1)).view(rows, -1, pages.shape[2]).to(wide)
    query = torch.cat([absorbed.transpose(0, 1), q_r], dim=-1).to(wide)
    behind = torch.arange(latent.shape[1], device=past.device) > past.unsqueeze(1)
    logits = torch.bmm(query, latent.mT).mul_(scale).masked_fill_(behind.unsqueeze(1), float("-inf"))
    return torch.bmm(logits.softmax(-1), latent[..., :z]).to(absorbed.dtype).transpose(0, 1)
