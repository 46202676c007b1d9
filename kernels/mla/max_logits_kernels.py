"""Triton kernel of `largest_logits`: a program has a tile of rows of one head and goes over their keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import dot

LAUNCH = {"rows": 128, "keys": 64, "stages": 3, "num_warps": 8}


@triton.jit(do_not_specialize=["n"])
def largest_kernel(
    q, k, first_key, tiles, n, q_t, q_h, k_t, k_h,
    D: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    there = row < n
    first = tl.load(first_key + row, mask=there, other=n)
    column, more = tl.arange(0, D), D + tl.arange(0, max(REST, 1))
    own = q + head * q_h + row.to(tl.int64)[:, None] * q_t
    wide = tl.load(own + column[None, :], mask=there[:, None], other=0.0)
    if REST > 0:
        narrow = tl.load(own + more[None, :], mask=there[:, None], other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    # First keys rise with the rows, so the first row reaches back farthest.
    start = tl.load(first_key + tile * ROWS) // KEYS * KEYS
    for at in tl.range(start, tl.minimum(tile * ROWS + ROWS, n), KEYS, num_stages=STAGES):
        key = at + tl.arange(0, KEYS)
        seen = k + head * k_h + key.to(tl.int64)[None, :] * k_t
        logits = dot(wide, tl.load(seen + column[:, None], mask=key[None, :] < n, other=0.0))
        if REST > 0:
            logits = dot(narrow, tl.load(seen + more[:, None], mask=key[None, :] < n, other=0.0), logits)
        counts = (key[None, :] >= first[:, None]) & (key[None, :] <= row[:, None])
        best = tl.maximum(best, tl.max(tl.where(counts, logits, float("-inf")), axis=1))
    tl.store(tiles + head * tl.num_programs(0) + tile, tl.max(best, axis=0))


def largest_logits(q: torch.Tensor, k: torch.Tensor, first: torch.Tensor, width: int, rest: int) -> torch.Tensor:
    """bf16 rows of heads of `width` + `rest` columns; see `k3rl.kernels.mla.max_logits.largest_logits`."""
    n, heads, _ = q.shape
    if not n:
        return torch.full((heads,), float("-inf"), dtype=torch.float32, device=q.device)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    tiles = torch.empty(heads, triton.cdiv(n, LAUNCH["rows"]), dtype=torch.float32, device=q.device)
    largest_kernel[(tiles.shape[1], heads)](
        q, k, first, tiles, n, *q.stride()[:2], *k.stride()[:2], D=width, REST=rest,
        ROWS=LAUNCH["rows"], KEYS=LAUNCH["keys"], STAGES=LAUNCH["stages"], num_warps=LAUNCH["num_warps"],
    )  # fmt: skip
    return tiles.amax(1)
