"""What attention kernels of one width want of MLA's heads, and their gradients: copies, in one pass each.

    spread   kv [N, h, n + V], k_r [N, r]             ->  keys [N, h, n + r], values [N, h, n + r], zeros behind V
    collect  their gradients                          ->  those of kv and k_r, whose heads are summed in float32
    resized  [N, h, a]                                ->  [N, h, b], cut off or filled up with zeros

The references in plain torch are the definitions; their bits are the kernels', but for the order of the sum over heads.
"""

from __future__ import annotations

import torch


def spread(kv: torch.Tensor, k_r: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """kv [N, h, nope + V], k_r [N, r], V at most nope + r -> keys and filled-up values [N, h, nope + r]."""
    from k3rl.kernels.mla import heads_kernels

    return heads_kernels.spread(kv, k_r, nope)


def spread_reference(kv: torch.Tensor, k_r: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`spread` in plain torch."""
    k_n, v = kv.split([nope, kv.shape[2] - nope], dim=2)
    k = torch.cat([k_n, k_r.unsqueeze(1).expand(-1, kv.shape[1], -1)], dim=2)
    return k, resized_reference(v, k.shape[2])


def collect(d_k: torch.Tensor, d_v: torch.Tensor, nope: int, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of keys and filled-up values [N, h, nope + r] -> of kv [N, h, nope + value] and of k_r [N, r]."""
    from k3rl.kernels.mla import heads_kernels

    return heads_kernels.collect(d_k, d_v, nope, value)


def collect_reference(d_k: torch.Tensor, d_v: torch.Tensor, nope: int, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`collect` in plain torch."""
    wide = torch.promote_types(d_k.dtype, torch.float32)
    d_k_r = d_k[..., nope:].sum(1, dtype=wide).to(d_k.dtype)
    return torch.cat([d_k[..., :nope], d_v[..., :value]], dim=2), d_k_r


def resized(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [N, h, a] -> [N, h, width], contiguous."""
    from k3rl.kernels.mla import heads_kernels

    return heads_kernels.resized(x, width)


def resized_reference(x: torch.Tensor, width: int) -> torch.Tensor:
    """`resized` in plain torch."""
    return torch.nn.functional.pad(x[..., :width], (0, max(0, width - x.shape[2]))).contiguous()
