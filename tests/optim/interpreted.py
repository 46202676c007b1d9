"""Kernels of the optimizer and of banks of experts under Triton's interpreter, against their references.

TRITON_INTERPRET=1 python tests/optim/interpreted.py
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from k3rl.kernels.moe import add_groups_kernels
from k3rl.kernels.moe.add_groups import add_groups_reference
from k3rl.kernels.optim import add_many_kernels, muon, muon_kernels, symmetric_kernels
from k3rl.kernels.optim.add_many import BLOCK, Table, add_many_reference, aligned
from k3rl.kernels.optim.symmetric import symmetric_reference
from k3rl.numerics import project


def near(what: str, found: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    if not bool(found.isfinite().all()) or float((found.double() - wanted.double()).abs().max()) > bound:
        raise SystemExit(f"{what}: {found} is not {wanted}")


def muon_step() -> None:
    """Blocks of uneven sizes, some of zeros, some near the ends of float32. Sums of float32 in another order change the
    norm by 1e-6, which moves a bf16 value of at most 1 by one rounding, 2^-8, where it was near a tie."""
    cases = [
        ((3, 16, 48), True, 1.0),
        ((2, 48, 16), False, 1e-25),
        ((2, 48, 16), True, 1e25),
        ((4, 100, 70), True, 1.0),
    ]
    for shape, nesterov, scale in cases:
        gradient, momentum = torch.randn(shape) * scale, torch.randn(shape) * scale
        gradient[0], momentum[0] = 0, 0
        wanted, factor = momentum.clone(), torch.tensor(0.7)
        live = None if len(gradient) < 4 else torch.tensor([1, 0, 7, 0], dtype=torch.int32)
        x = muon_kernels.start(gradient, momentum, factor, 0.95, nesterov, live)
        x2 = muon.start_reference(gradient, wanted, factor, 0.95, nesterov, live)
        near("momentum", momentum / scale, wanted / scale, 1e-6)
        moved = slice(None) if live is None else live > 0
        near("direction", x[moved], x2[moved], 2.0**-8)
        if x[0].any():
            raise SystemExit("a block of zeros must stay one")
    master, update = torch.randn(3, 50, 70), torch.randn(3, 50, 70).bfloat16()
    wanted = master.clone()
    lr = torch.tensor(0.1)
    for live in (None, torch.tensor([0, 3, 0], dtype=torch.int32)):
        before = master.clone()
        muon_kernels.finish(master, update, lr, 0.1, 3.0, live)
        muon.finish_reference(wanted, update, lr, 0.1, 3.0, live)
        near("master", master, wanted, 1e-6)
        if live is not None and not torch.equal(master[live == 0], before[live == 0]):
            raise SystemExit("a block without a gradient must stay as it is")


def projection() -> None:
    """The values that each device is tried with: the same bits but for NaN's."""
    x = muon.trial(torch.device("cpu"))
    found, wanted = muon_kernels.mxfp4(x), project(x, "mxfp4", "ceil")
    wrong = muon.unequal(found, wanted)
    if bool(wrong.any()) or not bool(muon.unequal(found * 2, wanted).any()):
        raise SystemExit(f"mxfp4: {x[wrong]} became {found[wrong]} instead of {wanted[wrong]}")


def groups() -> None:
    """What lies in a group without rows, NaN here, must not be read."""
    for size in (70, 5000):
        total, part = torch.randn(4, size), torch.randn(4, size).bfloat16()
        part[1] = float("nan")
        ends, rows = torch.tensor([3, 3, 4, 9], dtype=torch.int32), torch.ones(4, dtype=torch.int32)
        wanted, wanted_rows = total.clone(), rows.clone()
        add_groups_kernels.add_groups(total, part, ends, rows)
        add_groups_reference(wanted, part, ends, wanted_rows)
        near("sum", total, wanted, 0)
        near("rows", rows, wanted_rows, 0)
        add_groups_kernels.add_groups(total, part, ends, None)


def many() -> None:
    """More tensors than one launch takes, of one element, of less and of more than a program's, one with gaps."""
    sizes = [5, 1, *[8] * 33, BLOCK + 3]
    for kind in (torch.bfloat16, torch.float32):
        parts = [torch.randn(size).to(kind) for size in sizes]
        parts[2] = torch.randn(16).to(kind)[::2]
        parts[3] = torch.randn(9).to(kind)[1:]
        total = torch.randn(sum(sizes))
        wanted = total.clone()
        add_many_kernels.add_many(total, [aligned(part) for part in parts], Table(sizes, total.device))
        add_many_reference(wanted, parts)
        near("sums of many", total, wanted, 0)


def squares() -> None:
    """Sizes that fill no tile, wide and tall, and more than one column of tiles; bf16 results of float32 sums."""
    for r, k in ((40, 72), (150, 70), (256, 64)):
        wide = torch.randn(2, r, k).bfloat16() / k**0.5
        for p in (wide, wide.mT.contiguous().mT):
            out = torch.full((2, r, r), float("nan")).bfloat16()
            symmetric_kernels.symmetric(p, out, 1.0, 0.0, 0.0)
            near("product", out, symmetric_reference(p), 2.0**-7)
            if not torch.equal(out, out.mT):
                raise SystemExit("the product is not symmetric")
        grown = torch.full((2, r, r), float("nan")).bfloat16()
        symmetric_kernels.symmetric(out, grown, 2.0, -4.5, 3.4)
        near("polynomial", grown / 16, symmetric_reference(out, 2.0, -4.5, 3.4) / 16, 2.0**-8)


if __name__ == "__main__":
    torch.manual_seed(0)
    muon_step()
    projection()
    groups()
    squares()
    many()
