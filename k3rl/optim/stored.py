"""What a checkpoint stores of a master, by kernels where they run: `Project` of the trainers."""

from __future__ import annotations

import torch
from torch import Tensor

from k3rl.kernels.optim import mxfp4
from k3rl.numerics import Stored, project


def stored_values(stored: Stored, master: Tensor, rule: str) -> Tensor:
    """The values of `k3rl.numerics.project` of a master [..., n], in a dtype that holds them.

    stored: the format; rule: `QuantizationConfig.scale_rule`. Raises QuantizationError as `project` does.
    """
    if stored == "bf16" and master.dtype == torch.float32:
        return master.to(torch.bfloat16)
    found = mxfp4(master) if stored == "mxfp4" and rule == "ceil" else None
    return project(master, stored, rule) if found is None else found
