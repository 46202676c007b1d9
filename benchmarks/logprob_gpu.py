"""Logprobs and entropies of targets over a large vocabulary, beside Liger's fused linear cross-entropy.

    python benchmarks/logprob_gpu.py [--out FILE] [--rows 8192] [--vocabulary 163840] [--widths 2304 7168]

bf16 rows and head, made from a seed. `forward` is without gradient, `forward and backward` with those of rows and head;
the peer gives a loss for each row and no entropy (`liger-kernel` 0.8.5, when installed), and its gradients of the head
add up in bf16. `mb_beside` is the largest allocation beside inputs and outputs, in 10^6 bytes. The floor is that of the
products (one forward, four with backward: the logits twice, and two gradients) at the rate of a large bf16 product.
A check compares 64 rows and 4,096 columns' gradients with float64.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from k3rl.losses import target_logprobs

_spec = importlib.util.spec_from_file_location("gpu", Path(__file__).with_name("gpu.py"))
assert _spec is not None
assert _spec.loader is not None
gpu = sys.modules.setdefault("gpu", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(gpu)


def made(rows: int, width: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(rows, width, generator=draw, device=device).bfloat16()
    weight = (torch.randn(vocabulary, width, generator=draw, device=device) * width**-0.5 * 2).bfloat16()
    return hidden, weight, torch.randint(0, vocabulary, (rows,), generator=draw, device=device)


def beside(call: Callable[[], Any]) -> float:
    """10^6 bytes that a call allocates beyond what it leaves behind."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return round((peak - left) / 1e6, 1)


def check(report: gpu.Report, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Against float64 over the whole vocabulary."""
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = target_logprobs(h, w, targets)
    coefficients = torch.linspace(-1, 1, len(targets), device=hidden.device)
    grads = torch.autograd.grad((logprobs * coefficients).sum(), [h, w])
    table = torch.log_softmax(hidden[:64].double() @ weight.double().t(), -1)
    p = table.exp()
    d = -p * coefficients[:64, None].double()
    d[torch.arange(64), targets[:64]] += coefficients[:64].double()
    columns = slice(1000, 5096)
    normal = torch.logsumexp((hidden.double() @ weight.double().t()), -1) if len(hidden) <= 512 else None
    found = {
        "logprob": (logprobs[:64] - table.gather(1, targets[:64, None])[:, 0]).abs().max().item(),
        "entropy": (entropy[:64] + (p * table).sum(-1)).abs().max().item(),
        "gradient of rows": relative(grads[0][:64], d @ weight.double()),
    }
    if normal is not None:
        whole = -(hidden.double() @ weight[columns].double().t() - normal[:, None]).exp() * coefficients[:, None]
        place = targets - columns.start
        inside = (place >= 0) & (place < 4096)
        whole[inside, place[inside]] += coefficients[inside].double()
        found["gradient of head"] = relative(grads[1][columns], whole.t() @ hidden.double())
    bounds = {"logprob": 1e-4, "entropy": 1e-3, "gradient of rows": 1e-2, "gradient of head": 1e-2}
    report.check(f"{len(hidden)} rows", ok=all(value <= bounds[name] for name, value in found.items()), **found)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def measure(report: gpu.Report, rows: int, width: int, vocabulary: int) -> None:
    hidden, weight, targets = made(rows, width, vocabulary, report.device)
    peer = None
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        peer = LigerFusedLinearCrossEntropyLoss(reduction="none"), LigerFusedLinearCrossEntropyLoss()
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    coefficients = torch.linspace(-1, 1, rows, device=report.device)

    def ours() -> Any:
        with torch.no_grad():
            return target_logprobs(hidden, weight, targets)

    def ours_both() -> Any:
        return torch.autograd.grad((target_logprobs(*leaves, targets)[0] * coefficients).sum(), leaves)

    def theirs() -> Any:
        with torch.no_grad():
            return peer[0](weight, hidden, targets)

    def theirs_both() -> Any:
        return torch.autograd.grad(peer[1](leaves[1], leaves[0], targets), leaves)

    product = 2.0 * rows * width * vocabulary / gpu.MATRIX_RATE
    pairs = (("forward", ours, theirs, 1), ("forward and backward", ours_both, theirs_both, 4))
    for name, mine, other, products in pairs:
        shape = f"{rows} x {width}, {vocabulary} ids"
        if not report.time_left(f"{name} {shape}"):
            return
        times: list[list[float]] = [[], []]
        for _ in range(3):  # turn by turn
            times[0].append(gpu.wall(mine, report.device, repeats=3, warm=1))
            if peer is not None:
                times[1].append(gpu.wall(other, report.device, repeats=3, warm=1))
        report.row(
            name, shape, min(times[0]), peer="liger-kernel, fused linear cross-entropy" if peer else "none",
            peer_s=min(times[1], default=None), floor_s=products * product, mb_beside=beside(mine),
            peer_mb_beside=beside(other) if peer else None,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=163_840)
    parser.add_argument("--widths", type=int, nargs="+", default=[2304, 7168])
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further row begins")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    report = gpu.Report(torch.device("cuda"), given.out, given.budget)
    check(report, *made(512, given.widths[0], given.vocabulary, report.device))
    for width in given.widths:
        measure(report, given.rows, width, given.vocabulary)


if __name__ == "__main__":
    main()
