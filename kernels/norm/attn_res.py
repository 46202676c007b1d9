"""One read of attention residuals: a softmax mix of block sums and the running sum.

    mix = sum_i p_i V_i,  p = softmax_i(r_i V_i . q),  r_i = 1 / sqrt(mean(V_i^2) + eps),  q = w_norm * w_proj

`mix_reference` is the definition; autograd gives its gradients. `mix`, `mix_sum` and `mix_gradient` run the Triton
kernels, for what `limits.ATTN_RES` takes. Source: k3 architecture section 6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3rl.kernels.gemm.skinny import PartialSums


def mix_reference(
    last: torch.Tensor, bank: Sequence[torch.Tensor], norm: torch.Tensor, proj: torch.Tensor, eps: float
) -> torch.Tensor:
    """Running sum [N, H], block sums [N, H] each -> mix [N, H] in the dtype of the running sum."""
    wide = torch.promote_types(last.dtype, torch.float32)
    values = torch.stack([*(row.to(wide) for row in bank), last.to(wide)])
    query = (norm * proj[0]).to(wide)
    r = (values.square().mean(-1) + eps).rsqrt()
    p = ((values * query).sum(-1) * r).softmax(0)
    return (values * p.unsqueeze(-1)).sum(0).to(last.dtype)


def mix(
    last: torch.Tensor, bank: Sequence[torch.Tensor], norm: torch.Tensor, proj: torch.Tensor, eps: float,
    weight: torch.Tensor | None = None, norm_eps: float = 0.0, save: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Running sum [N, H], block sums [N, H] -> mix [N, H] and, with `save`, what `mix_gradient` needs.

    weight [H]: the result is `rms_norm` of the mix with this weight and norm_eps instead.
    """
    from k3rl.kernels.norm import attn_res_kernels

    return attn_res_kernels.mix(last, bank, norm, proj, eps, weight, norm_eps, save)


def mix_sum(
    last: torch.Tensor | None, added: torch.Tensor | PartialSums, bank: Sequence[torch.Tensor], norm: torch.Tensor,
    proj: torch.Tensor, eps: float, weight: torch.Tensor | None = None, norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`mix` of the running sum last + added, rounded to their dtype, and that sum [N, H]; the bits of two calls.

    last: None is a running sum of nothing yet.
    """
    from k3rl.kernels.norm import attn_res_kernels

    base, sums = (added.base, added.sums) if isinstance(added, PartialSums) else (added, None)
    like = bank[0].new_empty(bank[0].shape, dtype=added.dtype) if last is None else last
    out, running = attn_res_kernels.mix(
        like, bank, norm, proj, eps, weight, norm_eps, False, base, sums, fresh=last is None
    )
    assert running is not None
    return out, running


def mix_gradient(
    grad: torch.Tensor, last: torch.Tensor, bank: Sequence[torch.Tensor], norm: torch.Tensor, proj: torch.Tensor,
    state: torch.Tensor, added: torch.Tensor | None = None, added_bank: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """Gradients of w_norm [H], w_proj [1, H], the running sum (its dtype) and the block sums (float32).

    added, added_bank: gradients of the running sum and the block sums from elsewhere, in the same dtypes, that these
    start from.
    """
    from k3rl.kernels.norm import attn_res_kernels

    return attn_res_kernels.mix_gradient(grad, last, bank, norm, proj, state, added, added_bank)
