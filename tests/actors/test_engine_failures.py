"""A step of an engine that raises is the answer of those who waited for it, and of nobody else."""

from __future__ import annotations

import asyncio

import pytest

from k3rl.actors import ClusterConfig, RolloutActor
from k3rl.actors.answers import EngineClient
from k3rl.checkpoint import save_checkpoint
from k3rl.envs.faults import EngineFailed
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.tokens import Tokenizer
from k3rl.types import Completion, SamplingParams, StopReason

PROMPT = Tokenizer.builtin().encode("hello")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
    model.init_weights(0)
    path = tmp_path_factory.mktemp("model") / "ck"
    save_checkpoint(model, path, tokenizer=Tokenizer.builtin())
    return path


def failing(actor: RolloutActor, at: set[int]) -> None:
    """Makes these steps of its engine, counted from 1, raise."""
    step, count = actor.engine.step, 0

    def stepped():
        nonlocal count
        count += 1
        if count in at:
            raise RuntimeError("a kernel failed")
        return step()

    actor.engine.step = stepped


async def loaded(checkpoint) -> RolloutActor:
    actor = RolloutActor(ClusterConfig(), max_running=8)
    await actor.load(str(checkpoint))
    return actor


def test_a_failed_step_fails_its_own_requests_and_later_ones_get_what_they_would_have_got(checkpoint):
    async def ask():
        actor = await loaded(checkpoint)
        params = SamplingParams(max_tokens=6, seed=1)
        (before,) = await actor.generate([(PROMPT, params)])
        failing(actor, {3})
        failed = await actor.generate([(PROMPT, SamplingParams(max_tokens=n, seed=n)) for n in (2, 6, 9)])
        left = actor.engine.num_running, actor.engine.num_waiting
        await actor.check()
        (after,) = await actor.generate([(PROMPT, params)])
        return before, failed, left, after

    before, failed, left, after = asyncio.run(ask())
    assert isinstance(failed[0], Completion), "it had ended before"
    assert [type(answer) for answer in failed[1:]] == [EngineFailed] * 2
    assert left == (0, 0)
    assert after == before


def test_an_engine_that_keeps_failing_says_so_when_it_is_asked(checkpoint):
    async def ask():
        actor = await loaded(checkpoint)
        failing(actor, set(range(100)))
        for _ in range(3):
            await actor.check()
            (answer,) = await actor.generate([(PROMPT, SamplingParams(max_tokens=2))])
            assert isinstance(answer, EngineFailed)
        with pytest.raises(EngineFailed, match="the last 3 steps of the engine failed"):
            await actor.check()

    asyncio.run(ask())


def test_a_request_that_is_taken_back_leaves_the_engine_and_its_neighbour_goes_on(checkpoint, in_process):
    async def ask():
        actor = await loaded(checkpoint)
        client = EngineClient(in_process(actor), "a client")
        long, short = (
            asyncio.ensure_future(client.complete((PROMPT, SamplingParams(max_tokens=n, seed=3)))) for n in (3000, 300)
        )
        while actor.engine.num_running < 2:
            await asyncio.sleep(0)
        long.cancel()
        completion = await short
        running = actor.engine.num_running
        client.close()
        return completion, running

    completion, running = asyncio.run(ask())
    assert completion.stop_reason is StopReason.LENGTH
    assert running == 0


def test_requests_rest_until_the_next_version(checkpoint):
    async def ask():
        actor = await loaded(checkpoint)
        waiting = asyncio.ensure_future(actor.generate([(PROMPT, SamplingParams(max_tokens=50))]))
        await asyncio.sleep(0)
        await actor.pause()
        await asyncio.sleep(0.2)
        assert not waiting.done()
        actor.engine.finish_weight_update = lambda version: None
        await actor.commit(1)
        return await waiting

    (completion,) = asyncio.run(ask())
    assert len(completion.token_ids) == 50
