"""The Triton kernels of `w4_grouped_skinny`: matrices are read as MXFP4 and become bf16 in registers.

A code that is put into the exponent and mantissa bits of a bf16 is its value times 2^-126, subnormals included, so one
product with 2^(scale - 1) makes it exact. A word of 16 bits holds a number of each of four blocks, in such places that
three of them need a shift and a mask, and the fourth a multiplication that moves its bits apart. Two words at a time.
Registers feed the matrix instructions in the order of the bf16 kernel, so sums have that kernel's bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from k3rl.kernels import limits
from k3rl.kernels.moe.mxfp8_kernels import CARRY, rounded_blocks, through
from k3rl.kernels.moe.situ_kernels import situ_value
from k3rl.kernels.triton_ops import INTERPRET, begin, dot, early, prefetch, to_bf16_rne

CHUNK = limits.W4_GROUPED_SKINNY.chunk
# Rows an expert up to which matrices are asked for before it is known who reads them; more take longer than to wait.
AHEAD_ROWS, AHEAD_CHUNKS = 16, tl.constexpr(4)
# By the most rows that an expert should have: rows of a pass, beside them, and of the last one if that is enough;
# outputs a program, stages, blocks at a time, warps, registers. As measured: two to four programs on a multiprocessor.
_ANY = {"extra": 0, "rest": 0, "strip": 128, "stages": 3, "blocks": 4, "num_warps": 4, "maxnreg": None}
LAUNCHES: dict[int, dict[str, Any]] = {
    16: _ANY | {"rows": 16},
    32: _ANY | {"rows": 32, "rest": 16},
    48: _ANY | {"rows": 32, "extra": 16},
    64: _ANY | {"rows": 64, "num_warps": 8},
    80: _ANY | {"rows": 64, "extra": 32},
    96: _ANY | {"rows": 64, "extra": 32},
}

# $0 to $3: values of the blocks 0 to 3; $4: two words of codes; $5, $7, $9, $11: twice 2^(scale - 1) of each block.
_DECODE = tl.constexpr("""
{
.reg .b32 code;
and.b32 code, $4, 0x81C081C0;
mul.bf16x2 $0, code, $5;
mul.lo.u32 code, $4, 8;
and.b32 code, code, 0x81C081C0;
mul.bf16x2 $1, code, $7;
mul.lo.u32 code, $4, 64;
and.b32 code, code, 0x81C081C0;
mul.bf16x2 $2, code, $9;
shr.u32 code, $4, 8;
and.b32 code, code, 0x006C006C;
mul.lo.u32 code, code, 0x421;
and.b32 code, code, 0x81C081C0;
mul.bf16x2 $3, code, $11;
}
""")


@triton.jit
def _factor(word, BLOCK: tl.constexpr):
    """Scale byte of a block -> 2^(byte - 128) as two bf16 side by side; bytes to 128."""
    return ((word >> (8 * BLOCK)) & 0xFF) * 0x00800080 + 126 * 0x00800080


@triton.jit
def _by_bits(words, factor, BLOCK: tl.constexpr):
    """What `_DECODE` does for one block, in fp32: the interpreter has no bf16 arithmetic."""
    word = words.to(tl.int32) & 0xFFFF
    code = word << (3 * BLOCK)
    if BLOCK == 3:
        code = ((word >> 8) & 0x6C) * 0x421
    value = ((code & 0x81C0) << 16).to(tl.float32, bitcast=True) * (factor << 16).to(tl.float32, bitcast=True)
    return (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def decoded(words, scales):
    """int16 [b, 32] codes, int32 [b, 1] scales -> bf16 [b, 32] of each of four blocks."""
    f0, f1, f2, f3 = _factor(scales, 0), _factor(scales, 1), _factor(scales, 2), _factor(scales, 3)
    if INTERPRET:
        return _by_bits(words, f0, 0), _by_bits(words, f1, 1), _by_bits(words, f2, 2), _by_bits(words, f3, 3)
    else:
        return tl.inline_asm_elementwise(
            _DECODE,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [words, f0, f1, f2, f3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _settled(total):
    """The sum itself, once it is there: registers that the matrix instructions read must not be written before."""
    if INTERPRET:
        return total
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _keep(
    out, total, row, last, column, outputs, inverse_beta, inverse_linear, scale,
    UNIT: tl.constexpr, ROUND: tl.constexpr, CARRY: tl.constexpr, CLAMP: tl.constexpr, STRIP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sums [STRIP, ROWS] as they are, or the unit of those of gate and up, which are the halves of a strip."""
    if UNIT:
        gate, up = tl.split(through(total, True).reshape(2, STRIP // 2, ROWS).permute(1, 2, 0))
        value = situ_value(gate, up, inverse_beta, inverse_linear, scale)
        if ROUND:
            blocks = through(value, True).reshape(STRIP // 64, 32, ROWS)
            value = rounded_blocks(blocks, CARRY, CLAMP).reshape(STRIP // 2, ROWS)
        to = out + row.to(tl.int64)[None, :] * (outputs // 2) + column[:, None]
        tl.store(to, to_bf16_rne(value), mask=(row < last)[None, :])
    else:
        to = out + row.to(tl.int64)[None, :] * outputs + column[:, None]
        tl.store(to, to_bf16_rne(total), mask=(row < last)[None, :])


@triton.jit
def _turn(total, total2, matrix, at, row, at2, row2, last, EXTRA: tl.constexpr):
    """Sums with the products of some inputs added: matrix [STRIP, n] times rows [ROWS, n] and, where EXTRA, more."""
    x = tl.load(at, mask=(row < last)[:, None], other=0.0)
    total = dot(matrix, tl.trans(x), total)
    if EXTRA > 0:
        x2 = tl.load(at2, mask=(row2 < last)[:, None], other=0.0)
        total2 = _settled(dot(matrix, tl.trans(x2), total2))
    return _settled(total), total2


@triton.jit
def _pass(
    rows, token, strip, scale, out, start, last, column, outputs, inverse_beta, inverse_linear, unit_scale,
    WIDTH: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr, EXTRA: tl.constexpr, STRIP: tl.constexpr,
    STAGES: tl.constexpr, BLOCKS: tl.constexpr, UNIT: tl.constexpr, ROUND: tl.constexpr, CARRY: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """Rows start to start + ROWS + EXTRA of one expert, before its last, times a strip of its matrix."""
    depth = tl.arange(0, 32 * BLOCKS)[None, :]
    row = start + tl.arange(0, ROWS)
    source = row.to(tl.int64)
    if GATHER:
        source = tl.load(token + row, mask=row < last, other=0)
    given = rows + source[:, None] * WIDTH + depth
    total = tl.zeros([STRIP, ROWS], tl.float32)
    row2, given2, total2 = row, given, 0
    if EXTRA > 0:
        row2 = start + ROWS + tl.arange(0, EXTRA)
        source2 = row2.to(tl.int64)
        if GATHER:
            source2 = tl.load(token + row2, mask=row2 < last, other=0)
        given2 = rows + source2[:, None] * WIDTH + depth
        total2 = tl.zeros([STRIP, EXTRA], tl.float32)
    for c in tl.range(0, WIDTH // 128, num_stages=STAGES):
        words = tl.load(strip + c * outputs * 32)
        a, b, d, e = decoded(words, tl.load(scale + c * outputs)[:, None])
        at, at2 = given + c * 128, given2 + c * 128
        if BLOCKS == 4:
            matrix = tl.join(tl.join(a, d), tl.join(b, e)).permute(0, 2, 3, 1).reshape(STRIP, 128)
            total, total2 = _turn(total, total2, matrix, at, row, at2, row2, last, EXTRA)
        elif BLOCKS == 2:
            first = tl.join(a, b).permute(0, 2, 1).reshape(STRIP, 64)
            total, total2 = _turn(total, total2, first, at, row, at2, row2, last, EXTRA)
            second = tl.join(d, e).permute(0, 2, 1).reshape(STRIP, 64)
            total, total2 = _turn(total, total2, second, at + 64, row, at2 + 64, row2, last, EXTRA)
        else:
            total, total2 = _turn(total, total2, a, at, row, at2, row2, last, EXTRA)
            total, total2 = _turn(total, total2, b, at + 32, row, at2 + 32, row2, last, EXTRA)
            total, total2 = _turn(total, total2, d, at + 64, row, at2 + 64, row2, last, EXTRA)
            total, total2 = _turn(total, total2, e, at + 96, row, at2 + 96, row2, last, EXTRA)
    _keep(
        out, total, row, last, column, outputs, inverse_beta, inverse_linear, unit_scale,
        UNIT, ROUND, CARRY, CLAMP, STRIP, ROWS,
    )  # fmt: skip
    if EXTRA > 0:
        _keep(
            out, total2, row2, last, column, outputs, inverse_beta, inverse_linear, unit_scale,
            UNIT, ROUND, CARRY, CLAMP, STRIP, EXTRA,
        )  # fmt: skip


@triton.jit
def w4_grouped_skinny_kernel(
    rows, token, ends, codes, scales, out, outputs, inverse_beta, inverse_linear, scale,
    WIDTH: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr, EXTRA: tl.constexpr, REST: tl.constexpr,
    STRIP: tl.constexpr, STAGES: tl.constexpr, BLOCKS: tl.constexpr, UNIT: tl.constexpr, ROUND: tl.constexpr,
    CARRY: tl.constexpr, CLAMP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """outputs: a multiple of STRIP. A pass takes ROWS + EXTRA rows, powers of two, or EXTRA 0; or, where REST is not 0
    and no more are left, REST.

    BLOCKS of 32 inputs are decoded and multiplied at a time. UNIT: a strip is STRIP / 2 gates and their ups, half of
    all outputs behind them; their unit is what is kept. AHEAD: the first chunks are on their way before the rows are.
    """
    expert = tl.program_id(1).to(tl.int64)
    if AHEAD:
        RUN: tl.constexpr = STRIP // 2 if UNIT else STRIP
        for c in tl.static_range(min(AHEAD_CHUNKS, WIDTH // 128)):
            at = (expert * (WIDTH // 128) + c) * outputs + tl.program_id(0) * RUN
            prefetch(codes + at * 32, RUN * 64)
            prefetch(scales + at, RUN * 4)
            if UNIT:
                prefetch(codes + (at + outputs // 2) * 32, RUN * 64)
                prefetch(scales + at + outputs // 2, RUN * 4)
    begin()
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    lane = tl.arange(0, STRIP)
    column = tl.program_id(0) * STRIP + lane
    kept = column
    if UNIT:
        kept = tl.program_id(0) * (STRIP // 2) + tl.arange(0, STRIP // 2)
        column = tl.program_id(0) * (STRIP // 2) + lane % (STRIP // 2) + lane // (STRIP // 2) * (outputs // 2)
    place = expert * (WIDTH // 128) * outputs + column
    strip = codes + place[:, None] * 32 + tl.arange(0, 32)[None, :]
    for start in tl.range(first, last, ROWS + EXTRA, num_stages=1):
        if REST > 0 and last - start <= REST:
            _pass(
                rows, token, strip, scales + place, out, start, last, kept, outputs,
                inverse_beta, inverse_linear, scale,
                WIDTH, GATHER, REST, 0, STRIP, STAGES, BLOCKS, UNIT, ROUND, CARRY, CLAMP,
            )  # fmt: skip
        else:
            _pass(
                rows, token, strip, scales + place, out, start, last, kept, outputs,
                inverse_beta, inverse_linear, scale,
                WIDTH, GATHER, ROWS, EXTRA, STRIP, STAGES, BLOCKS, UNIT, ROUND, CARRY, CLAMP,
            )  # fmt: skip


@triton.jit
def decode_kernel(codes, scales, out, outputs, WIDTH: tl.constexpr, STRIP: tl.constexpr):
    """out bf16 [E, outputs, WIDTH]: a program decodes STRIP rows of one chunk of one matrix."""
    chunk, expert = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    place = (expert * (WIDTH // 128) + chunk) * outputs + row
    slot = tl.arange(0, 32)[None, :]
    words = tl.load(codes + place[:, None] * 32 + slot)
    a, b, d, e = decoded(words, tl.load(scales + place)[:, None])
    to = out + (expert * outputs + row)[:, None] * WIDTH + chunk * 128 + slot
    tl.store(to, a)
    tl.store(to + 32, b)
    tl.store(to + 64, d)
    tl.store(to + 96, e)


def launch_for(count: int, experts: int) -> dict[str, Any]:
    """The launch for so many rows of so many experts: most experts need one pass, and a short one what is above it."""
    mean = count / experts
    most = next((most for most in LAUNCHES if most >= mean + 0.75 * mean**0.5), max(LAUNCHES))
    return LAUNCHES[most]


def product(rows, token, codes, scales, ends, launch: dict[str, Any] | None = None, unit=None):
    """`w4_grouped_skinny.product` by the kernel: codes uint8 [E, a / 128, b, 64], scales uint8 [E, a / 128, b, 4].

    unit: (beta, linear beta, rule) for `w4_grouped_skinny.activated`.
    """
    experts, chunks, outputs, _ = codes.shape
    rows = rows.contiguous()
    count = len(rows) if token is None else len(token)
    own = launch or launch_for(count, experts)
    strip = min(own["strip"], outputs & -outputs)
    beta, linear_beta, rule = unit or (1.0, 1.0, None)
    width = outputs if unit is None else outputs // 2
    out = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
    w4_grouped_skinny_kernel[(outputs // strip, experts)](
        rows, rows if token is None else token, ends, codes.view(torch.int16), scales.view(torch.int32), out, outputs,
        1 / beta, 1 / linear_beta, beta * linear_beta,
        WIDTH=chunks * CHUNK, GATHER=token is not None, ROWS=own["rows"], EXTRA=own["extra"], REST=own["rest"],
        STRIP=strip, STAGES=own["stages"], BLOCKS=own["blocks"], UNIT=unit is not None, ROUND=rule is not None,
        CARRY=CARRY[rule or "ceil"], CLAMP=rule not in (None, "ceil"), AHEAD=1 <= count / experts <= AHEAD_ROWS,
        num_warps=own["num_warps"], maxnreg=own["maxnreg"], **early(),
    )  # fmt: skip
    return out


def decode(codes, scales):
    """`w4_grouped_skinny.decode` by the kernel."""
    experts, chunks, outputs, _ = codes.shape
    out = torch.empty(experts, outputs, chunks * CHUNK, dtype=torch.bfloat16, device=codes.device)
    strip = min(64, outputs & -outputs)
    decode_kernel[(outputs // strip, chunks, experts)](
        codes.view(torch.int16), scales.view(torch.int32), out, outputs, WIDTH=chunks * CHUNK, STRIP=strip
    )
    return out
