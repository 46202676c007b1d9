"""The Triton kernels of `decode_step`: a program for 16 rows and one head.

`query_kernel` norms its rows, multiplies them with the head's part of the second query matrix and the result, rounded
as it would be in memory, with the head's part of the up-projection. One more program of 16 rows than there are heads
writes the latents. `values_kernel` adds up the parts of split attention where they are few, expands the sums of latents
to values and gates them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels import limits
from k3rl.kernels.mla import decode_attention_kernels
from k3rl.kernels.mla.decode_attention_kernels import NEVER
from k3rl.kernels.mla.decode_step import Norm
from k3rl.kernels.moe.mxfp8_kernels import through
from k3rl.kernels.triton_ops import begin, dot, early, exp2, sigmoid, to_bf16_rne

UNMERGED_SPLITS = 4  # of attention, which are added up in registers
ROWS = limits.MLA_DECODE_STEP.rows
WARPS, STAGES = 8, 3  # of the queries
COLUMNS, DEPTH = 64, 64  # of values, a program; of latents, a step


@triton.jit
def _scale(x, width, eps):
    """1 / sqrt(mean(x^2) + eps) of rows [ROWS, n], as a column."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]


@triton.jit(do_not_specialize=["rows"])
def query_kernel(
    q_a, c, k_r, q_gain, c_gain, q_b, kv_b, place, pages, absorbed, q_r, rows, heads, a_t, c_t, k_t, part_h,
    q_eps, c_eps,
    RANK: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, Z: tl.constexpr, NOPE: tl.constexpr,
    ROPE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """RANK: width of q_a, BLOCK: that rounded up to a power of two; part_h: elements of a head's part of kv_b."""
    begin()
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None]
    channel, rope = tl.arange(0, Z)[None, :], tl.arange(0, ROPE)[None, :]
    if head == heads:
        value = tl.load(c + at * c_t + channel, mask=here, other=0.0).to(tl.float32)
        gain = tl.load(c_gain + channel).to(tl.float32)
        to = pages + tl.load(place + row, mask=row < rows, other=0)[:, None] * (Z + ROPE)
        key = tl.load(k_r + at * k_t + rope, mask=here, other=0.0)
        value = through(value * _scale(value, Z, c_eps), True) * gain
        tl.store(to + channel, to_bf16_rne(value), mask=here)
        tl.store(to + Z + rope, key, mask=here)
    else:
        given = q_a + at * a_t
        nope, turned = tl.arange(0, NOPE)[:, None], NOPE + tl.arange(0, ROPE)[:, None]
        up = tl.load(kv_b + head.to(tl.int64) * part_h + nope * Z + channel)  # asked for before all waits
        whole = tl.arange(0, BLOCK)[None, :]
        inverse = _scale(tl.load(given + whole, mask=here & (whole < RANK), other=0.0).to(tl.float32), RANK, q_eps)
        depth = tl.arange(0, DEPTH)[None, :]
        first = q_b + head * (NOPE + ROPE) * RANK + depth
        q_n = tl.zeros([ROWS, NOPE], tl.float32)
        q_s = tl.zeros([ROWS, ROPE], tl.float32)
        for k in tl.range(0, RANK, DEPTH, num_stages=STAGES):
            x = tl.load(given + k + depth, mask=here, other=0.0).to(tl.float32)
            x = to_bf16_rne(through(x * inverse, True) * tl.load(q_gain + k + depth).to(tl.float32))
            q_n = dot(x, tl.trans(tl.load(first + nope * RANK + k)), q_n)
            q_s = dot(x, tl.trans(tl.load(first + turned * RANK + k)), q_s)
        tl.store(q_r + (at * heads + head) * ROPE + rope, to_bf16_rne(q_s), mask=here)
        tl.store(absorbed + (head * rows + at) * Z + channel, to_bf16_rne(dot(to_bf16_rne(q_n), up)), mask=here)


@triton.jit(do_not_specialize=["rows"])
def values_kernel(
    context, parts, sums, kv_b, gate, out, rows, heads, gate_t, part_h, value_h,
    Z: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """value_h: elements of the key half of a head's part of kv_b, which comes first. Offsets fit into 32 bits."""
    begin()
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    matrix = kv_b + head * part_h + value_h + column[:, None] * Z + depth[None, :]
    to = head * V + column[None, :]
    g = tl.load(gate + row[:, None] * gate_t + to, mask=here[:, None], other=0.0).to(tl.float32)
    first = row * SPLITS * heads + head  # of the parts of a row
    highest = tl.full([ROWS], NEVER, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if SPLITS > 1:
        for i in tl.static_range(SPLITS):
            highest = tl.maximum(highest, tl.load(sums + (first + i * heads) * 2, here, NEVER))
        for i in tl.static_range(SPLITS):
            share = exp2(tl.load(sums + (first + i * heads) * 2, here, NEVER) - highest)
            weight += share * tl.load(sums + (first + i * heads) * 2 + 1, here, 1.0)
    o = tl.zeros([ROWS, COLUMNS], tl.float32)
    for z in tl.static_range(0, Z, DEPTH):
        w = tl.load(matrix + z)
        if SPLITS == 1:
            at = context + (head * rows + row)[:, None] * Z + z + depth[None, :]
            x = tl.load(at, mask=here[:, None], other=0.0)
        else:
            total = tl.zeros([ROWS, DEPTH], tl.float32)
            for i in tl.static_range(SPLITS):
                share = exp2(tl.load(sums + (first + i * heads) * 2, here, NEVER) - highest)
                at = parts + (first + i * heads)[:, None] * Z + z + depth[None, :]
                total += share[:, None] * tl.load(at, mask=here[:, None], other=0.0)
            x = to_bf16_rne(total / weight[:, None])
        o = dot(x, tl.trans(w), o)
    o = through(o, True) * sigmoid(g)
    tl.store(out + row[:, None] * (heads * V) + to, to_bf16_rne(o), mask=here[:, None])


def queries(q_a, c, k_r, q_norm: Norm, c_norm: Norm, q_b, kv_b, nope: int, pages, place):
    """`k3rl.kernels.mla.decode_step.queries` by the kernel: bf16, what `takes` takes."""
    q_a, c, k_r = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_a, c, k_r))
    (rows, rank), (h, both, z), rope = q_a.shape, kv_b.shape, k_r.shape[1]
    absorbed = torch.empty(h, rows, z, dtype=q_a.dtype, device=q_a.device)
    q_r = torch.empty(rows, h, rope, dtype=q_a.dtype, device=q_a.device)
    query_kernel[(triton.cdiv(rows, ROWS), h + 1)](
        q_a, c, k_r, q_norm.weight, c_norm.weight, q_b, kv_b, place, pages, absorbed, q_r, rows, h,
        q_a.stride(0), c.stride(0), k_r.stride(0), both * z, q_norm.eps, c_norm.eps,
        RANK=rank, BLOCK=triton.next_power_of_2(rank), DEPTH=128 if rank % 128 == 0 else 64, Z=z, NOPE=nope,
        ROPE=rope, ROWS=ROWS, STAGES=STAGES, num_warps=WARPS, **early(),
    )  # fmt: skip
    return absorbed, q_r


def attend(absorbed, q_r, pages, table, past, scale: float, kv_b, nope: int, gate):
    """`k3rl.kernels.mla.decode_step.attend` by the kernels."""
    context, parts, sums = decode_attention_kernels.attend(
        absorbed, q_r, pages, table, past, scale, unmerged_splits=UNMERGED_SPLITS
    )
    (h, both, z), rows = kv_b.shape, len(gate)
    value = both - nope
    out = torch.empty(rows, h * value, dtype=gate.dtype, device=gate.device)
    columns = min(COLUMNS, value)
    values_kernel[(triton.cdiv(rows, ROWS), h, value // columns)](
        context, context if parts is None else parts, context if sums is None else sums, kv_b, gate, out, rows, h,
        gate.stride(0), both * z, nope * z,
        Z=z, V=value, COLUMNS=columns, ROWS=ROWS, DEPTH=min(DEPTH, z),
        SPLITS=1 if parts is None else parts.shape[1], num_warps=4, **early(),
    )  # fmt: skip
    return out
