"""An engine's warm-up leaves nothing behind, and where it fails the engine is as it was."""

from __future__ import annotations

import logging

import pytest
import torch

from k3rl.actors.engines import warm_up
from k3rl.engine import Engine, PrefixCache
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.types import SamplingParams

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    model = K3ForCausalLM(K3Config.named("k3-nano"))
    model.init_weights(0)
    return model.to(torch.float32)


def engine_of(model: K3ForCausalLM) -> Engine:
    return Engine(model, max_running=48, max_context=128, prefix_cache=PrefixCache.of_bytes(1 << 28))


def said(engine: Engine) -> list[tuple]:
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=6, seed=3))
    return [(one.token_ids, one.logprobs, one.cached_tokens) for one in done]


def test_what_is_sampled_after_a_warm_up_is_what_would_have_been_sampled_without(model):
    warmed = engine_of(model)
    warm_up(warmed)
    assert warmed.counters.sampled_tokens > 48, "steps of all rows were computed"
    assert not warmed.num_running
    assert not warmed.num_waiting
    assert said(warmed) == said(engine_of(model))


def test_a_warm_up_that_fails_is_said_and_leaves_an_engine_that_works(model, monkeypatch, caplog):
    engine = engine_of(model)
    step, calls = engine.step, []

    def broken():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(engine, "step", broken)
    with caplog.at_level(logging.WARNING):
        warm_up(engine)
    assert "out of memory" in caplog.text
    assert said(engine) == said(engine_of(model))
