"""Gradients of a bank of experts that outlive a step: one tensor for each joined matrix, written in place.

A backward adds to whole matrices instead of handing autograd a gradient for each expert, of which a model has
thousands. The `.grad` of a leaf is a view. Experts without rows since `clear` have none, and zeros here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from k3rl.kernels.moe import add_groups

EXPERT_LEAVES = 3  # w1, w3, w2


class BankGradients:
    """gate_up [E, 2I, Z] and down [E, Z, I], the sums of all backwards since `clear`, at fixed addresses.

    leaves: w1, w3, w2 of each expert in turn. rows int32 [E], on the device: rows of each expert in the backwards that
    left the leaves' `.grad` to `attach`, as those whose host does not know the counts do.
    """

    def __init__(self, leaves: Sequence[nn.Parameter], shapes: Sequence[torch.Size], rows: Tensor) -> None:
        device, dtype = leaves[0].device, leaves[0].grad_dtype or leaves[0].dtype
        self.gate_up, self.down = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self.rows = rows
        self.leaves = list(leaves)
        self.done: torch.cuda.Event | None = None  # recorded behind each `add`, in a captured graph too
        self._views: list[Tensor] = []
        self._added: set[int] = set()  # experts that are known on the host to have rows since `clear`
        self._before: set[int] = set()  # those at the last `attach`
        self._as_before = False  # whether the leaves are those of `_before` for certain
        for both, second in zip(self.gate_up.unbind(), self.down.unbind(), strict=True):
            self._views += [*both.chunk(2), second]

    def places(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each leaf and where its gradient adds up."""
        return zip(self.leaves, self._views, strict=True)

    def clear(self) -> None:
        """Zeros everywhere. Leaves whose `.grad` is a view keep it, zero, until `attach` says who has rows."""
        clear_gradients([self])

    def _forget(self, leaves: bool) -> None:
        for leaf, view in zip(self.leaves, self._views, strict=True) if leaves else ():
            grad = leaf.grad  # to set one costs several times as much as to look at it, and there are thousands
            if grad is not None and grad is not view:
                leaf.grad = None
        self._added.clear()
        self._as_before = False

    def add(self, gate_up: Tensor, down: Tensor, ends: Tensor) -> None:
        """Adds gradients whose values for experts without rows mean nothing; ends int32 [E] of each expert's rows.

        The host waits for nothing and sets no `.grad`, so it can be captured in a CUDA graph.
        """
        add_groups(self.gate_up, gate_up.contiguous(), ends, self.rows)
        add_groups(self.down, down.contiguous(), ends)
        if self.done is not None:
            self.done.record()

    def add_expert(self, number: int, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> None:
        """Adds a' b of the pairs (a, b) to one expert, and gives its leaves their `.grad`."""
        for total, (left, right) in ((self.gate_up[number], gate_up), (self.down[number], down)):
            if (
                number in self._added and self.leaves[EXPERT_LEAVES * number].grad is not None
            ):  # or somebody has forgotten it
                total += left.t() @ right
            elif total.dtype == left.dtype:
                torch.mm(left.t(), right, out=total)
            else:
                total.copy_(left.t() @ right)
        self._added.add(number)
        self._attach(number, True)

    def tell(self) -> None:
        """Experts that only the host knows to have rows have them in `rows` too, for ranks that sum these gradients."""
        if self._added:
            self.rows[torch.tensor(sorted(self._added), device=self.rows.device)] += 1

    def attach(self, rows: Sequence[int]) -> None:
        """`.grad` for the leaves of experts that have rows, none for others; `rows` is what the tensor held."""
        self._added.update(number for number, count in enumerate(rows) if count)
        looked = self._added ^ self._before if self._as_before else range(len(rows))
        for number in looked:
            self._attach(number, number in self._added)
        self._before, self._as_before = set(self._added), False

    def attach_as_before(self) -> None:
        """Leaves as at the last `attach`, so that the next one has to look only at those that differ from it.

        Nobody else may set their `.grad` in between.
        """
        for number in range(len(self.rows)):
            self._attach(number, number in self._before)
        self._as_before = True

    def _attach(self, number: int, there: bool) -> None:
        for place in range(EXPERT_LEAVES * number, EXPERT_LEAVES * (number + 1)):
            leaf, view = self.leaves[place], self._views[place]
            if leaf.grad is not (view if there else None):
                leaf.grad = view if there else None


def clear_gradients(banks: Sequence[BankGradients], *, leaves: bool = True) -> None:
    """`BankGradients.clear` of many; the device has its work before the host looks at the leaves.

    leaves False: what somebody else has put into their `.grad` stays there until `attach_as_before` or `attach`, which
    look at all of them.
    """
    if banks:
        torch._foreach_zero_([tensor for bank in banks for tensor in (bank.gate_up, bank.down)])
        torch._foreach_zero_([bank.rows for bank in banks])
    for bank in banks:
        bank._forget(leaves)
