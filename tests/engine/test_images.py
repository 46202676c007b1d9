"""Images in prompts: any schedule gives what the learner recomputes from the same pixels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from k3rl.checkpoint import manifest_of, official_tensors
from k3rl.data.images import ImagePatches, rows_per_token, stack
from k3rl.engine import Engine, InvalidRequest, NonFiniteLogits, PrefixCache
from k3rl.model import VisionConfig
from k3rl.model.flat_step import FlatStep
from k3rl.types import SamplingParams

TOLERANCE = 1e-9  # float64: only the order of summation differs
PAD = 39
VISION = VisionConfig(
    patch_size=2,
    init_pos_emb_height=4,
    init_pos_emb_width=4,
    vt_num_attention_heads=2,
    vt_num_hidden_layers=1,
    vt_hidden_size=16,
    vt_intermediate_size=16,
    qkv_hidden_size=16,
    mm_hidden_size=16,
    text_hidden_size=32,
)


def image(rows: int, columns: int, seed: int) -> ImagePatches:
    """Noise of rows x columns cells of 2 x 2 patches, rows * columns rows of the model."""
    pixels = np.random.default_rng(seed).standard_normal((4 * rows * columns, 3, 2, 2), np.float32)
    return ImagePatches(pixels, (1, 2 * rows, 2 * columns), 4 * columns, 4 * rows, rows * columns)


A, B, C = image(2, 3, 0), image(1, 1, 1), image(2, 3, 2)  # A and C are of one size
PROMPTS = [([5, PAD, 2], (A,)), ([5, PAD, 2], (C,)), ([PAD, 7, PAD, PAD], (B, A, B)), ([1, 2, 3], ())]


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "seed": 1, "return_routes": True, **changes})


@pytest.fixture(scope="session")
def seeing(build_model):
    return build_model(vision_config=VISION)


@pytest.fixture(scope="session")
def learned(seeing):
    """(logits [rows, V], routes) of a learner's pass over a prompt, its images and what was sampled behind them."""

    def run(prompt, images, sampled=()):
        ids = np.repeat(prompt, rows_per_token(np.asarray(prompt), images, PAD)).tolist()
        shown = None
        with torch.no_grad():
            if images:
                rows = torch.cat(seeing.image_rows(*map(torch.from_numpy, stack(images))))
                shown = rows, torch.from_numpy(np.flatnonzero(np.array(ids) == PAD))
            out = seeing.hidden(torch.tensor([[*ids, *sampled]]), images=shown)
            return seeing.logits(out.hidden[0]), out.routes[0].numpy()

    return run


def check(learned, prompt, images, got) -> None:
    """The completion's logprobs and routes are those of the learner, images counted by their rows."""
    count = len(got.token_ids)
    if not count:
        return
    logits, routes = learned(prompt, images, got.token_ids)
    rows = torch.log_softmax(logits, -1)[-count - 1 : -1]
    np.testing.assert_allclose(got.logprobs, rows[range(count), list(got.token_ids)], atol=TOLERANCE, rtol=0)
    assert np.array_equal(np.sort(got.routes, -1), np.sort(routes[:-1], -1))


asked = st.builds(lambda shown, seed: (*shown, params(seed=seed)), st.sampled_from(PROMPTS), st.integers(0, 2))


def test_any_schedule_samples_what_the_learner_recomputes(seeing, learned, any_schedule):
    def engine_of(rows, prefill, paged, cached) -> Engine:
        return Engine(
            seeing,
            max_running=rows,
            max_context=24,
            prefill_tokens=prefill,
            poison=True,
            memory_bytes=40_000 if paged else None,
            page_tokens=4,
            prefix_cache=PrefixCache.of_bytes(1 << 20, block=4) if cached else None,
        )

    def alone(given):
        each = [[one[part] for one in given] for part in range(3)]
        return Engine(seeing).generate(each[0], each[2], each[1])

    any_schedule(
        engine_of,
        asked,
        alone,
        examples=20,
        drawn={
            "rows": st.integers(1, 3),
            "prefill": st.integers(2, 9),
            "paged": st.booleans(),
            "cached": st.booleans(),
        },
        check=lambda given, got: check(learned, given[0], given[1], got),
        most_steps=3,
    )


@pytest.fixture
def tower_runs(seeing):
    """How often the tower ran, as a list that grows."""
    runs: list[int] = []
    handle = seeing.vision_tower.register_forward_hook(lambda *_: runs.append(1))
    yield runs
    handle.remove()


def test_equal_ids_with_other_pixels_share_neither_group_nor_prefix(seeing, learned, tower_runs):
    engine = Engine(seeing, max_running=2, prefill_tokens=3, prefix_cache=PrefixCache.of_bytes(1 << 20, block=4))
    ids = PROMPTS[0][0]
    first = engine.generate([ids] * 5, params(seed=None), [(A,), (C,), (A,), (C,), (A,)])
    assert len(tower_runs) == 2, "once an image and group, however many chunks and samples"
    assert engine.counters.prefilled_tokens == 2 * 8, "two texts of 2 ids and an image of 6 rows"
    for images, got in zip([(A,), (C,), (A,), (C,), (A,)], first, strict=True):
        check(learned, ids, images, got)
    tower_runs.clear()  # of the learner
    seen, other = engine.generate([[*ids, 9]] * 2, params(), [(A,), (B,)])
    assert (seen.cached_tokens, other.cached_tokens) == (8, 0)
    assert len(tower_runs) == 1, "an image inside a cached prefix is not computed again"
    check(learned, [*ids, 9], (A,), seen)
    check(learned, [*ids, 9], (B,), other)


def test_preempted_requests_go_on_with_the_same_tokens(seeing, learned):
    engine = Engine(seeing, max_context=32, memory_bytes=24_000, page_tokens=4, poison=True)
    own = params(max_tokens=16)
    numbers = [engine.submit(ids, own, images) for ids, images in PROMPTS[:3] * 2]
    outcomes = dict(engine.drain())
    assert engine.counters.preempted
    for number, (ids, images) in zip(numbers, PROMPTS[:3] * 2, strict=True):
        check(learned, ids, images, outcomes[number])


def test_an_image_that_is_half_read_when_weights_change_is_read_anew(seeing, build_model, tower_runs):
    other = build_model(seed=7, vision_config=VISION)
    engine = Engine(seeing, prefill_tokens=3)
    number = engine.submit(*PROMPTS[0][:1], params(), PROMPTS[0][1])
    engine.step()
    assert tower_runs == [1]
    stored = dict(official_tensors(other))
    engine.start_weight_update(1, manifest_of(stored.items()))
    engine.update_weights(stored.items())
    engine.finish_weight_update(1)
    got = dict(engine.drain())[number]
    (expected,) = Engine(other, version=1).generate([PROMPTS[0][0]], params(), [PROMPTS[0][1]])
    assert got.token_ids == expected.token_ids
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)
    assert np.array_equal(np.sort(got.routes, -1), np.sort(expected.routes, -1))


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ([1, PAD, 2], (), "1 image placeholders .* 0 images"),
        ([1, 2], (A,), "0 image placeholders .* 1 images"),
        ([PAD, PAD], (A,), "2 image placeholders"),
        ([PAD], (image(5, 5, 0),), "25 tokens and rows of 1 images"),
        ([PAD, 1, 2, PAD, 3, 4, PAD], (A, A, A), "22 tokens and rows of 3 images"),
        ([PAD], (dataclasses.replace(A, rows=5),), "says 5 rows"),
        ([PAD], (dataclasses.replace(A, grid=(1, 3, 8)),), "multiple of 2"),
        ([PAD], (dataclasses.replace(A, grid=(1, 2, 2)),), "describes 4 patches"),
        ([PAD], (dataclasses.replace(A, pixels=A.pixels.astype(np.float64)),), "float64"),
        ([PAD], (dataclasses.replace(A, pixels=np.zeros((24, 3, 14, 14), np.float32)),), "pixel_values must be"),
        ([PAD], (dataclasses.replace(A, pixels=A.pixels * np.float32("nan")),), "NaN"),
        ([-7, 1], (), "outside the vocabulary"),
    ],
)
def test_images_that_do_not_fit_are_refused_and_others_go_on(seeing, learned, ids, images, message):
    engine = Engine(seeing, max_context=20)
    number = engine.submit(*PROMPTS[0][:1], params(), PROMPTS[0][1])
    for door in (engine.check, engine.submit):
        with pytest.raises(InvalidRequest, match=message):
            door(ids, params(max_tokens=1), images)
    ((ended, got),) = engine.drain()
    assert ended == number
    check(learned, *PROMPTS[0], got)


def test_the_context_counts_rows(seeing):
    engine = Engine(seeing, max_context=12)
    assert len(engine.generate([PROMPTS[0][0]], params(max_tokens=4), [(A,)])[0].token_ids) == 4
    with pytest.raises(InvalidRequest, match="ask for at most 4"):
        engine.submit(PROMPTS[0][0], params(max_tokens=5), (A,))


def test_a_text_model_refuses_images_and_takes_every_id_for_a_token(model):
    with pytest.raises(InvalidRequest, match="no vision tower"):
        Engine(model).submit([PAD], params(), (A,))
    assert len(Engine(model).generate([[1, PAD]], params())[0].token_ids) == 4


def test_a_tower_that_gives_nan_is_named_and_text_goes_on(build_model):
    broken = build_model(vision_config=VISION)
    with torch.no_grad():
        broken.vision_tower.encoder.final_layernorm.weight.fill_(float("nan"))
    engine = Engine(broken)
    bad, good = engine.submit(*PROMPTS[0][:1], params(), (A,)), engine.submit([1, 2], params())
    outcomes = dict(engine.drain())
    assert isinstance(outcomes[bad], NonFiniteLogits)
    assert outcomes[bad].layer.startswith("vision_tower")
    assert outcomes[bad].position == 7, "the last of eight rows"
    assert len(outcomes[good].token_ids) == 4


def test_a_placeholder_that_is_sampled_stays_a_token(seeing, monkeypatch):
    """Nothing else can be meant by it: an image never comes out of a model."""
    own = params(temperature=0, logit_bias=((PAD, 100.0),), max_tokens=3)
    (got,) = Engine(seeing).generate([PROMPTS[0][0]], own, [(A,)])
    assert got.token_ids == (PAD, PAD, PAD)
    monkeypatch.setattr(FlatStep, "takes", lambda model: False)  # the forward shows what it reads
    seen = []
    handle = seeing.language_model.model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    (again,) = Engine(seeing).generate([PROMPTS[0][0]], own, [(A,)])
    handle.remove()
    assert torch.equal(seen[-1][0], seeing.language_model.model.embed_tokens.weight[PAD])
    assert again.token_ids == got.token_ids
    assert again.logprobs == pytest.approx(got.logprobs, abs=1e-9)  # float64
