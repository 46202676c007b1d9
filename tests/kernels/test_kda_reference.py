"""The torch definition of KDA against golden vectors (FLA's naive recurrence in float64) and against itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from k3rl.kernels.kda.operator import kda, kda_recurrent, kda_reference

GOLDEN = Path(__file__).parents[1] / "golden" / "kda"
CASES = {case["name"]: case for case in json.loads((GOLDEN / "meta.json").read_text())["cases"]}
INPUTS = ("q", "k", "v", "z", "beta_logit", "A_log", "dt_bias", "S0")
# Relative to the largest absolute value; float64 is limited by the float32 storage of the golden numbers.
TOLERANCE = {torch.float64: (1e-6, 1e-6), torch.float32: (5e-5, 5e-4)}


def golden(name: str) -> dict[str, torch.Tensor]:
    tensors = load_file(GOLDEN / "kda.safetensors")
    return {key.split(".", 1)[1]: value for key, value in tensors.items() if key.startswith(name + ".")}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def inputs(T: int, H: int = 2, K: int = 8, V: int = 6, B: int = 1, seed: int = 0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)  # noqa: E731
    return [r(B, T, H, K), r(B, T, H, K), r(B, T, H, V), 2 * r(B, T, H, K), r(B, T, H), 0.3 * r(H), 0.3 * r(H * K)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("run", [kda_reference, kda_recurrent])
@pytest.mark.parametrize("name", CASES)
def test_output_state_and_gradients_match_golden(name, run, dtype):
    t = golden(name)
    args = {key: t[key].to(dtype).clone().requires_grad_() for key in INPUTS if key in t}
    o, S = run(*[args[key] for key in INPUTS[:7]], CASES[name]["lower_bound"], args.get("S0"), t.get("cu_seqlens"))
    ((o * t["wo"].to(dtype)).sum() + (S * t["wS"].to(dtype)).sum()).backward()
    forward, backward = TOLERANCE[dtype]
    assert error(o, t["o"]) < forward
    assert error(S, t["S"]) < forward
    for key, value in args.items():
        assert error(value.grad, t[f"grad.{key}"]) < backward, key


def test_public_operator_is_the_reference_on_a_cpu():
    args = inputs(40)
    for got, want in zip(kda(*args), kda_reference(*args), strict=True):
        assert torch.equal(got, want)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 1000))
def test_packed_equals_separate_and_rows_past_the_end_are_zero(lengths, tail, seed):
    total = sum(lengths)
    args = inputs(total + tail, seed=seed)
    S0 = torch.randn(len(lengths), 2, 8, 6, dtype=torch.float64)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    o, S = kda(*args, initial_state=S0, cu_seqlens=ends)
    assert torch.equal(o[:, total:], torch.zeros_like(o[:, total:]))
    for s, (first, last) in enumerate(itertools.pairwise(ends)):
        part = [x[:, first:last] for x in args[:5]]
        o1, S1 = kda_recurrent(*part, *args[5:], initial_state=S0[s : s + 1])
        torch.testing.assert_close(o[:, first:last], o1, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(S[s : s + 1], S1, rtol=1e-9, atol=1e-10)


def test_no_sequence_with_tokens_hands_the_initial_state_through():
    args = inputs(3)
    S0 = torch.randn(2, 2, 8, 6, dtype=torch.float64)
    o, S = kda(*args, initial_state=S0, cu_seqlens=torch.tensor([0, 0, 0]))
    assert torch.equal(S, S0)
    assert not o.any()


def test_later_tokens_change_neither_earlier_outputs_nor_their_gradients():
    args = [x.requires_grad_() for x in inputs(50)]
    changed = [x.detach().clone().requires_grad_() for x in args]
    with torch.no_grad():
        for x in changed[:5]:
            x[:, 21:] += 1.0
    grads = []
    for a in (args, changed):
        o = kda(*a)[0][:, :21]
        grads.append((o, torch.autograd.grad(o.sum(), a[:5])))
    assert torch.equal(grads[0][0], grads[1][0])
    for x, y in zip(grads[0][1], grads[1][1], strict=True):
        assert torch.equal(x[:, :21], y[:, :21])


@pytest.mark.parametrize("splits", [[1, 1, 46], [17, 31], [32, 15, 1]])
def test_prefill_in_pieces_then_decode_equals_one_pass(splits):
    args = inputs(48)
    o, S = kda(*args)
    state, parts = None, []
    for piece in zip(*(x.split(splits, 1) for x in args[:5]), strict=True):
        part, state = kda(*piece, *args[5:], initial_state=state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, S, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("A", [-20.0, 0.0, 20.0, 80.0])
@pytest.mark.parametrize("bias", [-200.0, 200.0])
def test_saturated_gates_stay_finite_forward_and_backward(A, bias):
    args = inputs(40, dtype=torch.float32)
    args[5], args[6] = torch.full_like(args[5], A), torch.full_like(args[6], bias)
    args = [x.requires_grad_() for x in args]
    o, S = kda(*args)
    for value in (o, S, *torch.autograd.grad(o.sum() + S.sum(), args)):
        assert torch.isfinite(value).all()


def test_states_are_float32_for_bf16_rows_and_outputs_keep_the_dtype():
    args = [x.bfloat16() for x in inputs(20, dtype=torch.float32)]
    o, S = kda(*args)
    assert o.dtype == torch.bfloat16
    assert S.dtype == torch.float32


def test_wrong_arguments_are_named():
    q, k, v, z, beta, A_log, dt_bias = inputs(8)
    with pytest.raises(ValueError, match="gate_lower_bound"):
        kda(q, k, v, z, beta, A_log, dt_bias, gate_lower_bound=-5.5)
    with pytest.raises(ValueError, match=r"A_log.*padded"):
        kda(q, k, v, z, beta, torch.zeros(128), dt_bias)
    with pytest.raises(ValueError, match="k must have shape"):
        kda(q, k[:, :, :1], v, z, beta, A_log, dt_bias)
    with pytest.raises(ValueError, match="B must be 1"):
        kda(*inputs(8, B=2), cu_seqlens=torch.tensor([0, 8]))
