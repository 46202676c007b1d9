"""Images in prompts: any schedule gives what the learner recomputes from the same pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.data.images import ImagePatches, stack
from k3rl.engine import Engine, PrefixCache
from k3rl.model import VisionConfig
from k3rl.types import SamplingParams, StopReason

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
        given = {}
        if images:
            pixels, grids = stack(images)
            given = {"pixel_values": torch.from_numpy(pixels), "grid_thws": torch.from_numpy(grids)}
        with torch.no_grad():
            out = seeing.hidden(torch.tensor([[*prompt, *sampled]]), **given)
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


actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, len(PROMPTS) - 1), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(1, 3),
    budget=st.integers(2, 9),
    paged=st.booleans(),
    cached=st.booleans(),
    schedule=st.lists(actions, min_size=3, max_size=10),
)
def test_any_schedule_samples_what_the_learner_recomputes(seeing, learned, rows, budget, paged, cached, schedule):
    engine = Engine(
        seeing,
        max_running=rows,
        max_context=24,
        prefill_tokens=budget,
        poison=True,
        memory_bytes=40_000 if paged else None,
        page_tokens=4,
        prefix_cache=PrefixCache.of_bytes(1 << 20, block=4) if cached else None,
    )
    asked, outcomes = {}, []
    for action, a, b in schedule:
        if action == "submit":
            prompt, images = PROMPTS[a]
            asked[engine.submit(prompt, params(seed=b), images)] = PROMPTS[a]
        elif action == "step":
            for _ in range(a):
                outcomes += engine.step()
        elif live := sorted(asked.keys() - {number for number, _ in outcomes}):
            engine.abort(live[a % len(live)])
            outcomes += engine.step()
    outcomes += engine.drain()
    assert sorted(number for number, _ in outcomes) == sorted(asked)
    for number, got in outcomes:
        check(learned, *asked[number], got)
        assert got.stop_reason is StopReason.ABORTED or len(got.token_ids) == 4
