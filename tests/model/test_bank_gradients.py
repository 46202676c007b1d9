"""Gradients that a bank of experts adds up itself, against those that autograd collects leaf by leaf."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from k3rl.kernels.moe import add_groups
from k3rl.model.moe import ExpertBank, ExpertByExpert
from k3rl.model.moe_grouped import GroupedExperts
from tests.model.test_grouped import bank_of

WIDE = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}


def parts_of_a_step(kind: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """z, weights, ids, gradient of three micro-batches; expert 14 has rows in the last one only, 15 in none."""
    torch.manual_seed(0)
    found = []
    for tokens in (11, 7, 5):
        ids = torch.randint(0, 9, (tokens, 1)) + torch.tensor([0, 3])
        weights = torch.rand(tokens, 2, dtype=WIDE[kind])
        found.append((torch.randn(tokens, 64).to(kind), weights, ids, torch.randn(tokens, 64).to(kind)))
    ids[1] = torch.tensor([14, 2])
    return found


def gradients(bank: ExpertBank, function, kind: torch.dtype, *, sums: bool, again: bool = False) -> list:
    for leaf in bank.leaves:
        leaf.grad, leaf.grad_dtype = None, WIDE[kind]
    rows = torch.zeros(bank.experts, dtype=torch.int32)
    bank.keep_sums(rows if sums else None)
    leaves = bank.leaves[:1] if sums else bank.leaves
    run = lambda *given: function.apply(*given, bank, *leaves)  # noqa: E731
    for z, weights, ids, up in parts_of_a_step(kind):
        out = checkpoint(run, z, weights, ids, use_reentrant=False) if again else run(z, weights, ids)
        out.backward(up)
    if bank.sums is not None:
        bank.sums.attach(rows.tolist())
    return [leaf.grad for leaf in bank.leaves]


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [GroupedExperts, ExpertByExpert])
def test_sums_are_what_autograd_would_collect(nano, function, kind):
    bank = bank_of(nano, kind, "mxfp8")
    wanted = gradients(bank, function, kind, sums=False)
    for again in (False, True):
        found = gradients(bank, function, kind, sums=True, again=again)
        assert [grad is None for grad in found] == [grad is None for grad in wanted]
        assert all(g is w or torch.equal(g, w) for g, w in zip(found, wanted, strict=True))
        assert {g.dtype for g in found if g is not None} == {WIDE[kind]}
    assert found[-3:] == [None] * 3, "an expert without rows in the whole step has no gradient"
    assert found[3 * 14] is not None, "one that has rows in a later micro-batch has"


def test_sums_stay_where_they_are_and_gradients_are_views_of_them(nano):
    bank = bank_of(nano, torch.float32, "none")
    found = gradients(bank, GroupedExperts, torch.float32, sums=True)
    gate_up, down = bank.gradients()
    assert torch.equal(gate_up[2], torch.cat([found[6], found[7]]))
    assert not gate_up[15].any()
    places = {grad.untyped_storage().data_ptr() for grad in found if grad is not None}
    assert places == {gate_up.data_ptr(), down.data_ptr()}
    assert bank.sums is not None
    bank.sums.clear()
    assert not gate_up.any()
    assert not down.any()
    assert bank.gradients()[0] is gate_up
    bank.keep_sums(None)
    with pytest.raises(ValueError, match="keep_sums"):
        bank.gradients()


def test_leaves_attached_as_before_end_as_those_that_were_not(nano):
    """Experts with rows in one step only, and a `.grad` that somebody else has put there."""
    bank = bank_of(nano, torch.float32, "none")
    bank.keep_sums(torch.zeros(bank.experts, dtype=torch.int32))
    sums = bank.sums
    for turn, rows in enumerate(([3, 0, 1], [0, 2, 1], [0, 2, 1], [1, 1, 0])):
        sums.clear()
        bank.leaves[6].grad = torch.ones_like(bank.leaves[6]) if turn == 2 else bank.leaves[6].grad
        sums.attach_as_before()
        sums.attach(rows + [0] * (bank.experts - 3))
        found = [leaf.grad is view for leaf, view in sums.places()]
        assert found == [bool(n < 3 and rows[n]) for n in range(bank.experts) for _ in range(3)]


def test_where_every_gradient_is_wanted_autograd_gets_zeros(nano):
    bank = bank_of(nano, torch.float32, "none")
    bank.every_gradient = True
    for function in (GroupedExperts, ExpertByExpert):
        for leaf in bank.leaves:
            leaf.grad = None
        bank.keep_sums(torch.zeros(bank.experts, dtype=torch.int32))
        assert bank.sums is None
        z, weights, ids, up = parts_of_a_step(torch.float32)[0]
        function.apply(z, weights, ids, bank, *bank.leaves).backward(up)
        found = [leaf.grad for leaf in bank.leaves]
        assert all(grad is not None for grad in found)
        assert not any(grad.any() for grad in found[-3:])


def test_what_lies_in_empty_groups_is_left_out():
    total, part = torch.ones(3, 2, 5), torch.full((3, 2, 5), 2.0)
    part[1] = float("nan")
    rows = torch.tensor([1, 0, 0], dtype=torch.int32)
    add_groups(total, part.bfloat16(), torch.tensor([4, 4, 9], dtype=torch.int32), rows)
    assert total[:, 0, 0].tolist() == [3.0, 1.0, 3.0]
    assert rows.tolist() == [5, 0, 5]
    with pytest.raises(ValueError, match="do not fit"):
        add_groups(total, part[:2], rows)
    with pytest.raises(ValueError, match="contiguous"):
        add_groups(total, part.mT.contiguous().mT, rows)
