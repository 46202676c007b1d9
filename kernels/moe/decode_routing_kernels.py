"""Triton kernels of `decode_routing`: one program a token, one an expert, and one a token and run of columns.

The choice takes the largest key k times, or ranks few keys by comparing each with all; a key is the biased score as a
sortable integer with the expert's number below it, so that one reduction finds value and place and equal scores go by
number. The order by expert is a counting sort without shared counts: the program of an expert reads all ids, counts the
smaller ones and ranks its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import begin, early, sigmoid, to_bf16_rne

EXPERTS_A_WARP = 256
RANKED, RANKED_WARPS = tl.constexpr(128), 4  # up to so many experts are ranked by comparing all with all
SORT_WARPS = (4, 8)  # up to 1,024 assignments, and for more
COLUMNS = 1024


@triton.jit(do_not_specialize=["part_size"])
def choose_kernel(
    logits, bias, weights, ids, experts, logits_t, part_size, scaling,
    E: tl.constexpr, CHOICES: tl.constexpr, LANES: tl.constexpr, RENORMALIZE: tl.constexpr, RECORDED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """E and LANES: experts and choices rounded up to powers of two; RECORDED: ids are given.

    Logits are the sum of PARTS, part_size elements apart.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * logits_t
    begin()
    choice = tl.arange(0, LANES)
    here = choice < CHOICES
    to = token * CHOICES + choice
    if RECORDED:
        chosen = tl.load(ids + to, mask=here, other=0)
    else:
        expert = tl.arange(0, E)
        biased = sigmoid(added_up(row + expert, expert < experts, part_size, PARTS))
        biased += tl.load(bias + expert, mask=expert < experts, other=0.0)
        chosen = largest(biased, expert, experts, choice, E, CHOICES)
        tl.store(ids + to, chosen, mask=here)
    score = tl.where(here, sigmoid(added_up(row + chosen, here, part_size, PARTS)), 0.0)
    if RENORMALIZE:
        score = score / (tl.sum(score, axis=0) + 1e-20)
    tl.store(weights + to, score * scaling, mask=here)


@triton.jit
def added_up(pointer, mask, part_size, PARTS: tl.constexpr):
    total = tl.load(pointer, mask=mask, other=0.0)
    for i in tl.static_range(1, PARTS):
        total += tl.load(pointer + i * part_size, mask=mask, other=0.0)
    return total


@triton.jit
def largest(biased, expert, experts, choice, E: tl.constexpr, CHOICES: tl.constexpr):
    """The experts of the largest biased scores [E], at the places of `choice`."""
    bits = biased.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = tl.where(biased == biased, bits, 0x7FFFFFFF)
    taken = -(2**62)
    key = tl.where(expert < experts, bits.to(tl.int64) * E + (E - 1 - expert), taken)
    chosen = tl.zeros_like(choice).to(tl.int64)
    if E <= RANKED:  # few enough to compare each with all others
        rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1)
        mine = rank[:, None] == choice[None, :]
        chosen = tl.sum(tl.where(mine, expert[:, None], 0), axis=0).to(tl.int64)
    else:
        for i in tl.static_range(CHOICES):
            best = tl.max(key, axis=0)
            chosen = tl.where(choice == i, (E - 1) - (best & (E - 1)), chosen)
            key = tl.where(key == best, taken, key)
    return chosen


@triton.jit(do_not_specialize=["count"])
def sort_kernel(ids, token, inverse, ends, count, CHOICES: tl.constexpr, ROWS: tl.constexpr):
    """ROWS: assignments rounded up to a power of two."""
    begin()
    expert = tl.program_id(0)
    row = tl.arange(0, ROWS)
    found = tl.load(ids + row, mask=row < count, other=2**30).to(tl.int32)
    mine = (found == expert).to(tl.int32)
    before = tl.sum((found < expert).to(tl.int32), axis=0)
    place = before + tl.cumsum(mine, axis=0) - 1
    tl.store(token + place, (row // CHOICES).to(tl.int64), mask=mine == 1)
    tl.store(inverse + row, place.to(tl.int64), mask=mine == 1)
    tl.store(ends + expert, before + tl.sum(mine, axis=0))


@triton.jit
def sum_kernel(
    rows, inverse, weights, gain, out, width, eps,
    CHOICES: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """NORM: the sum's RMSNorm, which reads it in the precision of the rows; a program has all columns then."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for i in tl.static_range(CHOICES):
        at = tl.load(inverse + token * CHOICES + i) * width + column
        weight = tl.load(weights + token * CHOICES + i)
        total += weight * tl.load(rows + at, mask=valid, other=0.0).to(tl.float32)
    if NORM:
        if BF16:
            total = to_bf16_rne(total).to(tl.float32)
        total *= tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
        if BF16:
            total = to_bf16_rne(total).to(tl.float32)
        total *= tl.load(gain + column, mask=valid, other=0.0).to(tl.float32)
    to = out + token * width + column
    if BF16:
        tl.store(to, to_bf16_rne(total), mask=valid)
    else:
        tl.store(to, total, mask=valid)


def choose(logits, bias, k: int, renormalize: bool, scaling: float, recorded=None):
    """`k3rl.kernels.moe.decode_routing.choose` by the kernel; float32."""
    n, experts = logits.shape[-2:]
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    parts = logits.unsqueeze(0) if logits.dim() == 2 else logits
    weights = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    if recorded is None:
        ids = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    else:
        ids = recorded.to(torch.int64).contiguous()
    if n:
        size = triton.next_power_of_2(experts)
        choose_kernel[(n,)](
            logits, bias.contiguous(), weights, ids, experts, parts.stride(1), parts.stride(0), float(scaling),
            E=size, CHOICES=k, LANES=triton.next_power_of_2(k), RENORMALIZE=renormalize,
            RECORDED=recorded is not None, PARTS=len(parts),
            num_warps=RANKED_WARPS if size <= RANKED.value else max(1, size // EXPERTS_A_WARP),
            **early(),
        )  # fmt: skip
    return weights, ids


def sort_assignments(ids, experts: int):
    """`k3rl.kernels.moe.decode_routing.sort_assignments` by the kernel: (token, inverse, ends)."""
    count = ids.numel()
    token, inverse = torch.empty(2, count, dtype=torch.int64, device=ids.device).unbind()
    ends = torch.empty(experts, dtype=torch.int32, device=ids.device)
    size = triton.next_power_of_2(count)
    sort_kernel[(experts,)](
        ids.contiguous(), token, inverse, ends, count,
        CHOICES=ids.shape[1], ROWS=size, num_warps=SORT_WARPS[size > 1024], **early(),
    )  # fmt: skip
    return token, inverse, ends


def sum_choices(rows, inverse, weights, norm=None):
    """`decode_routing.sum_choices` by the kernel: bf16 or float32; with a norm up to `limits.DECODE_ROUTING.normed`
    columns.
    """
    n, k = weights.shape
    width = rows.shape[1]
    out = torch.empty(n, width, dtype=rows.dtype, device=rows.device)
    columns = triton.next_power_of_2(width)
    if norm is None:
        columns = min(COLUMNS, columns)
    gain, eps = (rows, 0.0) if norm is None else norm
    sum_kernel[(n, triton.cdiv(width, columns))](
        rows.contiguous(), inverse, weights.float().contiguous(), gain, out, width, eps,
        CHOICES=k, COLUMNS=columns, BF16=rows.dtype == torch.bfloat16, NORM=norm is not None, num_warps=4,
        **early(),
    )  # fmt: skip
    return out
