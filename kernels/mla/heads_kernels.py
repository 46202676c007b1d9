"""Triton kernels of `heads`. A program has some rows: of one head, or of all heads where they are summed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.moe.mxfp8_kernels import keep

ELEMENTS = 2048  # of a tile


@triton.jit(do_not_specialize=["n"])
def spread_kernel(
    kv, shared, keys, values, n, kv_t, kv_h, shared_t, heads,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    there = row < n
    own = kv + row * kv_t + head * kv_h + column
    to = (row * heads + head) * (NOPE + ROPE) + column
    inside = there & (column < NOPE + ROPE)
    first = tl.load(own, mask=there & (column < NOPE), other=0.0)
    rest = tl.load(shared + row * shared_t + column - NOPE, mask=inside & (column >= NOPE), other=0.0)
    tl.store(keys + to, tl.where(column < NOPE, first, rest), mask=inside)
    tl.store(values + to, tl.load(own + NOPE, mask=there & (column < VALUE), other=0.0), mask=inside)


@triton.jit(do_not_specialize=["n"])
def collect_kernel(
    d_keys, d_values, d_kv, d_shared, n, keys_t, keys_h, values_t, values_h, heads,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """COLUMNS, LAST: those of a head of kv and of the shared part, as powers of two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column, last = tl.arange(0, COLUMNS)[None, :], tl.arange(0, LAST)[None, :]
    there = row < n
    total = tl.zeros([ROWS, LAST], tl.float32)
    for head in tl.range(0, heads):
        key, value = d_keys + row * keys_t + head * keys_h, d_values + row * values_t + head * values_h
        first = tl.load(key + column, mask=there & (column < NOPE), other=0.0)
        behind = (column >= NOPE) & (column < NOPE + VALUE)
        rest = tl.load(value + column - NOPE, mask=there & behind, other=0.0)
        to = d_kv + (row * heads + head) * (NOPE + VALUE) + column
        tl.store(to, tl.where(column < NOPE, first, rest), mask=there & (column < NOPE + VALUE))
        total += tl.load(key + NOPE + last, mask=there & (last < ROPE), other=0.0).to(tl.float32)
    keep(d_shared + row * ROPE + last, total, there & (last < ROPE), BF16)


@triton.jit(do_not_specialize=["n"])
def resize_kernel(
    x, out, n, x_t, x_h, heads, FROM: tl.constexpr, TO: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    found = tl.load(x + row * x_t + head * x_h + column, mask=(row < n) & (column < FROM), other=0.0)
    tl.store(out + (row * heads + head) * TO + column, found, mask=(row < n) & (column < TO))


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x with a last axis without gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def spread(kv, k_r, nope: int):
    """`k3rl.kernels.mla.heads.spread` by the kernel."""
    kv, k_r = _dense(kv), _dense(k_r)
    n, heads, width = kv.shape
    rope = k_r.shape[1]
    keys, values = torch.empty(2, n, heads, nope + rope, dtype=kv.dtype, device=kv.device).unbind()
    columns = triton.next_power_of_2(nope + rope)
    rows = max(1, ELEMENTS // columns)
    spread_kernel[(triton.cdiv(n, rows), heads)](
        kv, k_r, keys, values, n, *kv.stride()[:2], k_r.stride(0), heads,
        NOPE=nope, ROPE=rope, VALUE=width - nope, COLUMNS=columns, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return keys, values


def collect(d_k, d_v, nope: int, value: int):
    """`k3rl.kernels.mla.heads.collect` by the kernel."""
    d_k, d_v = _dense(d_k), _dense(d_v)
    n, heads, width = d_k.shape
    d_kv = torch.empty(n, heads, nope + value, dtype=d_k.dtype, device=d_k.device)
    d_shared = torch.empty(n, width - nope, dtype=d_k.dtype, device=d_k.device)
    columns = triton.next_power_of_2(nope + value)
    rows = max(1, ELEMENTS // columns)
    collect_kernel[(triton.cdiv(n, rows),)](
        d_k, d_v, d_kv, d_shared, n, *d_k.stride()[:2], *d_v.stride()[:2], heads,
        NOPE=nope, ROPE=width - nope, VALUE=value, COLUMNS=columns, LAST=triton.next_power_of_2(width - nope),
        ROWS=rows, BF16=d_k.dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return d_kv, d_shared


def resized(x, width: int):
    """`k3rl.kernels.mla.heads.resized` by the kernel."""
    x = _dense(x)
    n, heads, have = x.shape
    out = torch.empty(n, heads, width, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(max(width, have))
    rows = max(1, ELEMENTS // columns)
    resize_kernel[(triton.cdiv(n, rows), heads)](
        x, out, n, *x.stride()[:2], heads, FROM=have, TO=width, COLUMNS=columns, ROWS=rows, num_warps=4
    )
    return out
