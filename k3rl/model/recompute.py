"""Parts of a layer that keep their inputs only, and run again before their backward.

A part reads the residual stream and gives a sublayer's output, so what it keeps is the running sum; the rows of the
bank are shared by all parts. It runs again on equal inputs by the same operations, so its gradients are the same bits.
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

    def again(*given: Tensor) -> Result:
        apart.give(given)
        return run(apart, watching.pop() if watching else None)

    result: Result = checkpoint(again, *sources, use_reentrant=False, preserve_rng_state=False)
    return result
