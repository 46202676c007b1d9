"""Norms and residuals over rows.

rms_norm.py    RMSNorm and its gradient       gated_norm.py    the output norm of a KDA head
attn_res.py    one read of attention residuals
"""

from k3rl.kernels.norm import attn_res, rms_norm
from k3rl.kernels.norm.gated_norm import gated_norm

__all__ = ["attn_res", "gated_norm", "rms_norm"]
