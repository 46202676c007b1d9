"""Small arrays of the host on their way to the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_STAGE_BYTES = 1 << 20
_ALIGNMENT = 16  # of an array in a stage: any dtype may be read there


class _Stages:
    """Two pieces of page-locked memory, filled in turn: one is written to again once the copies from it have left."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = [torch.empty(_STAGE_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._left: list[torch.cuda.Event | None] = [None, None]  # recorded behind the copies from each
        self._current, self._used = 0, 0

    def send(self, host: Tensor) -> Tensor:
        """A contiguous tensor on the device, in the order of the current stream."""
        if host.nbytes > _STAGE_BYTES:
            return host.pin_memory().to(self._device, non_blocking=True)
        if self._used + host.nbytes > _STAGE_BYTES:
            left = self._left[self._current] = torch.cuda.Event()
            left.record()
            self._current, self._used = 1 - self._current, 0
            if (earlier := self._left[self._current]) is not None:
                earlier.synchronize()
        part = self._memory[self._current][self._used : self._used + host.nbytes]
        self._used += -(-host.nbytes // _ALIGNMENT) * _ALIGNMENT
        staged = part.view(host.dtype).view(host.shape)
        staged.copy_(host)
        return staged.to(self._device, non_blocking=True)


_of_thread = threading.local()
"""The stages of each thread: its copies are on one stream, so that one event says when they have left."""


def upload(
    values: np.ndarray | Tensor | Sequence[int], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """The values on the device, in `dtype` or their own.

    A GPU gets them from page-locked memory behind what it was told before: from any other the host would wait for all
    of that first, and a step has many such arrays. A thread uploads on one stream.
    """
    host = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
    host = host if dtype is None else host.to(dtype)
    if device.type != "cuda":
        return host.to(device)
    stages: dict[str, _Stages] = _of_thread.__dict__
    own = stages.get(place := str(device))
    if own is None:
        own = stages[place] = _Stages(device)
    return own.send(host.contiguous())
