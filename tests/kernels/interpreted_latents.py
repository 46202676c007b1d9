"""Runs attention over latents of several tokens under Triton's interpreter; see interpreted.py."""

from __future__ import annotations

import torch
from interpreted import bf16, poison, require

from k3rl.kernels.mla import chunked_prefill, chunked_prefill_kernels, decode_attention


def main() -> None:
    """Segments of no, one and several tokens behind no, some and many pages; heads in one group and in several."""
    poison()
    torch.manual_seed(0)
    for h, z, r, page, splits in ((12, 32, 16, 16, 1), (12, 32, 16, 32, 2), (40, 16, 16, 16, 1)):
        lengths, before = [3, 0, 1, 6], [0, 3, 2 * page + 5, page - 1]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        past = torch.cat([torch.arange(n) + b for n, b in zip(lengths, before, strict=True)])
        n, segments, blocks = len(past), len(lengths), 4
        pages = bf16(segments * blocks + 1, page, z + r)
        table = torch.randperm(segments * blocks).view(segments, blocks) + 1
        absorbed, q_r = bf16(n, h, z).transpose(0, 1), bf16(n, h, 2 * r)[..., r:]
        got = chunked_prefill_kernels.attend(absorbed, q_r, pages, table, past, ends, 0.2, splits=splits)
        wide = (absorbed.double(), q_r.double(), pages.double())
        want = chunked_prefill.attend_reference(*wide, table, past, ends, 0.2)
        rows = table.repeat_interleave(torch.tensor(lengths), 0)
        require("chunks, by rows", want, decode_attention.attend_reference(*wide, rows, past, 0.2), 1e-12)
        require("chunks", got, want, 6e-3)


if __name__ == "__main__":
    main()
