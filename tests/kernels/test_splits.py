"""Prefill in pieces, decode in both forms, prefill again: the references give the result of one pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.kernels.kda import PendingRows, flush_pending, kda_decode, kda_reference
from k3rl.kernels.kda.short_conv import short_conv_reference
from k3rl.kernels.norm.gated_norm import gated_norm_reference

_spec = importlib.util.spec_from_file_location("kda_layer", Path(__file__).with_name("layer.py"))
layer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layer)


def reference_layer(T: int) -> layer.Layer:
    def conv(xs, weights, history):
        return short_conv_reference(xs, weights, history=history)

    def run_kda(q, k, v, gate, beta, A_log, dt_bias, state):
        return kda_reference(q, k, v, gate, beta, A_log, dt_bias, -5.0, state)

    def step(*args):
        return kda_decode(*args[:-1], pending=args[-1])

    return layer.Layer(T, 8, torch.float64, conv, run_kda, gated_norm_reference, step, flush_pending)


@settings(max_examples=30)
@given(layer.PLANS, st.integers(1, 60))
def test_any_order_of_prefill_and_decode_equals_one_pass(plan, tokens):
    whole = reference_layer(tokens)
    y, state = whole.run([])
    y2, state2 = whole.run(plan)
    torch.testing.assert_close(y2, y, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state2, state, rtol=1e-9, atol=1e-10)


def decode_call(B: int, seed: int, H: int = 2, D: int = 8):
    g = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return [r(B, H, D), r(B, H, D), r(B, H, D), 3 * r(B, H, D), r(B, H), r(B, H, D)]


@pytest.mark.parametrize("bound", [-5.0, None])
@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 40), min_size=6, max_size=6),
    st.lists(
        st.tuples(st.permutations(range(4)), st.sampled_from(("plain", "pad", "fork", "no write", "reuse", "flush"))),
        min_size=1,
        max_size=24,
    ),
)
def test_deferred_writes_give_the_outputs_and_states_of_the_form_that_writes_each_token(bound, positions, steps):
    """Without a bound some gates pass -60 within a few tokens."""
    (_, _, _, _, _, _), D, H = decode_call(4, 0), 8, 2
    g = torch.Generator().manual_seed(1)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    shared = ([r(H * D, 4) for _ in range(3)], 0.2 * r(H), 0.2 * r(H * D), r(D))
    conv_pool, pool = r(6, 3, 3 * H * D), r(6, H, D, D)
    other_conv, other = conv_pool.clone(), pool.clone()
    pending = PendingRows.empty(pool)
    for buffer in (pending.keys, pending.updates, pending.decay):
        buffer.fill_(float("nan"))  # what no row was written to is never read
    pending.begin(torch.arange(6), torch.tensor(positions))
    for at, (order, event) in enumerate(steps):
        read = torch.tensor(order, dtype=torch.int32)
        write = read.clone()
        if event == "pad":
            read[0] = write[0] = -1
        elif event == "fork":
            write[0] = 4 + at % 2
        elif event == "no write":
            write[0] = -1
        elif event == "reuse":
            pool[order[0]] = other[order[0]] = 0.5
            pending.begin(torch.tensor([order[0]]))
        elif event == "flush":
            flush_pending(pool, pending, torch.tensor([order[0], -1]))
            torch.testing.assert_close(pool[order[0]], other[order[0]], rtol=1e-9, atol=1e-11)
        rows = decode_call(4, at)
        if bound is None:
            rows[3] = 4 * rows[3]
        y = kda_decode(
            *rows, *shared, conv_pool, pool, read, write, gate_lower_bound=bound, pending=pending
        )  # fmt: skip
        y2 = kda_decode(*rows, *shared, other_conv, other, read, write, gate_lower_bound=bound)
        torch.testing.assert_close(y, y2, rtol=1e-9, atol=1e-11)
    flush_pending(pool, pending, torch.arange(6))
    torch.testing.assert_close(pool, other, rtol=1e-9, atol=1e-11)
    assert torch.equal(conv_pool, other_conv)


def test_the_state_is_written_at_chunk_boundaries_only():
    D, H = 8, 2
    shared = (
        [torch.ones(H * D, 4, dtype=torch.float64) for _ in range(3)],
        torch.zeros(H),
        torch.zeros(H * D),
        torch.ones(D),
    )
    conv_pool, pool = torch.zeros(1, 3, 3 * H * D, dtype=torch.float64), torch.zeros(1, H, D, D, dtype=torch.float64)
    pending = PendingRows.empty(pool)
    pending.begin(torch.tensor([0]), torch.tensor([13]))
    index = torch.zeros(1, dtype=torch.int32)
    changed = []
    for t in range(13, 50):
        before = pool.clone()
        kda_decode(*decode_call(1, t), *shared, conv_pool, pool, index, index, pending=pending)
        if not torch.equal(pool, before):
            changed.append(t)
    assert changed == [15, 31, 47]
