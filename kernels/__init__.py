"""Triton kernels, each beside the plain torch function that defines it.

kda/ mla/ moe/ norm/ gemm/ optim/ sampling/    a folder a part; its `*_kernels` files need Triton and load on first use
dispatch.py     kernel or reference: device, dtypes, toolchain      limits.py    what each kernel takes, in one table
cuda_graph.py   steps of fixed shapes, captured and replayed        ptxas.py     the assembler, and whether it is safe
compile_cache.py  triton_cache.py    compiled kernels, kept, shared by processes, and made ahead
triton_ops.py   what kernels share
Not here: model code, quantizer definitions (`k3rl.numerics`), competitors.
"""

from k3rl.kernels import compile_cache, cuda_graph, dispatch, limits, ptxas
from k3rl.kernels.cuda_graph import CapturedStep, GraphPool, KeyedStep, StagedInputs
from k3rl.kernels.dispatch import HEAD_DIMS, UnsupportedKernel, slow_paths
from k3rl.kernels.ptxas import doctor_checks

__all__ = [
    "HEAD_DIMS",
    "CapturedStep",
    "GraphPool",
    "KeyedStep",
    "StagedInputs",
    "UnsupportedKernel",
    "compile_cache",
    "cuda_graph",
    "dispatch",
    "doctor_checks",
    "limits",
    "ptxas",
    "slow_paths",
]
