"""Triton kernels of `train_routing`. A program has a tile of tokens and all experts of each.

The order by expert is a counting sort in four launches: counts of each block of 128 assignments, their sums along the
blocks of an expert, where experts begin, and each assignment's place. An assignment's rank in its block is the number
of equal ids before it, by comparison of all pairs. No sum is taken twice in another order: nothing depends on which
program runs first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import sigmoid, to_bf16_rne

ELEMENTS = 2048  # of a tile of tokens and experts
BLOCK = 128  # assignments


@triton.jit
def _largest(key, taken):
    """The largest key of each row, and the keys without it."""
    best = tl.max(key, axis=1)
    return best, tl.where(key == best[:, None], taken, key)


@triton.jit(do_not_specialize=["n"])
def choose_many_kernel(
    logits, bias, weights, ids, scores, cutoff, n, experts, logits_t, scaling,
    E: tl.constexpr, TOKENS: tl.constexpr, CHOICES: tl.constexpr, LANES: tl.constexpr, RENORMALIZE: tl.constexpr,
    RECORDED: tl.constexpr,
):  # fmt: skip
    """As `route_kernels.choose_kernel`: keys are biased scores as sortable integers, the expert's number below them."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < n
    expert, choice = tl.arange(0, E), tl.arange(0, LANES)
    inside = there[:, None] & (expert[None, :] < experts)
    score = sigmoid(tl.load(logits + token[:, None] * logits_t + expert[None, :], mask=inside, other=0.0))
    tl.store(scores + token[:, None] * experts + expert[None, :], score, mask=inside)
    biased = score + tl.load(bias + expert, mask=expert < experts, other=0.0)[None, :]
    bits = biased.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = tl.where(biased == biased, bits, 0x7FFFFFFF)
    taken = -(2**62)
    key = tl.where(inside, bits.to(tl.int64) * E + (E - 1 - expert)[None, :], taken)
    chosen = tl.zeros([TOKENS, LANES], tl.int64)
    for i in tl.static_range(CHOICES):
        best, key = _largest(key, taken)
        chosen = tl.where(choice[None, :] == i, ((E - 1) - (best & (E - 1)))[:, None], chosen)
    left, key = _largest(key, taken)
    last = ((left - (left & (E - 1))) // E).to(tl.int32)
    last = last ^ ((last >> 31) & 0x7FFFFFFF)
    tl.store(cutoff + token, last.to(tl.float32, bitcast=True), mask=there)
    real = there[:, None] & (choice[None, :] < CHOICES)
    to = token[:, None] * CHOICES + choice[None, :]
    if RECORDED:
        chosen = tl.load(ids + to, mask=real, other=0)
    else:
        tl.store(ids + to, chosen, mask=real)
    own = sigmoid(tl.load(logits + token[:, None] * logits_t + chosen, mask=real, other=0.0))
    own = tl.where(real, own, 0.0)
    if RENORMALIZE:
        own = own / (tl.sum(own, axis=1) + 1e-20)[:, None]
    tl.store(weights + to, own * scaling, mask=real)


@triton.jit(do_not_specialize=["n"])
def choose_gradient_kernel(
    grad, logits, ids, out, n, experts, logits_t, scaling,
    E: tl.constexpr, TOKENS: tl.constexpr, CHOICES: tl.constexpr, RENORMALIZE: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < n
    expert = tl.arange(0, E)
    whole, along = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
    if RENORMALIZE:
        for i in tl.static_range(CHOICES):
            at = token * CHOICES + i
            chosen = tl.load(ids + at, mask=there, other=0)
            score = sigmoid(tl.load(logits + token * logits_t + chosen, mask=there, other=0.0))
            whole += score
            along += tl.load(grad + at, mask=there, other=0.0) * scaling * score
        whole += 1e-20
        along = along / whole
    found = tl.zeros([TOKENS, E], tl.float32)
    for i in tl.static_range(CHOICES):
        at = token * CHOICES + i
        chosen = tl.load(ids + at, mask=there, other=0)
        score = sigmoid(tl.load(logits + token * logits_t + chosen, mask=there, other=0.0))
        d = tl.load(grad + at, mask=there, other=0.0) * scaling
        if RENORMALIZE:
            d = (d - along) / whole
        d = d * score * (1.0 - score)
        found = tl.where(expert[None, :] == chosen[:, None], d[:, None], found)
    to = out + token[:, None] * experts + expert[None, :]
    inside = there[:, None] & (expert[None, :] < experts)
    if BF16:
        tl.store(to, to_bf16_rne(found), mask=inside)
    else:
        tl.store(to, found, mask=inside)


@triton.jit(do_not_specialize=["count", "blocks"])
def block_counts_kernel(ids, counts, count, blocks, experts, E: tl.constexpr, BLOCK: tl.constexpr):
    """counts [E, blocks]. Those past the end are counted as of expert 0, and taken off."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    found = tl.histogram(tl.load(ids + at, mask=there, other=0).to(tl.int32), E)
    expert = tl.arange(0, E)
    found = found - tl.where(expert == 0, BLOCK - tl.sum(there.to(tl.int32), axis=0), 0)
    tl.store(counts + expert * blocks + block, found, mask=expert < experts)


@triton.jit(do_not_specialize=["blocks"])
def expert_sums_kernel(counts, totals, blocks, SIZE: tl.constexpr):
    """Counts of an expert become what the blocks before have."""
    expert = tl.program_id(0)
    block = tl.arange(0, SIZE)
    found = tl.load(counts + expert * blocks + block, mask=block < blocks, other=0)
    tl.store(counts + expert * blocks + block, tl.cumsum(found, axis=0) - found, mask=block < blocks)
    tl.store(totals + expert, tl.sum(found, axis=0))


@triton.jit
def expert_ends_kernel(totals, starts, ends, experts, E: tl.constexpr):
    expert = tl.arange(0, E)
    found = tl.load(totals + expert, mask=expert < experts, other=0)
    stop = tl.cumsum(found, axis=0)
    tl.store(ends + expert, stop, mask=expert < experts)
    tl.store(starts + expert, stop - found, mask=expert < experts)


@triton.jit(do_not_specialize=["count", "blocks"])
def places_kernel(
    ids, counts, starts, weights, order, inverse, token, routed, count, blocks,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    number, other = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    at, before = block * BLOCK + number, block * BLOCK + other
    mine = tl.load(ids + at, mask=at < count, other=-1).to(tl.int32)
    theirs = tl.load(ids + before, mask=before < count, other=-1).to(tl.int32)
    equal = (mine[:, None] == theirs[None, :]) & (other[None, :] < number[:, None])
    rank = tl.sum(equal.to(tl.int32), axis=1)
    there = at < count
    place = tl.load(starts + mine, mask=there, other=0) + tl.load(counts + mine * blocks + block, mask=there, other=0)
    place = (place + rank).to(tl.int64)
    tl.store(order + place, at.to(tl.int64), mask=there)
    tl.store(token + place, (at // CHOICES).to(tl.int64), mask=there)
    tl.store(inverse + at, place, mask=there)
    if WEIGHTED:
        tl.store(routed + place, tl.load(weights + at, mask=there, other=0.0), mask=there)


def _tile(experts: int) -> tuple[int, int]:
    """Experts as a power of two, and tokens of a tile."""
    size = max(16, triton.next_power_of_2(experts))
    return size, max(1, ELEMENTS // size)


def choose(logits, bias, k: int, renormalize: bool, scaling: float, recorded=None):
    """`k3rl.kernels.moe.train_routing.choose` by the kernel: (weights, ids, scores, cutoff)."""
    n, experts = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    made = {"dtype": torch.float32, "device": logits.device}
    weights, scores, cutoff = torch.empty(n, k, **made), torch.empty(n, experts, **made), torch.empty(n, **made)
    if recorded is None:
        ids = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    else:
        ids = recorded.to(torch.int64).contiguous()
    size, tokens = _tile(experts)
    choose_many_kernel[(triton.cdiv(n, tokens),)](
        logits, bias.contiguous(), weights, ids, scores, cutoff, n, experts, logits.stride(0), float(scaling),
        E=size, TOKENS=tokens, CHOICES=k, LANES=triton.next_power_of_2(k), RENORMALIZE=renormalize,
        RECORDED=recorded is not None, num_warps=4,
    )  # fmt: skip
    return weights, ids, scores, cutoff


def choose_gradient(grad, logits, ids, renormalize: bool, scaling: float, dtype: torch.dtype):
    """`k3rl.kernels.moe.train_routing.choose_gradient` by the kernel."""
    n, experts = logits.shape
    out = torch.empty(n, experts, dtype=dtype, device=logits.device)
    size, tokens = _tile(experts)
    choose_gradient_kernel[(triton.cdiv(n, tokens),)](
        grad.contiguous(), logits, ids.contiguous(), out, n, experts, logits.stride(0), float(scaling),
        E=size, TOKENS=tokens, CHOICES=ids.shape[1], RENORMALIZE=renormalize, BF16=dtype == torch.bfloat16,
        num_warps=4,
    )  # fmt: skip
    return out


def sort_many(ids, experts: int, weights=None):
    """`k3rl.kernels.moe.train_routing.sort_many` by the kernels: (order, inverse, token, ends, weights)."""
    count, device = ids.numel(), ids.device
    ids = ids.contiguous()
    order, inverse, token = torch.empty(3, count, dtype=torch.int64, device=device).unbind()
    blocks = triton.cdiv(count, BLOCK)
    counts = torch.empty(experts, blocks, dtype=torch.int32, device=device)
    totals, starts = torch.empty(2, experts, dtype=torch.int32, device=device).unbind()
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    size = max(16, triton.next_power_of_2(experts))
    block_counts_kernel[(blocks,)](ids, counts, count, blocks, experts, E=size, BLOCK=BLOCK, num_warps=4)
    many = max(16, triton.next_power_of_2(blocks))
    expert_sums_kernel[(experts,)](counts, totals, blocks, SIZE=many, num_warps=4)
    expert_ends_kernel[(1,)](totals, starts, ends, experts, E=size, num_warps=1)
    routed = None if weights is None else torch.empty(count, dtype=torch.float32, device=device)
    places_kernel[(blocks,)](
        ids, counts, starts, ids if weights is None else weights.detach().contiguous(), order, inverse, token,
        ids if routed is None else routed, count, blocks,
        CHOICES=ids.shape[1], BLOCK=BLOCK, WEIGHTED=weights is not None, num_warps=4,
    )  # fmt: skip
    return order, inverse, token, ends, routed
