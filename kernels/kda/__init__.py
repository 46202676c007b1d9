"""Kimi Delta Attention: the public operator, its chunked forward and backward, its decode step, short convolutions."""

from k3rl.kernels.kda.operator import kda

__all__ = ["kda"]
