"""Rounding to MXFP8, blocks of 32 along the last axis: what an expert's product sees of its input.

The definition is `k3rl.numerics.mx.fake_quantize_mxfp8`; `mxfp8` gives its bits, by one kernel on a GPU.
"""

from __future__ import annotations

import torch

from k3rl.kernels import limits
from k3rl.numerics import mx


def mxfp8(x: torch.Tensor, rule: str = "ceil") -> torch.Tensor:
    """x [..., n] -> its MXFP8 values in x's dtype, without gradient; rule: one of `mx.RULES`.

    Raises QuantizationError where `fake_quantize_mxfp8` does.
    """
    if rule in mx.RULES and limits.MXFP8.takes(x):
        from k3rl.kernels.moe import mxfp8_kernels

        return mxfp8_kernels.mxfp8(x, rule)
    return mxfp8_reference(x, rule)


def mxfp8_reference(x: torch.Tensor, rule: str = "ceil") -> torch.Tensor:
    """`mxfp8` in plain torch."""
    return mx.fake_quantize_mxfp8(x.detach(), rule)
