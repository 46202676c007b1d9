"""Skinny matrix products, whose time is what it takes to read the matrix.

skinny.py               few rows with one matrix, whole or as split-K partial sums
grouped_skinny.py       few rows with many matrices        w4_grouped_skinny.py    with matrices held as MXFP4
"""

from k3rl.kernels.gemm import grouped_skinny, skinny, w4_grouped_skinny
from k3rl.kernels.gemm.skinny import PartialSums

__all__ = ["PartialSums", "grouped_skinny", "skinny", "w4_grouped_skinny"]
