"""The decode step of fixed shapes against the ordinary path; sampling where the logits are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.engine import Engine, EngineError, PrefixCache, totals_of
from k3rl.engine.compute.decode_graph import BATCHES, CapturedDecode, padded_batch
from k3rl.engine.sampling.device_sampler import sample_uncut
from k3rl.engine.sampling.sampler import sample
from k3rl.types import SamplingParams

TOLERANCE = 1e-9  # float64: only the order of summation differs
PROMPTS = [[1], [5, 9, 2], [7, 7, 7, 7, 3, 30, 11, 2, 18], list(range(1, 24))]
CONTEXT, PAGE = 48, 4


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "seed": 1, **changes})


def fixed_engine(model, rows: int, **options) -> Engine:
    """An engine that decodes in steps of fixed shapes, with pages for every row."""
    options = {"max_context": CONTEXT, "page_tokens": PAGE, "poison": True, **options}
    engine = Engine(model, max_running=rows, static_decode=True, **options)
    assert engine.captured_decode is not None
    return engine


def same(got, expected) -> None:
    assert got.token_ids == expected.token_ids
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)


request_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 5]),
    max_tokens=st.sampled_from([1, 5, 8, 20]),
    seed=st.sampled_from([0, 1, 2]),
    return_routes=st.booleans(),
)
asked = st.tuples(st.sampled_from(PROMPTS), st.just(()), request_params)


def test_any_schedule_gives_what_the_ordinary_path_gives(model, any_schedule):
    """Preempted, forked, cached and freed states (NaN there) included; a prefix cache and little memory on and off."""

    def engine_of(rows, bounded, prefill, prefix) -> Engine:
        memory = {"memory_bytes": memory_of(model, rows, CONTEXT // PAGE + 3)} if bounded else {}
        cache = PrefixCache.of_bytes(30_000, block=4) if prefix else None
        return fixed_engine(model, rows, prefill_tokens=prefill, prefix_cache=cache, **memory)

    any_schedule(
        engine_of,
        asked,
        lambda given: Engine(model).generate([prompt for prompt, _, _ in given], [own for _, _, own in given]),
        examples=20,
        drawn={
            "rows": st.integers(1, 5),
            "bounded": st.booleans(),
            "prefill": st.integers(3, 40),
            "prefix": st.booleans(),
        },
    )


def memory_of(model, rows: int, pages: int) -> int:
    """Bytes of `rows` rows, the parked state and `pages` pages."""
    cache = model.new_cache(1)
    cache.reserve(1)
    slot = sum(cache.recurrent(n).nbytes + cache.conv(n).nbytes for n in model.config.kda_layers)
    return (rows + 1) * slot + pages * PAGE * sum(cache.latent(n, 1).nbytes for n in model.config.mla_layers)


@pytest.mark.parametrize("changes", [{}, {"num_experts": 8, "num_experts_per_token": 3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_step_equals_the_ordinary_one_at_every_precision(build_model, dtype, changes):
    """Logits relative to the largest. bf16: the path rounds in other places, 2^-9 each, over three layers."""
    model = build_model(dtype=dtype, **changes)
    engines = [fixed_engine(model, 3), Engine(model, max_running=3, max_context=CONTEXT)]
    for engine in engines:
        for prompt in PROMPTS[1:]:
            engine.submit(prompt, params(temperature=0.0, max_tokens=20))
        engine.step()
    rows, tokens = [0, 1, 2], np.array([3, 4, 5])
    for engine in engines:
        engine.batch.pool.claim(rows, [1, 1, 1])
    with torch.inference_mode():
        ours, _ = engines[0].captured_decode.run(model, rows, tokens)
        out = model.hidden(torch.from_numpy(tokens)[:, None], cache=engines[1].batch.pool.view(rows))
        wanted = model.logits(out.hidden[:, 0])
    bound = {torch.float32: 2e-4, torch.bfloat16: 4e-2}[dtype]  # MXFP8 values may round the other way, in float32 too
    assert float((ours - wanted).abs().max()) <= bound * float(wanted.abs().max())
    states = [(engine.batch.pool.view(rows).recurrent(1), engine.batch.pool.view(rows).conv(1)) for engine in engines]
    for got, expected in zip(*states, strict=True):
        assert float((got - expected).abs().max()) <= bound * float(expected.abs().max())


def test_padding_rows_write_nothing_and_disturb_nobody(model):
    engine = fixed_engine(model, 6)
    for prompt in PROMPTS[1:]:
        engine.submit(prompt, params(max_tokens=20))
    engine.step()
    cache = engine.batch.pool.paged
    before = {n: (cache.recurrent[n].clone(), cache.conv[n].clone()) for n in cache.recurrent}
    pages = {n: latent.clone() for n, latent in cache.latent.items()}
    for rows in ([2], [0, 1, 2]):  # batches of 1 and of 4
        engine.batch.pool.claim(rows, [1] * len(rows))
        logits, _ = engine.captured_decode.run(model, rows, np.full(len(rows), 7))
        assert logits.isfinite().all()
    for n, (recurrent, conv) in before.items():  # rows 3.. are nobody's and NaN, row 6 is the parked one
        assert torch.equal(cache.recurrent[n][3:].nan_to_num(0.5), recurrent[3:].nan_to_num(0.5))
        assert torch.equal(cache.conv[n][3:].nan_to_num(0.5), conv[3:].nan_to_num(0.5))
    table = cache.table
    mine = {page for row in range(3) for page in table.table[row, : table.held[row]].tolist()}
    others = [page for page in range(table.pages + 1) if page not in mine]
    for n, latent in pages.items():
        assert torch.equal(cache.latent[n][others].nan_to_num(0.5), latent[others].nan_to_num(0.5))
        assert not cache.latent[n][0].any(), "page 0 stays zero"


def test_weights_that_change_in_place_and_new_versions_are_seen_by_the_next_step(build_model):
    model = build_model(seed=3)
    engine = fixed_engine(model, 2)
    first = engine.generate(PROMPTS[2:], params(seed=5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    for got, expected in zip(
        engine.generate(PROMPTS[2:], params(seed=5)), Engine(model).generate(PROMPTS[2:], params(seed=5)), strict=True
    ):
        same(got, expected)
        assert got.logprobs != first[0].logprobs
    other = build_model(seed=9)
    tensors = dict(official_tensors(other))
    engine.start_weight_update(1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(1)
    for got, expected in zip(
        engine.generate(PROMPTS[2:], params(seed=5)), Engine(other).generate(PROMPTS[2:], params(seed=5)), strict=True
    ):
        same(got, expected)


def test_more_rows_than_the_largest_batch_run_in_pieces(model, monkeypatch):
    monkeypatch.setattr("k3rl.engine.compute.decode_graph.BATCHES", (1, 2))
    own = [params(seed=seed, max_tokens=4) for seed in range(5)]
    for got, expected in zip(
        fixed_engine(model, 5).generate([PROMPTS[1]] * 5, own), Engine(model).generate([PROMPTS[1]] * 5, own),
        strict=True,
    ):  # fmt: skip
        same(got, expected)


def test_rows_of_like_length_run_together_where_padding_would_be_too_much(model, monkeypatch):
    own = [params(seed=seed, max_tokens=12 + 20 * (seed % 2)) for seed in range(5)]
    given = [PROMPTS[seed % 4] for seed in range(5)]
    ordinary = Engine(model).generate(given, own)
    for tokens in (4 * PAGE, 16 * PAGE):  # one row of 8 pages is more than the first, and runs alone
        monkeypatch.setattr("k3rl.engine.compute.decode_graph._TOKENS", tokens)
        engine = fixed_engine(model, 5, max_context=64)
        for got, expected in zip(engine.generate(given, own), ordinary, strict=True):
            same(got, expected)
        assert all(
            batch * blocks * PAGE <= max(tokens, blocks * PAGE) for batch, blocks in engine.captured_decode.shapes
        )


def test_a_long_row_splits_no_step_where_latents_are_read_in_their_pages(model, monkeypatch):
    """What limits how much is gathered is of the definition alone; where it does split, that is counted."""
    monkeypatch.setattr("k3rl.engine.compute.decode_graph._TOKENS", 4 * PAGE)
    own = [params(seed=seed, max_tokens=12) for seed in range(3)]
    given = [PROMPTS[1], PROMPTS[1], PROMPTS[3]]
    found = {}
    for gathers in (True, False):
        engine = fixed_engine(model, 3, max_context=64)
        engine.captured_decode._gathers = gathers
        found[gathers] = engine.generate(given, own), totals_of(engine)
    for got, expected in zip(found[False][0], found[True][0], strict=True):
        same(got, expected)
    assert (found[False][1]["split_steps"], found[False][1]["uncaptured_steps"]) == (0, 0)
    assert found[False][1]["ahead_steps"] >= 9
    assert found[True][1]["split_steps"] >= 9


def test_shapes_are_few_whatever_the_lengths(model):
    engine = fixed_engine(model, 5, max_context=200)
    engine.generate([PROMPTS[3]] * 5, [params(seed=seed, max_tokens=20 + 30 * seed) for seed in range(5)])
    shapes = engine.captured_decode.shapes
    assert all(batch in BATCHES and blocks & (blocks - 1) == 0 for batch, blocks in shapes)
    assert len(shapes) <= 4 * 4  # batches 1 to 8, pages 8 to 64


def test_a_row_without_room_is_refused(model):
    engine = fixed_engine(model, 2)
    engine.submit([3] * PAGE, params(max_tokens=20))
    engine.step()
    with pytest.raises(EngineError, match="claim it before"):
        engine.captured_decode.run(model, [0], np.array([3]))


def test_batches_hold_their_rows_and_a_cpu_captures_nothing(model):
    assert [padded_batch(n) for n in (1, 3, 17, 256)] == [1, 4, 32, 256]
    engine = fixed_engine(model, 2)
    engine.generate(PROMPTS[:2], params())
    assert isinstance(engine.captured_decode, CapturedDecode)
    assert not engine.captured_decode.buckets.capture
    assert engine.captured_decode.buckets.captured == 0
    assert Engine(model).captured_decode is None, "a CPU decodes by the ordinary path unless it is told otherwise"


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 6), size=st.integers(2, 50))
def test_draws_on_the_device_are_those_of_the_sampler(seed, rows, size):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 4, (rows, size))).float()
    temperature = rng.choice([0.0, 0.5, 1.0, 1.7], rows)
    broken = rng.random(rows) < 0.2
    logits[torch.from_numpy(broken), 0] = float("nan")
    uniform = rng.random(rows)
    free = (np.ones(rows), np.zeros(rows, np.int64))
    got = sample_uncut(logits, temperature, uniform)
    expected = sample(logits, temperature, *free, uniform)
    assert np.array_equal(got.finite, ~broken)
    assert np.array_equal(got.finite, expected.finite)
    assert np.array_equal(got.ids[got.finite], expected.ids[got.finite])
    np.testing.assert_allclose(got.logprobs[got.finite], expected.logprobs[got.finite], atol=1e-12)
    assert not got.cut_rows.size
