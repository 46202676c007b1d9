"""Host side of the KDA kernels: chunk tables, workspaces, launches, and the autograd function around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import triton

from k3rl.kernels.kda import backward_kernels, forward_kernels, sequence_tables
from k3rl.types import ContextCommunicator

CHUNK = forward_kernels.CHUNK
TILE_V = 64
MULTIPROCESSORS = 132
# A scan of few programs is cut into segments until this many run side by side, none shorter than SEGMENT_LEAST chunks.
SEGMENT_PROGRAMS = 256
SEGMENT_LEAST = 32
# Gradient kernels: what is read late is brought to the L2 cache first, what is read early is read together.
EARLY = True
EARLY_PREPARE = True


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The tokens of each chunk: `start`, `length` int32 [max chunks] (length 0: not used), `offset` int32 [n + 1].

    Where asked for: `sequence` of the chunk (-1 - sequence for the first chunk of one), `rest` tokens of it after the
    chunk, int32 [max chunks].
    """

    start: torch.Tensor
    length: torch.Tensor
    offset: torch.Tensor
    sequence: torch.Tensor | None = None
    rest: torch.Tensor | None = None
    none_empty: bool = False  # known on the host: every sequence has tokens
    lasting: bool = False  # lives as long as what was made of it, in a capture too

    _segments: dict = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def count(self) -> int:
        return self.start.numel()

    def segments(self, size: int) -> tuple[Chunks, torch.Tensor, torch.Tensor]:
        """Runs of `size` chunks of one sequence, as chunks of chunks (with `sequence` and `rest`); their bounds
        [count + 1]; the last of each."""
        if size in self._segments:
            return self._segments[size]
        segments = packed_chunks(self.offset, self.count, size, where=True)
        total = self.offset[-1:]
        bounds = torch.cat([torch.where(segments.length > 0, segments.start, total), total])
        found = segments, bounds, (segments.offset[1:] - 1).clamp(min=0).long()
        if self.lasting or not capturing(total.device):
            self._segments[size] = found
        return found

    def wanted_columns(self, size: int, K: int, V: int, from_state: bool) -> torch.Tensor:
        """How many of the V columns of a segment's end state and the K of its transition matter to the start states,
        int32 [segments]: none of a sequence's last, and no transition of its first unless there is an initial state."""
        key = (size, K, V, from_state)
        if key in self._segments:
            return self._segments[key]
        segments, _, _ = self.segments(size)
        assert segments.sequence is not None
        assert segments.rest is not None
        wanted = torch.full_like(segments.rest, V + K)
        if not from_state:
            wanted.masked_fill_(segments.sequence < 0, V)
        wanted.masked_fill_(segments.rest == 0, 0)
        if self.lasting or not capturing(wanted.device):
            self._segments[key] = wanted
        return wanted

    @property
    def sequences(self) -> int:
        return self.offset.numel() - 1


class TableCache:
    """Tables that depend on shapes alone, made once: at most `most`, and those that a CUDA graph reads for good.

    A tensor made during a capture belongs to the graph and is filled only by its replay, so it is never kept; one made
    before is used by the capture, and must then outlive the graph.
    """

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self.tables: dict[tuple, object] = {}
        self.in_graphs: dict[tuple, object] = {}

    def get(self, key: tuple, make: Callable[[], Any], capturing: bool) -> Any:
        """What `make` returned when it was first called for this key."""
        found = self.in_graphs.get(key, self.tables.get(key))
        if capturing:
            if found is None:
                return make()
            self.in_graphs[key] = found
            return found
        if found is None:
            found = self.tables[key] = make()
            while len(self.tables) > self.most:
                del self.tables[next(iter(self.tables))]
        return found


_fixed = TableCache()


def fixed_chunks(batch: int, tokens: int, device: torch.device, C: int = CHUNK) -> Chunks:
    """Chunks of `batch` sequences of `tokens` each, packed one after the other."""

    def make() -> Chunks:
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
        return dataclasses.replace(packed_chunks(ends, batch * tokens, C), none_empty=tokens > 0)

    return _fixed.get((batch, tokens, device, C), make, capturing(device))


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def packed_chunks(cu_seqlens: torch.Tensor, tokens: int, C: int = CHUNK, where: bool = False) -> Chunks:
    """Chunks of packed sequences, computed on the device: no host synchronisation, an upper bound of chunks.

    where: also fill `sequence` and `rest`. Made once for ends that are marked (`packed_ends`).
    """
    key = ("chunks", tokens, C, where)
    return sequence_tables.table(cu_seqlens, key, lambda: _packed_chunks(cu_seqlens, tokens, C, where))


def _packed_chunks(cu_seqlens: torch.Tensor, tokens: int, C: int, where: bool) -> Chunks:
    n = cu_seqlens.numel() - 1
    most = min(tokens, tokens // C + n)
    start, length, *places = (
        torch.empty(most, dtype=torch.int32, device=cu_seqlens.device) for _ in range(4 if where else 2)
    )
    offset = torch.empty(n + 1, dtype=torch.int32, device=cu_seqlens.device)
    size = max(16, triton.next_power_of_2(n))
    block = max(1, min(128, (1 << 15) // size))
    grid = (max(1, triton.cdiv(most, block)),)
    forward_kernels.chunk_table_kernel[grid](
        cu_seqlens, start, length, offset, *(places or (start, start)), n, most, C, WHERE=where, N=size, CHUNKS=block
    )
    return dataclasses.replace(
        Chunks(start, length, offset, *places), lasting=hasattr(cu_seqlens, sequence_tables.MARK)
    )


def zero_tail(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """x [1, T, ...] contiguous, with the rows past cu_seqlens[-1] set to 0: they belong to no sequence."""
    if cu_seqlens is not None and not sequence_tables.covers(cu_seqlens) and x.numel():
        tokens = x.shape[1]
        row = x[0, 0].numel()
        width = min(1024, triton.next_power_of_2(row))
        grid = (triton.cdiv(tokens, 32), triton.cdiv(row, width))
        forward_kernels.zero_tail_kernel[grid](x, cu_seqlens, cu_seqlens.numel() - 1, tokens, row, ROWS=32, WIDTH=width)
    return x


@dataclasses.dataclass
class Prepared:
    """What `prepare_kernel` leaves for the scan, one tile a chunk and head; see `forward_kernels`."""

    q_in: torch.Tensor
    k_in: torch.Tensor
    k_out: torch.Tensor
    A: torch.Tensor
    solve: torch.Tensor
    decay: torch.Tensor
    norms: torch.Tensor | None


def rows(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] as token rows [B * T, H, D] with a contiguous last dimension, copied only when strides demand it."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def block_rows(lower_bound: float | None) -> int:
    """Rows that the kernels anchor at one place (bounded gates), or halve down to single rows (no bound)."""
    return 8 if lower_bound is None else 16


def prepare(
    q,
    k,
    gate,
    beta,
    A_log,
    dt_bias,
    lower_bound: float | None,
    chunks: Chunks,
    save: bool = False,
    num_warps: int = 4,
    maxnreg: int = 168,
    C: int = CHUNK,
) -> Prepared:
    """Launch `prepare_kernel` on rows [tokens, H, K] (beta [tokens, H])."""
    _, H, K = q.shape
    tile = (chunks.count, H, C)
    out = Prepared(
        *(q.new_empty(*tile, K) for _ in range(3)),
        *(q.new_empty(*tile, C) for _ in range(2)),
        torch.empty(chunks.count, H, K, dtype=torch.float32, device=q.device),
        torch.empty(chunks.count, H, 2, C, dtype=torch.float32, device=q.device) if save else None,
    )
    forward_kernels.prepare_kernel[(H, chunks.count)](
        q, k, gate, beta, A_log, dt_bias, chunks.start, chunks.length,
        out.q_in, out.k_in, out.k_out, out.A, out.solve, out.decay, out.norms,
        *q.stride()[:2], *k.stride()[:2], *gate.stride()[:2], *beta.stride()[:2], H, lower_bound, K**-0.5,
        SAVE=save, K=K, C=C, BLOCK=block_rows(lower_bound), EARLY=EARLY_PREPARE, num_warps=num_warps, maxnreg=maxnreg,
    )  # fmt: skip
    return out


def scan(
    p: Prepared, v, o, initial_state, chunks: Chunks, save: bool = False, segment: int | None = None, stages: int = 3,
):  # fmt: skip
    """Run the scan on v rows [tokens, H, V], filling o; returns the final state and, if saved, states and updates.

    segment: chunks per segment; None picks it so that few heads still fill the GPU, 0 keeps each sequence whole.
    """
    _, H, V = v.shape
    C, K = p.q_in.shape[-2:]
    states = v.new_empty(chunks.count, H, V, K) if save else None
    updates = v.new_empty(chunks.count, H, C, V) if save else None
    if segment is None:
        segment = segment_chunks(H * chunks.sequences * V // TILE_V, chunks.count // chunks.sequences)
    whole = (chunks.offset, chunks.sequences, initial_state)
    if segment == 0:
        return _scan(p, v, o, whole, chunks, (states, updates), stages), states, updates
    final = segmented_scan(p, v, o, initial_state, chunks, (states, updates), segment, stages)
    return final, states, updates


def segmented_scan(p: Prepared, v, o, initial_state, chunks: Chunks, saved, segment: int, stages: int = 3):
    """The scan with every sequence cut into segments that run side by side; exact, at about twice the products.

    Each segment's end state from zero and its transition matrix come first, then the segments' start states by a short
    serial merge, then the scan proper. Returns the final state.
    """
    _, H, V = v.shape
    K = p.q_in.shape[-1]
    segments, bounds, last = chunks.segments(segment)
    wanted = chunks.wanted_columns(segment, K, V, initial_state is not None)
    ends = _scan(p, v, o, (bounds, segments.count, None), chunks, (None, None), stages, transition=True, wanted=wanted)
    starts = torch.empty(segments.count, H, K, V, dtype=torch.float32, device=v.device)
    forward_kernels.merge_kernel[(V // TILE_V, H, chunks.sequences)](
        ends, initial_state, starts, segments.offset, H,
        HAS_S0=initial_state is not None, K=K, V=V, BV=TILE_V, num_warps=8,
    )  # fmt: skip
    ends = _scan(p, v, o, (bounds, segments.count, starts), chunks, saved, stages)
    final = ends.index_select(0, last)
    if chunks.none_empty:
        return final
    empty = (segments.offset[1:] == segments.offset[:-1]).view(-1, 1, 1, 1)
    return torch.where(empty, 0.0 if initial_state is None else initial_state, final)


def segment_chunks(programs: int, chunks: int) -> int:
    """Chunks per segment for a scan that has this many programs and chunks per sequence; 0: do not cut."""
    if programs > MULTIPROCESSORS // 2:
        return 0
    segment = max(SEGMENT_LEAST, -(-chunks // (SEGMENT_PROGRAMS // programs)))
    return segment if 2 * segment <= chunks else 0


def _scan(
    p: Prepared, v, o, pieces, chunks: Chunks, saved, stages: int, transition: bool = False, columns=None, wanted=None
):  # fmt: skip
    """Launch `scan_kernel` over pieces = (chunk bounds [n + 1], n, start states); returns the end states.

    transition: those from zero, and behind them the products of the transitions, in memory [n, H] (K V numbers, then
    K K), and no outputs; columns: how many of the V + K are wanted, and `wanted` [n] how many of a piece.
    """
    bounds, count, starts = pieces
    _, H, V = v.shape
    C, K = p.q_in.shape[-2:]
    whole = V + K if transition else V
    ends = torch.empty(count, H, K, whole, dtype=torch.float32, device=v.device)
    forward_kernels.scan_kernel[((columns or whole) // TILE_V, H, count)](
        p.q_in, p.k_in, p.k_out, p.A, p.solve, p.decay, v, o, starts, ends, *saved,
        bounds, chunks.start, chunks.length, wanted, *v.stride()[:2], *o.stride()[:2], H,
        HAS_S0=starts is not None, SAVE=saved[0] is not None, TRANSITION=transition,
        K=K, V=V, BV=TILE_V, C=C, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return ends


def reverse_scan(p: Prepared, do, dv, final_gradient, chunks: Chunks, stages: int = 3):
    """Launch `reverse_scan_kernel`: fills dv, returns the gradients of the initial and of every chunk's end state."""
    _, H, V = do.shape
    C, K = p.q_in.shape[-2:]
    initial = torch.empty(chunks.sequences, H, K, V, dtype=torch.float32, device=do.device)
    dstates = do.new_empty(chunks.count, H, V, K)
    backward_kernels.reverse_scan_kernel[(V // TILE_V, H, chunks.sequences)](
        p.q_in, p.k_in, p.k_out, p.A, p.solve, p.decay, do, dv, final_gradient, initial, dstates,
        chunks.offset, chunks.start, chunks.length, *do.stride()[:2], *dv.stride()[:2], H,
        HAS_DS=final_gradient is not None, K=K, V=V, BV=TILE_V, C=C, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return initial, dstates


def incoming_state(p: Prepared, v, chunks: Chunks, context: ContextCommunicator):
    """The start states [n, H, K, V] of a rank's sequences, None for all zero, and the product of the only sequence's
    transitions [H, K, K] where `incoming_gradient` will need it; hands the state after the last one to the right.

    What the last sequence leaves of a zero state is computed before anything is waited for, on all ranks at once. One
    product of a transition with a state remains, where a sequence both comes from the left and goes on at the right.
    """
    _, H, V = v.shape
    K = p.q_in.shape[-1]
    own = product = state = None
    if context.continues:
        spans = context.before > 0 and chunks.sequences == 1
        pieces = (chunks.offset[-2:], 1, None)
        ends = _scan(p, v, v, pieces, chunks, (None, None), 3, transition=True, columns=V + K if spans else V)
        left, through = ends.view(H, K * (V + K)).split([K * V, K * K], dim=-1)
        own = left.reshape(H, K, V)
        product = through.reshape(H, K, K) if spans else None
    if context.before:
        state = torch.zeros(chunks.sequences, H, K, V, dtype=torch.float32, device=v.device)
        state[0] = context.receive(state[0])
        if own is not None and product is not None:
            own = torch.baddbmm(own, product, state[0])
    if own is not None:
        context.send(own, right=True)
    return state, product


def incoming_gradient(p: Prepared, do, chunks: Chunks, context: ContextCommunicator, product):
    """Gradients [n, H, K, V] of the states after a rank's sequences, None for all zero, from the right; hands that of
    the state before the first one to the left. product: what `incoming_state` gave."""
    _, H, V = do.shape
    K = p.q_in.shape[-1]
    own = dfinal = None
    if context.before:
        first = dataclasses.replace(chunks, offset=chunks.offset[:2])
        own = reverse_scan(p, do, torch.empty_like(do), None, first)[0][0]
    if context.continues:
        dfinal = torch.zeros(chunks.sequences, H, K, V, dtype=torch.float32, device=do.device)
        dfinal[-1] = context.receive(dfinal[-1], right=True)
        if own is not None and product is not None:
            own = torch.baddbmm(own, product.mT, dfinal[-1])
    if own is not None:
        context.send(own)
    return dfinal


def gradients(
    q, k, v, gate, beta, A_log, dt_bias, lower_bound, o, do, updates, dv, states, dstates, decay, norms, grads,
    chunks: Chunks, columns: int = 64, options=({}, {}),
):  # fmt: skip
    """Launch the gradient kernels: fill grads = (dq, dk, dgate), return dbeta [tokens, H], dA_log [H], ddt_bias."""
    tokens, H, K = q.shape
    C, V = updates.shape[-2:]
    columns = min(columns, K)
    dbeta = torch.zeros(tokens, H, dtype=torch.float32, device=q.device)
    tiles = [updates.new_empty(chunks.count, H, C, K) for _ in range(3)]
    tiles += [updates.new_empty(chunks.count, H, C, C) for _ in range(2)]
    fading, along = torch.empty_like(decay), torch.empty_like(norms)
    backward_kernels.state_gradients_kernel[(H, chunks.count)](
        v, beta, o, do, updates, dv, states, dstates, decay, chunks.start, chunks.length, *tiles, dbeta, fading, along,
        *(stride for x in (v, beta, o, do, dv) for stride in x.stride()[:2]), H, K=K, V=V, C=C,
        EARLY=EARLY, num_warps=4, **options[0],
    )  # fmt: skip
    dbias, drate = torch.empty_like(decay), torch.empty_like(decay)
    backward_kernels.input_gradients_kernel[(K // columns, H, chunks.count)](
        q, k, gate, A_log, dt_bias, *tiles, fading, norms, along, chunks.start, chunks.length, *grads, dbias, drate,
        *(stride for x in (q, k, gate) for stride in x.stride()[:2]), H, lower_bound, K**-0.5,
        K=K, KB=columns, C=C, BLOCK=block_rows(lower_bound), EARLY=EARLY, num_warps=4, **options[1],
    )  # fmt: skip
    return dbeta, drate.sum((0, 2)), dbias.sum(0).flatten()


class _KDA(torch.autograd.Function):
    """Saves the raw inputs and the forward's tiles; the tiles are freed as soon as the reverse scan has used them."""

    @staticmethod
    def forward(ctx, q, k, v, gate, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, context, save):
        B, T = v.shape[:2]
        chunks = fixed_chunks(B, T, q.device) if cu_seqlens is None else packed_chunks(cu_seqlens, T)
        flat = [rows(x) for x in (q, k, gate, v)]
        p = prepare(*flat[:3], beta.flatten(0, 1), A_log, dt_bias, lower_bound, chunks, save)
        o = zero_tail(v.new_empty(v.shape), cu_seqlens)
        first, product = initial_state, None
        if context is not None:
            first, product = incoming_state(p, flat[3], chunks, context)
        final, states, updates = scan(p, flat[3], o.flatten(0, 1), first, chunks, save=save)
        ctx.set_materialize_grads(False)  # nobody asks for the final state in training: no zeros for it
        if save:
            ctx.save_for_backward(q, k, v, gate, beta, A_log, dt_bias, o)
            ctx.tiles, ctx.chunks = [p, states, updates], chunks
            ctx.lower_bound, ctx.ends, ctx.state = lower_bound, cu_seqlens, initial_state
            ctx.context, ctx.product = context, product
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal):
        if ctx.tiles is None:
            raise RuntimeError(
                "kda: backward ran twice; its tiles are freed on first use (retain_graph is not supported)"
            )
        q, k, v, gate, beta, A_log, dt_bias, o = ctx.saved_tensors
        (p, states, updates), ctx.tiles = ctx.tiles, None
        # Rows past cu_seqlens[-1] belong to no chunk: their gradient is 0, not memory as found.
        dq, dk, dgate, dv = (
            zero_tail(torch.empty_like(x, memory_format=torch.contiguous_format), ctx.ends) for x in (q, k, gate, v)
        )
        # An expanded gradient (of a sum) has strides of 0; the kernels step through states as they lie.
        do = torch.zeros_like(o) if do is None else do
        do, dfinal = rows(do), None if dfinal is None else dfinal.contiguous()
        if ctx.context is not None:
            dfinal = incoming_gradient(p, do, chunks=ctx.chunks, context=ctx.context, product=ctx.product)
        dS0, dstates = reverse_scan(p, do, dv.flatten(0, 1), dfinal, ctx.chunks)
        decay, norms, p = p.decay, p.norms, None
        dbeta, dA_log, dbias = gradients(
            *(rows(x) for x in (q, k, v, gate)), beta.flatten(0, 1), A_log, dt_bias, ctx.lower_bound, rows(o), do,
            updates, dv.flatten(0, 1), states, dstates, decay, norms, [x.flatten(0, 1) for x in (dq, dk, dgate)],
            ctx.chunks,
        )  # fmt: skip
        dS0 = None if ctx.state is None else dS0.to(ctx.state.dtype)
        dbeta = dbeta.to(beta.dtype).view(beta.shape)
        return (
            dq,
            dk,
            dv,
            dgate,
            dbeta,
            dA_log.to(A_log.dtype),
            dbias.to(dt_bias.dtype),
            None,
            dS0,
            None,
            None,
            None,
        )


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def kda(q, k, v, gate, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, context=None):
    """`k3rl.kernels.kda.operator.kda` by the kernels: bf16 rows, K = V = 128, fp32 states."""
    A_log, dt_bias, initial_state, cu_seqlens = map(_contiguous, (A_log, dt_bias, initial_state, cu_seqlens))
    inputs = (q, k, v, gate, beta, A_log, dt_bias, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _KDA.apply(*inputs[:7], lower_bound, initial_state, cu_seqlens, context, save)
