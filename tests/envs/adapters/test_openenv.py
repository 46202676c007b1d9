"""The OpenEnv client against a server that speaks its WebSocket protocol."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import WSMsgType, web

from k3rl.config import MissingResource
from k3rl.envs import EpisodeContext, make
from k3rl.envs.base import Action
from k3rl.types import Failed, Message, Scored, Task

TASK = Task("t", "e", (Message("user", "play"),), "f", data={"seed": 1})


class Server:
    """One session a connection; the number to say is the seed modulo 10. `bad` names an answer that breaks rules."""

    def __init__(self, bad: str = "") -> None:
        self.bad, self.open, self.closed, self.resets = bad, 0, 0, []

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.open += 1
        number = 0
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            asked = json.loads(message.data)
            if asked["type"] == "close":
                self.closed += 1
                break
            if asked["type"] == "reset":
                self.resets.append(asked["data"])
                number = asked["data"]["seed"] % 10
                answer = self.observed("say a digit", None, False)
            else:
                answer = self.stepped(asked["data"], number)
            if answer is None:
                await asyncio.sleep(600)
            elif answer == "hang up":
                break
            else:
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        await socket.close()
        self.open -= 1
        return socket

    def stepped(self, action, number):
        if set(action) - {"metadata"} != {"digit"}:
            problem = [{"loc": ["digit"], "msg": "Field required"}]
            data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": problem}
            return {"type": "error", "data": data}
        bad = {
            "raise": {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}},
            "hang": None,
            "hang up": "hang up",
            "text": "not json",
            "nan": '{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": true}}',
            "missing": self.observed("", None, True),
            "state": {"type": "state", "data": {}},
            "done": {"type": "observation", "data": {"observation": {"text": ""}, "reward": 1.0}},
        }
        if self.bad:
            return bad[self.bad]
        right = action["digit"] == str(number)
        return self.observed("right" if right else "wrong", right or -0.25, right)

    @staticmethod
    def observed(text, reward, done):
        seen = {"text": text, "metadata": {"secret": 1}}
        return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}}


@asynccontextmanager
async def serving(server):
    app = web.Application()
    app.router.add_get("/ws", server.session)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"openenv:http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def said(environment, *texts, index=0):
    """(what the policy read, score) of an episode by hand."""
    task = environment.source.get("train", index)
    env = environment.make_env()
    try:
        seen = [(await env.reset(task.public(), EpisodeContext())).messages[0].content]
        for text in texts:
            step = await env.step(Action(Message("assistant", text)))
            if step.done:
                return seen, environment.grader().score_batch([(task, step.answer)])[0]
            seen.append(step.observation.messages[0].content)
        raise AssertionError("the episode goes on")
    finally:
        await env.close()


async def test_an_episode_is_a_session_of_its_own_and_its_rewards_are_summed():
    server = Server()
    async with serving(server) as name:
        environment = make(name, field="digit", show="text", instructions="Play.", reset={"level": 2})
        digit = environment.source.get("train", 0).data["seed"] % 10
        wrong = str((digit + 1) % 10)
        (seen, score), (_, other) = await asyncio.gather(
            said(environment, wrong, wrong, str(digit)), said(environment, str(digit))
        )
        assert seen == ["Play.\nsay a digit", "wrong", "wrong"]
        assert score == Scored(pytest.approx(0.5), {"finished": 1.0, "rewards": 3.0})
        assert isinstance(other, Scored)
        assert other.reward == 1.0  # the server says true, which OpenEnv allows as a reward
        assert server.resets == [{"level": 2, "seed": environment.source.get("train", 0).data["seed"]}] * 2
    assert server.closed == 2


async def test_an_action_that_the_server_does_not_take_is_told_to_the_policy():
    async with serving(Server()) as name:
        environment = make(name)
        digit = environment.source.get("train", 0).data["seed"] % 10
        seen, score = await said(environment, "hello", '{"finger": 1}', json.dumps({"digit": str(digit)}))
        assert json.loads(seen[0]) == {"text": "say a digit"}
        assert "one JSON object" in seen[1]
        assert "Field required" in seen[2]
        assert isinstance(score, Scored)


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        ("raise", "ForeignRaised", "EXECUTION_ERROR: it broke"),
        ("hang", "ForeignHung", r"step took more than 0\.3 s"),
        ("hang up", "ForeignDied", "ended the session during step"),
        ("text", "ForeignLied", "not JSON"),
        ("nan", "ForeignLied", "not a finite number"),
        ("state", "ForeignLied", "not an observation"),
        ("done", "ForeignLied", "`done` is None"),
    ],
)
async def test_a_server_that_breaks_or_lies_is_an_error_of_its_own_kind(bad, kind, words):
    from k3rl.envs import adapters

    async with serving(Server(bad)) as name:
        environment = make(name, field="digit", call_s=0.3)
        with pytest.raises(getattr(adapters, kind), match=words):
            await said(environment, "1")


async def test_an_end_without_a_reward_is_failed():
    async with serving(Server("missing")) as name:
        _, score = await said(make(name, field="digit"), "1")
    assert score == Failed("the environment ended the episode and gave no reward")


async def test_no_server_is_a_missing_resource():
    async with serving(Server()) as name:
        pass
    with pytest.raises(MissingResource, match="no OpenEnv server at ws://127"):
        await said(make(name, connect_s=2.0), "1")
    with pytest.raises(MissingResource, match="no OpenEnv server at ws://127"):
        await make(name, connect_s=2.0).make_env().reset(TASK, EpisodeContext())
