"""Joined parameters: leaves that share one storage, so that matrices reading the same input are one product.

Official checkpoints name q_proj, k_proj, ... apart, and optimizers want them apart; the machine wants one matrix.
`JoinedParameters` keeps them as views of one tensor: no copy when a step changes them, one product when they are used.
Parameters must be written in place (`copy_`, `add_`); moving the module re-joins them at the next use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from k3rl.kernels import limits
from k3rl.kernels.gemm import PartialSums, skinny
from k3rl.model.low_rank import LowRank


class Weight(nn.Module):
    """A parameter called `weight`, uninitialised, as the official names want it; `adapter` is what LoRA adds to it."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.adapter: LowRank | None = None

    def linear(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] of a matrix [out, in], the adapter's part included."""
        out = nn.functional.linear(x, self.weight) if torch.is_grad_enabled() else skinny.product(x, self.weight)
        return out if self.adapter is None else out + self.adapter.delta(x)

    def summand(self, x: Tensor, base: Tensor | None = None) -> Tensor | PartialSums:
        """base + `linear`, without gradient, for the residual stream: of few rows on a GPU its partial sums.

        base [..., out] may be overwritten.
        """
        if self.adapter is None and limits.SPLIT_K.takes(x, self.weight):
            return skinny.split_k(x, self.weight, base)
        out = skinny.product(x, self.weight, base)
        return out if self.adapter is None else out + self.adapter.delta(x)


class JoinedParameters:
    """Parameters joined along their first axis. `shape` is that of the joined tensor (default [sum of rows, rest])."""

    def __init__(self, parameters: Sequence[nn.Parameter], shape: tuple[int, ...] | None = None) -> None:
        self.parameters = list(parameters)
        self._weights: tuple[Weight, ...] = ()
        rest = self.parameters[0].numel() // self.parameters[0].shape[0]
        self.shape = shape or (sum(p.shape[0] for p in self.parameters), rest)
        self._joined = self.join()

    @classmethod
    def of(cls, *weights: Weight) -> JoinedParameters:
        """The matrices of these modules, whose adapters `linear` heeds."""
        joined = cls([weight.weight for weight in weights])
        joined._weights = weights
        return joined

    def join(self) -> Tensor:
        """Puts the parameters into one storage, end to end; -> the joined tensor."""
        first = self.parameters[0]
        if first.is_meta:  # nothing to copy, and torch's `cat` without data imports its whole compiler
            flat = torch.empty(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        else:
            flat = torch.cat([p.data.reshape(-1) for p in self.parameters])
        start = 0
        for parameter in self.parameters:
            parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        self._joined = flat.view(self.shape)
        return self._joined

    def tensor(self) -> Tensor:
        """The joined tensor, without gradient; the parameters are views of it."""
        first, last = self.parameters[0], self.parameters[-1]
        end = self._joined.data_ptr() + self._joined.numel() * self._joined.element_size()
        if (
            first.data_ptr() != self._joined.data_ptr()
            or last.data_ptr() + last.numel() * last.element_size() != end
            or first.dtype != self._joined.dtype
        ):
            lying = self._lying_joined()
            return self.join() if lying is None else lying
        return self._joined

    def _lying_joined(self) -> Tensor | None:
        """The joined tensor where the parameters were put into one storage, end to end; None where they were not."""
        first = self.parameters[0]
        end, storage = first.data_ptr(), first.untyped_storage()._cdata
        for parameter in self.parameters:
            if parameter.untyped_storage()._cdata != storage or parameter.data_ptr() != end:
                return None
            end += parameter.nbytes
        flat = first.detach().as_strided((sum(p.numel() for p in self.parameters),), (1,), first.storage_offset())
        self._joined = flat.view(self.shape)
        return self._joined

    def forget(self) -> None:
        """Lets go of the joined tensor: the parameters were put elsewhere."""
        self._joined = torch.empty(0, dtype=self._joined.dtype)

    def split(self, joined: Tensor) -> list[Tensor]:
        """A gradient of the joined tensor as gradients of the parameters (views)."""
        pieces = joined.reshape(-1).split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]

    def linear(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of rows]: all the products at once, and what adapters add."""
        if torch.is_grad_enabled():
            out = _JoinedLinear.apply(x, self, *self.parameters)
        else:
            out = skinny.product(x, self.tensor())
        adapters = [weight.adapter for weight in self._weights]
        if all(adapter is None for adapter in adapters):
            return out
        pieces = out.split([parameter.shape[0] for parameter in self.parameters], dim=-1)
        added = [
            torch.zeros_like(piece) if adapter is None else adapter.delta(x)
            for piece, adapter in zip(pieces, adapters, strict=True)
        ]
        return out + torch.cat(added, dim=-1)


def joined_in(module: nn.Module) -> Iterator[JoinedParameters]:
    """Those of a module and of the modules inside it."""
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, JoinedParameters))


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: JoinedParameters, *leaves: Tensor) -> Tensor:
        matrix = parameters.tensor()
        trains = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(x if trains else None, matrix)
        ctx.parameters = parameters
        return nn.functional.linear(x, matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        if x is None:  # frozen
            grad_x = grad @ matrix if ctx.needs_input_grad[0] else None
            return (grad_x, None, *(None for _ in ctx.parameters.parameters))
        rows, read = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        found = ctx.parameters.split(rows.t() @ read)
        return (grad @ matrix if ctx.needs_input_grad[0] else None, None, *found)
