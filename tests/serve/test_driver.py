"""The driver: tokens as they come, and everything between steps."""

from __future__ import annotations

import asyncio
import threading

import pytest

from k3rl.checkpoint import manifest_of
from k3rl.checkpoint.hf import official_tensors
from k3rl.engine import Engine, EngineError, InvalidRequest
from k3rl.serve import EngineDriver
from k3rl.types import SamplingParams, StopReason

PROMPT = [5, 9, 2]


async def ready(load) -> EngineDriver:
    driver = EngineDriver(load)
    driver.start()
    while driver.state == "starting":
        await asyncio.sleep(0.01)
    return driver


async def test_streams_give_the_tokens_of_the_engine_in_pieces_or_at_once(model):
    own = [SamplingParams(max_tokens=9, seed=seed) for seed in range(3)]
    expected = [completion.token_ids for completion in Engine(model).generate([PROMPT] * 3, own)]
    driver = await ready(lambda: Engine(model, max_running=2))
    streams = [driver.submit(PROMPT, params, incremental=True) for params in own]
    whole = driver.submit(PROMPT, own[0])
    for stream, ids in zip(streams, expected, strict=True):
        pieces = [tokens async for tokens in stream]
        assert tuple(token for piece in pieces for token in piece.ids) == ids == stream.completion.token_ids
        assert sum(len(piece.logprobs) for piece in pieces) == 9
    assert (await whole.result()).token_ids == expected[0]
    await driver.close()


async def test_weights_can_be_updated_between_steps_while_requests_run(model, build_model):
    driver = await ready(lambda: Engine(model))
    tensors = dict(official_tensors(build_model(seed=4)))
    stream = driver.submit(PROMPT, SamplingParams(max_tokens=200, seed=1), incremental=True)
    await anext(aiter(stream))

    def update(engine: Engine) -> int:
        assert threading.current_thread().name.startswith("k3rl-engine")
        engine.start_weight_update(5, manifest_of(tensors.items()))
        engine.update_weights(tensors.items())
        engine.finish_weight_update(5)
        return engine.version

    assert await driver.call(update) == 5
    completion = await stream.result()
    assert (completion.first_version, completion.weight_version) == (0, 5)
    with pytest.raises(ZeroDivisionError):
        await driver.call(lambda engine: 1 // 0)
    assert driver.state == "ready"
    await driver.close()


async def test_an_aborted_or_refused_request_ends_alone_and_closing_ends_the_rest(model):
    driver = await ready(lambda: Engine(model))
    stay = driver.submit(PROMPT, SamplingParams(max_tokens=240))
    leave = driver.submit(PROMPT, SamplingParams(max_tokens=240))
    wrong = driver.submit([1000], SamplingParams())
    with pytest.raises(InvalidRequest, match="1000"):
        await wrong.result()
    driver.abort(leave)
    assert (await leave.result()).stop_reason is StopReason.ABORTED
    driver.abort(leave)
    await driver.close()
    with pytest.raises(EngineError, match="closed"):
        await stay.result()
    with pytest.raises(EngineError, match="closed"):
        driver.submit(PROMPT, SamplingParams())


async def test_a_paused_engine_is_looked_at_now_and_then_and_goes_on_at_once(model):
    looks = 0

    class Watched(Engine):
        def step(self):
            nonlocal looks
            looks += 1
            return super().step()

    driver = await ready(lambda: Watched(model))
    await driver.call(lambda engine: engine.pause("keep"))
    stream = driver.submit(PROMPT, SamplingParams(max_tokens=3))
    await asyncio.sleep(0.3)
    assert looks < 20
    await driver.call(lambda engine: engine.resume())
    assert len((await stream.result()).token_ids) == 3
    await driver.close()


async def test_an_engine_that_breaks_ends_every_request_and_says_why(model):
    begun, go_on = threading.Event(), threading.Event()

    class Broken(Engine):
        def step(self):
            begun.set()
            go_on.wait(10)
            raise RuntimeError("out of luck")

    driver = await ready(lambda: Broken(model))
    stream = driver.submit(PROMPT, SamplingParams())
    await asyncio.to_thread(begun.wait, 10)
    called = asyncio.create_task(driver.call(lambda engine: engine.version))
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(EngineError, match="out of luck"):
        await stream.result()
    with pytest.raises(EngineError, match="out of luck"):
        await asyncio.wait_for(called, 10)
    assert driver.state == "failed"
    with pytest.raises(EngineError, match="out of luck"):
        driver.submit(PROMPT, SamplingParams())
    await driver.close()
