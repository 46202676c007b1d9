"""The Triton kernels of `decode_attention`: a program for one row, some of its heads and a run of its tokens.

A tile of latents is read once and serves as keys and as values of all heads of the program. Sums go on as tokens come
(running maximum, sum of weights, weighted latents); where rows are few their tokens are split over programs, and
`merge_kernel` adds the parts up, which are in the same order whatever program was first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import LOG2E, begin, dot, early, exp2, to_bf16_rne

PROGRAMS = 264  # two on each of 132 multiprocessors
MOST_SPLITS = 32
HEADS = 32  # of a program, at most
NEVER = tl.constexpr(-1.0e30)  # a logit that weighs nothing; finite, so that differences are


@triton.jit(do_not_specialize=["rows"])
def decode_attention_kernel(
    absorbed, q_r, pages, table, past, out, parts, sums, scale, heads, rows, blocks_t, a_h, a_t, r_h, r_t,
    Z: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    mine = (head < heads)[:, None]
    channel = tl.arange(0, Z)
    rope = tl.arange(0, ROPE)
    q = tl.load(absorbed + head[:, None] * a_h + row * a_t + channel[None, :], mask=mine, other=0.0)
    q_rope = tl.load(q_r + row * r_t + head[:, None] * r_h + rope[None, :], mask=mine, other=0.0)
    count = tl.load(past + row).to(tl.int32) + 1
    blocks = tl.cdiv(count, TOKENS)
    run = tl.cdiv(blocks, SPLITS)
    token = tl.arange(0, TOKENS)
    most = tl.full([HEADS], NEVER, tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, Z], tl.float32)
    for block in tl.range(split * run, tl.minimum(blocks, (split + 1) * run), num_stages=STAGES):
        page = tl.load(table + row * blocks_t + block * TOKENS // PAGE)
        at = pages + (page * PAGE + block * TOKENS % PAGE + token)[:, None] * (Z + ROPE)
        latent = tl.load(at + channel[None, :])
        key = tl.load(at + Z + rope[None, :])
        logits = dot(q_rope, tl.trans(key), dot(q, tl.trans(latent))) * (scale * LOG2E)
        logits = tl.where((block * TOKENS + token < count)[None, :], logits, NEVER)
        higher = tl.maximum(most, tl.max(logits, axis=1))
        fade = exp2(most - higher)
        p = exp2(logits - higher[:, None])
        weight = weight * fade + tl.sum(p, axis=1)
        total = dot(to_bf16_rne(p), latent, total * fade[:, None])
        most = higher
    if SPLITS == 1:
        to = out + (head[:, None] * rows + row) * Z + channel[None, :]
        tl.store(to, to_bf16_rne(total / weight[:, None]), mask=mine)
    else:
        part = (row * SPLITS + split) * heads + head
        tl.store(parts + part[:, None] * Z + channel[None, :], total, mask=mine)
        tl.store(sums + part * 2, most, mask=head < heads)
        tl.store(sums + part * 2 + 1, weight, mask=head < heads)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(parts, sums, out, heads, rows, Z: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr):
    """Adds up the parts of one row and head; LANES: splits rounded up to a power of two."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, Z)
    split = tl.arange(0, LANES)
    part = (row * SPLITS + split) * heads + head
    most = tl.load(sums + part * 2, mask=split < SPLITS, other=NEVER)
    weight = tl.load(sums + part * 2 + 1, mask=split < SPLITS, other=0.0)
    highest = tl.max(most, axis=0)
    whole = tl.sum(weight * exp2(most - highest), axis=0)
    total = tl.zeros([Z], tl.float32)
    for i in tl.static_range(SPLITS):
        one = (row * SPLITS + i) * heads + head
        total += exp2(tl.load(sums + one * 2) - highest) * tl.load(parts + one * Z + channel)
    tl.store(out + (head * rows + row) * Z + channel, to_bf16_rne(total / whole))


def attend(
    absorbed, q_r, pages, table, past, scale: float, *, splits: int | None = None, num_warps: int | None = None,
    unmerged_splits: int = 0,
):  # fmt: skip
    """`k3rl.kernels.mla.decode_attention.attend` by the kernels: bf16, Z and r powers of two, pages of whole blocks.

    With unmerged_splits: (result, parts, sums), and where there are no more splits than that they are not merged, the
    result is not filled; else they are None.
    """
    (h, rows, z), r = absorbed.shape, q_r.shape[-1]
    absorbed, q_r = (x if x.stride(-1) == 1 else x.contiguous() for x in (absorbed, q_r))
    page = pages.shape[1]
    tokens = next(n for n in (64, 32, 16) if page % n == 0 and (n < 64 or z < 512))
    heads = min(HEADS, max(16, triton.next_power_of_2(h)))
    groups = triton.cdiv(h, heads)
    if splits is None:
        splits = max(1, min(PROGRAMS // (rows * groups), MOST_SPLITS, table.shape[1] * page // tokens))
    out = torch.empty(h, rows, z, dtype=absorbed.dtype, device=absorbed.device)
    parts, sums = out, out  # not written
    if splits > 1:
        parts = torch.empty(rows, splits, h, z, dtype=torch.float32, device=out.device)
        sums = torch.empty(rows, splits, h, 2, dtype=torch.float32, device=out.device)
    decode_attention_kernel[(rows, splits, groups)](
        absorbed, q_r, pages, table, past, out, parts, sums, scale, h, rows, table.stride(0),
        absorbed.stride(0), absorbed.stride(1), q_r.stride(1), q_r.stride(0),
        Z=z, ROPE=r, HEADS=heads, TOKENS=tokens, PAGE=page, SPLITS=splits, STAGES=2,
        num_warps=num_warps or (4 if heads * z <= 4096 else 8), **early(),
    )  # fmt: skip
    if 1 < splits <= unmerged_splits:
        return out, parts, sums
    if splits > 1:
        merge_kernel[(rows, h)](
            parts, sums, out, h, rows, Z=z, SPLITS=splits, LANES=triton.next_power_of_2(splits), num_warps=4,
            **early(),
        )  # fmt: skip
    return (out, None, None) if unmerged_splits else out
