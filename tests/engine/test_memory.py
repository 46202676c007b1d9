"""Bounded memory: admission by pages, preemption, and the paged cache against the model's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from k3rl.checkpoint import manifest_of
from k3rl.checkpoint.hf import official_tensors
from k3rl.engine import Engine, EngineError, PrefixCache
from k3rl.engine.paged import PagedCache
from k3rl.engine.scheduler import Scheduler
from k3rl.types import SamplingParams, StopReason

TOLERANCE = 1e-9  # float64: preemption computes a state again in another order of summation
PROMPTS = [[1], [5, 9, 2], [7, 7, 7, 7, 3, 30, 11, 2, 18], list(range(1, 24))]
CONTEXT, PAGE = 48, 4


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "seed": 1, **changes})


def bounded(model, rows: int, pages: int, **options) -> Engine:
    """An engine whose memory holds `rows` rows, the parked state and `pages` pages."""
    cache = model.new_cache(1)
    cache.reserve(1)
    slot = sum(cache.recurrent(n).nbytes + cache.conv(n).nbytes for n in model.config.kda_layers)
    page = PAGE * sum(cache.latent(n, 1).numel() * 8 for n in model.config.mla_layers)
    engine = Engine(
        model,
        max_running=rows,
        max_context=CONTEXT,
        memory_bytes=(rows + 1) * slot + pages * page,
        page_tokens=PAGE,
        poison=True,
        **options,
    )
    assert (engine.batch.scheduler.rows, engine.batch.scheduler.pages) == (rows, pages)
    return engine


def rows_of(model, memory_bytes: int) -> int:
    return Engine(model, memory_bytes=memory_bytes).batch.scheduler.rows


def consistent(engine: Engine) -> None:
    """A page is free, once, or has as many users as there are rows that list it."""
    cache = engine.batch.pool.paged
    held, table = cache.table.held, cache.table.table
    owned = [page for row, count in enumerate(held) for page in table[row, :count].tolist()]
    assert sorted({*owned, 0} | set(cache.table.free)) == list(range(engine.batch.scheduler.pages + 1))
    assert not set(owned) & set(cache.table.free)
    assert len(cache.table.free) == len(set(cache.table.free))
    assert np.array_equal(np.bincount(owned, minlength=len(cache.table.users)), cache.table.users)
    assert all(not latent[0].any() for latent in cache.latent.values())
    free = range(engine.num_running, engine.batch.scheduler.rows)
    assert not any(held[row] for row in free), "a row that nobody has owns nothing"


request_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 5]),
    max_tokens=st.sampled_from([1, 5, 8, 20]),
    seed=st.sampled_from([0, 1, 2]),
    return_routes=st.booleans(),
)
asked = st.tuples(st.sampled_from(PROMPTS), st.just(()), request_params)


def test_any_schedule_in_little_memory_gives_what_there_is_in_much(model, any_schedule):
    def engine_of(rows, pages, prefill, prefix) -> Engine:
        cache = PrefixCache.of_bytes(30_000, block=4) if prefix else None
        return bounded(model, rows, pages, prefill_tokens=prefill, prefix_cache=cache)

    any_schedule(
        engine_of,
        asked,
        lambda given: Engine(model).generate([prompt for prompt, _, _ in given], [own for _, _, own in given]),
        examples=30,
        drawn={
            "rows": st.integers(1, 5),
            "pages": st.integers(CONTEXT // PAGE, 20),
            "prefill": st.integers(3, 40),
            "prefix": st.booleans(),
        },
        after_step=consistent,
    )


def test_running_requests_that_outgrow_the_memory_are_preempted_and_go_on(model):
    engine = bounded(model, rows=4, pages=CONTEXT // PAGE)
    own = [params(seed=seed, max_tokens=30, return_routes=True) for seed in range(4)]
    completions = engine.generate([PROMPTS[2]] * 4, own)
    assert engine.counters.preempted > 0
    for got, expected in zip(completions, Engine(model).generate([PROMPTS[2]] * 4, own), strict=True):
        assert got.token_ids == expected.token_ids
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)


def test_a_preempted_request_keeps_its_tokens_when_it_is_aborted_or_asked_for_them(model):
    engine = bounded(model, rows=2, pages=CONTEXT // PAGE)
    first, second = (engine.submit([3] * 20, params(seed=seed, max_tokens=28)) for seed in range(2))
    while not engine.counters.preempted:
        assert engine.step() == []
    ids, logprobs = engine.sampled(second, 1)
    engine.abort(second)
    outcomes = dict(engine.drain())
    assert outcomes[second].stop_reason is StopReason.ABORTED
    assert (outcomes[second].token_ids[1:], outcomes[second].logprobs[1:]) == (ids, logprobs)
    assert len(ids) >= 1
    assert len(outcomes[first].token_ids) == 28


def test_a_request_preempted_under_old_weights_goes_on_under_the_new_ones(model, build_model):
    engine = bounded(model, rows=2, pages=CONTEXT // PAGE)
    numbers = [engine.submit([3] * 20, params(seed=seed, max_tokens=28)) for seed in range(2)]
    while not engine.counters.preempted:
        engine.step()
    before, _ = engine.sampled(numbers[1])
    tensors = dict(official_tensors(build_model(seed=9)))
    engine.start_weight_update(1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(1)
    got = dict(engine.drain())[numbers[1]]
    assert (got.first_version, got.weight_version, len(got.token_ids)) == (0, 1, 28)
    assert got.token_ids[: len(before)] == before
    with torch.no_grad():  # one pass of the new weights alone: nothing of the old states is left
        logits = engine.model.logits(engine.model.hidden(torch.tensor([[3] * 20 + list(before)])).hidden[0, -1])
    logprob = torch.log_softmax(logits, -1)[got.token_ids[len(before)]]
    assert got.logprobs[len(before)] == pytest.approx(float(logprob), abs=TOLERANCE)
    consistent(engine)


def test_many_requests_in_little_memory_all_end_and_nothing_is_allocated(model):
    engine = bounded(model, rows=6, pages=CONTEXT // PAGE)
    before = engine.batch.pool.paged.latent[2].data_ptr()
    completions = engine.generate([[1 + i % 30] * (1 + i % 9) for i in range(200)], params(max_tokens=4, seed=None))
    assert len(completions) == 200
    assert engine.batch.pool.paged.latent[2].data_ptr() == before
    consistent(engine)


def test_memory_that_cannot_hold_one_request_is_refused_and_less_memory_means_fewer_rows(model):
    with pytest.raises(ValueError, match="give more, or a smaller max_context"):
        Engine(model, memory_bytes=1000)
    assert rows_of(model, 100_000) < rows_of(model, 400_000)
    assert rows_of(model, 1 << 30) == 64


def test_a_scheduler_prefers_dropping_the_parked_prompt_to_preempting():
    scheduler = Scheduler(rows=2, prefill_tokens=100, pages=30)
    for request in range(3):
        scheduler.submit(request, "p", 9)
    assert scheduler.plan().segments[0].parks, "20 pages for two rows, 9 for the parked state"
    assert not scheduler.overcommitted()
    scheduler.plan()
    assert scheduler.parked is not None
    assert not scheduler.overcommitted()
    assert scheduler.parked is None, "the rows need 22 pages now"
    assert scheduler.num_waiting == 1


def test_a_paged_cache_gives_the_model_what_its_own_cache_gives(model):
    own, paged = model.new_cache(3), PagedCache(model.config, 3, 30, 4, torch.float64)
    ids = torch.arange(60).view(3, 20) % 38
    with torch.inference_mode():
        for rows, start, stop in [([0, 1, 2], 0, 7), ([2, 0], 7, 8), ([0, 1, 2], 8, 15), ([1], 15, 16)]:
            paged.claim(rows, [int(n) + stop - start for n in paged.lengths[rows]])
            views = [cache.select(torch.tensor(rows)) for cache in (own, paged)]
            a, b = (model.hidden(ids[rows, start:stop], cache=view).hidden for view in views)
            assert torch.equal(a, b)
        paged.copy_rows(torch.tensor([0]), torch.tensor([2]))
        paged.move_rows(torch.tensor([0]), torch.tensor([1]))
        assert paged.lengths.tolist() == [0, int(own.lengths[0]), int(own.lengths[0])]
        for row in (1, 2):
            length = int(own.lengths[0])
            view = paged.select(torch.tensor([row]))
            assert torch.equal(view.latent(2, length)[0], own.latent(2, length)[0])
            assert torch.equal(view.recurrent(0)[0], own.recurrent(0)[0])
        with pytest.raises(EngineError, match="free"):
            paged.claim([0], [1000])
        with pytest.raises(EngineError, match="claim"):
            model.hidden(ids[:1], cache=paged.select(torch.tensor([0])))


def test_copies_of_a_row_share_its_whole_pages_and_go_on_alone(model):
    """Until the last row that has a page is gone; what is written behind it is nobody else's."""
    page = 4
    cache = PagedCache(model.config, 3, 12, page, torch.float64)
    ids = torch.arange(10)[None]

    def read(row: int, tokens: torch.Tensor) -> None:
        cache.claim([row], [int(cache.lengths[row]) + tokens.shape[1]])
        model.hidden(tokens, cache=cache.select(torch.tensor([row])))

    with torch.inference_mode():
        read(0, ids)
        cache.copy_rows(torch.tensor([0, 0]), torch.tensor([1, 2]))
        assert len(cache.table.free) == 12 - 3 - 2, "two whole pages for all of them, and one that goes on for each"
        for row in (1, 2):
            read(row, torch.tensor([[row, 30, 31]]))
        for row in (0, 1, 2):
            alone = model.new_cache(1)
            model.hidden(ids if row == 0 else torch.cat([ids, torch.tensor([[row, 30, 31]])], 1), cache=alone)
            for layer in model.config.mla_layers:
                got = cache.select(torch.tensor([row])).latent(layer)
                assert torch.allclose(got, alone.latent(layer), atol=1e-9, rtol=0)
        before = cache.select(torch.tensor([2])).latent(min(model.config.mla_layers)).clone()
        cache.poison(torch.tensor([0, 1]))
        assert torch.equal(cache.select(torch.tensor([2])).latent(min(model.config.mla_layers)), before)
        cache.reset(torch.tensor([2]))
    assert sorted(cache.table.free) == list(range(1, 13))
    assert not cache.table.users.any()
