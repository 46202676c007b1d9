"""The Triton kernel of `draw`: one program a row, which it holds as a whole in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3rl.kernels.triton_ops import begin, early


@triton.jit(do_not_specialize=["tokens"])
def draw_kernel(logits, temperature, uniform, out, tokens, logits_t, V: tl.constexpr):
    """V: tokens rounded up to a power of two."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, V)
    here = token < tokens
    z = tl.load(logits + row * logits_t + token, mask=here, other=0.0).to(tl.float64)
    total = tl.sum(z, axis=0)
    finite = tl.abs(total) < float("inf")
    z = tl.where(finite, z, 0.0)
    z -= tl.max(tl.where(here, z, float("-inf")), axis=0)
    heat = tl.load(temperature + row)
    largest = tl.min(tl.where(here & (z == 0.0), token, V), axis=0)
    z = z / tl.where(heat == 0.0, 1.0, heat)
    cumulative = tl.cumsum(tl.where(here, tl.exp(z), 0.0), axis=0)
    mass = tl.max(cumulative, axis=0)
    target = tl.load(uniform + row) * mass
    drawn = tl.sum((here & (cumulative <= target)).to(tl.int32), axis=0)
    drawn = tl.where(heat == 0.0, largest, tl.minimum(drawn, tokens - 1))
    logprob = tl.sum(tl.where(token == drawn, z, 0.0), axis=0) - tl.log(mass)
    tl.store(out + row * 3, drawn.to(tl.float64))
    tl.store(out + row * 3 + 1, logprob)
    tl.store(out + row * 3 + 2, finite.to(tl.float64))


def draw(logits, temperature, uniform):
    """`k3rl.kernels.sampling.draw.draw` by the kernel."""
    rows, tokens = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty(rows, 3, dtype=torch.float64, device=logits.device)
    if rows:
        size = triton.next_power_of_2(tokens)
        draw_kernel[(rows,)](
            logits, temperature.contiguous(), uniform.contiguous(), out, tokens, logits.stride(0),
            V=size, num_warps=4 if size <= 1024 else 8, **early(),
        )  # fmt: skip
    return out
