"""One decode step of a KDA layer over an indexed pool of slots: convolution, norm, gate, recurrence, gated RMSNorm.

`kda_decode` is one launch on a GPU that the kernel supports, `kda_decode_reference` its definition in plain torch from
the same pieces as training (`short_conv`, `kda`, `gated_norm`). Both update the pool in place; nothing is read on the
host, so a step can be captured in a CUDA graph and replayed with other indices.

The step has two forms with one result. Without `pending` the state is read and written every token. With `pending`
(`PendingRows`) the write may be deferred: the pool keeps the state of the last chunk boundary, the rows since then wait
beside it, and every 16th token brings the state up to date. The kernels defer where that is faster (many rows x heads),
else they write each token and take rows that wait in first; the reference always defers. A waiting row's key is divided
by its decay, so with gates without a bound a state is also written when a channel has decayed below 2^-90 since.
`flush_pending` brings the states up to date at once, for a reader of the pool.
Source: k3 architecture sections 2.1 and 2.3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from k3rl.kernels import limits
from k3rl.kernels.kda.operator import CHUNK, check_bound, kda_recurrent, l2_normalize, log_decay
from k3rl.kernels.kda.short_conv import short_conv_reference
from k3rl.kernels.norm.gated_norm import gated_norm_reference

# log2 of the decay since a stored state at which it is written, where gates have no bound. Past 2^-126 float32 takes
# what a waiting row still gives for 0; it is then less than 2^-36 of what the row gave.
LEAST_PENDING = -90.0


@dataclasses.dataclass(frozen=True)
class PendingRows:
    """The tokens of each slot and head that its stored state has not taken in yet, at most 15 of a chunk of 16.

    keys [slots, H, 16, D]: normalised key of row i times exp(-G_i), G the running sum of the log decay since the stored
    state; updates [slots, H, 16, D]: beta (v - S^T k) of row i; decay [slots, H, D]: G of the last row in units of
    log 2; span int32 [slots, H, 2]: first and one past the last row. Rows outside span, and decay where span is empty,
    are never read. The dtype is the state pool's.
    """

    keys: torch.Tensor
    updates: torch.Tensor
    decay: torch.Tensor
    span: torch.Tensor

    @classmethod
    def empty(cls, state_pool: torch.Tensor) -> PendingRows:
        """For state_pool [slots, H, D, D], with no row in any slot."""
        slots, H, D, _ = state_pool.shape
        rows = [state_pool.new_empty(slots, H, CHUNK, D) for _ in range(2)]
        span = torch.zeros(slots, H, 2, dtype=torch.int32, device=state_pool.device)
        return cls(*rows, state_pool.new_empty(slots, H, D), span)

    def begin(self, slots: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """The states of slots [n] were just stored (prefill, reuse of a slot): forget the rows that they had.

        positions [n]: tokens that each state has seen. The first write then falls on the next multiple of 16 of them,
        so that chunk boundaries are those of training; without positions it comes after 16 tokens.
        """
        phase = torch.zeros_like(slots) if positions is None else positions % CHUNK
        self.span[slots] = phase.to(torch.int32)[:, None, None].expand(-1, *self.span.shape[1:])


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
    gate_lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    pending: PendingRows | None = None,
) -> torch.Tensor:
    """One token per row, from raw projections to the gated, normed output [B, H, V] in v's dtype.

    q, k, gate [B, H, K], v, out_gate [B, H, V], beta [B, H]: projections, rows may be strided slices of a wider matrix.
    conv_weights: three of [H * D, 4] for q, k, v. A_log [H], dt_bias [H * K], norm_weight [V].
    conv_pool [slots, 3, 3 * H * D] (raw inputs, q | k | v, oldest first), state_pool [slots, H, K, V] float32 or wider.
    read_index, write_index int [B]: the slots a row reads and writes; they may differ (a fork), two rows may read one
    slot, but no row may write a slot that another reads or writes. A row whose read_index is -1 is padding: output 0,
    nothing written; write_index -1 computes without writing. K = V = D.
    pending: writes of the state may be deferred; rows may be at different phases of their chunks. A slot that gets
    another sequence needs `pending.begin`. Raises ValueError on shapes that do not fit.
    """
    _check(q, k, v, gate, beta, out_gate, conv_weights, conv_pool, state_pool, read_index, write_index, pending)
    check_bound("kda_decode", gate_lower_bound)
    args = (q, k, v, gate, beta, out_gate, conv_weights, A_log, dt_bias, norm_weight, conv_pool, state_pool)
    if limits.KDA.takes_step(q, k, v):
        from k3rl.kernels.kda import decode_kernels

        return decode_kernels.kda_decode(*args, read_index, write_index, gate_lower_bound, norm_eps, pending)
    return kda_decode_reference(
        *args, read_index, write_index, gate_lower_bound=gate_lower_bound, norm_eps=norm_eps, pending=pending
    )


def flush_pending(state_pool: torch.Tensor, pending: PendingRows, index: torch.Tensor) -> None:
    """Bring the states of the slots in index int [n] (distinct; -1 is padding) up to date and forget their rows.

    Afterwards state_pool [slots, H, D, D] holds what the form without `pending` would; the phase in the chunk stays.
    """
    if limits.KDA.takes_states(state_pool):
        from k3rl.kernels.kda import decode_kernels

        return decode_kernels.flush(state_pool, pending, index)
    return flush_reference(state_pool, pending, index)


def _check(q, k, v, gate, beta, out_gate, conv_weights, conv_pool, state_pool, read_index, write_index, pending):
    B, H, D = q.shape
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...]]]
    wanted = {"k": (k, (B, H, D)), "v": (v, (B, H, D)), "gate": (gate, (B, H, D)), "out_gate": (out_gate, (B, H, D))}
    wanted |= {"beta": (beta, (B, H)), "read_index": (read_index, (B,)), "write_index": (write_index, (B,))}
    wanted["conv_pool"] = (conv_pool, (conv_pool.shape[0], 3, 3 * H * D))
    wanted["state_pool"] = (state_pool, (conv_pool.shape[0], H, D, D))
    if pending is not None:
        each = (state_pool.shape[0], H)
        wanted["pending.keys"] = (pending.keys, (*each, CHUNK, D))
        wanted["pending.updates"] = (pending.updates, (*each, CHUNK, D))
        wanted["pending.decay"] = (pending.decay, (*each, D))
        wanted["pending.span"] = (pending.span, (*each, 2))
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
    read_index, write_index, *, gate_lower_bound=-5.0, norm_eps=1e-5, pending=None,
):  # fmt: skip
    """`kda_decode` in plain torch."""
    B, H, D = q.shape
    read, write = read_index.long(), write_index.long()
    live = read >= 0
    at = read.clamp(min=0)
    keep = live & (write >= 0)
    streams = [x.reshape(B, 1, H * D) for x in (q, k, v)]
    convolved, history = short_conv_reference(streams, conv_weights, history=conv_pool[at])
    u = [x.view(B, 1, H, D) for x in convolved]
    if pending is None:
        o, S = kda_recurrent(*u, gate[:, None], beta[:, None], A_log, dt_bias, gate_lower_bound, state_pool[at])
        state_pool[write[keep]] = S[keep].to(state_pool.dtype)
        o = o[:, 0]
    else:
        decay = log_decay(gate, A_log, dt_bias, gate_lower_bound)
        o = _deferred_step(*(x[:, 0] for x in u), decay, beta, state_pool, pending, at, write, keep)
    y = gated_norm_reference(o.to(v.dtype), out_gate, norm_weight, norm_eps)
    conv_pool[write[keep]] = history[keep]
    return torch.where(live[:, None, None], y, 0)


def _deferred_step(q, k, v, log_decay_of_row, beta, state_pool, pending, read, write, keep):
    """o [B, H, D] of one token; the stored state changes only where a chunk ends (or goes to another slot)."""
    wide = state_pool.dtype
    S, keys, updates = state_pool[read], pending.keys[read], pending.updates[read]
    first, count = pending.span[read].long().unbind(-1)  # [B, H]
    row = torch.arange(CHUNK, device=S.device)
    waits = ((row >= first[..., None]) & (row < count[..., None]))[..., None]
    keys, updates = torch.where(waits, keys, 0), torch.where(waits, updates, 0)
    G = torch.where((first < count)[..., None], pending.decay[read], 0) + log_decay_of_row.to(wide) / math.log(2)
    q, k = l2_normalize(q.to(wide)) * q.shape[-1] ** -0.5, l2_normalize(k.to(wide))
    k_since, q_since = k * torch.exp2(G), q * torch.exp2(G)

    def along(x):
        return torch.einsum("bhkv,bhk->bhv", S, x) + torch.einsum("bhik,bhk,bhiv->bhv", keys, x, updates)

    u = torch.sigmoid(beta.to(wide))[..., None] * (v.to(wide) - along(k_since))
    o = along(q_since) + (q * k).sum(-1, keepdim=True) * u
    full = (count == CHUNK - 1) | (G < LEAST_PENDING).any(-1)
    taken_in = torch.exp2(G)[..., None] * (S + torch.einsum("bhik,bhiv->bhkv", keys, updates))
    S = torch.where(full[..., None, None], taken_in + k[..., None] * u[:, :, None], S)
    new = (row == count[..., None])[..., None]
    keys = torch.where(new, (k * torch.exp2(-G))[:, :, None], keys)
    updates = torch.where(new, u[:, :, None], updates)
    after = torch.stack([(count + 1) % CHUNK] * 2, -1)
    span = torch.where(full[..., None], after, torch.stack([first, count + 1], -1))
    for pool, value in (
        (state_pool, S), (pending.keys, keys), (pending.updates, updates), (pending.decay, G), (pending.span, span),
    ):  # fmt: skip
        pool[write[keep]] = value[keep].to(pool.dtype)
    return o


@torch.no_grad()
def flush_reference(state_pool, pending, index) -> None:
    """`flush_pending` in plain torch."""
    at = index[index >= 0].long()
    first, count = pending.span[at].long().unbind(-1)
    row = torch.arange(CHUNK, device=at.device)
    waits = ((row >= first[..., None]) & (row < count[..., None]))[..., None]
    keys, updates = (torch.where(waits, x[at], 0) for x in (pending.keys, pending.updates))
    G = torch.where((first < count)[..., None], pending.decay[at], 0)
    state_pool[at] = torch.exp2(G)[..., None] * (state_pool[at] + torch.einsum("bhik,bhiv->bhkv", keys, updates))
    pending.span[at] = torch.stack([count, count], -1).to(torch.int32)
