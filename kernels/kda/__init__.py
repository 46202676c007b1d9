"""Kimi Delta Attention and the short convolutions before it.

operator.py     `kda`, the public operator, and the torch functions that define it
autograd.py     its chunked forward and backward by the kernels      context.py    sequences that several ranks hold
decode.py       one fused decode step over a pool of states          short_conv.py    convolutions of width 4
sequence_tables.py    what is known of one tensor of sequence ends
"""

from k3rl.kernels.kda import sequence_tables
from k3rl.kernels.kda.decode import PendingRows, flush_pending, kda_decode
from k3rl.kernels.kda.operator import CHUNK, kda, kda_recurrent, kda_reference
from k3rl.kernels.kda.short_conv import short_conv

__all__ = [
    "CHUNK",
    "PendingRows",
    "flush_pending",
    "kda",
    "kda_decode",
    "kda_recurrent",
    "kda_reference",
    "sequence_tables",
    "short_conv",
]
