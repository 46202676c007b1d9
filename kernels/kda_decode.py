"""One decode step of a KDA layer over an indexed pool of slots: convolution, norm, gate, recurrence, gated RMSNorm.

`kda_decode` is one launch on a GPU that the kernel supports, `kda_decode_reference` its definition in plain torch from
the same pieces as training (`short_conv`, `kda`, `gated_norm`). Both update the pool in place. The state is read and
written once per token; nothing is read on the host, so a step can be captured in a CUDA graph and replayed with other
indices. Source: k3 architecture sections 2.1 and 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3rl.kernels import dispatch
from k3rl.kernels.gated_norm import gated_norm_reference
from k3rl.kernels.kda import kda_recurrent
from k3rl.kernels.short_conv import short_conv_reference


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weights: Sequence[torch.Tensor],
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    read_index: torch.Tensor,
    write_index: torch.Tensor,
    *,
    gate_lower_bound: float = -5.0,
    norm_eps: float = 1e-5,
) -> torch.Tensor:
    """One token per row, from raw projections to the gated, normed output [B, H, V] in v's dtype.

    q, k, gate [B, H, K], v, out_gate [B, H, V], beta [B, H]: projections, rows may be strided slices of a wider matrix.
    conv_weights: three of [H * D, 4] for q, k, v. A_log [H], dt_bias [H * K], norm_weight [V].
    conv_pool [slots, 3, 3 * H * D] (raw inputs, q | k | v, oldest first), state_pool [slots, H, K, V] float32 or wider.
    read_index, write_index int [B]: the slots a row reads and writes; they may differ (a fork), two rows may read one
    slot, but no row may write a slot that another reads or writes. A row whose read_index is -1 is padding: output 0,
    nothing written; write_index -1 computes without writing. K = V = D. Raises ValueError on shapes that do not fit.
    """
    _check(q, k, v, gate, beta, out_gate, conv_weights, conv_pool, state_pool, read_index, write_index)
    D = q.shape[-1]
    args = (q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool)
    if dispatch.use_kernel("kda_decode", q, k, v, head_dims=(D, v.shape[-1]), float32_rows=False):
        from k3rl.kernels import kda_decode_kernels

        return kda_decode_kernels.kda_decode(*args, read_index, write_index, gate_lower_bound, norm_eps)
    return kda_decode_reference(*args, read_index, write_index, gate_lower_bound=gate_lower_bound, norm_eps=norm_eps)


def _check(q, k, v, gate, beta, out_gate, conv_weights, conv_pool, state_pool, read_index, write_index) -> None:
    B, H, D = q.shape
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...]]]
    wanted = {"k": (k, (B, H, D)), "v": (v, (B, H, D)), "gate": (gate, (B, H, D)), "out_gate": (out_gate, (B, H, D))}
    wanted |= {"beta": (beta, (B, H)), "read_index": (read_index, (B,)), "write_index": (write_index, (B,))}
    wanted["conv_pool"] = (conv_pool, (conv_pool.shape[0], 3, 3 * H * D))
    wanted["state_pool"] = (state_pool, (conv_pool.shape[0], H, D, D))
    wanted |= {f"conv_weights[{s}]": (w, (H * D, 4)) for s, w in enumerate(conv_weights)}
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"kda_decode: {name} must have shape {shape} to fit q {tuple(q.shape)}, got {tuple(tensor.shape)}"
            )
    if len(conv_weights) != 3:
        raise ValueError(f"kda_decode: conv_weights must be three tensors (q, k, v), got {len(conv_weights)}")


@torch.no_grad()
def kda_decode_reference(
    q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_index, write_index, *, gate_lower_bound=-5.0, norm_eps=1e-5,
):  # fmt: skip
    """`kda_decode` in plain torch."""
    B, H, D = q.shape
    read, write = read_index.long(), write_index.long()
    live = read >= 0
    at = read.clamp(min=0)
    streams = [x.reshape(B, 1, H * D) for x in (q, k, v)]
    convolved, history = short_conv_reference(streams, conv_weights, history=conv_pool[at])
    u = [x.view(B, 1, H, D) for x in convolved]
    o, S = kda_recurrent(*u, gate[:, None], beta[:, None], A_log, dt_bias, gate_lower_bound, state_pool[at])
    y = gated_norm_reference(o[:, 0].to(v.dtype), out_gate, norm_weight, norm_eps)
    keep = live & (write >= 0)
    conv_pool[write[keep]] = history[keep]
    state_pool[write[keep]] = S[keep].to(state_pool.dtype)
    return torch.where(live[:, None, None], y, 0)
