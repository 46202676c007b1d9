"""A tiny K3 with every part, quantized activations on, and an engine-free way to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.engine import Engine
from k3rl.engine.sampling import sampler
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.types import Completion, SamplingParams, StopReason

VOCAB = 40
TOLERANCE = 1e-9  # float64: only the order of summation differs
Asked = tuple[Sequence[int], Sequence[Any], SamplingParams]  # prompt, images, parameters


def tiny_config(**changes) -> K3Config:
    """Two KDA layers (the first dense), one MLA layer, 4 experts top-2, two AttnRes blocks, MXFP4 and MXFP8 on."""
    nano = K3Config.named("k3-nano")
    linear = type(nano.linear_attn_config)(num_heads=2, head_dim=8, kda_layers=(1, 2), full_attn_layers=(3,))
    tiny = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        routed_expert_hidden_size=32,
        attn_res_block_size=2,
        linear_attn_config=linear,
        max_position_embeddings=256,
        media_placeholder_token_id=VOCAB - 1,
        pad_token_id=VOCAB - 2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return nano.replace(**{**tiny, **changes})


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> K3ForCausalLM:
    """The tiny model with random weights, its head scaled up so that the distribution is far from uniform."""
    model = K3ForCausalLM(tiny_config(**changes), dtype=dtype)
    model.init_weights(seed)
    with torch.no_grad():
        for name, parameter in model.official_parameters():
            if name.endswith("lm_head.weight"):
                parameter.mul_(2)
    return model


def teacher_forced(model: K3ForCausalLM, ids: list[int]):
    """(logits [T, V], routes [T, M, k]) of one pass over ids without a cache."""
    with torch.no_grad():
        out = model.hidden(torch.tensor([ids]))
        return model.logits(out.hidden[0]), out.routes[0].numpy()


def alone(model: K3ForCausalLM, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float]]:
    """(ids, logprobs) of one request, by whole passes over all its tokens: no cache, no batch, no engine."""
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < params.max_tokens and not (ids and ids[-1] in params.stop_ids):
        logits, _ = teacher_forced(model, [*prompt, *ids])
        draws = sampler.sample(
            logits[-1:],
            np.array([params.temperature]),
            np.array([params.top_p]),
            np.array([params.top_k]),
            sampler.uniforms(np.array([params.seed], np.uint64), np.array([len(ids)])),
        )
        ids.append(int(draws.ids[0]))
        logprobs.append(float(draws.logprobs[0]))
    return ids, logprobs


@pytest.fixture(scope="session")
def model() -> K3ForCausalLM:
    """The tiny model in float64; tests must not change it."""
    return build()


@pytest.fixture(scope="session")
def build_model() -> Callable[..., K3ForCausalLM]:
    return build


@pytest.fixture(scope="session")
def run_alone() -> Callable:
    return alone


@pytest.fixture(scope="session")
def run_teacher_forced() -> Callable:
    return teacher_forced


# ---- contracts


def played(engine: Engine, schedule: Sequence[tuple], after_step: Callable[[Engine], None]) -> tuple[dict, dict, set]:
    """(asked, outcomes, aborted) by number, of a schedule and of the steps that end everything behind it."""
    asked: dict[int, Asked] = {}
    outcomes: dict[int, Any] = {}
    aborted: set[int] = set()

    def step() -> None:
        for number, outcome in engine.step():
            assert number not in outcomes, "a request comes out once"
            outcomes[number] = outcome
        after_step(engine)

    for action, what in schedule:
        if action == "submit":
            prompt, images, params = what
            asked[engine.submit(prompt, params, images)] = what
        elif action == "step":
            for _ in range(what):
                step()
        elif live := sorted(asked.keys() - outcomes.keys() - aborted):
            aborted.add(live[what % len(live)])
            engine.abort(live[what % len(live)])
    for _ in range(2000):
        if outcomes.keys() == asked.keys():
            break
        step()
    return asked, outcomes, aborted


def schedules_of(requests: st.SearchStrategy[Asked], most_steps: int) -> st.SearchStrategy[list[tuple]]:
    submit, abort = st.tuples(st.just("submit"), requests), st.tuples(st.just("abort"), st.integers(0, 20))
    return st.lists(st.one_of(submit, st.tuples(st.just("step"), st.integers(1, most_steps)), abort), min_size=3,
                    max_size=16)  # fmt: skip


@pytest.fixture(scope="session")
def any_schedule() -> Callable[..., None]:
    """The contract of every kind of engine: whatever is submitted, stepped and aborted in whatever order, each request
    ends once and gets what it gets alone.

    engine_of(**drawn): the engine, from what `given` draws. requests: (prompt, images, parameters) that are submitted.
    alone(asked): what they get alone, each for its own request, of which an aborted one has the beginning.
    """

    def hold(
        engine_of: Callable[..., Engine],
        requests: st.SearchStrategy[Asked],
        alone: Callable[[list[Asked]], Sequence[Completion]],
        *,
        examples: int,
        drawn: Mapping[str, st.SearchStrategy[Any]],
        check: Callable[[Asked, Completion], None] = lambda asked, got: None,
        after_step: Callable[[Engine], None] = lambda engine: None,
        tolerance: float = TOLERANCE,
        most_steps: int = 4,
    ) -> None:
        @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(schedule=schedules_of(requests, most_steps), options=st.fixed_dictionaries(dict(drawn)))
        def one_schedule(schedule: Sequence[tuple], options: dict[str, Any]) -> None:
            asked, outcomes, aborted = played(engine_of(**options), schedule, after_step)
            assert outcomes.keys() == asked.keys(), "every request ends"
            for number, expected in zip(asked, alone(list(asked.values())), strict=True):
                got = outcomes[number]
                assert number in aborted if got.stop_reason is StopReason.ABORTED else whole(got, expected)
                same_beginning(asked[number], got, expected, tolerance)
                check(asked[number], got)

        one_schedule()

    return hold


def whole(got: Completion, expected: Completion) -> bool:
    return (len(got.token_ids), got.stop_reason) == (len(expected.token_ids), expected.stop_reason)


def same_beginning(asked: Asked, got: Completion, expected: Completion, tolerance: float) -> None:
    """What `got` has is what `expected` begins with: tokens, logprobs, sampling masks and routes."""
    count = len(got.token_ids)
    assert got.token_ids == expected.token_ids[:count]
    np.testing.assert_allclose(got.logprobs, expected.logprobs[:count], atol=tolerance, rtol=0)
    if expected.sampling_mask is not None and count:
        masks = zip(got.sampling_mask, expected.sampling_mask[:count], strict=True)
        assert all(np.array_equal(mine, others) for mine, others in masks)
    if asked[2].return_routes and count:
        prompt_rows = len(expected.routes) - len(expected.token_ids) + 1  # an image counts its rows
        wanted = expected.routes[: prompt_rows + count - 1]
        assert np.array_equal(np.sort(got.routes, -1), np.sort(wanted, -1))  # order within k is free
