"""In which format the official layout stores a parameter (k3.md 1.3)."""

from __future__ import annotations

import re
from typing import Literal

Stored = Literal["mxfp4", "bf16", "fp32"]

_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_FP32 = re.compile(r"(\.A_log|\.dt_bias|_conv1d\.weight|\.o_norm\.weight|\.e_score_correction_bias)$")


def stored_dtype(name: str, weights: str = "mxfp4") -> Stored:
    """The format of the parameter with this official name; the same for every layer and expert.

    weights: "mxfp4", or "none" for a checkpoint whose routed experts are plain bf16.
    """
    if _EXPERT.search(name):
        return "mxfp4" if weights == "mxfp4" else "bf16"
    return "fp32" if _FP32.search(name) else "bf16"
