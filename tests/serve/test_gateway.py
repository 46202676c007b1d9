"""A real engine behind a recording session: what is recorded is what the engine computes, turn after turn."""

from __future__ import annotations

import asyncio
import json

import numpy as np

from k3rl.engine import Engine
from k3rl.envs import TurnSettings
from k3rl.envs.gateway import GatewaySession, answer
from k3rl.serve import EngineDriver, EnginePolicy
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Budgets, Message, SamplingParams, StopReason, Task

TOKENIZER = Tokenizer.builtin()
TASK = Task("t/0", "t", (Message("user", "x"),), "f")


async def test_turns_hold_the_tokens_logprobs_and_version_of_the_engine(build_model, run_alone):
    special = {"media_placeholder_token_id": 511, "pad_token_id": 510}  # no id that these prompts hold
    model = build_model(vocab_size=TOKENIZER.vocab_size, **special)
    driver = EngineDriver(lambda: Engine(model, max_running=4))
    driver.start()
    while driver.state == "starting":
        await asyncio.sleep(0.01)
    settings = TurnSettings(TOKENIZER, SamplingParams(max_tokens=8, seed=3))
    session = GatewaySession(TASK, EnginePolicy(driver), settings, budgets=Budgets(turns=3))
    asked = [[{"role": "user", "content": word}] for word in ("one", "two", "three")]
    answers = await asyncio.gather(*(answer(session, json.dumps({"messages": one}).encode()) for one in asked))
    assert [given.status for given in answers] == [200, 200, 200]
    assert (await answer(session, json.dumps({"messages": asked[0]}).encode())).status == 403
    other = GatewaySession(TASK, EnginePolicy(driver), settings)
    long = {"messages": [{"role": "user", "content": "word " * 300}]}
    refused = await answer(other, json.dumps(long).encode())
    assert (refused.status, refused.body["error"]["code"]) == (400, "context_length_exceeded")
    assert (other.stop_reason, other.engine_error) == (StopReason.CONTEXT_OVERFLOW, None)
    assert (await answer(other, json.dumps({"messages": asked[0]}).encode())).status == 200
    assert other.stop_reason is not StopReason.CONTEXT_OVERFLOW
    await driver.close()
    episode = session.episode("e", StopReason.MAX_TURNS)
    assert len(episode.branches) == 3
    for number, (branch, messages) in enumerate(zip(episode.branches, asked, strict=True)):
        [turn] = branch.turns
        prompt = TOKENIZER.encode_segments(xtml.render(messages, thinking=False))
        own = SamplingParams(max_tokens=8, seed=3 * 1_000_003 + number, stop_ids=(xtml.stop_id(TOKENIZER),))
        ids, logprobs = run_alone(model, prompt, own)
        assert list(turn.prompt_ids) == prompt
        assert list(turn.sampled_ids) == ids
        # float64, batch against single; what is recorded is float32
        np.testing.assert_allclose(turn.logprobs, logprobs, rtol=2**-23, atol=1e-9)
        assert (turn.first_version, turn.last_version) == (0, 0)
