"""Parameters and gradients that lie end to end in one storage, which the optimizer takes as one tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from k3rl.model.config import K3Config
from k3rl.numerics import project, stored_dtype
from k3rl.optim import MuonConfig, PerHeadMuon
from k3rl.optim.joined import joined, runs

NANO = K3Config.named("k3-nano")
AT = "language_model.model.layers.1.block_sparse_moe.experts."


def stored(name: str, master: torch.Tensor) -> torch.Tensor:
    return project(master, stored_dtype(name))


class Counted(TorchDispatchMode):
    """How many operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def bank(experts: int, dtype: torch.dtype, apart: bool) -> tuple[dict[str, torch.nn.Parameter], list[torch.Tensor]]:
    """w1, w3, w2 of experts as views of one tensor for w1 and w3 and one for w2, or each by itself; their storage."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(experts * n, 32, 32, generator=generator).to(dtype) for n in (2, 1)]
    params = {}
    for e in range(experts):
        for name, value in (("w1", whole[0][2 * e]), ("w2", whole[1][e]), ("w3", whole[0][2 * e + 1])):
            params[f"{AT}{e}.{name}.weight"] = torch.nn.Parameter(value.clone() if apart else value)
    return params, whole


def give_gradients(params: dict[str, torch.nn.Parameter], experts: int, seed: int, apart: bool, idle: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(experts * n, 32, 32, generator=generator) for n in (2, 1)]
    for e in range(experts):
        for name, value in (("w1", whole[0][2 * e]), ("w2", whole[1][e]), ("w3", whole[0][2 * e + 1])):
            param = params[f"{AT}{e}.{name}.weight"]
            param.grad_dtype = torch.float32
            param.grad = None if e == idle else value.clone() if apart else value


@pytest.mark.parametrize("variant", ["per_head_muon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bank_is_trained_as_its_experts_would_be_apart(variant, dtype):
    """Only where numbers lie differs, so every bit is equal; an expert in the middle sits out the second step."""
    found = []
    for apart in (True, False):
        params, whole = bank(6, dtype, apart)
        optimizer = PerHeadMuon(params.items(), NANO, MuonConfig(0.02, 0.01, variant=variant), project=stored)
        for step, idle in ((0, -1), (1, 3)):
            give_gradients(params, 6, step, apart, idle)
            before = {name: p.grad.clone() for name, p in params.items() if p.grad is not None}
            (optimizer.step, optimizer.step_clipped)[step]()
            assert all(torch.equal(grad, params[name].grad) for name, grad in before.items()), "gradients are read only"
        if not apart:
            assert torch.equal(whole[0][4], params[f"{AT}2.w1.weight"]), "parameters are written where they are"
        found.append(optimizer.state_tensors() | {name: p.detach() for name, p in params.items()})
    assert found[0].keys() == found[1].keys()
    assert [key for key, value in found[0].items() if not torch.equal(value, found[1][key])] == []


@pytest.mark.parametrize("variant", ["per_head_muon", "adamw"])
def test_a_step_takes_no_more_operations_for_more_experts(variant):
    counts = []
    for experts in (4, 12):
        params, _ = bank(experts, torch.bfloat16, apart=False)
        optimizer = PerHeadMuon(params.items(), NANO, MuonConfig(0.02, 0.01, variant=variant), project=stored)
        give_gradients(params, experts, 0, apart=False, idle=-1)
        with Counted() as counted:
            optimizer.step_clipped()
        counts.append(counted.calls)
    assert counts[0] == counts[1]


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=12))
def test_runs_are_what_lies_end_to_end(cuts):
    """Tensors of one storage with gaps between some of them: what is joined holds the same values in order."""
    flat, at, tensors = torch.arange(100.0), 0, []
    for size, gap in cuts:
        at += gap
        tensors.append(flat[at : at + size])
        at += size
    whole = joined(tensors)
    assert torch.equal(torch.cat([flat[:0], *whole]), torch.cat([flat[:0], *tensors]))
    assert len(whole) <= 1 + sum(gap for _, gap in cuts[1:])
    edges = list(runs(tensors))
    assert [start for start, _ in edges[1:]] == [stop for _, stop in edges[:-1]]


def test_storages_dtypes_and_strides_end_a_run():
    flat = torch.arange(12.0)
    assert len(joined([flat[:4], torch.arange(4.0), flat[4:8]])) == 3
    assert len(joined([flat[:4], flat[4:8].view(torch.int32)])) == 2
    assert len(joined([flat[:4].view(2, 2).t(), flat[4:8]])) == 2
    assert len(joined([flat[:4].view(2, 2), flat[4:8]])) == 1
    assert joined([]) == []
