"""The prefill step of fixed shapes against the ordinary path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.engine import Engine, EngineError, PrefixCache
from k3rl.engine.cache import MemoryPlan, StatePool
from k3rl.engine.compute.decode_graph import CapturedDecode
from k3rl.engine.compute.prefill_graph import RUNS, SEGMENTS, TOKENS, CapturedPrefill
from k3rl.types import SamplingParams

TOLERANCE = 1e-9  # float64: only the order of summation differs
ROWS, PAGE, CONTEXT = 4, 4, 64


@torch.inference_mode()
def paged(model, deferred: bool = False) -> StatePool:
    """A pool of empty rows, everything else in it NaN."""
    pool = StatePool(model, ROWS, True, MemoryPlan(ROWS, ROWS * CONTEXT // PAGE, PAGE, deferred))
    pool.free(range(ROWS + 1))
    pool.paged.every_latent[:, 1:].fill_(float("nan"))
    return pool


def started(model, deferred: bool = False) -> tuple[StatePool, CapturedPrefill]:
    pool = paged(model, deferred)
    pool.reset([0, 1, 2])
    return pool, CapturedPrefill(model, pool.paged, CONTEXT // PAGE, capture=False)


def close(got, wanted) -> None:
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=0)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=3, unique_by=lambda one: one[0]),
        min_size=1, max_size=4,
    ),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_split_over_any_rows_gives_what_whole_passes_give(model, steps, seed):
    pool, captured = started(model)
    rng = np.random.default_rng(seed)
    told = {row: np.zeros(0, np.int64) for row in range(3)}
    for chunks in steps:
        rows, counts = zip(*chunks, strict=True)
        fresh = [rng.integers(0, 38, count) for count in counts]
        pool.claim(rows, counts)
        last, routes = captured.run(model, rows, np.concatenate(fresh), counts)
        pieces = np.split(routes.numpy(), np.cumsum(counts)[:-1])
        for row, ids, hidden, chosen in zip(rows, fresh, last, pieces, strict=True):
            told[row] = np.append(told[row], ids)
            with torch.inference_mode():
                whole = model.hidden(torch.from_numpy(told[row])[None])
            close(hidden, whole.hidden[0, -1:])
            assert np.array_equal(np.sort(chosen, -1), np.sort(whole.routes[0, -len(ids) :].numpy(), -1))
    for row, ids in told.items():
        if len(ids):
            cache = model.new_cache(1)
            with torch.inference_mode():
                model.hidden(torch.from_numpy(ids)[None], cache=cache)
                view = pool.view([row])
                for layer in model.config.kda_layers:
                    close(view.recurrent(layer), cache.recurrent(layer))
                    close(view.conv(layer), cache.conv(layer))
                for layer in model.config.mla_layers:
                    close(view.latent(layer), cache.latent(layer))


def test_padding_and_segments_that_are_not_there_write_nothing(model):
    pool, captured = started(model)
    pool.claim([0, 1, 2], [5, 6, 7])
    captured.run(model, [0, 1, 2], np.arange(18), [5, 6, 7])
    cache = pool.paged
    before = [tensor.clone() for tensor in (cache.every_recurrent, cache.every_conv, cache.every_latent)]
    pool.claim([1], [2])
    last, _ = captured.run(model, [1], np.array([3, 4]), [2])
    pool.claim([2, 0], [1, 1])
    captured.run(model, [2, 0], np.array([3, 4]), [1, 1])  # one of three shapes has five segments that are not there
    assert last[0].isfinite().all()
    mine = set(range(3))
    others = [row for row in range(ROWS + 1) if row not in mine]
    for now, then in zip((cache.every_recurrent, cache.every_conv), before, strict=False):
        assert now[:, others].isnan().all()
        assert not torch.equal(now[:, 1], then[:, 1])
    table = cache.table
    pages = {page for row in mine for page in table.table[row, : table.held[row]].tolist()}
    free = [page for page in range(1, table.pages + 1) if page not in pages]
    assert cache.every_latent[:, free].isnan().all()
    assert not cache.every_latent[:, 0].any(), "page 0 stays zero"
    first = table.table[0, 0]
    assert torch.equal(cache.every_latent[:, first], before[2][:, first]), "what was there is not touched"


def test_a_shape_of_padding_alone_changes_no_state(model):
    """As shapes warm up before a capture."""
    pool, captured = started(model)
    pool.claim([0], [5])
    captured.run(model, [0], np.arange(5), [5])
    cache = pool.paged
    for slot in (0, 3):  # a live row, and one that is nobody's
        before = [tensor.clone() for tensor in (cache.every_recurrent, cache.every_conv, cache.every_latent[:, :-1])]
        bucket = captured.bucket(9, 2)
        bucket.inputs.clear(slot, cache.scratch_place)
        with torch.inference_mode():
            bucket.step()
        for now, then in zip(
            (cache.every_recurrent, cache.every_conv, cache.every_latent[:, :-1]), before, strict=True
        ):
            assert torch.equal(now.nan_to_num(0.5), then.nan_to_num(0.5))


def test_a_chunk_goes_on_from_tokens_that_steps_deferred(build_model):
    """Decoded ones that the recurrent states have not taken in."""
    model = build_model(dtype=torch.float32)
    pool, captured = started(model, deferred=True)
    ids = np.arange(1, 12)
    pool.claim([0], [len(ids)])
    captured.run(model, [0], ids[:3], [3])
    for token in ids[3:6]:
        CapturedDecode(model, pool.paged).run(model, [0], np.array([token]))
    assert pool.paged.deferred.defers[0]
    last, _ = captured.run(model, [0], ids[6:], [5])
    whole = model.hidden(torch.from_numpy(ids)[None]).hidden[0, -1:].detach()
    assert float((last[0] - whole).abs().max()) < 2e-4 * float(whole.abs().max())  # float32; MXFP8 may round otherwise


def test_a_row_without_room_is_refused(model):
    pool, captured = started(model)
    pool.claim([0], [PAGE])
    with pytest.raises(EngineError, match="claim it before"):
        captured.run(model, [0], np.arange(PAGE + 1), [PAGE + 1])


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "seed": 1, **changes})


def fixed_engine(model, **options) -> Engine:
    engine = Engine(
        model, max_running=3, max_context=CONTEXT, page_tokens=PAGE, poison=True, static_decode=True, **options
    )
    assert engine.captured_prefill is not None
    return engine


@pytest.mark.parametrize("block", [4, 6])  # whole pages, and not
def test_turns_behind_cached_prefixes_are_sampled_as_without_a_cache(model, run_alone, block):
    engine = fixed_engine(model, prefix_cache=PrefixCache.of_bytes(1 << 30, block=block))
    prompt = [3, 1, 4, 1, 5, 9, 2]
    for turn in range(4):
        own = [params(seed=turn), params(seed=turn + 50, return_routes=True)]
        got = engine.generate([prompt, prompt], own)
        for one, asked in zip(got, own, strict=True):
            ids, logprobs = run_alone(model, prompt, asked)
            assert list(one.token_ids) == ids
            close(one.logprobs, logprobs)
            assert one.cached_tokens == (len(prompt) - 4 if turn else 0)  # three new ones, and the last sampled one
        assert len(got[1].routes) == len(prompt) + 3
        prompt = [*prompt, *got[1].token_ids, 7, turn, 8]  # the one whose routes are known


def test_more_than_a_shape_holds_runs_in_turn_and_longer_chunks_take_the_ordinary_path(model, run_alone, monkeypatch):
    monkeypatch.setattr("k3rl.engine.compute.prefill_graph.TOKENS", (4, 8))
    monkeypatch.setattr("k3rl.engine.compute.prefill_graph.SEGMENTS", (1, 2))
    cases = {"longer": [list(range(1, 30)), [4]], "tokens": [[4] * 7, [5, 6], [7, 8, 9]], "rows": [[5], [6], [7]]}
    for name, prompts in cases.items():
        engine = fixed_engine(model)
        for got, prompt in zip(engine.generate(prompts, params()), prompts, strict=True):
            ids, logprobs = run_alone(model, prompt, params())
            assert list(got.token_ids) == ids
            close(got.logprobs, logprobs)
        assert bool(engine.captured_prefill.shapes) == (name != "longer")


def test_a_new_version_of_the_weights_is_what_the_next_chunk_is_computed_by(build_model, run_alone):
    model, other = build_model(seed=3), build_model(seed=9)
    engine = fixed_engine(model)
    engine.generate([[1, 2, 3]], params())
    tensors = dict(official_tensors(other))
    engine.start_weight_update(1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(1)
    (got,) = engine.generate([[1, 2, 3]], params())
    ids, logprobs = run_alone(other, [1, 2, 3], params())
    assert list(got.token_ids) == ids
    close(got.logprobs, logprobs)


def test_shapes_hold_what_they_are_for_and_a_cpu_captures_nothing(model):
    engine = fixed_engine(model)
    engine.generate([[1] * 20, [2] * 3], params())
    assert engine.captured_prefill.buckets.captured == 0
    assert all(tokens in TOKENS and segments in SEGMENTS for tokens, segments in engine.captured_prefill.shapes)
    assert Engine(model).captured_prefill is None, (
        "a CPU computes prompts by the ordinary path unless it is told otherwise"
    )


def test_images_adapters_and_long_chunks_take_the_ordinary_path(model, monkeypatch):
    captured = started(model)[1]
    assert captured.takes(model, np.array([1, 2]), [2])
    assert not captured.takes(model, np.array([1, -2]), [2]), "a row of an image"
    assert not captured.takes(model, np.ones(TOKENS[-1] + 1, np.int64), [TOKENS[-1] + 1])
    many = RUNS * SEGMENTS[-1]
    assert captured.takes(model, np.ones(many, np.int64), [1] * many)
    assert not captured.takes(model, np.ones(many + 1, np.int64), [1] * (many + 1))
    monkeypatch.setattr(model, "adapter", object())
    assert not captured.takes(model, np.array([1, 2]), [2])
