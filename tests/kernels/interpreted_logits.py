"""Kernels over logits under the interpreter: the largest ones against every visible pair, slices against the whole.

TRITON_INTERPRET=1 python tests/kernels/interpreted_logits.py
"""

from __future__ import annotations

import torch
from interpreted import bf16, poison, require, require_equal

from k3rl.kernels import limits
from k3rl.kernels.mla import max_logits_kernels
from k3rl.kernels.sampling import RunningSoftmax, logits_slice_kernels


def largest() -> None:
    """Documents shorter and longer than a tile, padding behind them, heads of one power of two and of two."""
    for width, lengths, padding in ((48, [3, 150, 1, 60], 10), (32, [128], 0), (64, [40], 90)):
        q, k = bf16(sum(lengths) + padding, 2, width), bf16(sum(lengths) + padding, 2, width)
        starts = [sum(lengths[:n]) for n, length in enumerate(lengths) for _ in range(length)]
        first = torch.tensor(starts + [len(starts) + n + 1 for n in range(padding)], dtype=torch.int32)
        split = limits.MAX_LOGITS.split(width)
        assert split is not None
        got = max_logits_kernels.largest_logits(q, k, first, *split)
        logits = torch.einsum("ihd,jhd->hij", q.double(), k.double())
        row = torch.arange(len(first))
        counts = (row >= first.unsqueeze(1)) & (row <= row.unsqueeze(1))
        require("largest", got, logits.masked_fill(~counts, -torch.inf).amax((1, 2)), 1e-6)
        q[len(starts) :] = k[len(starts) :] = 100.0
        require_equal("padding", [got], [max_logits_kernels.largest_logits(q, k, first, *split)])


def slices() -> None:
    """Columns in three slices, one of them cut away for a row, logits far from 0, against float64 over the whole."""
    rows, vocabulary, scale = 5, 2500, 0.7
    logits = torch.randn(rows, vocabulary) * 3 + torch.tensor([0.0, 1e3, -1e3, 0.0, 50.0])[:, None]
    logits[3, :1100] = -torch.inf
    targets, grad = torch.tensor([0, 1099, 1100, 2499, 2000]), torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    running, bounds = RunningSoftmax.empty(rows, torch.float32, logits.device), [(0, 1100), (1100, 2499), (2499, 2500)]
    for start, stop in bounds:
        logits_slice_kernels.add_slice(running, logits[:, start:stop].contiguous(), targets, start, scale)
    table = torch.log_softmax(logits.double() * scale, -1)
    p = table.exp()
    require("logprob", running.target - running.normalizer, table.gather(1, targets[:, None])[:, 0], 1e-5)
    # A sum of p times logits near 700 in float32.
    require("entropy", running.entropy, -(p * table.masked_fill(p == 0, 0.0)).sum(-1), 1e-3)
    wanted = -p * (grad * scale)[:, None]
    wanted[torch.arange(rows), targets] += grad * scale
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 4e-3)):
        for start, stop in bounds:
            numbers = targets, start, scale, running.normalizer, grad
            got = logits_slice_kernels.slice_gradient(logits[:, start:stop].contiguous(), *numbers, dtype)
            require(f"gradient in {dtype}", got.float(), wanted[:, start:stop], bound)


if __name__ == "__main__":
    torch.manual_seed(0)
    poison()
    largest()
    slices()
