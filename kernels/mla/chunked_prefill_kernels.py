"""The Triton kernel of `chunked_prefill`: a program for some tokens of one segment, some of their heads and a run of
what they attend to.

Tokens times heads are the rows of one tile, so that a tile of latents is read once for all of them, as keys and as
values. Sums go on as in `decode_attention_kernels`, whose `merge_kernel` adds the parts of a split run up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.kda.autograd import packed_chunks
from k3rl.kernels.mla.decode_attention_kernels import NEVER, PROGRAMS, merge_kernel
from k3rl.kernels.triton_ops import LOG2E, dot, exp2, to_bf16_rne

TILE = 64  # tokens times heads of a program
MOST_SPLITS = 64
LAUNCH = {"num_warps": 8}


@triton.jit(do_not_specialize=["rows"])
def chunked_prefill_kernel(
    absorbed, q_r, pages, table, past, out, parts, sums, chunk_start, chunk_len, chunk_sequence, scale, heads, rows,
    blocks_t, a_h, a_t, r_h, r_t,
    Z: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    split = tl.program_id(1)
    n = tl.load(chunk_len + chunk)
    if n == 0:
        return
    t0 = tl.load(chunk_start + chunk).to(tl.int64)
    segment = tl.load(chunk_sequence + chunk)
    segment = tl.where(segment < 0, -1 - segment, segment).to(tl.int64)
    number = tl.arange(0, TILE)
    row = t0 + number // HEADS
    head = tl.program_id(2) * HEADS + number % HEADS
    mine = (number // HEADS < n) & (head < heads)
    channel = tl.arange(0, Z)
    rope = tl.arange(0, ROPE)
    q = tl.load(absorbed + (head * a_h + row * a_t)[:, None] + channel[None, :], mask=mine[:, None], other=0.0)
    q_rope = tl.load(q_r + (row * r_t + head * r_h)[:, None] + rope[None, :], mask=mine[:, None], other=0.0)
    count = tl.load(past + row, mask=mine, other=0).to(tl.int32) + 1
    blocks = tl.cdiv(tl.load(past + t0 + n - 1).to(tl.int32) + 1, TOKENS)
    run = tl.cdiv(blocks, SPLITS)
    token = tl.arange(0, TOKENS)
    most = tl.full([TILE], NEVER, tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, Z], tl.float32)
    for block in tl.range(split * run, tl.minimum(blocks, (split + 1) * run), num_stages=STAGES):
        page = tl.load(table + segment * blocks_t + block * TOKENS // PAGE)
        at = pages + (page * PAGE + block * TOKENS % PAGE + token)[:, None] * (Z + ROPE)
        latent = tl.load(at + channel[None, :])
        key = tl.load(at + Z + rope[None, :])
        logits = dot(q_rope, tl.trans(key), dot(q, tl.trans(latent))) * (scale * LOG2E)
        logits = tl.where((block * TOKENS + token)[None, :] < count[:, None], logits, NEVER)
        higher = tl.maximum(most, tl.max(logits, axis=1))
        fade = exp2(most - higher)
        p = exp2(logits - higher[:, None])
        weight = weight * fade + tl.sum(p, axis=1)
        total = dot(to_bf16_rne(p), latent, total * fade[:, None])
        most = higher
    if SPLITS == 1:
        to = out + (head * rows + row)[:, None] * Z + channel[None, :]
        tl.store(to, to_bf16_rne(total / weight[:, None]), mask=mine[:, None])
    else:
        part = (row * SPLITS + split) * heads + head
        tl.store(parts + part[:, None] * Z + channel[None, :], total, mask=mine[:, None])
        tl.store(sums + part * 2, most, mask=mine)
        tl.store(sums + part * 2 + 1, weight, mask=mine)


def chunk_heads(h: int) -> int:
    """Heads of a program over several tokens: all of them, or as many of a tile's as leave room for two tokens."""
    return h if h <= TILE // 2 else TILE // 2


def attend(absorbed, q_r, pages, table, past, ends, scale: float, *, splits: int | None = None):
    """`chunked_prefill.attend` by the kernels: bf16, Z and r powers of two, pages of whole blocks."""
    (h, rows, z), r = absorbed.shape, q_r.shape[-1]
    absorbed, q_r = (x if x.stride(-1) == 1 else x.contiguous() for x in (absorbed, q_r))
    page, heads = pages.shape[1], chunk_heads(h)
    tokens = next(n for n in (64, 32, 16) if page % n == 0 and (n < 64 or z < 512))
    chunks = packed_chunks(ends, rows, TILE // heads, where=True)
    groups = triton.cdiv(h, heads)
    if splits is None:
        most = max(1, min(PROGRAMS // (chunks.count * groups), MOST_SPLITS, table.shape[1] * page // tokens))
        splits = 1 << (most.bit_length() - 1)  # each number is compiled
    out = torch.empty(h, rows, z, dtype=absorbed.dtype, device=absorbed.device)
    parts, sums = out, out  # not written
    if splits > 1:
        parts = torch.empty(rows, splits, h, z, dtype=torch.float32, device=out.device)
        sums = torch.empty(rows, splits, h, 2, dtype=torch.float32, device=out.device)
    chunked_prefill_kernel[(chunks.count, splits, groups)](
        absorbed, q_r, pages, table, past, out, parts, sums, chunks.start, chunks.length, chunks.sequence, scale, h,
        rows, table.stride(0), absorbed.stride(0), absorbed.stride(1), q_r.stride(1), q_r.stride(0),
        Z=z, ROPE=r, HEADS=heads, TILE=TILE, TOKENS=tokens, PAGE=page, SPLITS=splits, STAGES=2, **LAUNCH,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(rows, h)](
            parts, sums, out, h, rows, Z=z, SPLITS=splits, LANES=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out
