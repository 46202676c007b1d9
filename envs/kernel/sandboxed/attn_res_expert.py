"""The expert for `attn_res` on a GPU: one program a token, which reads every source row twice.

The first pass finds the scores, the second mixes; nothing but the scores is kept in between.
"""

import triton
import triton.language as tl


@triton.jit
def attn_res(v, w, out, S, T, D, SOURCES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    weight = tl.load(w + columns, inside, other=0.0)
    places = tl.arange(0, SOURCES)
    scores = tl.full([SOURCES], -float("inf"), tl.float32)
    for s in range(S):
        row = tl.load(v + (s * T + token) * D + columns, inside, other=0.0).to(tl.float32)
        score = tl.sum(row * weight, 0) / tl.sqrt(tl.sum(row * row, 0) / D + 1e-5)
        scores = tl.where(places == s, score, scores)
    weights = tl.exp(scores - tl.max(scores, 0))
    weights = weights / tl.sum(weights, 0)
    mix = tl.zeros([BLOCK], tl.float32)
    for s in range(S):
        row = tl.load(v + (s * T + token) * D + columns, inside, other=0.0).to(tl.float32)
        mix += tl.sum(tl.where(places == s, weights, 0.0), 0) * row
    tl.store(out + token * D + columns, mix.to(tl.bfloat16), inside)


def launches(dim):
    constants = {"SOURCES": triton.next_power_of_2(dim["S"]), "BLOCK": triton.next_power_of_2(dim["D"])}
    arguments = ["v", "w", "out", "S", "T", "D"]
    return [{"kernel": attn_res, "grid": (dim["T"],), "args": arguments, "constants": constants, "num_warps": 8}]
