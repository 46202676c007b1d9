"""The chunked recurrence and its written-out backward against FLA's reference numbers and finite differences."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from k3rl.model.kda import GatedNormFunction, ShortConvFunction
from k3rl.model.kda_chunks import chunked_kda
from k3rl.model.layout import HISTORY, Layout


def spread(rows: Tensor, layout: Layout) -> Tensor:
    """Rows [N, C] at their extended places [n, C], histories NaN-free noise that must not matter."""
    noise = torch.linspace(-2, 2, layout.n_extended, dtype=rows.dtype).unsqueeze(1).expand(-1, rows.shape[1])
    return noise.index_copy(0, layout.extended, rows)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Relative to the largest absolute value, as golden/kda/README.md says."""
    return float((a - b).detach().abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_output_states_and_all_gradients_match_the_reference(kda_golden, dtype) -> None:
    data, meta = kda_golden
    forward, backward = (1e-6, 1e-6) if dtype == torch.float64 else (5e-5, 5e-4)
    bounds = {case["name"]: case["lower_bound"] for case in meta["cases"]}
    checked = 0
    for case in bounds:
        x = {key.split(".", 1)[1]: value for key, value in data.items() if key.split(".")[0] == case}
        if x["q"].shape[-1] != x["v"].shape[-1]:
            continue  # the model has one head width
        checked += 1
        tokens = x["q"].shape[1]
        ends = x["cu_seqlens"].tolist() if "cu_seqlens" in x else [0, tokens]
        layout = Layout([b - a for a, b in pairwise(ends)])
        names = [n for n in ("q", "k", "v", "z", "beta_logit", "A_log", "dt_bias", "S0") if n in x]
        leaf = {n: x[n].to(dtype).requires_grad_() for n in names}
        qkv = torch.cat([leaf[n].reshape(tokens, -1) for n in "qkv"], dim=1)
        o, state = chunked_kda(
            spread(qkv, layout),
            spread(leaf["z"].reshape(tokens, -1), layout),
            spread(leaf["beta_logit"][0], layout),
            leaf["A_log"],
            leaf["dt_bias"],
            layout,
            state=leaf.get("S0"),
            bound=bounds[case],
        )
        assert close(o.view(x["o"].shape), x["o"], forward), case
        assert close(state, x["S"], forward), case
        ((o.view(x["wo"].shape) * x["wo"]).sum() + (state * x["wS"]).sum()).backward()
        for name in names:
            assert close(leaf[name].grad, x[f"grad.{name}"], backward), (case, name)
    assert checked >= 4


def test_backward_equals_finite_differences() -> None:
    torch.manual_seed(0)
    layout, h, width = Layout([3, 18]), 2, 4
    n = layout.n_extended
    shapes = [(n, 3 * h * width), (n, h * width), (n, h), (h,), (h * width,), (2, h, width, width)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_kda(*given[:5], layout, state=given[5])

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_strong_decay_stays_finite_in_float32() -> None:
    layout, h, width = Layout([40]), 1, 32
    torch.manual_seed(0)
    qkv = torch.randn(layout.n_extended, 3 * width, requires_grad=True)
    z = torch.full((layout.n_extended, width), 100.0, requires_grad=True)  # every gate at its bound of -5
    o, state = chunked_kda(qkv, z, torch.zeros(layout.n_extended, h), torch.ones(h), torch.zeros(width), layout)
    (o.sum() + state.sum()).backward()
    assert all(bool(t.isfinite().all()) for t in (o, state, qkv.grad, z.grad))


def test_gated_norm_backward_equals_finite_differences() -> None:
    torch.manual_seed(0)
    o, gate = (torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: GatedNormFunction.apply(*x, 1e-5), (o, gate, weight))


class _Taps:
    """Three parameters as one [C, 4] tensor, as the layer keeps them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters

    def tensor(self) -> Tensor:
        return torch.cat([p.detach().view(-1, 4) for p in self.parameters])

    def split(self, joined: Tensor) -> list[Tensor]:
        return [piece.reshape(p.shape) for piece, p in zip(joined.split(2), self.parameters, strict=True)]


def test_short_convolution_equals_a_padded_depthwise_one_per_segment() -> None:
    torch.manual_seed(0)
    layout = Layout([5, 1, 2])
    taps = [torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    rows = torch.randn(layout.n_rows, 6, dtype=torch.float64, requires_grad=True)
    extended = torch.zeros(layout.n_extended, 6, dtype=torch.float64).index_copy(0, layout.extended, rows)
    out = ShortConvFunction.apply(extended, _Taps(taps), *taps).index_select(0, layout.extended)
    pieces = []
    for segment in rows.split(layout.lengths):
        padded = nn.functional.pad(segment.t().unsqueeze(0), (HISTORY, 0))
        pieces.append(nn.functional.silu(nn.functional.conv1d(padded, torch.cat(taps), groups=6))[0].t())
    assert torch.allclose(out, torch.cat(pieces), atol=1e-14, rtol=0)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), [rows, *taps])
    theirs = torch.autograd.grad((torch.cat(pieces) * weight).sum(), [rows, *taps])
    assert all(torch.allclose(a, b, atol=1e-13, rtol=0) for a, b in zip(ours, theirs, strict=True))
