"""Triton kernels of `k3rl.kernels.optim.muon`, each one pass over its numbers. Bytes moved for each number:
`start` 12 and 10 (the norm of a block has to be known before it is divided by), `finish` 10, `mxfp4` 6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import to_bf16_rne

CHUNK = 4096  # numbers of a block that one program takes
WIDE_CHUNK = 16384  # of blocks that would have more partial sums than one program adds up
MOST_PARTIALS = 4096
ROWS = 128  # blocks of 32 numbers that share a scale


@triton.jit
def _direction(g, m, rate, NESTEROV: tl.constexpr):
    if NESTEROV:
        return g + rate * m
    else:
        return m


@triton.jit(do_not_specialize=["size", "parts", "rate"])
def momentum_kernel(
    gradient, momentum, factor, live, largest, squares, size, parts, rate,
    NESTEROV: tl.constexpr, CHUNK: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """Moves the momentum; leaves of each chunk its largest magnitude and its sum of squares in units of that."""
    part, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    within = part * CHUNK + tl.arange(0, CHUNK)
    inside = within < size
    at = block * size + within
    g = tl.load(factor) * tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = rate * tl.load(momentum + at, mask=inside, other=0.0) + g
    moves = inside
    if LIVE:
        moves &= tl.load(live + block) > 0
    tl.store(momentum + at, m, mask=moves)
    magnitude = tl.abs(_direction(g, m, rate, NESTEROV))
    most = tl.max(magnitude, axis=0)
    unit = magnitude / tl.where(most > 0.0, most, 1.0)
    tl.store(largest + block * parts + part, most)
    tl.store(squares + block * parts + part, tl.sum(unit * unit, axis=0))


@triton.jit(do_not_specialize=["size", "parts", "rate"])
def unit_kernel(
    gradient, momentum, factor, largest, squares, out, size, parts, rate,
    NESTEROV: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The direction divided by its block's norm, in bf16."""
    part, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    every = tl.arange(0, PARTS)
    tops = tl.load(largest + block * parts + every, mask=every < parts, other=0.0)
    most = tl.max(tops, axis=0)
    top = tl.where(most > 0.0, most, 1.0)
    share = tops / top
    sums = tl.load(squares + block * parts + every, mask=every < parts, other=0.0)
    norm = tl.sqrt(tl.maximum(tl.sum(sums * share * share, axis=0), 1.0))
    within = part * CHUNK + tl.arange(0, CHUNK)
    inside = within < size
    at = block * size + within
    m = tl.load(momentum + at, mask=inside, other=0.0)
    g = m
    if NESTEROV:
        g = tl.load(factor) * tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, to_bf16_rne(_direction(g, m, rate, NESTEROV) / top / norm), mask=inside)


@triton.jit(do_not_specialize=["size", "decay", "scale", "block"])
def finish_kernel(master, update, lr, live, size, decay, scale, block, CHUNK: tl.constexpr, LIVE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = at < size
    if LIVE:
        inside &= tl.load(live + at // block, mask=inside, other=0) > 0
    rate = tl.load(lr)
    moved = (1.0 - rate * decay) * tl.load(master + at, mask=inside, other=0.0)
    o = tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(master + at, moved - rate * scale * o, mask=inside)


@triton.jit(do_not_specialize=["size"])
def mxfp4_kernel(master, out, size, ROWS: tl.constexpr):
    """Blocks of 32 numbers to MXFP4 values; the scale is rounded up, ties go to the smaller magnitude.

    2 * scale is the power of two whose bits are those of the largest magnitude, with a carry into the exponent where
    its mantissa exceeds that of 6, one exponent below.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = at < size
    x = tl.load(master + at, mask=inside, other=0.0)
    magnitude = tl.abs(x)
    most = tl.max(magnitude, axis=1)
    bits = most.to(tl.int32, bitcast=True) - 0x400001  # 2^23 - 2^22 - 1 carries, less one exponent
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7F000000) & 0x7F800000
    double_scale = (bits.to(tl.float32, bitcast=True) + most * 0.0)[:, None]
    half = tl.div_rn(magnitude, tl.broadcast_to(double_scale, (ROWS, 32)))
    quantum = tl.where(half >= 2.0, 1.0, tl.where(half >= 1.0, 0.5, 0.25))
    steps = tl.where(half >= 2.0, 1.0, tl.where(half >= 1.0, 2.0, 4.0))
    value = tl.abs(tl.ceil(half * steps - 0.5)) * quantum * double_scale  # -0.5 to 0 gives -0
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    signed = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    tl.store(out + at, to_bf16_rne(signed), mask=inside)


def start(
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    factor: torch.Tensor,
    rate: float,
    nesterov: bool,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `k3rl.kernels.optim.muon.start`."""
    count, size = len(momentum), momentum[0].numel()
    chunk = CHUNK if triton.cdiv(size, CHUNK) <= MOST_PARTIALS else WIDE_CHUNK
    parts = triton.cdiv(size, chunk)
    sums = torch.empty(2, count, parts, dtype=torch.float32, device=momentum.device)
    x = torch.empty(momentum.shape, dtype=torch.bfloat16, device=momentum.device)
    kind = {"NESTEROV": nesterov, "CHUNK": chunk, "num_warps": 8}
    momentum_kernel[(parts, count)](
        gradient, momentum, factor, live, sums[0], sums[1], size, parts, rate, LIVE=live is not None, **kind
    )
    unit_kernel[(parts, count)](
        gradient, momentum, factor, sums[0], sums[1], x, size, parts, rate, PARTS=triton.next_power_of_2(parts), **kind
    )
    return x


def finish(
    master: torch.Tensor,
    update: torch.Tensor,
    lr: torch.Tensor,
    decay: float,
    scale: float,
    live: torch.Tensor | None = None,
) -> None:
    """See `k3rl.kernels.optim.muon.finish`."""
    size = master.numel()
    finish_kernel[(triton.cdiv(size, CHUNK),)](
        master, update, lr, live, size, decay, scale, size // max(1, len(master)), CHUNK=CHUNK, LIVE=live is not None,
        num_warps=8,
    )  # fmt: skip


def mxfp4(master: torch.Tensor) -> torch.Tensor:
    """See `k3rl.kernels.optim.muon.mxfp4`."""
    out = torch.empty(master.shape, dtype=torch.bfloat16, device=master.device)
    size = master.numel()
    mxfp4_kernel[(triton.cdiv(size, ROWS * 32),)](master, out, size, ROWS=ROWS, num_warps=4)
    return out
