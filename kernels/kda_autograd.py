"""Host side of the KDA kernels: chunk tables, workspaces, launches, and the autograd function around them."""

from __future__ import annotations

import dataclasses
import functools

import torch

from k3rl.kernels import kda_backward, kda_forward

CHUNK = kda_forward.CHUNK
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Which tokens each chunk covers. `start`, `length` int32 [max chunks] (length 0: not used), `offset` int32 [n + 1]."""

    start: torch.Tensor
    length: torch.Tensor
    offset: torch.Tensor

    @property
    def count(self) -> int:
        return self.start.numel()

    @property
    def sequences(self) -> int:
        return self.offset.numel() - 1


@functools.lru_cache(maxsize=64)
def fixed_chunks(batch: int, tokens: int, device: torch.device, C: int = CHUNK) -> Chunks:
    """Chunks of `batch` sequences of `tokens` each, packed one after the other."""
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
    return packed_chunks(ends, batch * tokens, C)


def packed_chunks(cu_seqlens: torch.Tensor, tokens: int, C: int = CHUNK) -> Chunks:
    """Chunks of packed sequences, computed on the device: no host synchronisation, an upper bound of chunks."""
    ends = cu_seqlens.to(torch.int32)
    sequences = ends.numel() - 1
    most = min(tokens, tokens // C + sequences)
    lengths = ends[1:] - ends[:-1]
    offset = torch.zeros_like(ends)
    torch.cumsum((lengths + C - 1) // C, 0, dtype=torch.int32, out=offset[1:])
    chunk = torch.arange(most, dtype=torch.int32, device=ends.device)
    sequence = torch.searchsorted(offset[1:], chunk, right=True, out_int32=True).clamp_(max=sequences - 1)
    start = ends[sequence] + (chunk - offset[sequence]) * C
    length = (ends[sequence + 1] - start).clamp_(0, C)
    return Chunks(start.int(), length.int(), offset)


@dataclasses.dataclass
class Prepared:
    """What `prepare_kernel` leaves for the scan, one tile a chunk and head; see kda_forward."""

    q_in: torch.Tensor
    k_in: torch.Tensor
    k_out: torch.Tensor
    A: torch.Tensor
    solve: torch.Tensor
    decay: torch.Tensor


def rows(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] as token rows [B * T, H, D] with a contiguous last dimension, copied only when strides demand it."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def prepare(q, k, gate, beta, A_log, dt_bias, lower_bound: float, chunks: Chunks, num_warps: int = 4, C: int = CHUNK, **options) -> Prepared:
    """Launch `prepare_kernel` on rows [tokens, H, K] (beta [tokens, H])."""
    _, H, K = q.shape
    tile = (chunks.count, H, C)
    out = Prepared(
        *(q.new_empty(*tile, K) for _ in range(3)),
        *(q.new_empty(*tile, C) for _ in range(2)),
        torch.empty(chunks.count, H, K, dtype=torch.float32, device=q.device),
    )
    kda_forward.prepare_kernel[(H, chunks.count)](
        q, k, gate, beta, A_log, dt_bias, chunks.start, chunks.length,
        out.q_in, out.k_in, out.k_out, out.A, out.solve, out.decay,
        *q.stride()[:2], *k.stride()[:2], *gate.stride()[:2], *beta.stride()[:2], H, lower_bound, K**-0.5,
        K=K, C=C, BLOCK=BLOCK, num_warps=num_warps, **options,
    )  # fmt: skip
    return out


def scan(p: Prepared, v, o, initial_state, chunks: Chunks, save: bool = False, tile_v: int = 64, num_warps: int = 4, stages: int = 3, **options):
    """Launch `scan_kernel` on v rows [tokens, H, V]; returns the final state and, if saved, states and updates."""
    _, H, V = v.shape
    C, K = p.q_in.shape[-2:]
    final = torch.empty(chunks.sequences, H, K, V, dtype=torch.float32, device=v.device)
    states = v.new_empty(chunks.count, H, V, K) if save else None
    updates = v.new_empty(chunks.count, H, C, V) if save else None
    kda_forward.scan_kernel[(V // tile_v, H, chunks.sequences)](
        p.q_in, p.k_in, p.k_out, p.A, p.solve, p.decay, v, o, initial_state, final, states, updates,
        chunks.offset, chunks.start, chunks.length, *v.stride()[:2], *o.stride()[:2], H,
        HAS_S0=initial_state is not None, SAVE=save, K=K, V=V, BV=tile_v, C=C, STAGES=stages,
        num_warps=num_warps, **options,
    )  # fmt: skip
    return final, states, updates


def reverse_scan(p: Prepared, do, dv, final_gradient, chunks: Chunks, tile_v: int = 64, num_warps: int = 4, stages: int = 2, **options):
    """Launch `reverse_scan_kernel`: fills dv, returns the gradient of the initial state and of every chunk's end state."""
    _, H, V = do.shape
    C, K = p.q_in.shape[-2:]
    initial = torch.empty(chunks.sequences, H, K, V, dtype=torch.float32, device=do.device)
    dstates = do.new_empty(chunks.count, H, V, K)
    kda_backward.reverse_scan_kernel[(V // tile_v, H, chunks.sequences)](
        p.q_in, p.k_in, p.k_out, p.A, p.solve, p.decay, do, dv, final_gradient, initial, dstates,
        chunks.offset, chunks.start, chunks.length, *do.stride()[:2], *dv.stride()[:2], H,
        HAS_DS=final_gradient is not None, K=K, V=V, BV=tile_v, C=C, STAGES=stages, num_warps=num_warps, **options,
    )  # fmt: skip
    return initial, dstates


def gradients(q, k, gate, beta, A_log, dt_bias, lower_bound, do, updates, dv, states, dstates, decay, grads, chunks: Chunks, warps=(4, 4), options=({}, {})):
    """Launch the two gradient kernels: fills grads = (dq, dk, dgate) rows; returns dbeta [tokens, H], dA_log [H], ddt_bias [H K]."""
    tokens, H, K = q.shape
    C, V = updates.shape[-2:]
    dbeta = torch.zeros(tokens, H, dtype=torch.float32, device=q.device)
    tiles = [updates.new_empty(chunks.count, H, C, K) for _ in range(3)]
    tiles += [updates.new_empty(chunks.count, H, C, C) for _ in range(2)]
    fading = torch.empty_like(decay)
    kda_backward.state_gradients_kernel[(H, chunks.count)](
        beta, do, updates, dv, states, dstates, decay, chunks.start, chunks.length, *tiles, dbeta, fading,
        *beta.stride()[:2], *do.stride()[:2], *dv.stride()[:2], H, K=K, V=V, C=C, num_warps=warps[0], **options[0],
    )  # fmt: skip
    dbias, drate = torch.empty_like(decay), torch.empty_like(decay)
    kda_backward.input_gradients_kernel[(H, chunks.count)](
        q, k, gate, A_log, dt_bias, *tiles, fading, chunks.start, chunks.length, *grads, dbias, drate,
        *q.stride()[:2], *k.stride()[:2], *gate.stride()[:2], H, lower_bound, K**-0.5,
        K=K, C=C, BLOCK=BLOCK, num_warps=warps[1], **options[1],
    )  # fmt: skip
    return dbeta, drate.sum((0, 2)), dbias.sum(0).flatten()


class _KDA(torch.autograd.Function):
    """Saves the raw inputs and the forward's tiles; the tiles are freed as soon as the reverse scan has used them."""

    @staticmethod
    def forward(ctx, q, k, v, gate, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens):
        B, T, H, V = v.shape
        chunks = fixed_chunks(B, T, q.device) if cu_seqlens is None else packed_chunks(cu_seqlens, T)
        save = any(ctx.needs_input_grad)
        flat = [rows(x) for x in (q, k, gate, v)]
        p = prepare(*flat[:3], beta.flatten(0, 1), A_log, dt_bias, lower_bound, chunks, maxnreg=168)
        o = v.new_empty(v.shape) if cu_seqlens is None else v.new_zeros(v.shape)
        final, states, updates = scan(p, flat[3], o.flatten(0, 1), initial_state, chunks, save=save)
        if save:
            ctx.save_for_backward(q, k, gate, beta, A_log, dt_bias)
            ctx.tiles, ctx.chunks = [p, states, updates], chunks
            ctx.lower_bound, ctx.packed, ctx.state = lower_bound, cu_seqlens is not None, initial_state
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal):
        if ctx.tiles is None:
            raise RuntimeError("kda: backward ran twice; its tiles are freed on first use (retain_graph is not supported)")
        q, k, gate, beta, A_log, dt_bias = ctx.saved_tensors
        (p, states, updates), ctx.tiles = ctx.tiles, None
        # Rows past cu_seqlens[-1] belong to no chunk: their gradient is 0, not memory as found.
        make = torch.zeros_like if ctx.packed else torch.empty_like
        dq, dk, dgate = (make(x, memory_format=torch.contiguous_format) for x in (q, k, gate))
        do = rows(do)
        dv = make(do, memory_format=torch.contiguous_format)
        dS0, dstates = reverse_scan(p, do, dv, dfinal, ctx.chunks)
        decay, p = p.decay, None
        dbeta, dA_log, dbias = gradients(
            *(rows(x) for x in (q, k, gate)), beta.flatten(0, 1), A_log, dt_bias, ctx.lower_bound, do, updates, dv,
            states, dstates, decay, [x.flatten(0, 1) for x in (dq, dk, dgate)], ctx.chunks,
        )  # fmt: skip
        dS0 = None if ctx.state is None else dS0.to(ctx.state.dtype)
        dbeta = dbeta.to(beta.dtype).view(beta.shape)
        return dq, dk, dv.view(q.shape[:3] + dv.shape[-1:]), dgate, dbeta, dA_log.to(A_log.dtype), dbias.to(dt_bias.dtype), None, dS0, None


def kda(q, k, v, gate, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens):
    """`k3rl.kernels.kda.kda` by the kernels: bf16 rows, K = V = 128, fp32 states."""
    return _KDA.apply(q, k, v, gate, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens)
