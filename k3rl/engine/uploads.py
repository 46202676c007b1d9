"""Small arrays of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(
    values: np.ndarray | Tensor | Sequence[int], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """The values on the device, in `dtype` or their own.

    A GPU gets them from page-locked memory behind what it was told before: from any other the host would wait for all
    of that first, and a step has many such arrays.
    """
    host = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
    host = host if dtype is None else host.to(dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
