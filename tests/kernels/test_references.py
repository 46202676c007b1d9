"""The torch definitions of short convolution, gated norm and the decode step, against formulas written another way."""

from __future__ import annotations

import pytest
import torch

from k3rl.kernels.kda import sequence_tables
from k3rl.kernels.kda.decode import kda_decode
from k3rl.kernels.kda.operator import kda
from k3rl.kernels.kda.short_conv import short_conv
from k3rl.kernels.norm.gated_norm import gated_norm


def direct_conv(x: torch.Tensor, w: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """y of one sequence [T, C] with past [3, C], by torch's own convolution."""
    if not x.shape[0]:
        return x
    whole = torch.cat([past, x]).t()[None]
    return torch.nn.functional.silu(torch.nn.functional.conv1d(whole, w[:, None], groups=w.shape[0])[0].t())


@pytest.mark.parametrize("lengths", [[5], [1], [2, 3], [0, 1, 4, 2]])
def test_conv_matches_torch_and_hands_on_the_last_three_inputs(lengths):
    g = torch.Generator().manual_seed(1)
    n, C, T = len(lengths), 4, sum(lengths)
    xs = [torch.randn(1, T + 2, C, generator=g, dtype=torch.float64) for _ in range(3)]
    ws = [torch.randn(C, 4, generator=g, dtype=torch.float64) for _ in range(3)]
    history = torch.randn(n, 3, 3 * C, generator=g, dtype=torch.float64)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    ys, new = short_conv(xs, ws, history=history, cu_seqlens=ends)
    for s, (x, w, y) in enumerate(zip(xs, ws, ys, strict=True)):
        assert not y[0, T:].any()
        for i in range(n):
            past, rows = history[i, :, s * C : (s + 1) * C], x[0, ends[i] : ends[i + 1]]
            torch.testing.assert_close(y[0, ends[i] : ends[i + 1]], direct_conv(rows, w, past))
            torch.testing.assert_close(new[i, :, s * C : (s + 1) * C], torch.cat([past, rows])[-3:])


def test_conv_in_one_token_steps_equals_one_pass():
    g = torch.Generator().manual_seed(2)
    x, w = torch.randn(2, 6, 4, generator=g, dtype=torch.float64), torch.randn(4, 4, generator=g, dtype=torch.float64)
    (whole,), last = short_conv([x], [w])
    state, parts = None, []
    for t in range(6):
        (y,), state = short_conv([x[:, t : t + 1]], [w], history=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


def test_conv_gradients_stay_within_a_sequence():
    x = torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True)
    (y,), _ = short_conv([x], [torch.ones(2, 4, dtype=torch.float64)], cu_seqlens=torch.tensor([0, 3, 6]))
    (grad,) = torch.autograd.grad(y[:, 3:].sum(), x)
    assert not grad[:, :3].any()
    assert grad[:, 3:].all()


def test_gated_norm_matches_rms_norm_times_sigmoid_with_zero_gate_and_expanded_gradient():
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(8, dtype=torch.float64, requires_grad=True)
    gate = torch.zeros(3, 2, 8, dtype=torch.float64, requires_grad=True)
    y = gated_norm(x, gate, w)
    torch.testing.assert_close(y, 0.5 * torch.nn.functional.rms_norm(x, (8,), w, 1e-5))
    grads = torch.autograd.grad(y.sum(), [x, gate, w])
    half = torch.nn.functional.rms_norm(x, (8,), w, 1e-5)
    want = torch.autograd.grad(0.5 * half.sum(), [x, w])
    torch.testing.assert_close(grads[0], want[0])
    torch.testing.assert_close(grads[2], want[1])
    torch.testing.assert_close(grads[1], 0.25 * half.detach())


def test_conv_and_norm_name_the_argument_that_does_not_fit():
    with pytest.raises(ValueError, match="weights must be"):
        short_conv([torch.zeros(1, 2, 4)], [torch.zeros(3, 4)])
    with pytest.raises(ValueError, match="gate must be"):
        gated_norm(torch.zeros(2, 4), torch.zeros(2, 3), torch.zeros(4))


def decode_arguments(B: int, slots: int, H: int = 2, D: int = 8):
    g = torch.Generator().manual_seed(3)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    rows = [r(B, H, D), r(B, H, D), r(B, H, D), r(B, H, D), r(B, H), r(B, H, D)]
    shared = [[r(H * D, 4) for _ in range(3)], 0.2 * r(H), 0.2 * r(H * D), r(D)]
    return rows, shared, r(slots, 3, 3 * H * D), r(slots, H, D, D)


def test_decode_steps_equal_prefill_of_the_same_tokens():
    (q, k, v, z, beta, out), shared, conv_pool, pool = decode_arguments(B=5, slots=1)
    conv_pool, pool = torch.zeros_like(conv_pool), torch.zeros_like(pool)
    index = torch.zeros(1, dtype=torch.int64)
    ys = [
        kda_decode(*(x[t : t + 1] for x in (q, k, v, z, beta, out)), *shared, conv_pool, pool, index, index)
        for t in range(5)
    ]
    weights, A_log, dt_bias, norm = shared
    convolved, history = short_conv([x.view(1, 5, 16) for x in (q, k, v)], weights)
    o, S = kda(*(x.view(1, 5, 2, 8) for x in convolved), z[None], beta[None], A_log, dt_bias)
    torch.testing.assert_close(torch.cat(ys), gated_norm(o[0], out, norm))
    torch.testing.assert_close(pool, S)
    torch.testing.assert_close(conv_pool, history)


def test_decode_forks_and_leaves_padding_and_other_slots_alone():
    rows, shared, conv_pool, pool = decode_arguments(B=4, slots=6)
    before = conv_pool.clone(), pool.clone()
    read, write = torch.tensor([[2, 2], [0, 1], [-1, -1], [0, -1]]).t()  # strided, as a slice of a table is
    y = kda_decode(*rows, *shared, conv_pool, pool, read, write)
    assert not y[2].any()
    for slot in (0, 3, 4, 5):
        assert torch.equal(conv_pool[slot], before[0][slot])
        assert torch.equal(pool[slot], before[1][slot])
    for row, slot in ((0, 2), (1, 0)):
        one = [before[0][slot : slot + 1].clone(), before[1][slot : slot + 1].clone()]
        index = torch.zeros(1, dtype=torch.int64)
        alone = kda_decode(*(x[row : row + 1] for x in rows), *shared, *one, index, index)
        torch.testing.assert_close(y[row : row + 1], alone)
        torch.testing.assert_close(pool[int(write[row])], one[1][0])


def test_tables_of_marked_ends_are_made_once_and_others_at_each_call():
    ends, made = torch.tensor([0, 3], dtype=torch.int32), []
    for _ in range(2):
        sequence_tables.table(ends, "a", lambda: made.append(1))
    assert len(made) == 2
    assert not sequence_tables.covers(ends)
    assert sequence_tables.covers(sequence_tables.covering(ends))
    first = sequence_tables.table(ends, "a", object)
    sequence_tables.table(ends, "b", object)
    assert sequence_tables.table(ends, "a", object) is first
    assert sequence_tables.covers(ends.contiguous()), "what is no copy is marked too"
    assert not sequence_tables.covers(ends.clone())
