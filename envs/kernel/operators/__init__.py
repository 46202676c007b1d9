"""The ladder of `kernel`, easy rungs first; each has its expert in `experts/` and its task file in `sandboxed/`."""

from k3rl.envs.kernel.operators.attention import ATTN_RES, KDA_CHUNK
from k3rl.envs.kernel.operators.base import (
    C_TYPES,
    STORAGE,
    Arrays,
    Axis,
    Dims,
    Operator,
    Tensor,
    Tolerance,
    from_bf16,
    to_bf16,
    value_of,
)
from k3rl.envs.kernel.operators.products import LINEAR, MATMUL, MXFP4_DEQUANT, MXFP4_GROUPED_GEMM
from k3rl.envs.kernel.operators.rows import LOGSUMEXP, RMS_NORM_GATED, SHORT_CONV, SITU_GLU, SOFTMAX

LADDER: tuple[Operator, ...] = (
    SITU_GLU,
    RMS_NORM_GATED,
    LOGSUMEXP,
    SOFTMAX,
    SHORT_CONV,
    MATMUL,
    LINEAR,
    MXFP4_DEQUANT,
    ATTN_RES,
    KDA_CHUNK,
    MXFP4_GROUPED_GEMM,
)
BY_FAMILY = {one.family: one for one in LADDER}

__all__ = [
    "BY_FAMILY",
    "C_TYPES",
    "LADDER",
    "STORAGE",
    "Arrays",
    "Axis",
    "Dims",
    "Operator",
    "Tensor",
    "Tolerance",
    "from_bf16",
    "to_bf16",
    "value_of",
]
