"""The experts as grouped products against the path that goes expert by expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.model.moe import ExpertBank, ExpertByExpert, LatentMoE
from k3rl.model.moe_grouped import GroupedExperts, grouped_outer, grouped_product, sort_by_expert


def bank_of(nano, dtype: torch.dtype, activations: str) -> ExpertBank:
    model = nano(dtype=dtype, activations=activations)
    return next(module for module in model.modules() if isinstance(module, LatentMoE)).bank


@settings(max_examples=40)
@given(rows=st.integers(1, 9), experts=st.integers(1, 6), k=st.integers(1, 3), seed=st.integers(0, 100))
def test_sorting_groups_every_assignment_under_its_expert(rows, experts, k, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (rows, k), generator=generator)
    sort = sort_by_expert(ids, experts)
    counts = [int((ids == e).sum()) for e in range(experts)]
    assert sort.ends.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert ids.view(-1)[sort.order].tolist() == sorted(ids.view(-1).tolist())
    assert torch.equal(sort.order[sort.inverse], torch.arange(rows * k))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_each_group(dtype):
    """bf16 rounds the result, 2^-9; the other two are exact to their order of sums."""
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)  # the second expert has no rows
    left, right, matrices = torch.randn(10, 8).to(dtype), torch.randn(10, 16).to(dtype), torch.randn(3, 8, 16).to(dtype)
    bound = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    product, outer = grouped_product(left, matrices, ends), grouped_outer(left, right, ends)
    for expert, rows in ((0, slice(0, 3)), (2, slice(3, 10))):
        wanted = left[rows].double() @ matrices[expert].double()
        assert torch.allclose(product[rows].double(), wanted, atol=bound * 10, rtol=bound)
        wanted = left[rows].double().t() @ right[rows].double()
        assert torch.allclose(outer[expert].double(), wanted, atol=bound * 10, rtol=bound)


@pytest.mark.parametrize("activations", ["none", "mxfp8"])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_a_static_step_equals_the_call(nano, activations, tokens):
    bank = bank_of(nano, torch.float64, activations)
    torch.manual_seed(tokens)
    z, weights = torch.randn(tokens, 64, dtype=torch.float64), torch.rand(tokens, 2, dtype=torch.float64)
    ids = torch.stack([torch.randperm(16)[:2] for _ in range(tokens)])
    with torch.no_grad():
        assert torch.allclose(bank.static(z, weights, ids), bank(z, weights, ids), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("activations", ["none", "mxfp8"])
def test_gradients_equal_those_of_the_path_by_expert(nano, activations):
    bank = bank_of(nano, torch.float64, activations)
    torch.manual_seed(0)
    z = torch.randn(11, 64, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(11, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 9, (11, 1)) + torch.tensor([0, 3])  # experts 12 to 15 have no rows
    up = torch.randn(11, 64, dtype=torch.float64)
    found = []
    for function in (GroupedExperts, ExpertByExpert):
        out = function.apply(z, weights, ids, bank, *bank.leaves)
        found.append((out, *torch.autograd.grad(out, [z, weights, *bank.leaves], up, allow_unused=True)))
    missing = 0
    for got, expected in zip(*found, strict=True):
        assert (got is None) == (expected is None), "experts without rows have no gradient"
        missing += got is None
        assert got is None or torch.allclose(got, expected, atol=1e-12, rtol=1e-11)
    assert missing >= 3 * 4


def test_bf16_gradients_are_as_near_to_float64_as_the_other_paths(nano):
    wide, narrow = bank_of(nano, torch.float64, "none"), bank_of(nano, torch.bfloat16, "none")
    torch.manual_seed(0)
    z, weights, up = torch.randn(40, 64).bfloat16(), torch.rand(40, 2), torch.randn(40, 64).bfloat16()
    ids = torch.stack([torch.randperm(16)[:2] for _ in range(40)])

    def gradients(function, bank, kind):
        own = [z.to(kind).requires_grad_(), weights.to(torch.promote_types(kind, torch.float32)).requires_grad_()]
        leaves = [leaf.detach().to(kind).requires_grad_() for leaf in bank.leaves]
        out = function.apply(*own, ids, bank, *leaves)
        return torch.cat([g.flatten().double() for g in torch.autograd.grad(out, [*own, *leaves], up.to(kind))])

    exact = gradients(ExpertByExpert, wide, torch.float64)
    ours, theirs = (
        (gradients(function, narrow, torch.bfloat16) - exact).norm() for function in (GroupedExperts, ExpertByExpert)
    )
    assert ours <= 1.25 * theirs
