"""Kernels of a decode step under Triton's interpreter, against their references.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_step.py

In a process of its own and with new buffers full of NaN, as `interpreted.py`.
"""

from __future__ import annotations

import torch
from interpreted import bf16, poison, require, require_equal

from k3rl.kernels.gemm import skinny, skinny_kernels
from k3rl.kernels.mla import decode_step, decode_step_kernels
from k3rl.kernels.moe import decode_routing, decode_routing_kernels


def mla() -> None:
    """Rows that fill no program, strided inputs, one split of a row's tokens, splits added up here, many splits."""
    h, nope, rope, value, z, rank, page = 2, 32, 16, 16, 32, 64, 16
    decode_step_kernels.DEPTH = 16
    for rows, blocks in ((1, 20), (19, 1), (3, 3)):
        joined = bf16(rows, rank + z + rope + h * value + 5)
        q_a, c, k_r, gate, _ = joined.split([rank, z, rope, h * value, 5], dim=-1)
        norms = [decode_step.Norm(bf16(n), eps) for n, eps in ((rank, 1e-5), (z, 1e-6))]
        q_b, kv_b = bf16(h * (nope + rope), rank) * rank**-0.5, bf16(h, nope + value, z) * nope**-0.5
        past = torch.randint(0, blocks * page, (rows,))
        table = torch.randperm(rows * blocks).view(rows, blocks)
        place = table.gather(1, (past // page)[:, None])[:, 0] * page + past % page
        pages, pages2 = bf16(rows * blocks, page, z + rope), None
        pages2 = pages.double()
        absorbed, q_r = decode_step_kernels.queries(q_a, c, k_r, *norms, q_b, kv_b, nope, pages, place)
        wide = [x.double() for x in (q_a, c, k_r)]
        wide_norms = [decode_step.Norm(norm.weight.double(), norm.eps) for norm in norms]
        want = decode_step.queries_reference(*wide, *wide_norms, q_b.double(), kv_b.double(), nope, pages2, place)
        require("absorbed", absorbed, want[0], 8e-3)
        require("shared part", q_r, want[1], 8e-3)
        require("pages", pages, pages2, 4e-3)
        where = (table, past, 0.2)
        got = decode_step_kernels.attend(absorbed, q_r, pages, *where, kv_b, nope, gate)
        given = [x.double() for x in (absorbed, q_r, pages)]
        want = decode_step.attend_reference(*given, *where, kv_b.double(), nope, gate.double())
        require("gated values", got, want, 8e-3)


def split_k_products() -> None:
    """One row and several, one split and several, strided rows: each partial sum against float64."""
    for n, width, outputs in ((1, 128, 64), (19, 256, 128)):
        x, matrix = bf16(n, width + 3)[:, :width], bf16(outputs, width)
        want = skinny.split_k_reference(x.double(), matrix.double())
        require("split-K", skinny_kernels.split_k(x, matrix), want.sums, 1e-6)


def skinny_products() -> None:
    """Strips and tiles that are not full, strided rows, a width of one step and of several, with a base and without."""
    for n, width, outputs in ((1, 64, 64), (19, 256, 200)):
        x, matrix, base = bf16(n, width + 8)[:, :width], bf16(outputs, width), bf16(n, outputs)
        want = x.double() @ matrix.double().T
        got = skinny_kernels.product(x, matrix)
        require("product", got, want, 4e-3)
        require("product and base", skinny_kernels.product(x, matrix, base), want + base.double(), 4e-3)
        require_equal("product of one row", [got[:1]], [skinny_kernels.product(x[:1], matrix)])


def choices() -> None:
    """Partial sums of logits are chosen from as their sum is, ties and NaN too; few experts and many; recorded ones."""
    for experts, k in ((24, 3), (130, 2)):
        pieces = torch.randint(-2, 3, (3, 5, experts)) / 4
        pieces[1, 2, 3:5] = float("nan")
        bias, given = torch.randn(experts) / 8, []
        for logits in (pieces, skinny.sum_partials(pieces)):
            weights, ids = decode_routing_kernels.choose(logits, bias, k, True, 2.5)
            again, _ = decode_routing_kernels.choose(logits, bias, k, True, 2.5, ids)
            given.append([ids, weights.nan_to_num(), again.nan_to_num()])
        require_equal("choice from partial sums", *given)
        require_equal("kept choice", [given[0][1]], [given[0][2]])
        want, ids2 = decode_routing.choose_reference(pieces.double(), bias.double(), k, True, 2.5)
        require_equal("ids", [given[0][0]], [ids2])
        require("weights", given[0][1], want.nan_to_num(), 1e-6)


if __name__ == "__main__":
    torch.manual_seed(0)
    poison()
    mla()
    choices()
    split_k_products()
    skinny_products()
