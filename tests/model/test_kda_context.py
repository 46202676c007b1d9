"""KDA of sequences that are cut into ranges equals the recurrence over whole ones, gradients included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3rl.kernels.kda.operator import kda_recurrent
from k3rl.model.kda_chunks import chunked_kda
from k3rl.model.layout import Layout

HEADS, WIDTH = 2, 4


class Neighbours:
    """The `ContextCommunicator` of one range, for ranges that run one after the other in one process.

    Forwards run from left to right and backwards from right to left, so every message is there when it is read.
    """

    def __init__(self, before: int, continues: bool, mail: dict[tuple[int, bool], Tensor], rank: int) -> None:
        self.before, self.continues, self._mail, self._rank = before, continues, mail, rank

    def rows_before(self, rows: Tensor, reach: int | None = None) -> Tensor:
        raise NotImplementedError("the recurrence alone reads no rows of other ranks")

    def receive(self, like: Tensor, *, right: bool = False) -> Tensor:
        came = self._mail.pop((self._rank + (1 if right else -1), not right))
        assert came.shape == like.shape
        assert came.dtype == like.dtype
        return came

    def send(self, tensor: Tensor, *, right: bool = False) -> None:
        self._mail[self._rank, right] = tensor.clone()


def extend(rows: Tensor, layout: Layout) -> Tensor:
    """Rows at their extended places, histories zero."""
    return rows.new_zeros(layout.n_extended, rows.shape[1]).index_copy(0, layout.extended, rows)


def inputs(n: int, seed: int) -> list[Tensor]:
    """q, k, v, gate logits [n, hD] each, beta logits [n, h], A_log [h], dt_bias [hD]."""
    torch.manual_seed(seed)
    shapes = [(n, HEADS * WIDTH)] * 4 + [(n, HEADS), (HEADS,), (HEADS * WIDTH,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def whole(given: list[Tensor], ends: list[int], weight: Tensor, bound: float | None) -> list[Tensor]:
    """Outputs of the plain recurrence [n, hD], and gradients of their weighted sum."""
    *streams, beta, a_log, dt_bias = given
    q, k, v, gate = (x.view(1, -1, HEADS, WIDTH) for x in streams)
    o, _ = kda_recurrent(q, k, v, gate, beta[None], a_log, dt_bias, bound, cu_seqlens=torch.tensor(ends))
    out = o.reshape(-1, HEADS * WIDTH)
    return [out, *torch.autograd.grad((out * weight).sum(), given)]


def cut(given: list[Tensor], ends: list[int], cuts: list[int], weight: Tensor, bound: float | None) -> list[Tensor]:
    """The same from ranges between `cuts`, each computed by itself with what its neighbours send."""
    mail: dict[tuple[int, bool], Tensor] = {}
    outs, losses = [], []
    leaves = [x.detach().requires_grad_() for x in given]
    for rank, (first, last) in enumerate(pairwise(cuts)):
        begin = max(end for end in ends if end <= first)
        inner = [end - first for end in ends if first < end < last]
        context = Neighbours(first - begin, last not in ends, mail, rank)
        layout = Layout([b - a for a, b in pairwise([0, *inner, last - first])], context=context)
        q, k, v, gate, beta = (x[first:last] for x in leaves[:5])
        qkv = extend(torch.cat([q, k, v], dim=1), layout)
        o, _ = chunked_kda(qkv, extend(gate, layout), extend(beta, layout), *leaves[5:], layout, bound=bound)
        outs.append(o.detach())
        losses.append((o * weight[first:last]).sum())
    assert not mail
    for loss in reversed(losses):
        loss.backward()
    assert not mail
    return [torch.cat(outs), *(x.grad for x in leaves if x.grad is not None)]


def check(lengths: list[int], cuts: list[int], seed: int, bound: float | None = -5.0) -> None:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    given_ = inputs(ends[-1], seed)
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(ends[-1], HEADS * WIDTH, dtype=torch.float64, generator=draw)
    for ours, theirs in zip(cut(given_, ends, cuts, weight, bound), whole(given_, ends, weight, bound), strict=True):
        # chunks cut at other rows sum in another order, and a gradient of 0 may come out as the difference of equals
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-13 + 1e-11 * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("bound", [-5.0, None])
def test_one_sequence_over_four_ranges(bound) -> None:
    check([60], [0, 20, 36, 37, 60], 0, bound)


def test_ranges_that_end_where_sequences_end() -> None:
    check([16, 5, 30], [0, 16, 21, 51], 1)


def test_a_range_that_ends_one_sequence_and_begins_another() -> None:
    check([30, 1, 1, 40], [0, 20, 50, 72], 2)


@settings(max_examples=12)
@given(data=st.data())
def test_any_cuts_of_any_sequences(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    n = sum(lengths)
    inner = data.draw(st.sets(st.integers(1, n - 1), max_size=4)) if n > 1 else set()
    check(lengths, [0, *sorted(inner), n], data.draw(st.integers(0, 99)))
