"""Triton kernels, each beside the plain torch function that defines it.

`kda` (Kimi Delta Attention, training and prefill), `kda_decode` (one fused decode step), `short_conv`, `gated_norm`,
`muon` (the optimizer's element-wise passes), `add_groups` (sums of experts' gradients).
`dispatch` picks kernel or reference; `ptxas` says which assembler is in use and whether it is safe on Hopper.
Importing this package needs no Triton: kernel files (`*_kernels`, `kda_forward`, `kda_backward`) load on first use.
No model code, no quantizer definitions (those are in k3rl.numerics), no competitors.
"""

from __future__ import annotations

from k3rl.kernels.ptxas import doctor_checks

__all__ = ["doctor_checks"]
