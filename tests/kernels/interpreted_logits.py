"""The largest logits under the interpreter, against every visible pair.

TRITON_INTERPRET=1 python tests/kernels/interpreted_logits.py
"""

from __future__ import annotations

import torch
from interpreted import bf16, poison, require, require_equal

from k3rl.kernels import limits
from k3rl.kernels.mla import max_logits_kernels


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


if __name__ == "__main__":
    torch.manual_seed(0)
    poison()
    largest()
