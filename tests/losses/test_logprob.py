"""Logprobs by runs of rows against the plain table, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3rl.losses import logprob
from k3rl.losses.logprob import target_logprobs
from k3rl.packed import SamplingMasks


def case(targets: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(targets * 1000 + vocabulary)
    hidden = torch.randn(targets, 8, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (targets,), generator=draw)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = hidden.double() @ weight.double().t() / (temperature or 1.0)
    return torch.distributions.Categorical(logits=logits).log_prob(targets)


@given(st.integers(1, 40), st.integers(2, 30), st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.integers(1, 200))
def test_runs_of_any_size_give_the_values_and_gradients_of_the_table(targets, vocabulary, temperature, limit) -> None:
    hidden, weight, chosen = case(targets, vocabulary, torch.float64)
    before, logprob.TABLE_ELEMENTS = logprob.TABLE_ELEMENTS, limit
    try:
        got, entropy = target_logprobs(hidden, weight, chosen, temperature)
        coefficients = torch.arange(targets, dtype=torch.float64) - 3
        found = torch.autograd.grad((got * coefficients).sum(), [hidden, weight])
    finally:
        logprob.TABLE_ELEMENTS = before
    want = plain(hidden, weight, chosen, temperature)
    wanted = torch.autograd.grad((want * coefficients).sum(), [hidden, weight])
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)  # float64 sums in another order
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    logits = hidden.detach() @ weight.detach().t() / (temperature or 1.0)
    torch.testing.assert_close(
        entropy, torch.distributions.Categorical(logits=logits).entropy(), rtol=1e-10, atol=1e-10
    )
    assert not entropy.requires_grad


@given(st.data(), st.integers(1, 12), st.integers(2, 20), st.sampled_from([0.3, 1.0]), st.integers(1, 200))
def test_a_target_with_a_sampling_mask_is_scored_by_the_softmax_over_that_set(
    data, targets, vocabulary, temperature, limit
):
    hidden, weight, chosen = case(targets, vocabulary, torch.float64)
    parts, sets = [], []
    for target in chosen.tolist():
        others = data.draw(st.none() | st.sets(st.integers(0, vocabulary - 1), max_size=6))
        sets.append(list(range(vocabulary)) if others is None else sorted(others | {target}))
        parts.append(1 if others is None else SamplingMasks.of([np.array(sets[-1])]))
    before, logprob.TABLE_ELEMENTS = logprob.TABLE_ELEMENTS, limit
    try:
        got, entropy = target_logprobs(hidden, weight, chosen, temperature, SamplingMasks.join(parts))
        coefficients = torch.arange(targets, dtype=torch.float64) - 3
        found = torch.autograd.grad((got * coefficients).sum(), [hidden, weight])
    finally:
        logprob.TABLE_ELEMENTS = before
    want, spread = [], []
    for row, target, sampling_mask in zip(
        hidden, chosen.tolist(), sets, strict=True
    ):  # the table of the kept columns alone
        small = torch.distributions.Categorical(logits=weight[sampling_mask] @ row / temperature)
        want.append(small.log_prob(torch.tensor(sampling_mask.index(target))))
        spread.append(small.entropy())
    wanted = torch.autograd.grad((torch.stack(want) * coefficients).sum(), [hidden, weight])
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-10, atol=1e-11)  # float64 sums in another order
    torch.testing.assert_close(entropy, torch.stack(spread).detach(), rtol=1e-10, atol=1e-10)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_are_computed_in_float32(dtype) -> None:
    hidden, weight, chosen = case(50, 20, dtype)
    before, logprob.TABLE_ELEMENTS = logprob.TABLE_ELEMENTS, 100
    try:
        got, _ = target_logprobs(hidden, weight, chosen, 0.7)
        got.sum().backward()
    finally:
        logprob.TABLE_ELEMENTS = before
    assert got.dtype == torch.float32
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, dtype)
    # Products of 8 terms in float32, from inputs that float64 reads alike.
    torch.testing.assert_close(got.double(), plain(hidden, weight, chosen, 0.7), rtol=1e-5, atol=1e-5)


def test_a_large_table_is_never_made() -> None:
    hidden, weight, chosen = case(300, 50, torch.float32)
    before, logprob.TABLE_ELEMENTS = logprob.TABLE_ELEMENTS, 1000
    largest = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            target_logprobs(hidden, weight, chosen)
    finally:
        logprob.TABLE_ELEMENTS = before
    assert largest == hidden.numel()  # 300 x 8; the table would be 300 x 50


def test_no_targets_give_no_logprobs() -> None:
    hidden, weight, chosen = case(0, 5, torch.float32)
    assert [tuple(part.shape) for part in target_logprobs(hidden, weight, chosen)] == [(0,), (0,)]
