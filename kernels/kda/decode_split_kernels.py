"""The read-and-write step of `kda_decode_kernels` by several programs a head, for calls of few heads.

A program owns a tile of V. The norm needs the whole row: each program leaves its part of o and counts itself; the last
to arrive, whichever it is, reads the row, so the sum is formed in the same order every time, and sets the counter back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.kda.decode_kernels import (
    arguments,
    bring_up_to_date,
    convolve,
    finish,
    load_gates,
    load_past,
    load_row,
    normalized,
    rounded,
    shift,
    store_as,
    sums2,
)
from k3rl.kernels.triton_ops import begin, early, exp2, log2_decay

COUNTERS = 1 << 18


@triton.jit
def split_kernel(
    q, k, v, gate, beta, out_gate, wq, wk, wv, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_index, write_index, y, row_keys, row_updates, row_decay, span, parts_of_o, arrivals,
    q_t, k_t, v_t, g_t, b_t, z_t, read_stride, write_stride, H, lower_bound, scale, eps,
    D: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, PENDING: tl.constexpr, BF16: tl.constexpr,
    POOL_BF16: tl.constexpr,
):  # fmt: skip
    begin()
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, D)
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    square = column[:, None] * D + value[None, :]
    channel = head * D
    width = 3 * H * D
    place = row * H + head
    read = tl.load(read_index + row * read_stride).to(tl.int64)
    write = tl.load(write_index + row * write_stride).to(tl.int64)
    live = read >= 0
    keep = live & (write >= 0)
    slot, write = tl.maximum(read, 0), tl.maximum(write, 0)
    source, target = slot * H + head, write * H + head
    past = conv_pool + slot * 3 * width + channel
    q_row = load_row(q + row * q_t + channel, wq + channel * 4, column)
    k_row = load_row(k + row * k_t + channel, wk + channel * 4, column)
    v_row = load_row(v + row * v_t + channel, wv + channel * 4, value)
    z, rate, b, out_gate_row, norm_row = load_gates(
        gate + row * g_t, beta + row * b_t, out_gate + row * z_t, A_log, dt_bias, norm_weight, head, channel, column
    )
    q_past = load_past(past, column, width, live)
    k_past = load_past(past + H * D, column, width, live)
    v_past = load_past(past + 2 * H * D, value, width, live)
    if PENDING:
        first, count = tl.load(span + source * 2, live, 0), tl.load(span + source * 2 + 1, live, 0)
    S = tl.load(state_pool + source * D * D + square, mask=live & (square >= 0))
    tl.debug_barrier()
    if read < 0:
        store_as(y + place * D + value, tl.zeros([BV], tl.float32), value < D, BF16)
        return

    kn, qn, kq = normalized(q_row, q_past, k_row, k_past, scale, BF16)
    vc = convolve(v_row, v_past, BF16)
    if PENDING:
        S = bring_up_to_date(S, row_keys, row_updates, row_decay, source, first, count, value, D, ROWS)
    S *= exp2(log2_decay(z, rate, lower_bound))[:, None]
    along_k, along_q = sums2(S * kn[:, None], S * qn[:, None], 0)
    u = b * (vc - along_k)
    tl.store(parts_of_o + place * D + value, rounded(along_q + kq * u, BF16))
    tl.debug_barrier()
    others = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu")
    tl.store(state_pool + target * D * D + square, S + kn[:, None] * u[None, :], mask=keep & (square >= 0))
    to = conv_pool + write * 3 * width + channel
    shift(v_row, v_past, to + 2 * H * D, value, width, keep, POOL_BF16)
    if others == D // BV - 1:
        tl.debug_barrier()
        o = tl.load(parts_of_o + place * D + column, volatile=True)
        finish((o,), y + place * D, out_gate_row, norm_row, eps, D, 1, BF16)
        # All programs of the head have read what is written here.
        shift(q_row, q_past, to, column, width, keep, POOL_BF16)
        shift(k_row, k_past, to + H * D, column, width, keep, POOL_BF16)
        if PENDING:
            tl.store(span + target * 2 + tl.arange(0, 2), tl.full([2], (count + 1) % ROWS, tl.int32), mask=keep)
        tl.store(arrivals + place, 0)


_buffers: dict[torch.device, torch.Tensor] = {}
_used: dict[torch.device, int] = {}
_kept: dict[tuple[torch.device, int], torch.Tensor] = {}


def counters(device: torch.device, count: int) -> torch.Tensor | None:
    """Zeros int32 [count] that no call has that may run at the same time; None where there are none left.

    A stream keeps its own, every call that a graph captures gets some of its own. A graph's first call cannot make the
    buffer, whose zeros would then be written at each replay.
    """
    cuda = device.type == "cuda"
    capturing = cuda and torch.cuda.is_current_stream_capturing()
    stream = (device, torch.cuda.current_stream(device).cuda_stream if cuda else 0)
    if not capturing and stream in _kept and _kept[stream].numel() >= count:
        return _kept[stream]
    if device not in _buffers:
        if capturing:
            return None
        _buffers[device], _used[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device), 0
    start = _used[device]
    if start + count > COUNTERS:
        return None
    _used[device] = start + count
    mine = _buffers[device][start : start + count]
    if not capturing:
        _kept[stream] = mine
    return mine


def step(*args):
    """One step: the arguments of `kda_decode_kernels.arguments`, then counters and the programs a head."""
    y, tensors, numbers, constants = arguments(*args[:-2])
    B, H, D = y.shape
    o = torch.empty(B, H, D, dtype=torch.float32, device=y.device)
    split_kernel[(args[-1], H, B)](*tensors, o, args[-2], *numbers, BV=D // args[-1], **constants, **early())
    return y
