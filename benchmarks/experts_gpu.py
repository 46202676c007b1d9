"""Experts as stored bytes on one GPU: products of few rows against the kernel over bf16, bits first, then times.

    python benchmarks/experts_gpu.py --out FILE [--variants] [--tokens 1 16 64 256]
    python benchmarks/experts_gpu.py --dry         # the same control flow on a CPU with small matrices

Widths of K3 (56 experts, 16 choices) and of k3-small (64 experts, 8 choices); as many tokens as sequences decode. Times
are of captured graphs, over as many copies of the matrices as the cache cannot hold. Floor: packed bytes and scales of
the experts that have rows, over 4.3 TB/s. `--variants` adds the launches of `w4_grouped_skinny_kernels` and others.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from k3rl.kernels import limits
from k3rl.kernels.gemm import grouped_skinny, w4_grouped_skinny
from k3rl.kernels.moe import decode_routing, situ
from k3rl.numerics import mx

_spec = importlib.util.spec_from_file_location("gpu", Path(__file__).with_name("gpu.py"))
assert _spec is not None
assert _spec.loader is not None
gpu = importlib.util.module_from_spec(_spec)
sys.modules["gpu"] = gpu
_spec.loader.exec_module(gpu)

UNIT = (4.0, 25.0, "ceil")
CACHE = 100 << 20  # bytes that are surely more than the cache
# name: experts, choices of a token, outputs, inputs, whether rows are gathered
SHAPES = {
    "K3 gate and up": (56, 16, 6144, 3584, True), "K3 down": (56, 16, 3584, 3072, False),
    "k3-small gate and up": (64, 8, 512, 512, True), "k3-small down": (64, 8, 512, 256, False),
}  # fmt: skip
DRY = {"dry gate and up": (4, 2, 128, 128, True), "dry down": (4, 2, 64, 128, False)}


class Case:
    """One product: matrices in all forms, and rows of so many tokens."""

    def __init__(self, name: str, tokens: int, device: torch.device) -> None:
        self.experts, k, self.outputs, self.width, gathers = (SHAPES | DRY)[name]
        generator = torch.Generator().manual_seed(0)
        on_device = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int, low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=on_device)

        self.packed = drawn(self.experts, self.outputs, self.width // 2, low=0, high=256)
        self.scale = drawn(self.experts, self.outputs, self.width // mx.BLOCK, low=112, high=121)
        self.tiles = w4_grouped_skinny.tiled(self.packed, self.scale)
        self.matrices = w4_grouped_skinny.decode(*self.tiles, torch.bfloat16)
        ids = torch.stack([torch.randperm(self.experts, generator=generator)[:k] for _ in range(tokens)]).to(device)
        sort = decode_routing.sort_assignments(ids, self.experts)
        rows = torch.randn(tokens if gathers else tokens * k, self.width, generator=generator)
        self.rows, self.ends = rows.to(device, torch.bfloat16), sort.ends
        self.token = sort.token if gathers else None
        self.floor_s = ids.unique().numel() * self.outputs * self.width * 17 / 32 / gpu.BANDWIDTH
        self.copies = 1 + CACHE // (self.packed.nbytes + self.scale.nbytes) if device.type == "cuda" else 1

    def seconds(self, call: Callable[..., object], held: tuple[torch.Tensor, ...]) -> float:
        """Of call(rows, token, *held, ends), of one copy of `held` after the other."""
        every = [held, *(tuple(part.clone() for part in held) for _ in range(self.copies - 1))]

        def run() -> None:
            for own in every:
                call(self.rows, self.token, *own, self.ends)

        return gpu.replayed(run, self.rows.device, 10) / self.copies


def launches() -> Iterator[tuple[str, dict[str, Any]]]:
    from k3rl.kernels.gemm.w4_grouped_skinny_kernels import LAUNCHES

    for launch in LAUNCHES.values():
        for change in ({}, {"stages": 2}, {"blocks": 1}, {"blocks": 2, "maxnreg": 128}, {"rest": 0}):
            own = launch | change
            yield ", ".join(f"{key} {value}" for key, value in own.items()), own


def measured(report: Any, name: str, tokens: int, variants: bool) -> None:
    case, shape = Case(name, tokens, report.device), f"{name}, {tokens} tokens"
    wanted = grouped_skinny.product(case.rows, case.token, case.matrices, case.ends)
    same = torch.equal(w4_grouped_skinny.product(case.rows, case.token, *case.tiles, case.ends), wanted)
    exact = torch.equal(case.matrices, mx.dequantize_mxfp4(case.packed, case.scale, torch.bfloat16))
    back = w4_grouped_skinny.stored(*case.tiles)
    whole = torch.equal(back[0], case.packed) and torch.equal(back[1], case.scale)
    report.check(f"bits, {shape}", ok=same and exact and whole, product=same, values=exact, bytes=whole)
    bf16_s = case.seconds(grouped_skinny.product, (case.matrices,))
    report.row("packed product", shape, case.seconds(w4_grouped_skinny.product, case.tiles), peer="the same in bf16",
               peer_s=bf16_s, floor_s=case.floor_s, copies=case.copies)  # fmt: skip
    if case.token is not None:
        unit(report, case, shape)
    if tokens == 1:
        took = gpu.replayed(lambda: w4_grouped_skinny.decode(*case.tiles, torch.bfloat16), report.device, 5)
        report.row("decoded", shape, took, floor_s=case.matrices.nbytes * (1 + 17 / 64) / gpu.BANDWIDTH)
    for text, launch in launches() if variants and report.device.type == "cuda" else ():
        from k3rl.kernels.gemm import w4_grouped_skinny_kernels

        def call(*given: Any, own: dict[str, Any] = launch) -> torch.Tensor:
            return w4_grouped_skinny_kernels.product(*given, own)

        try:
            ok = torch.equal(call(case.rows, case.token, *case.tiles, case.ends), wanted)
            report.row(text, shape, case.seconds(call, case.tiles), floor_s=case.floor_s, same_bits=ok)
        except Exception as error:  # too much shared memory, say: a row like the others
            report.failed(text, shape, error)


def unit(report: Any, case: Case, shape: str) -> None:
    """The unit in the product's kernel against one of its own."""

    def apart(*given: Any) -> torch.Tensor:
        return situ.situ(w4_grouped_skinny.product(*given), *UNIT)

    def together(*given: Any) -> torch.Tensor:
        return w4_grouped_skinny.activated(*given, *UNIT)

    given = (case.rows, case.token, *case.tiles, case.ends)
    before = limits.W4_GROUPED_SKINNY
    limits.W4_GROUPED_SKINNY = dataclasses.replace(before, activated_chunks=1 << 10)
    try:
        report.check(f"bits of the unit, {shape}", ok=torch.equal(together(*given), apart(*given)))
        report.row("packed product and unit in one", shape, case.seconds(together, case.tiles), peer="two kernels",
                   peer_s=case.seconds(apart, case.tiles), floor_s=case.floor_s)  # fmt: skip
    finally:
        limits.W4_GROUPED_SKINNY = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--budget-s", type=float, default=300.0, help="no measurement is begun after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.dry else torch.device("cuda", 0)
    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --dry runs its control flow on a CPU")
    report = gpu.Report(device, arguments.out, arguments.budget_s)
    for name in DRY if arguments.dry else SHAPES:
        for tokens in (1, 9) if arguments.dry else arguments.tokens:
            if report.time_left(f"{name}, {tokens} tokens"):
                measured(report, name, tokens, arguments.variants)
    if arguments.json:
        print(json.dumps(report.json()))


if __name__ == "__main__":
    main()
