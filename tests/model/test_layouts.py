"""The same tokens give the same numbers, however they are packed, cut, or accompanied.

Everything in float64 with 1e-9: summation order is all that may differ, and it moves values of order 1 by 1e-14.
MXFP8 activations are on in some tests; a rounding boundary closer than 1e-14 does not occur with these seeds.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3rl.model import InputError, LayoutError

TOLERANCE = 1e-9
few = settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
lengths_of_some = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def sequences(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 500, (1, n), generator=generator) for n in lengths]


def bounds(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def gradients(model, loss: Tensor) -> dict[str, Tensor]:
    named = [(n, p) for n, p in model.official_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    return {n: g for (n, _), g in zip(named, found, strict=True) if g is not None}


@given(lengths=lengths_of_some, activations=st.sampled_from(["none", "mxfp8"]))
@few
def test_packed_equals_separate_forward_and_backward(nano, lengths, activations) -> None:
    model = nano(activations=activations)
    parts = sequences(lengths)
    packed = model(torch.cat(parts, dim=1), cu_seqlens=bounds(lengths, torch.int32))
    alone = [model(part) for part in parts]
    separate = torch.cat([out.logits for out in alone], dim=1)
    assert (packed.logits - separate).abs().max() < TOLERANCE
    assert torch.equal(packed.routes, torch.cat([out.routes for out in alone], dim=1))
    weight = torch.randn(separate.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, theirs = gradients(model, (packed.logits * weight).sum()), gradients(model, (separate * weight).sum())
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= TOLERANCE * gradient.norm().clamp_min(1e-3), name


@given(data=st.data(), lengths=lengths_of_some)
@few
def test_any_cut_into_cached_pieces_equals_one_pass(nano, data, lengths) -> None:
    """Each call advances some rows by any number of tokens, so prefill and one-token decode mix."""
    model = nano(activations="mxfp8")
    parts = sequences(lengths)
    whole = [model(part).logits[0] for part in parts]
    rows = torch.tensor(data.draw(st.permutations(range(len(lengths) + 2))))[: len(lengths)]
    cache = model.new_cache(len(lengths) + 2)
    done = [0] * len(lengths)
    got: list[list[Tensor]] = [[] for _ in lengths]
    while unfinished := [i for i, n in enumerate(lengths) if done[i] < n]:
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        take = [data.draw(st.sampled_from([1, 1, 2, 5, 16, 40])) for _ in chosen]
        take = [min(t, lengths[i] - done[i]) for i, t in zip(chosen, take, strict=True)]
        tokens = [parts[i][:, done[i] : done[i] + t] for i, t in zip(chosen, take, strict=True)]
        view = cache.select(rows[chosen])
        out = model(torch.cat(tokens, dim=1), cu_seqlens=bounds(take), cache=view)
        for i, t, logits in zip(chosen, take, out.logits[0].split(take), strict=True):
            got[i].append(logits)
            done[i] += t
    for pieces, expected in zip(got, whole, strict=True):
        assert (torch.cat(pieces) - expected).abs().max() < TOLERANCE
    assert cache.lengths[rows].tolist() == lengths


def test_a_sequence_does_not_feel_its_batch(nano) -> None:
    model = nano(activations="mxfp8")
    one = sequences([23], seed=3)[0]
    others = torch.cat(sequences([23] * 6, seed=4))
    batch = model(torch.cat([others[:3], one, others[3:]])).logits[3]
    assert (batch - model(one).logits[0]).abs().max() < TOLERANCE


def test_equal_batch_equals_packed(nano) -> None:
    model = nano()
    batch = torch.cat(sequences([19] * 3))
    packed = model(batch.view(1, -1), cu_seqlens=bounds([19] * 3))
    out = model(batch)
    assert torch.equal(out.logits.view(1, -1, out.logits.shape[-1]), packed.logits)
    assert out.routes.shape == (3, 19, 4, 2)
    assert out.routes.dtype == torch.int16


def test_replayed_routes_give_the_same_numbers_and_other_routes_do_not(nano) -> None:
    model = nano()
    ids = sequences([30])[0]
    out = model(ids)
    same = model(ids, routes=out.routes.flip(-1))
    assert torch.equal(same.routes.sort(-1).values, out.routes.sort(-1).values)
    assert (same.logits - out.logits).abs().max() < TOLERANCE
    other = model(ids, routes=(out.routes + 1) % 16)
    assert torch.equal(other.routes, (out.routes + 1) % 16)
    assert (other.logits - out.logits).abs().max() > 1e-3


def test_replayed_routes_still_give_the_router_a_gradient(nano) -> None:
    model = nano()
    ids = sequences([12])[0]
    routes = model(ids).routes
    gate = model.language_model.model.layers[1].block_sparse_moe.gate.weight
    (free,) = torch.autograd.grad(model(ids).logits.square().sum(), gate)
    (replayed,) = torch.autograd.grad(model(ids, routes=routes).logits.square().sum(), gate)
    assert free.norm() > 0
    assert (free - replayed).norm() < TOLERANCE * free.norm()


def test_float32_decode_agrees_with_the_training_forward(nano) -> None:
    """The learner recomputes what the engine sampled: 1e-5 in the mean is what the design asks of k3-nano."""
    model = nano(dtype=torch.float32)
    ids = torch.cat(sequences([60] * 4))
    trained = model(ids).logits.log_softmax(-1)
    cache = model.new_cache(4)
    steps = [model(ids[:, :20], cache=cache).logits]
    steps += [model(ids[:, t : t + 1], cache=cache).logits for t in range(20, 60)]
    difference = (torch.cat(steps, dim=1).log_softmax(-1) - trained).abs()
    assert difference.mean() < 1e-5
    assert difference.max() < 5e-4


def test_bfloat16_runs_whole_with_wide_states(nano) -> None:
    model = nano(dtype=torch.bfloat16)
    ids = sequences([21])[0]
    out = model(ids)
    out.logits.sum().backward()
    assert out.logits.dtype == torch.float32
    for name, parameter in model.official_parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all()), name
    cache = model.new_cache(1)
    model(ids, cache=cache)
    step = model(ids[:, :1], cache=cache)
    assert bool(step.logits.isfinite().all())
    assert cache.recurrent(0).dtype == torch.float32
    assert cache.latent(3).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("ids", "more", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, "must be [B, T]"),
        (torch.zeros(2, 3, dtype=torch.int64), {"cu_seqlens": torch.tensor([0, 6])}, "packed input is [1, N]"),
        (torch.zeros(1, 3, dtype=torch.int64), {"routes": torch.zeros(1, 3, 4, 1)}, "routes must be"),
        (torch.zeros(1, 3, dtype=torch.int64), {"pixel_values": torch.zeros(4, 3, 14, 14)}, "no vision tower"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(nano, ids, more, message) -> None:
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        nano(dtype=torch.float32)(ids, **more)


@pytest.mark.parametrize("cu_seqlens", [[0, 2], [1, 3], [0, 2, 2, 3], [3]])
def test_bounds_that_do_not_cover_the_tokens_are_refused(nano, cu_seqlens) -> None:
    with pytest.raises(LayoutError):
        nano(dtype=torch.float32)(torch.zeros(1, 3, dtype=torch.int64), cu_seqlens=torch.tensor(cu_seqlens))


def test_a_cache_of_another_size_is_refused(nano) -> None:
    model = nano(dtype=torch.float32)
    with pytest.raises(InputError, match=r"cache\.select"):
        model(torch.zeros(2, 3, dtype=torch.int64), cache=model.new_cache(3))


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_sequence_of_nan_breaks_no_other(nano, broken) -> None:
    """Packed training rows, prefill and decode; token 7 is NaN and stands in one sequence only."""
    model = nano(activations="mxfp8")
    lengths = [9, 30, 4]
    parts = [part.clamp_min(8) for part in sequences(lengths)]
    clean = [model(part).logits[0] for part in parts]
    with torch.no_grad():
        model.language_model.model.embed_tokens.weight[7] = float("nan")
    parts[broken] = torch.full_like(parts[broken], 7)
    packed = torch.cat(parts, dim=1)
    cache = model.new_cache(3)
    model(torch.cat([part[:, :-2] for part in parts], dim=1), cu_seqlens=bounds([n - 2 for n in lengths]), cache=cache)
    model(torch.cat([part[:, -2:-1] for part in parts]), cache=cache)
    last = model(torch.cat([part[:, -1:] for part in parts]), cache=cache).logits
    out = model(packed, cu_seqlens=bounds(lengths)).logits[0].split(lengths)
    for index, expected in enumerate(clean):
        if index == broken:
            assert bool(out[index].isnan().all())
        else:
            assert (out[index] - expected).abs().max() < TOLERANCE
            assert (last[index, 0] - expected[-1]).abs().max() < TOLERANCE
