"""The routed experts, but for their products (`gemm/`).

decode_routing.py    choice, order and sums of few tokens        train_routing.py    of many, with gradients
gather_rows.py       rows in expert order                        situ.py mxfp8.py    the unit, and rounded inputs
load_counts.py       what quantile balancing counts              add_groups.py       sums of experts' gradients
"""

from k3rl.kernels.moe import decode_routing, gather_rows, load_counts, mxfp8, situ, train_routing
from k3rl.kernels.moe.add_groups import add_groups

__all__ = ["add_groups", "decode_routing", "gather_rows", "load_counts", "mxfp8", "situ", "train_routing"]
