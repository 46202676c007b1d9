"""A step of an engine that raises is the answer of those who waited for it, and of nobody else."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from k3rl.actors import ClusterConfig, EngineConfig, RolloutActor
from k3rl.actors.answers import EngineClient
from k3rl.checkpoint import save_checkpoint
from k3rl.engine import EngineError
from k3rl.envs import ContextOutgrown, EngineFailed
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


@pytest.mark.parametrize("part", ["_prefill", "_decoder", "batch"])
def test_a_step_that_fails_half_way_leaves_no_request_behind(checkpoint, part):
    """Rows are given out, and maybe computed, when it fails."""

    async def ask():
        actor = await loaded(checkpoint)
        params = SamplingParams(max_tokens=6, seed=1)
        (before,) = await actor.generate([(PROMPT, params)])
        owner, name = getattr(actor.engine, part), {"_prefill": "run", "_decoder": "decode", "batch": "end"}[part]
        whole, left = getattr(owner, name), 2

        def broken(*given, **named):
            nonlocal left
            found, left = whole(*given, **named), left - 1
            if left == 0:
                raise RuntimeError("a kernel failed")
            return found

        setattr(owner, name, broken)
        failed = await actor.generate([(PROMPT, SamplingParams(max_tokens=9, seed=n)) for n in range(12)])
        setattr(owner, name, whole)
        left_over = actor.engine.num_running, actor.engine.num_waiting, len(actor.engine.batch.requests)
        (after,) = await actor.generate([(PROMPT, params)])
        await actor.close()
        return before, failed, left_over, after

    before, failed, left_over, after = asyncio.run(ask())
    assert {type(answer) for answer in failed} == {EngineFailed}
    assert left_over == (0, 0, 0)
    assert after == before


def test_other_calls_are_answered_while_a_long_step_runs(checkpoint):
    async def ask():
        actor = await loaded(checkpoint)
        step, begun = actor.engine.step, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow():
            loop.call_soon_threadsafe(begun.set)
            time.sleep(0.5)
            return step()

        actor.engine.step = slow
        asked = asyncio.ensure_future(actor.generate([(PROMPT, SamplingParams(max_tokens=1))]))
        await begun.wait()
        waited = []
        while not asked.done():
            began = time.perf_counter()
            await actor.check()
            await asyncio.sleep(0.005)
            waited.append(time.perf_counter() - began)
        await actor.close()
        return waited

    waited = asyncio.run(ask())
    assert len(waited) > 20
    assert sorted(waited)[len(waited) // 2] < 0.05  # of 0.5; the median, for the sake of busy machines


def test_closing_ends_what_waits_even_where_a_step_hangs(checkpoint):
    released = threading.Event()

    async def ask():
        actor = await loaded(checkpoint)
        begun = threading.Event()

        def hangs():
            begun.set()
            released.wait(20)
            return []

        actor.engine.step = hangs
        asked = asyncio.ensure_future(actor.generate([(PROMPT, SamplingParams(max_tokens=1))]))
        await asyncio.sleep(0)
        await asyncio.to_thread(begun.wait, 10)
        late = actor._thread.run(lambda engine: engine.version)
        began = time.perf_counter()
        await asyncio.to_thread(actor._thread.close, 0.1)
        answers = [*await asked, *await actor.generate([(PROMPT, SamplingParams(max_tokens=1))])]
        return answers, late.exception(1), time.perf_counter() - began

    answers, late, took = asyncio.run(ask())
    released.set()
    assert [type(answer) for answer in answers] == [EngineFailed] * 2
    assert "closed" in str(late)
    assert took < 5


def test_a_checkpoint_is_loaded_only_when_nothing_is_in_flight_and_an_engine_that_failed_is_replaced(checkpoint):
    async def ask():
        actor = await loaded(checkpoint)
        asked = asyncio.ensure_future(actor.generate([(PROMPT, SamplingParams(max_tokens=60))]))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests are in flight"):
            await actor.load(str(checkpoint))
        (whole,) = await asked
        failing(actor, set(range(100)))
        for _ in range(3):
            await actor.generate([(PROMPT, SamplingParams(max_tokens=2))])
        with pytest.raises(EngineFailed):
            await actor.check()
        assert await actor.load(str(checkpoint)) == 0
        await actor.check()
        (again,) = await actor.generate([(PROMPT, SamplingParams(max_tokens=60))])
        await actor.close()
        return whole, again

    whole, again = asyncio.run(ask())
    assert (len(whole.token_ids), len(again.token_ids)) == (60, 60)


def test_a_run_says_how_long_a_conversation_may_be_and_plans_memory_for_it(checkpoint):
    found = []
    for context in (64, 4096):

        async def one(context=context):
            actor = RolloutActor(ClusterConfig(engine=EngineConfig(max_context=context, memory_mb=4)), max_running=64)
            await actor.load(str(checkpoint))
            answers = await actor.generate([(PROMPT, SamplingParams(max_tokens=n)) for n in (20, 60)])
            rows = actor.engine.batch.scheduler.rows
            await actor.close()
            return *answers, rows

        found.append(asyncio.run(one()))
    (short, refused, many), (_, taken, few) = found
    assert len(short.token_ids) == 20
    assert isinstance(refused, ContextOutgrown)
    assert len(taken.token_ids) == 60
    assert many > few


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
