"""Low-rank pairs beside frozen matrices: what LoRA adds to one product, and to the routed experts of a layer.

A product y = W x becomes y + scale * B (A x), where x is what the base product reads: for routed experts the rows after
their rounding to MXFP8, so that an adapter is exactly the low-rank change of the weight beside it.

Letters: r rank, R rows in expert order, E experts, I expert width, Z latent width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from k3rl.model.moe_grouped import grouped_outer, grouped_product


class LowRank(NamedTuple):
    """The pair of one matrix [out, in]: down (A) [r, in], up (B) [out, r], and the factor alpha / r."""

    down: nn.Parameter
    up: nn.Parameter
    scale: float

    def delta(self, x: Tensor) -> Tensor:
        """x [..., in] -> scale * B (A x) [..., out]."""
        return nn.functional.linear(nn.functional.linear(x, self.down), self.up) * self.scale

    def product(self, kind: torch.dtype) -> Tensor:
        """scale * B A [out, in] in `kind`, without gradient."""
        return (self.up.detach().to(kind) @ self.down.detach().to(kind)).mul_(self.scale)


class GroupedLowRank:
    """One pair for each expert of a bank, beside the same matrix of each."""

    def __init__(self, pairs: Sequence[LowRank]) -> None:
        self.pairs = list(pairs)
        self.scale = self.pairs[0].scale
        self.rank = self.pairs[0].down.shape[0]

    @property
    def leaves(self) -> list[nn.Parameter]:
        """A and B of expert 0, A and B of expert 1, ..."""
        return [parameter for pair in self.pairs for parameter in (pair.down, pair.up)]

    def _stacked(self, ends: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """A [E, r, in] and B [E, out, r] of all experts where grouped products take them."""
        if ends is None or self.rank % 8:
            return None
        return torch.stack([pair.down for pair in self.pairs]), torch.stack([pair.up for pair in self.pairs])

    def add(self, out: Tensor, rows: Tensor, counts: list[int], ends: Tensor | None = None) -> Tensor:
        """Adds to out [R, out] in place what rows [R, in] give; returns A rows [R, r]. ends int32 [E]: of rows."""
        both = self._stacked(ends)
        if both is not None and ends is not None:
            low = grouped_product(rows, both[0].mT, ends)
            out.add_(grouped_product(low, both[1].mT, ends), alpha=self.scale)
            return low
        low = torch.empty(rows.shape[0], self.rank, dtype=rows.dtype, device=rows.device)
        for pair, given, result, kept in self._each(counts, rows, out, low):
            torch.mm(given, pair.down.mT, out=kept)
            result.addmm_(kept, pair.up.mT, alpha=self.scale)
        return low

    def add_grid(self, out: Tensor, rows: Tensor) -> None:
        """The same for cells [E, n, in] -> out [E, n, out]."""
        low = torch.bmm(rows, torch.stack([pair.down for pair in self.pairs]).mT)
        out.add_(torch.bmm(low, torch.stack([pair.up for pair in self.pairs]).mT), alpha=self.scale)

    def back(self, d_rows: Tensor, grad: Tensor, counts: list[int], ends: Tensor | None = None) -> Tensor:
        """Adds to d_rows [R, in] in place what grad [R, out] sends through the pairs; returns that of A rows [R, r]."""
        both = self._stacked(ends)
        if both is not None and ends is not None:
            d_low = grouped_product(grad.contiguous(), both[1], ends).mul_(self.scale)
            d_rows.add_(grouped_product(d_low, both[0], ends))
            return d_low
        d_low = torch.empty(grad.shape[0], self.rank, dtype=grad.dtype, device=grad.device)
        for pair, given, result, kept in self._each(counts, grad, d_rows, d_low):
            torch.mm(given, pair.up, out=kept)
            kept.mul_(self.scale)
            result.addmm_(kept, pair.down)
        return d_low

    def gradients(
        self, rows: Tensor, low: Tensor, grad: Tensor, d_low: Tensor, counts: list[int], ends: Tensor | None = None
    ) -> list[Tensor | None]:
        """Gradients of `leaves`; None for those of experts without rows."""
        found: list[Tensor | None] = [None] * (2 * len(self.pairs))
        if ends is not None and self.rank % 8 == 0:
            downs, ups = grouped_outer(d_low, rows, ends), grouped_outer(grad.contiguous(), low, ends).mul_(self.scale)
            for expert, (down, up) in enumerate(zip(downs.unbind(), ups.unbind(), strict=True)):
                if counts[expert]:
                    found[2 * expert : 2 * expert + 2] = [down, up]
            return found
        pieces = zip(*(tensor.split(counts) for tensor in (rows, low, grad, d_low)), strict=True)
        for expert, (given, kept, sent, d_kept) in enumerate(pieces):
            if given.shape[0]:
                found[2 * expert] = d_kept.t() @ given
                found[2 * expert + 1] = (sent.t() @ kept).mul_(self.scale)
        return found

    def _each(self, counts: list[int], *tensors: Tensor) -> Iterator[tuple[LowRank, Tensor, Tensor, Tensor]]:
        for pair, first, second, third in zip(self.pairs, *(tensor.split(counts) for tensor in tensors), strict=True):
            if first.shape[0]:
                yield pair, first, second, third


class BankSide:
    """The pairs of all matrices that read one input: those of w1 and w3 side by side, or that of w2."""

    def __init__(self, parts: Iterable[tuple[slice, GroupedLowRank]]) -> None:
        """parts: (columns of the output, pairs)."""
        self.parts = list(parts)

    @property
    def leaves(self) -> list[nn.Parameter]:
        return [leaf for _, pairs in self.parts for leaf in pairs.leaves]

    def add(self, out: Tensor, rows: Tensor, counts: list[int], ends: Tensor | None = None) -> list[Tensor]:
        return [pairs.add(out[:, columns], rows, counts, ends) for columns, pairs in self.parts]

    def add_grid(self, out: Tensor, rows: Tensor) -> None:
        for columns, pairs in self.parts:
            pairs.add_grid(out[..., columns], rows)

    def back(self, d_rows: Tensor, grad: Tensor, counts: list[int], ends: Tensor | None = None) -> list[Tensor]:
        return [pairs.back(d_rows, grad[:, columns], counts, ends) for columns, pairs in self.parts]

    def gradients(
        self,
        rows: Tensor,
        lows: Sequence[Tensor],
        grad: Tensor,
        d_lows: Sequence[Tensor],
        counts: list[int],
        ends: Tensor | None = None,
    ) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for (columns, pairs), low, d_low in zip(self.parts, lows, d_lows, strict=True):
            found += pairs.gradients(rows, low, grad[:, columns], d_low, counts, ends)
        return found


class BankAdapter(NamedTuple):
    """What is added to the experts of one layer: first to gate and up [R, 2I], second to the result [R, Z]."""

    first: BankSide
    second: BankSide

    @property
    def leaves(self) -> list[nn.Parameter]:
        return [*self.first.leaves, *self.second.leaves]


NO_PAIRS = BankAdapter(BankSide(()), BankSide(()))
