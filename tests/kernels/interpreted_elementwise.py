"""The element-wise kernels under Triton's interpreter, against their references.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_elementwise.py CASE

In a process of its own and with new buffers full of NaN, as `interpreted.py`.
"""

from __future__ import annotations

import sys

import torch
from interpreted import bf16, poison, require, require_equal

from k3rl.kernels import dispatch
from k3rl.kernels.gemm import skinny
from k3rl.kernels.moe import gather_rows, gather_rows_kernels, mxfp8_kernels, situ_kernels
from k3rl.kernels.moe import situ as situ_reference
from k3rl.kernels.norm import attn_res, attn_res_kernels, rms_norm, rms_norm_kernels
from k3rl.model import attn_res as model_attn_res
from k3rl.model.attn_res import ResidualStream
from k3rl.numerics import mx


def rounding() -> None:
    """The quantizer's bits for every bf16 value, in blocks of its own size and beside others, and for float32."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    mixed = every[torch.randperm(1 << 16)]
    ties = torch.cat([(torch.arange(96) / 32).repeat(3), 2.0 ** torch.arange(-149, 127, 1.0)[:256]]).view(-1, 32)
    for x in (every.view(-1, 32), mixed.view(4, -1, 64), mixed[:96], ties.float(), torch.randn(7, 32) * 1e38):
        for rule in mx.RULES if x.numel() < 1 << 16 else ("ceil",):
            got, want = mxfp8_kernels.mxfp8(x, rule), mx.fake_quantize_mxfp8(x, rule)
            require_equal("NaN after rounding", [got.isnan()], [want.isnan()])
            require_equal(f"rounding by {rule}", [got.nan_to_num()], [want.nan_to_num()])


def situ() -> None:
    """Values and gradients, saturated and tiny ones too, widths of one and several column blocks, tails of rows."""
    b, c = 4.0, 25.0
    sizes = torch.tensor([1e-6, 0.1, 1.0, 30.0])
    for rows, width in ((5, 32), (3, 96), (2, 1024)):
        gate_up = (torch.randn(rows, 2 * width) * sizes[torch.randint(4, (rows, 2 * width))]).bfloat16()
        grad, active, weight = bf16(rows, width), bf16(rows, width), torch.rand(rows, 1)
        wide = gate_up.double()
        value = situ_kernels.situ(gate_up, b, c, None)
        if not torch.allclose(value.double(), situ_reference.situ_reference(wide, b, c), rtol=2**-8, atol=1e-30):
            raise SystemExit("situ: further from float64 than a rounding to bf16")
        require_equal("rounded", [situ_kernels.situ(gate_up, b, c, "ceil")], [mx.fake_quantize_mxfp8(value, "ceil")])
        for given in ((None, None), (weight, active)):
            got, dots = situ_kernels.situ_gradient(grad, gate_up, b, c, *given)
            scaled = grad if given[0] is None else grad * weight.bfloat16()
            want, _ = situ_reference.situ_gradient_reference(scaled.double(), wide, b, c)
            # Where tanh is nearly 1 the factor 1 - tanh^2 has only float32's absolute precision.
            if not torch.allclose(got.double(), want, rtol=2**-8, atol=2e-5):
                raise SystemExit("situ: a gradient is further from float64 than a rounding to bf16")
        require("dots", dots, (grad.double() * active.double()).sum(-1), 1e-6)
    gate_up = torch.randn(2, 64)
    gate_up[0, 3], gate_up[1, 40], gate_up[0, 9], gate_up[0, 50] = float("nan"), float("nan"), 200.0, -2000.0
    for got in (situ_kernels.situ(gate_up, b, c, None), *situ_kernels.situ_gradient(gate_up[:, :32] * 0 + 1, gate_up,
                b, c, None, None)[0].chunk(2, -1)):  # fmt: skip
        if got.isnan().nonzero().tolist() != [[0, 3], [1, 8]]:
            raise SystemExit("situ: a NaN is lost, or a large value makes one")


def gathers() -> None:
    """Rows in another order, some of them several times, with and without weights: the reference's bits."""
    for n, width, count in ((3, 32, 1), (7, 96, 77)):
        rows, index, weight = bf16(n, width), torch.randint(n, (count,)), torch.rand(count, 1)
        for given in (None, weight):
            got, want = (run.gather_rows(rows, index, given) for run in (gather_rows_kernels, gather_rows))
            require_equal("gathered", *([x for x in pair if x is not None] for pair in (got, want)))


def rms_norms() -> None:
    """Rows that fill no tile and no power of two, both dtypes, repeats, strided gradients."""
    for rows, width, kind in ((1, 32, torch.bfloat16), (37, 200, torch.bfloat16), (9, 1024, torch.float32)):
        x, weight = torch.randn(rows, width).to(kind), torch.randn(width).to(kind)
        grad = torch.randn(rows, 2 * width).to(kind)[:, ::2]
        y, r = rms_norm_kernels.rms_norm(x, weight, 1e-5)
        wanted, wide_r = rms_norm.rms_norm_reference(x, weight, 1e-5)
        require("r", r, wide_r, 1e-6)
        require("y", y, wanted, 1e-3)
        got = [rms_norm_kernels.rms_norm_gradient(grad, x, weight, r) for _ in range(2)]
        require_equal("repeated gradient", *got)
        leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
        out = rms_norm.rms_norm_reference(*leaves, 1e-5)[0]
        for a, b in zip(got[0], torch.autograd.grad(out, leaves, grad.double()), strict=True):
            require("gradient of rms_norm", a, b, 3e-3)


def stream() -> None:
    """Reads that hand block sums from one to the next, and blocks that end in between, against reads of plain torch."""
    given = [x.requires_grad_() for x in (torch.randn(5, 32), torch.randn(32), torch.randn(1, 32))]
    results = []
    for by_kernel in (True, False):
        model_attn_res.reads_by_kernel = dispatch.use_kernel = lambda *_, by_kernel=by_kernel, **__: by_kernel
        residual = ResidualStream(given[0] * 2, 1e-5)
        for number in range(5):
            if number in (0, 3):
                residual.push()
                residual.add(given[0].square())
            seen = residual.read(*given[1:])
            residual.add(seen.sin())
        results.append([residual.total(), *torch.autograd.grad(residual.total().square().sum(), given)])
    for a, b in zip(*results, strict=True):
        require("stream", a, b, 1e-4)  # float32, through five reads of each other


def mixes() -> None:
    """One to eight block sums, rows that fill no program, the norm behind, gradients that arrive from elsewhere."""
    attn_res_kernels.PROGRAMS = 4
    stream()
    for n, width, count, held, early in ((1, 64, 1, 72, 24), (5, 72, 2, 72, 0), (3, 64, 8, 0, 0)):
        attn_res_kernels.HELD, attn_res_kernels.EARLY = held, early
        last, norm, proj, weight = bf16(n, width), bf16(width), bf16(1, width) * width**-0.5, bf16(width)
        bank = [torch.randn(n, width) * (1 + number) for number in range(count)]
        y, state = attn_res_kernels.mix(last, bank, norm, proj, 1e-5, None, 0.0, True)
        again, _ = attn_res_kernels.mix(last, bank, norm, proj, 1e-5, None, 0.0, False)
        require_equal("repeated mix", [y], [again])
        query = (norm * proj[0]).double()  # the product is rounded, as in the model
        leaves = [x.double().requires_grad_() for x in (last, *bank)]
        q = query.clone().requires_grad_()
        want = attn_res.mix_reference(leaves[0], leaves[1:], q, torch.ones(1, width).double(), 1e-5)
        require("mix", y, want, 3e-3)
        normed, _ = attn_res_kernels.mix(last, bank, norm, proj, 1e-5, weight, 1e-6, False)
        require("normed mix", normed, rms_norm.rms_norm_reference(y, weight, 1e-6)[0], 1e-3)
        rough = [row.bfloat16() for row in bank]
        pairs = [attn_res_kernels.mix(last + y, rows, norm, proj, 1e-5, weight, 1e-6, False)[0]
                 for rows in ([row.float() for row in rough], rough)]  # fmt: skip
        summed = attn_res_kernels.mix(last, rough, norm, proj, 1e-5, weight, 1e-6, False, y)
        require_equal("mix of a sum, and of block sums in bf16", [*pairs, last + y], [pairs[1], *summed])
        partial = skinny.PartialSums(torch.randn(3, n, width), y, torch.bfloat16)
        for given, before, base in ((last, last, y), (None, last * 0, None)):
            partial = partial._replace(base=base)
            summed = attn_res.mix_sum(given, partial, rough, norm, proj, 1e-5, weight, 1e-6)
            at_once = attn_res_kernels.mix(before + partial.total(), rough, norm, proj, 1e-5, weight, 1e-6, False)[0]
            require_equal("mix of partial sums", [at_once, before + partial.total()], summed)
        grad, more = bf16(n, 2 * width)[:, ::2], [torch.randn(n, width) for _ in bank]
        d_q, d_last, *d_bank = torch.autograd.grad(want, [q, *leaves], grad.double())
        for added in (None, more):
            given = (grad, last, bank, norm, proj, state, None if added is None else grad, added)
            got, second = attn_res_kernels.mix_gradient(*given), attn_res_kernels.mix_gradient(*given)
            require_equal("repeated gradient", [*got[:3], *got[3]], [*second[:3], *second[3]])
            d = d_last if added is None else d_last + grad
            for name, a, b in zip(("norm", "proj", "last"), got, (d_q * proj[0], d_q * norm, d), strict=False):
                require(f"gradient of {name}", a, b.view_as(a), 3e-3)
            for number, (a, b) in enumerate(zip(got[3], d_bank, strict=True)):
                require("gradient of a block sum", a, b if added is None else b + more[number], 2e-5)


CASES = {
    "situ": lambda: (rounding(), situ(), gathers()),
    "mix": lambda: (rms_norms(), mixes()),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    poison()
    CASES[sys.argv[1]]()
