"""The element-wise kernels of a layer on one GPU: SiTU, MXFP8 rounding, RMSNorm and reads of attention residuals.

    python benchmarks/elementwise_gpu.py --json --out FILE [--budget-s 120]
    python benchmarks/elementwise_gpu.py --dry     # the same control flow on a CPU, on the references

Shapes are those of k3-small at 8,192 tokens and of one decode step at 64 sequences. First the checks: each kernel
against its torch reference in float64 on the same inputs, the quantizer bit by bit, each result bit-equal when
repeated. Then the rows: ours, the torch reference as it is written (`eager_ms`) and what torch.compile makes of the
model's own functions (the peer), all replayed as CUDA graphs in one run. Floor: bytes that must move over 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rl.kernels import dispatch
from k3rl.kernels.moe import decode_routing, gather_rows, mxfp8, situ
from k3rl.kernels.norm import attn_res, rms_norm
from k3rl.model import attn_res as model_attn_res
from k3rl.model import moe_grouped, norm
from k3rl.model import situ as model_situ
from k3rl.numerics import mx

_spec = importlib.util.spec_from_file_location("gpu", Path(__file__).with_name("gpu.py"))
assert _spec is not None
assert _spec.loader is not None
gpu = sys.modules.setdefault("gpu", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(gpu)

BETAS = (4.0, 25.0)
EPS = 1e-5
Call = Callable[[], Any]


class Inputs:
    """Random rows on the device; a dry run has an eighth of the rows at most."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.dry = device, device.type == "cpu"
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, rows: int, *width: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
        rows = min(rows, 16) if self.dry else rows
        return torch.randn(rows, *width, device=self.device, generator=self._generator).to(kind)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def same(first: Any, second: Any) -> bool:
    """Whether two results, tensors or nested sequences of them, have the same bits."""
    if isinstance(first, Tensor):
        return torch.equal(first.nan_to_num(), second.nan_to_num())
    return first is second or all(same(a, b) for a, b in zip(first, second, strict=True))


def check_rounding(report: Any, inputs: Inputs) -> None:
    trial = moe_grouped.rounding_trial(inputs.device)
    for rule in mx.RULES:
        got, want = mxfp8.mxfp8(trial, rule).cpu(), mx.fake_quantize_mxfp8(trial.cpu(), rule)
        equal = (got == want) | (got.isnan() & want.isnan())
        report.check(f"MXFP8 bits, {rule}", ok=bool(equal.all()), different=int((~equal).sum()))


def check_situ(report: Any, inputs: Inputs) -> None:
    gate_up, grad, weight = 3 * inputs(1000, 512), inputs(1000, 256), inputs(1000, 1, kind=torch.float32)
    gate_up[0] *= 1e-4
    value = situ.situ(gate_up, *BETAS)
    active = situ.situ(gate_up, *BETAS, "ceil")
    error = relative(value, situ.situ_reference(gate_up.double(), *BETAS))
    bits = same(active, mx.fake_quantize_mxfp8(value, "ceil"))
    report.check("SiTU", ok=error < 3e-3 and bits, relative=error, rounded_bits_equal=bits)
    run = lambda: situ.situ_gradient(grad, gate_up, *BETAS, weight, active)  # noqa: E731
    (got, dots), scaled = run(), grad * weight.to(grad.dtype)
    want, _ = situ.situ_gradient_reference(scaled.double(), gate_up.double(), *BETAS)
    errors = relative(got, want), relative(dots, (grad.double() * active.double()).sum(-1))
    report.check("SiTU gradient", ok=errors[0] < 3e-3 and errors[1] < 1e-5 and same(run(), (got, dots)),
                 gradient=errors[0], dots=errors[1])  # fmt: skip


def check_gather(report: Any, inputs: Inputs) -> None:
    rows = inputs(300, 512)
    index = torch.randint(len(rows), (2000,), device=inputs.device)
    weight = torch.rand(2000, 1, device=inputs.device)
    pairs = zip(gather_rows.gather_rows(rows, index, weight), gather_rows.gather_rows_reference(rows, index, weight),
                strict=True)  # fmt: skip
    report.check("gather", ok=all(a is not None and b is not None and same(a, b) for a, b in pairs))


def check_norm(report: Any, inputs: Inputs, width: int) -> None:
    x, weight, grad = inputs(1000, width), inputs(1, width)[0], inputs(1000, width)
    y, r = rms_norm.rms_norm(x, weight, EPS)
    run = lambda: rms_norm.rms_norm_gradient(grad, x, weight, r)  # noqa: E731
    got = run()
    wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
    out = rms_norm.rms_norm_reference(*wide, EPS)[0]
    errors = [relative(y, out.detach())]
    errors += [relative(a, b) for a, b in zip(got, torch.autograd.grad(out, wide, grad.double()), strict=True)]
    report.check(f"RMSNorm {width}", ok=max(errors) < 4e-3 and same(run(), got), errors=errors)


def mix_inputs(inputs: Inputs, rows: int, width: int, count: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    bank = [inputs(rows, width, kind=torch.float32) for _ in range(count)]
    return inputs(rows, width), bank, inputs(1, width)[0], inputs(1, width) * width**-0.5


def check_mix(report: Any, inputs: Inputs, width: int, count: int) -> None:
    last, bank, norm_weight, proj = mix_inputs(inputs, 1000, width, count)
    grad, added = inputs(1000, width), [inputs(1000, width, kind=torch.float32) for _ in bank]
    y, state = attn_res.mix(last, bank, norm_weight, proj, EPS, save=True)
    assert state is not None
    query = (norm_weight * proj[0]).double().requires_grad_()
    leaves = [x.double().requires_grad_() for x in (last, *bank)]
    want = attn_res.mix_reference(leaves[0], leaves[1:], query, torch.ones_like(proj).double(), EPS)
    d_query, d_last, *d_bank = torch.autograd.grad(want, [query, *leaves], grad.double())
    run = lambda: attn_res.mix_gradient(grad, last, bank, norm_weight, proj, state, None, added)  # noqa: E731
    got = run()
    errors = [relative(y, want.detach()), relative(got[0], d_query * proj[0]), relative(got[2], d_last)]
    errors += [relative(a - b, c) for a, b, c in zip(got[3], added, d_bank, strict=True)]
    gain = inputs(1, width)[0]
    normed, _ = attn_res.mix(last, bank, norm_weight, proj, EPS, gain, EPS)
    errors.append(relative(normed, rms_norm.rms_norm_reference(y, gain, EPS)[0]))
    report.check(f"mix {width}, {count} block sums", ok=max(errors) < 5e-3 and same(run(), got), errors=errors)


def compiled(run: Call) -> Call:
    """The model's own functions with kernels off."""

    def call() -> Any:
        before, dispatch.use_kernel = dispatch.use_kernel, lambda *_, **__: False
        try:
            return run()
        finally:
            dispatch.use_kernel = before

    return call


class Timed:
    """Rows of ours, eager and compiled."""

    def __init__(self, report: Any, inputs: Inputs) -> None:
        self._report, self._device = report, inputs.device

    def __call__(self, name: str, shape: str, moved: int, ours: Call, eager: Call | None, peer: Call) -> None:
        if not self._report.time_left(f"{name} {shape}"):
            return
        seconds = [None if run is None else gpu.replayed(run, self._device) for run in (ours, eager, compiled(peer))]
        self._report.row(name, shape, seconds[0], peer="torch.compile", peer_s=seconds[2],
                         floor_s=moved / gpu.BANDWIDTH, eager_ms=seconds[1] and round(1e3 * seconds[1], 4))  # fmt: skip


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def time_situ(timed: Timed, inputs: Inputs, rows: int, width: int) -> None:
    gate_up, grad, weight = inputs(rows, 2 * width), inputs(rows, width), inputs(rows, 1, kind=torch.float32)
    shape, active = f"{rows} x {width}", situ.situ(gate_up, *BETAS, "ceil")
    timed("SiTU rounded", shape, bytes_of(gate_up, grad), lambda: situ.situ(gate_up, *BETAS, "ceil"),
          lambda: situ.situ_reference(gate_up, *BETAS, "ceil"),
          lambda: moe_grouped.rounded(model_situ.situ_value(gate_up, *BETAS), "ceil"))  # fmt: skip
    timed("rounding", shape, 2 * grad.nbytes, lambda: mxfp8.mxfp8(grad),
          lambda: mxfp8.mxfp8_reference(grad), lambda: moe_grouped.rounded(grad, "ceil"))  # fmt: skip
    timed("SiTU gradient", shape, bytes_of(gate_up, gate_up, grad),
          lambda: situ.situ_gradient(grad, gate_up, *BETAS),
          lambda: situ.situ_gradient_reference(grad, gate_up, *BETAS),
          lambda: model_situ.situ_gradient(grad, gate_up, *BETAS))  # fmt: skip
    timed("SiTU gradient, routed", shape, bytes_of(gate_up, gate_up, grad, active),
          lambda: situ.situ_gradient(grad, gate_up, *BETAS, weight, active),
          lambda: situ.situ_gradient_reference(grad, gate_up, *BETAS, weight, active),
          lambda: (model_situ.situ_gradient(moe_grouped.scaled(grad, weight), gate_up, *BETAS),
                   moe_grouped.dots(grad, active, weight)))  # fmt: skip


def time_norm(timed: Timed, inputs: Inputs, rows: int, width: int) -> None:
    x, weight, grad = inputs(rows, width), inputs(1, width)[0], inputs(rows, width)
    r = rms_norm.rms_norm(x, weight, EPS)[1]
    shape = f"{rows} x {width}"
    timed("RMSNorm", shape, 2 * x.nbytes, lambda: rms_norm.rms_norm(x, weight, EPS),
          lambda: rms_norm.rms_norm_reference(x, weight, EPS), lambda: norm.normed(x, weight, EPS))  # fmt: skip
    timed("RMSNorm gradient", shape, 3 * x.nbytes, lambda: rms_norm.rms_norm_gradient(grad, x, weight, r),
          lambda: rms_norm.rms_norm_gradient_reference(grad, x, weight, r),
          lambda: norm.normed_backward(grad, x, weight, r))  # fmt: skip


def time_mix(timed: Timed, inputs: Inputs, rows: int, width: int, count: int) -> None:
    last, bank, norm_weight, proj = mix_inputs(inputs, rows, width, count)
    grad, gain, shape = inputs(rows, width), inputs(1, width)[0], f"{rows} x {width}, {count + 1} sources"
    added, query = [torch.zeros_like(row) for row in bank], norm_weight.float() * proj[0].float()
    sources, inverses = [*bank, last.float()], [norm.inverse_rms(x.float(), EPS) for x in (*bank, last)]
    p, state = model_attn_res.mixed.function(sources, inverses, query)[1], attn_res.mix(
        last, bank, norm_weight, proj, EPS, save=True)[1]  # fmt: skip
    timed("mix", shape, bytes_of(*bank, last, last),
          lambda: attn_res.mix(last, bank, norm_weight, proj, EPS, save=True),
          lambda: attn_res.mix_reference(last, bank, norm_weight, proj, EPS),
          lambda: model_attn_res.mixed(sources, inverses, query))  # fmt: skip
    timed("mix and norm", shape, bytes_of(*bank, last, last),
          lambda: attn_res.mix(last, bank, norm_weight, proj, EPS, gain, EPS), None,
          lambda: norm.normed(model_attn_res.mixed_read(last, bank, inverses[:-1], norm_weight, proj, EPS), gain,
                              EPS))  # fmt: skip
    timed("mix gradient", shape, bytes_of(*bank, *bank, *bank, last, last, grad, grad),
          lambda: attn_res.mix_gradient(grad, last, bank, norm_weight, proj, state, grad, added), None,
          lambda: [a + b for a, b in zip(
              model_attn_res.mixed_backward(grad.float(), sources, inverses, p, query)[1], (*added, grad),
              strict=True)])  # fmt: skip


def time_gather(timed: Timed, inputs: Inputs, tokens: int, width: int, k: int) -> None:
    """Assignments of tokens to experts, in a random order as sorting by expert gives it."""
    rows = inputs(tokens, width)
    tokens = len(rows)
    order = torch.randperm(tokens * k, device=inputs.device)
    token, inverse = order // k, torch.argsort(order)
    grad = rows.index_select(0, token)
    shape, weight = f"{tokens} x {k} x {width}", torch.rand(tokens, k, device=inputs.device)
    flat, sort = weight.view(-1, 1), moe_grouped.SortedIds(order, inverse, order, order)
    moved = bytes_of(rows, token) + width * 2 * len(order)
    timed("gather", shape, moved, lambda: gather_rows.gather_rows(rows, token),
          lambda: gather_rows.gather_rows_reference(rows, token), lambda: rows.index_select(0, token))  # fmt: skip
    timed("gather, weighted too", shape, moved + width * 2 * len(order),
          lambda: gather_rows.gather_rows(rows, token, flat),
          lambda: gather_rows.gather_rows_reference(rows, token, flat),
          lambda: moe_grouped.scaled(rows.index_select(0, token), flat))  # fmt: skip
    timed("sum of choices", shape, bytes_of(grad, rows, inverse),
          lambda: decode_routing.sum_choices(grad, inverse, weight, grad.dtype),
          lambda: decode_routing.sum_reference(grad, inverse, weight, grad.dtype),
          lambda: moe_grouped.sum_of_choices(grad, sort, weight, k).to(grad.dtype))  # fmt: skip


PARTS: tuple[tuple[Callable[..., None], tuple[tuple[int, ...], ...]], ...] = (
    (time_situ, ((65536, 256), (8192, 512), (8192, 4096), (512, 256))),
    (time_gather, ((8192, 512, 8),)),
    (time_norm, ((8192, 1024), (8192, 512), (64, 1024))),
    (time_mix, ((8192, 1024, 1), (8192, 1024, 4), (2048, 7168, 8), (64, 1024, 4))),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--budget-s", type=float, default=150.0, help="no measurement is begun after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --dry runs its control flow on a CPU")
    inputs = Inputs(torch.device("cpu" if arguments.dry else "cuda"))
    report = gpu.Report(inputs.device, arguments.out, arguments.budget_s)
    timed = Timed(report, inputs)
    if arguments.dry:  # no kernels there
        attn_res.mix = lambda last, *rest, **_: (attn_res.mix_reference(last, *rest[:4]), torch.zeros(1))  # type: ignore
        attn_res.mix_gradient = lambda grad, *_: (grad[0], grad[0], grad, [])  # type: ignore
    check_rounding(report, inputs)
    check_situ(report, inputs)
    check_gather(report, inputs)
    for width in (200, 512, 1024, 7168):
        check_norm(report, inputs, width)
    for shape in () if arguments.dry else ((200, 1), (1024, 4), (1024, 8), (7168, 8)):
        check_mix(report, inputs, *shape)
    for part, shapes in PARTS:
        for shape in shapes:
            part(timed, inputs, *shape)
    if arguments.json:
        print(json.dumps(report.json()))


if __name__ == "__main__":
    main()
