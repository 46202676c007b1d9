"""Exact mode: the bits of a token's logprob are a function of the request alone, and the learner has the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from k3rl.data.batch import TrainBatch, TrainSequence
from k3rl.data.images import ImagePatches
from k3rl.engine import Engine, PrefixCache
from k3rl.engine.cache import state_bytes
from k3rl.engine.compute import exact
from k3rl.engine.sampling import sampler
from k3rl.losses import K3Policy
from k3rl.model import AblationConfig, VisionConfig
from k3rl.model.exact import ExactError, exact_hidden, exact_logits, exact_logprobs
from k3rl.packed import SamplingMasks
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.parallel.exact import exact_target_logprobs
from k3rl.types import Completion, SamplingParams

PROMPTS = [[1], [7, 7, 7, 7, 3, 30, 11, 2, 18], list(range(1, 24)), [5, 9] * 16, [5, 9] * 16 + [4]]


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "seed": 1, **changes})


def bounded(model, pages: int, **options) -> Engine:
    """Four rows over `pages` pages of 8 tokens, freed memory NaN."""
    slot, token = state_bytes(model)
    memory = 5 * slot + pages * 8 * token
    more = dict(memory_bytes=memory, page_tokens=8, max_context=64, poison=True, exact=True)
    return Engine(model, max_running=4, **more, **options)


def recomputed(model, prompt: list[int], own: SamplingParams, done: Completion) -> list[float]:
    """The learner's logprobs, by one pass over prompt and answer."""
    sampling_mask = None if done.sampling_mask is None else [torch.from_numpy(ids).long() for ids in done.sampling_mask]
    places = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(done.token_ids))
    ids = torch.tensor([*prompt, *done.token_ids])
    return exact_logprobs(
        model, ids, places, done.token_ids, temperature=own.temperature, sampling_mask=sampling_mask
    ).tolist()


@pytest.fixture(scope="module")
def single(build_model):
    """The tiny model in float32, with MXFP4 weights and MXFP8 activations."""
    return build_model(dtype=torch.float32)


request_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.02]),
    logit_bias=st.sampled_from([(), ((3, 1.5), (4, float("-inf")))]),
    max_tokens=st.sampled_from([1, 5, 18]),
    return_routes=st.booleans(),
)
asked = st.tuples(st.sampled_from(PROMPTS), st.just(()), request_params)


def test_any_schedule_gives_each_token_the_bits_of_the_learner(single, any_schedule):
    def engine_of(pages, prefill, prefix) -> Engine:
        cache = PrefixCache.of_bytes(60_000, block=4) if prefix else None
        return bounded(single, pages, prefill_tokens=prefill, prefix_cache=cache)

    def check(given, done) -> None:
        prompt, _, own = given
        if not own.logit_bias and done.token_ids:
            assert list(done.logprobs) == recomputed(single, prompt, own, done)

    any_schedule(
        engine_of,
        asked,
        lambda given: [
            Engine(single, max_running=1, exact=True).generate([prompt], own)[0] for prompt, _, own in given
        ],
        examples=8,
        drawn={"pages": st.integers(8, 14), "prefill": st.integers(3, 40), "prefix": st.booleans()},
        check=check,
        tolerance=0.0,
        most_steps=6,
    )


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_preemption_and_prefix_hits_leave_the_bits_alone_in_every_dtype(build_model, kind):
    model, own = build_model(dtype=kind), params(max_tokens=20, top_p=0.9, seed=None)
    engine = bounded(model, 9, prefix_cache=PrefixCache.of_bytes(200_000, block=8), seed=3)
    done = engine.generate(PROMPTS, own)
    grown = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, done, strict=True)]
    again = engine.generate(grown, params(max_tokens=4))
    assert engine.counters.preempted > 0
    assert any(completion.cached_tokens for completion in again)
    for prompt, answer in (*zip(PROMPTS, done, strict=True), *zip(grown, again, strict=True)):
        assert list(answer.logprobs) == recomputed(model, prompt, own, answer)


def packed(prompts, done, images=((), (), (), (), ())) -> TrainBatch:
    sequences = []
    for number, (prompt, answer, shown) in enumerate(zip(prompts, done, images, strict=False)):
        ids = np.array([*prompt, *answer.token_ids], np.int64)
        mask = np.arange(len(ids)) >= len(prompt)
        logprobs, advantages = np.zeros((2, len(ids)), np.float32)
        logprobs[mask], advantages[mask] = answer.logprobs, 1.0 - number
        routes = None if answer.routes is None else np.concatenate([answer.routes, answer.routes[-1:]])  # last unread
        sampling_mask = (
            None
            if answer.sampling_mask is None
            else SamplingMasks.join([len(prompt), SamplingMasks.of(answer.sampling_mask)])
        )
        sequences.append(
            TrainSequence(
                str(number), ids, mask, logprobs, advantages, routes, images=shown, sampling_mask=sampling_mask
            )
        )
    return TrainBatch.pack(sequences)


CUTS = [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"logit_bias": ((3, float("-inf")),)}]


@pytest.mark.parametrize("cut", [*CUTS, {"top_p": 0.9, "top_k": 12, "min_p": 0.02}], ids=str)
def test_the_learner_scores_what_every_way_of_sampling_drew_as_the_engine_did(build_model, cut):
    model, temperature = build_model(), 0.7
    done = Engine(model, max_running=3).generate(PROMPTS, params(max_tokens=20, temperature=temperature, **cut))
    batch = packed(PROMPTS, done)
    assert (batch.sampling_mask is None) == (not cut)
    trainer = Trainer(model, TrainerConfig(micro_batch_tokens=64))  # several micro-batches: the sets are cut with them
    found = {
        name: trainer.target_inputs(micro, temperature).logprobs.tolist()
        for micro in batch.split(64)
        for name in [micro.sequence_ids]
    }
    for names, values in found.items():
        wanted = [logprob for name in names for logprob in done[int(name)].logprobs]
        assert values == pytest.approx(wanted, abs=1e-9)  # float64, sums in another order
    assert trainer.logprobs(batch, temperature) == pytest.approx(batch.sampler_logprobs, abs=1e-5)  # kept as float32


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8}])
@pytest.mark.parametrize("replay", [True, False])
def test_the_divergence_of_sampler_and_learner_is_zero_and_the_gradient_is_not(build_model, replay, cut):
    model, temperature = build_model(dtype=torch.float32), 0.8
    own = params(max_tokens=20, seed=None, temperature=temperature, return_routes=replay, **cut)
    batch = packed(PROMPTS, Engine(model, max_running=3, exact=True).generate(PROMPTS, own))
    trainer = Trainer(model, TrainerConfig(exact=True, micro_batch_tokens=64))
    assert np.array_equal(trainer.logprobs(batch, temperature), batch.sampler_logprobs)
    metrics = trainer.train(batch, K3Policy(0.5, 2.0, 0.02), temperature=temperature).values()
    assert metrics["mismatch/kl/mean"] == 0
    assert metrics["mismatch/kl/max"] == 0
    assert metrics["optim/grad_norm"] > 0


def test_gradients_are_those_of_the_usual_forward(build_model):
    model = build_model()
    batch = packed(PROMPTS, Engine(model).generate(PROMPTS, params()))
    found = []
    for on in (False, True):
        trainer = Trainer(model, TrainerConfig(exact=on))
        K3Policy(0.5, 2.0, 0.02)(trainer.target_inputs(batch)).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    for name, grad in found[0].items():  # float64: the values differ by 1e-14, and so do the factors of the gradients
        assert torch.allclose(found[1][name], grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ablation": AblationConfig(attention="mla_rope", activation="swiglu")},
        {"ablation": AblationConfig(residual="sum", experts="latent")},
    ],
)
def test_the_exact_forward_is_the_models_up_to_rounding(build_model, changes):
    model = build_model(**changes)
    ids = torch.randint(0, 38, (70,), generator=torch.Generator().manual_seed(0))
    hidden, routes = exact_hidden(model, ids, model.new_cache(1))
    with torch.no_grad():
        usual = model(ids[None])
    assert torch.allclose(exact_logits(model, hidden, 0), usual.logits[0], rtol=0, atol=1e-9)  # order of sums only
    assert torch.equal(routes.sort(-1).values, usual.routes[0].sort(-1).values)


def test_threads_and_denormals_of_the_process_do_not_matter_and_come_back(single):
    ids = torch.arange(1, 38)
    expected, _ = exact_hidden(single, ids, single.new_cache(1))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.set_flush_denormal(True)
        found, _ = exact_hidden(single, ids, single.new_cache(1))
        assert torch.get_num_threads() == 3
        assert float(torch.tensor(2.0**-1022, dtype=torch.float64) * 0.5) == 0.0
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)


def test_a_cache_between_two_boundaries_is_refused(single):
    cache = single.new_cache(1)
    cache.advance(torch.tensor([3]))
    with pytest.raises(ExactError, match="with 3 tokens; wanted some ids and one row at a multiple of 16"):
        exact_hidden(single, torch.tensor([1]), cache)


VISION = dict(patch_size=2, init_pos_emb_height=4, init_pos_emb_width=4, vt_num_attention_heads=2)
WIDTHS = ("vt_hidden_size", "vt_intermediate_size", "qkv_hidden_size", "mm_hidden_size")


def test_images_have_the_bits_of_the_learner_too(build_model):
    vision = VisionConfig(**VISION, **dict.fromkeys(WIDTHS, 16), vt_num_hidden_layers=1, text_hidden_size=32)
    model = build_model(dtype=torch.float32, vision_config=vision)
    rng = np.random.default_rng(0)
    large, small = (
        ImagePatches(rng.standard_normal((4 * n, 3, 2, 2), np.float32), (1, 2, 2 * n), 4 * n, 4, n) for n in (20, 3)
    )
    prompts, images = [[5, 39, 2], [39, 7, 39]], [(large,), (small, large)]
    engine = Engine(model, max_running=2, prefill_tokens=7, exact=True)
    done = engine.generate(prompts, params(max_tokens=18, seed=None), images)
    found = exact_target_logprobs(model, packed(prompts, done, images)).tolist()
    assert found == [value for answer in done for value in answer.logprobs]


def test_drawing_row_by_row_is_drawing_together_with_biases_and_constraints():
    rng = np.random.default_rng(0)
    rows, size = 6, 24
    logits = torch.from_numpy(rng.normal(size=(rows, size)) * 3)
    logits[3, :12] += 2000.0  # the constraint leaves what has no mass beside the others
    mask = np.zeros((2, size), bool)
    mask[0, 3:9], mask[1, 12:15] = True, True
    biases = sampler.Biases(
        np.array([0, 0, 3]), np.array([4, 5, 13]), np.array([2.5, -np.inf, 1.0]), np.array([1, 0, 0, 0, 0, 0], bool)
    )
    given = (
        np.array([1.0, 0.0, 0.7, 1.0, 1.3, 1.0]),
        np.array([1.0, 1.0, 0.8, 1.0, 1.0, 0.6]),
        np.array([0, 0, 0, 0, 5, 0]),
        rng.random(rows),
        np.array([0.0, 0.0, 0.0, 0.0, 0.05, 0.0]),
        biases,
        sampler.Allowed(np.array([1, 3]), mask),
    )
    together, apart = sampler.sample(logits, *given), exact.sample(logits, *given)
    for name in ("ids", "finite", "cut_rows", "sampling_mask"):
        assert np.array_equal(getattr(apart, name), getattr(together, name)), name
    np.testing.assert_allclose(apart.logprobs, together.logprobs, rtol=0, atol=1e-12)  # float64 sums in another order


def test_routes_given_back_are_used(single):
    ids = torch.arange(1, 38)
    _, routes = exact_hidden(single, ids, single.new_cache(1))
    other = (routes + 1) % single.config.num_experts
    assert torch.equal(exact_hidden(single, ids, single.new_cache(1), routes=other)[1], other)


def test_an_exact_engine_samples_with_biases_as_the_usual_one(model):
    own = params(max_tokens=12, logit_bias=((3, 2.0), (5, float("-inf"))), top_k=6)
    (usual,) = Engine(model).generate([PROMPTS[1]], own)
    (mine,) = Engine(model, exact=True).generate([PROMPTS[1]], own)
    assert mine.token_ids == usual.token_ids
    np.testing.assert_allclose(mine.logprobs, usual.logprobs, rtol=0, atol=1e-9)  # order of sums only
    assert all(np.array_equal(a, b) for a, b in zip(mine.sampling_mask, usual.sampling_mask, strict=True))
