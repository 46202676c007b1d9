"""The sampler against loops in plain Python, and its frequencies against the probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.engine.sampling import device_sampler, sampler
from k3rl.types import SamplingParams


def reference(row: list[float], temperature: float, top_p: float, top_k: int, u: float, min_p=0.0, bias=()):
    """(id, logprob, kept ids) of one row, by the definition."""
    row = [value + dict(bias).get(i, 0.0) for i, value in enumerate(row)]
    size = len(row)
    allowed = [i for i in range(size) if row[i] > -math.inf]
    if temperature == 0:
        best = max(allowed, key=lambda i: (row[i], -i))
        return best, row[best] - _logsumexp([row[i] for i in allowed]), allowed
    scaled = [value / temperature for value in row]
    least = max(scaled) + math.log(min_p) if min_p else -math.inf
    ranked = sorted((i for i in allowed if scaled[i] >= least), key=lambda i: (-row[i], i))[: top_k or size]
    norm = _logsumexp([scaled[i] for i in ranked])
    sampling_mask, mass = [], 0.0
    for i in ranked:
        if top_p < 1 and mass >= top_p:
            break
        sampling_mask.append(i)
        mass += math.exp(scaled[i] - norm)
    sampling_mask.sort()
    norm = _logsumexp([scaled[i] for i in sampling_mask])
    cumulative = 0.0
    for i in sampling_mask:
        cumulative += math.exp(scaled[i] - norm)
        if cumulative > u:
            break
    return i, scaled[i] - norm, sampling_mask


def _logsumexp(values):
    top = max(values)
    return top + math.log(math.fsum(math.exp(value - top) for value in values))


def draw(rows, temperature, top_p, top_k, uniform):
    return sampler.sample(
        torch.tensor(rows), np.array(temperature, float), np.array(top_p, float), np.array(top_k), np.array(uniform)
    )


row_params = st.tuples(
    st.sampled_from([0.0, 0.3, 0.6, 1.0, 1.3, 4.0]),
    st.sampled_from([0.05, 0.31, 0.77, 0.98, 1.0]),
    st.sampled_from([0, 1, 2, 5, 9, 100]),
    st.floats(0, 1, exclude_max=True).map(lambda u: min(u, 0.9999)),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(row_params, min_size=1, max_size=6))
def test_rows_with_mixed_parameters_equal_the_definition(seed, params):
    logits = np.random.default_rng(seed).normal(size=(len(params), 9)).astype(np.float32) * 3
    draws = draw(logits, *zip(*params, strict=True))
    sampling_mask = dict(zip(draws.cut_rows.tolist(), draws.sampling_mask, strict=True))
    for index, (row, own) in enumerate(zip(logits.astype(float).tolist(), params, strict=True)):
        expected_id, expected_logprob, expected_kept = reference(row, *own)
        assert draws.ids[index] == expected_id
        assert draws.logprobs[index] == pytest.approx(expected_logprob, abs=1e-12)  # float64 sums of 9 terms
        if index in sampling_mask:
            assert np.flatnonzero(sampling_mask[index]).tolist() == expected_kept
        else:
            assert len(expected_kept) == 9


option_params = st.tuples(
    row_params,
    st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    st.dictionaries(st.integers(0, 7), st.sampled_from([-math.inf, -3.0, 0.5, 9.0]), max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(option_params, min_size=1, max_size=6))
def test_min_p_and_biases_in_a_mixed_batch_equal_the_definition(seed, params):
    logits = np.random.default_rng(seed).normal(size=(len(params), 9)).astype(np.float32) * 3
    temperature, top_p, top_k, uniform = zip(*(own for own, _, _ in params), strict=True)
    bias = [tuple(own.items()) for _, _, own in params]
    flat = [(row, token, value) for row, own in enumerate(bias) for token, value in own]
    biases = sampler.Biases(
        np.array([row for row, _, _ in flat], np.int64),
        np.array([token for _, token, _ in flat], np.int64),
        np.array([value for _, _, value in flat], np.float64),
        np.array([any(value == -math.inf for _, value in own) for own in bias]),
    )
    draws = sampler.sample(
        torch.tensor(logits),
        np.array(temperature, float),
        np.array(top_p, float),
        np.array(top_k),
        np.array(uniform),
        np.array([share for _, share, _ in params]),
        biases,
    )
    sampling_mask = dict(zip(draws.cut_rows.tolist(), draws.sampling_mask, strict=True))
    for index, ((own, share, _), row) in enumerate(zip(params, logits.astype(float).tolist(), strict=True)):
        expected_id, expected_logprob, expected_kept = reference(row, *own, share, bias[index])
        assert draws.ids[index] == expected_id
        assert draws.logprobs[index] == pytest.approx(expected_logprob, abs=1e-12)  # float64 sums of 9 terms
        if index in sampling_mask:
            assert np.flatnonzero(sampling_mask[index]).tolist() == expected_kept
        else:
            assert len(expected_kept) == 9


def test_samples_of_one_prompt_have_different_seeds_and_the_first_its_own():
    plain, seeded = SamplingParams(), SamplingParams(seed=-3)
    assert sampler.request_samples(plain, 3) == [plain] * 3, "the engine's number tells them apart"
    assert sampler.request_samples(seeded, 1) == [seeded]
    assert len({own.seed for own in sampler.request_samples(seeded, 50)}) == 50
    with pytest.raises(ValueError, match="at least 1"):
        sampler.request_samples(plain, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"stop": "text"}, "tuple"),
        ({"stop": ("",)}, "empty"),
        ({"logit_bias": ((1, 0.5), (1, 2.0))}, "twice"),
        ({"logit_bias": ((1, math.inf),)}, "-inf"),
        ({"logit_bias": ((1, math.nan),)}, "NaN"),
    ],
)
def test_impossible_options_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**changes)


def test_equal_logits_are_cut_and_chosen_by_lowest_id():
    rows = [[1.0, 3.0, 3.0, 3.0, 0.0]]
    assert draw(rows, [0.0], [1.0], [0], [0.9]).ids.tolist() == [1]
    assert draw(rows, [1.0], [1.0], [2], [0.9]).sampling_mask.tolist() == [[False, True, True, False, False]]
    assert draw(rows, [1.0], [0.5], [0], [0.9]).sampling_mask.tolist() == [[False, True, True, False, False]]


def test_the_most_likely_token_stays_however_small_top_p_is():
    draws = draw([[0.0, 5.0, 1.0]], [1.0], [1e-9], [0], [0.99])
    assert (draws.ids.tolist(), draws.logprobs.tolist()) == ([1], [0.0])


def test_extreme_uniforms_never_pick_a_token_without_mass():
    rows = [[-1e30, 0.0, 0.0, -1e30]] * 2
    assert draw(rows, [1.0, 1.0], [1.0, 1.0], [0, 0], [0.0, 1 - 2**-53]).ids.tolist() == [1, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_a_non_finite_logit_is_marked_and_the_others_are_drawn_as_without_it(bad):
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    broken = logits.clone()
    broken[1, 4] = bad
    ones, zeros, uniform = np.ones(3), np.zeros(3, np.int64), np.array([0.2, 0.5, 0.8])
    whole, partly = (sampler.sample(x, ones, ones, zeros, uniform) for x in (logits, broken))
    assert partly.finite.tolist() == [True, False, True]
    assert partly.ids[[0, 2]].tolist() == whole.ids[[0, 2]].tolist()
    assert partly.logprobs[[0, 2]].tolist() == whole.logprobs[[0, 2]].tolist()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.3, 0.9, 0), (1.0, 1.0, 5), (0.6, 0.8, 6)]
)
def test_frequencies_and_logprobs_follow_the_distribution(temperature, top_p, top_k):
    count, row = 20_000, np.random.default_rng(7).normal(size=12) * 1.5
    uniform = sampler.uniforms(np.full(count, 42, np.uint64), np.arange(count))
    draws = draw(np.tile(row, (count, 1)), *(np.full(count, x) for x in (temperature, top_p, top_k)), uniform)
    _, _, sampling_mask = reference(row.tolist(), temperature, top_p, top_k, 0.5)
    probability = np.zeros(12)
    probability[sampling_mask] = np.exp(row[sampling_mask] / temperature)
    probability /= probability.sum()
    observed = np.bincount(draws.ids, minlength=12)
    assert observed[probability == 0].sum() == 0
    expected = count * probability[sampling_mask]
    chi2 = float(((observed[sampling_mask] - expected) ** 2 / expected).sum())
    freedom = len(sampling_mask) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom), "4 sigma of a chi-square; the seed is fixed"
    np.testing.assert_allclose(np.exp(draws.logprobs), probability[draws.ids], rtol=1e-12)


def test_uniforms_fill_the_interval_along_seeds_and_along_positions():
    many, one = np.arange(40_000), np.zeros(40_000, np.int64)
    for u in (
        sampler.uniforms(np.full(40_000, 3, np.uint64), many),
        sampler.uniforms(many.astype(np.uint64), one + 5),
    ):
        assert ((u >= 0) & (u < 1)).all()
        chi2 = float(((np.bincount((u * 100).astype(int), minlength=100) - 400) ** 2 / 400).sum())
        assert chi2 < 99 + 4 * math.sqrt(2 * 99)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02  # 4 / sqrt(40,000)
        assert len(np.unique(u)) == len(u)


def test_a_uniform_depends_on_its_own_seed_and_position_only():
    seeds, positions = np.array([9, 1, 2**64 - 1], np.uint64), np.array([0, 7, 123_456])
    together = sampler.uniforms(seeds, positions)
    alone = [sampler.uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in (2, 0, 1)]
    assert together[[2, 0, 1]].tolist() == alone


def test_request_seeds_are_the_callers_or_differ_by_engine_and_number():
    assert sampler.request_seed(5, engine_seed=1, request=2) == 5
    assert sampler.request_seed(-1, engine_seed=1, request=2) == 2**64 - 1
    derived = {sampler.request_seed(None, engine, request) for engine in range(20) for request in range(20)}
    assert len(derived) == 400


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(option_params, min_size=1, max_size=5), st.booleans())
def test_a_device_leaves_and_draws_what_the_definition_says(seed, params, ties):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(params), 40)).astype(np.float32) * 3
    logits = np.round(logits) if ties else logits
    flat = [(*own, least) for own, least, _ in params]
    temperature, top_p, top_k, uniform, min_p = (np.array([one[i] for one in flat]) for i in range(5))
    given = torch.from_numpy(logits), temperature, uniform, top_p, top_k, min_p
    rows = np.flatnonzero((temperature > 0) & ((top_p < 1) | (top_k > 0) | (min_p > 0)))
    found = device_sampler.sample_cut(*given, rows)
    wanted = sampler.sample(given[0], temperature, top_p, top_k, uniform, min_p)
    assert np.array_equal(found.ids, wanted.ids)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-12)  # float64 sums in another order
    left = dict(zip(wanted.cut_rows.tolist(), wanted.kept.rows, strict=True))
    for row, ids in zip(rows.tolist(), found.kept.rows, strict=True):
        assert np.array_equal(ids, left.get(row, np.arange(40)))


@pytest.mark.parametrize("scale", [0.2, 6.0])
def test_sets_of_a_large_vocabulary_are_those_of_a_sort(scale):
    """Beyond the first logits that are put in order, too."""
    rows, size = 3, 5000
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(rows, size)) * scale).round(decimals=1)
    draws = sampler.sample(
        logits, np.ones(rows), np.array([0.95, 1.0, 0.6]), np.array([0, 2000, 0]), np.full(rows, 0.3)
    )
    for row, (p, k), ids in zip(logits, [(0.95, size), (1.0, 2000), (0.6, size)], draws.kept.rows, strict=True):
        order = np.argsort(-row.numpy(), kind="stable")[:k]
        share = torch.softmax(row[torch.from_numpy(order)], 0).numpy().cumsum()
        assert sorted(order[: int((share < p).sum()) + 1].tolist()) == ids.tolist()
