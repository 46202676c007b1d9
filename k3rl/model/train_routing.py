"""The router in training on a GPU: its product, the choice and what the balancer wants of it in two launches.

The choice is that of `k3rl.kernels.moe.decode_routing`, with which an engine samples, so both have the same
scores to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3rl.kernels import limits
from k3rl.kernels.moe import train_routing


class WideProduct(torch.autograd.Function):
    """x [N, H] weight' [H, E] with sums in a wider dtype, on a GPU: the products of wide copies, without the copies.

    Gradients are products in the dtype of x, to which the one that arrives is rounded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        d_x = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        return d_x, torch.mm(grad.t(), x) if ctx.needs_input_grad[1] else None, None


class RoutedChoice(torch.autograd.Function):
    """x [N, H] and the router's weight [E, H] in bf16, bias [E] -> `train_routing.Chosen`, of which the weights have
    gradients.

    Logits are sums in float32; their gradient is rounded to bf16 before it meets x and the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        k: int,
        renormalize: bool,
        scaling: float,
        recorded: Tensor | None,
    ) -> tuple[Tensor, ...]:
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
        chosen = train_routing.choose(logits, bias, k, renormalize, scaling, recorded)
        ctx.save_for_backward(x, weight, logits, chosen.ids)
        ctx.settings = renormalize, scaling
        ctx.mark_non_differentiable(chosen.ids, chosen.scores, chosen.cutoff)
        ctx.set_materialize_grads(False)
        return tuple(chosen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        x, weight, logits, ids = ctx.saved_tensors
        renormalize, scaling = ctx.settings
        d = train_routing.choose_gradient(grad, logits, ids, renormalize, scaling, x.dtype)
        d_weight = torch.mm(d.t(), x) if ctx.needs_input_grad[1] else None
        d_x = torch.mm(d, weight) if ctx.needs_input_grad[0] else None
        return d_x, d_weight, None, None, None, None, None


def takes(x: Tensor, weight: Tensor, k: int) -> bool:
    """Whether the kernels route rows like x [N, H] in training."""
    on_gpu = x.device.type == "cuda" and x.dtype == weight.dtype == torch.bfloat16
    return on_gpu and limits.TRAIN_ROUTING.takes_choice(x, len(weight), k)
