"""Parts of a layer that keep their inputs only, and run again before their backward.

A part reads the residual stream and gives a sublayer's output, so what it keeps is the running sum; the rows of the
bank are shared by all parts. It runs again on equal inputs by the same operations, so its gradients are the same bits.

Ranks that meet inside a part meet again in its second run, before they meet in its backward. Every rank goes through
the parts in one order, the last first, so their messages still pair. A second run ends at the last tensor that it has
to keep, and in each part that comes after the last message: the output projections of attention, and the up-projection
or the shared experts after the routed ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3rl.model.attn_res import ResidualStream
from k3rl.types import ForwardObserver

PARTS = ("attention", "mlp")
Result = TypeVar("Result", bound="Tensor | tuple[Tensor, Tensor]")


def recomputed(
    run: Callable[[ResidualStream, ForwardObserver | None], Result],
    stream: ResidualStream,
    observer: ForwardObserver | None,
) -> Result:
    """`run(stream, observer)`, whose saved tensors are made again in the backward; only the first run is observed."""
    if not torch.is_grad_enabled():
        return run(stream, observer)
    apart, sources = stream.apart()
    watching = [observer]

    def part(*given: Tensor) -> Result:
        apart.give(given)
        return run(apart, watching.pop() if watching else None)

    return again(part, *sources)


def again(run: Callable[..., Result], *given: Tensor) -> Result:
    """`run(*given)`, whose saved tensors are made again in the backward."""
    if not torch.is_grad_enabled():
        return run(*given)
    result: Result = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)
    return result
