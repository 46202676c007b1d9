"""How an engine's step is computed.

`prefill.py` computes prompts and `decoding.py` the next token of running rows, by captured steps of fixed shapes
(`prefill_graph.py`, `decode_graph.py`, both over `shape_buckets.py`), by an ordinary forward, or by `exact.py`, every
row by itself. What a step computes is decided in `engine/scheduler.py`; tokens are drawn in `engine/sampling/`.
"""

from k3rl.engine.compute.decode_graph import CapturedDecode, padded_batch
from k3rl.engine.compute.prefill_graph import CapturedPrefill

__all__ = ["CapturedDecode", "CapturedPrefill", "padded_batch"]
