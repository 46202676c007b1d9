"""What every endpoint of the chat dialect does alike: the server over an engine, and the gateway of programs."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, contextmanager

import httpx
import openai
import pytest
from serving import (
    CALLS,
    HEADERS,
    MESSAGES,
    TOKEN,
    TOKENIZER,
    TOOLS,
    TURN,
    Scripted,
    listening,
    running,
    turn_ids,
    wait_until,
)

from k3rl.envs import TurnSettings
from k3rl.envs.gateway import GatewaySession
from k3rl.serve import EngineDriver, EnginePolicy, Gateway
from k3rl.tokens import xtml
from k3rl.types import Budgets, Message, SamplingParams, Task

TASK = Task("t/0", "t", (Message("user", "x"),), "f")


@contextmanager
def behind_the_server(load):
    with running(load) as (url, _):
        wait_until(lambda: httpx.get(url + "/ready").status_code == 200)
        yield url + "/v1"


@contextmanager
def behind_the_gateway(load):
    driver, gateway = EngineDriver(load), Gateway()

    @asynccontextmanager
    async def lifespan(_app):
        driver.start()
        while driver.state == "starting":
            await asyncio.sleep(0.01)
        yield
        await driver.close()

    gateway.app.router.lifespan_context = lifespan
    settings = TurnSettings(TOKENIZER, SamplingParams(max_tokens=400), thinking=True)
    token = gateway.open(GatewaySession(TASK, EnginePolicy(driver), settings, budgets=Budgets()))
    with listening(gateway.app) as url:
        yield f"{url}/s/{token}/v1"


@pytest.fixture(scope="module", params=[behind_the_server, behind_the_gateway])
def endpoint(request, build_model):
    """The base URL of an endpoint whose every answer is TURN."""
    model = build_model(vocab_size=512, media_placeholder_token_id=509, pad_token_id=511, max_position_embeddings=1024)
    Scripted.script = turn_ids(TURN)
    with request.param(lambda: Scripted(model, tokenizer=TOKENIZER)) as url:
        yield url


@pytest.fixture(scope="module")
def client(endpoint):
    return openai.OpenAI(base_url=endpoint, api_key=TOKEN, max_retries=0)


def ask(endpoint, **fields):
    return httpx.post(endpoint + "/chat/completions", headers=HEADERS, json={"messages": MESSAGES, **fields})


def check_turn(message) -> None:
    said = (message["role"], message["content"], message["reasoning_content"])
    assert said == ("assistant", TURN.content, TURN.reasoning)
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [(c.name, c.arguments) for c in CALLS]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_a_whole_answer(endpoint):
    body = ask(endpoint, tools=TOOLS).json()
    assert (body["object"], body["id"].startswith("chatcmpl-"), body["created"] > 0) == ("chat.completion", True, True)
    [choice] = body["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "tool_calls", None)
    check_turn(choice["message"])
    prompt = len(TOKENIZER.encode_segments(xtml.render(MESSAGES, tools=TOOLS)))
    sampled = len(Scripted.script)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_adds_up_to_the_whole_answer(endpoint):
    answer = ask(endpoint, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *said, last = chunks
    assert (last["choices"], last["usage"]) == ([], ask(endpoint).json()["usage"])
    choices = [choice for chunk in said for choice in chunk["choices"]]
    assert all(choice.keys() >= {"index", "delta", "logprobs", "finish_reason"} for choice in choices)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    text = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content")}
    check_turn({"role": "assistant", **text, "tool_calls": calls})


def test_the_conversation_with_results_out_of_order_goes_back_in(client):
    said = client.chat.completions.create(model="", messages=MESSAGES, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in reversed(said.tool_calls)]
    history = [*MESSAGES, said.model_dump(exclude_none=True), *results]
    answer = client.chat.completions.create(model="", messages=history, tools=TOOLS)
    told = [Message("user", "What is it?"), TURN, *(Message("tool", "3", name=call.name) for call in CALLS)]
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode_segments(xtml.render(told, tools=TOOLS)))


@pytest.mark.parametrize("limit", [{"max_tokens": 4}, {"max_completion_tokens": 4, "max_tokens": 9}])
def test_the_least_limit_cuts_a_turn_and_a_developer_is_the_system(endpoint, limit):
    given = [{"role": "developer", "content": "be brief"}, *MESSAGES]
    body = ask(endpoint, messages=given, stop_token_ids=None, **limit).json()
    [choice] = body["choices"]
    assert (choice["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 4)
    assert not choice["message"].get("tool_calls")
    system = [{"role": "system", "content": "be brief"}, *MESSAGES]
    assert body["usage"]["prompt_tokens"] == len(TOKENIZER.encode_segments(xtml.render(system)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "nobody asked"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning": 3}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools.0"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"stop": 5}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_body_that_makes_no_sense_is_an_error_object(endpoint, fields, param, stream):
    body = json.dumps({"messages": MESSAGES, **fields, "stream": stream})
    answer = httpx.post(endpoint + "/chat/completions", headers=HEADERS, content=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], bool(error["message"])) == ("invalid_request_error", True)
    assert param is None or error["param"] == param


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_an_error_object(endpoint, content):
    answer = httpx.post(endpoint + "/chat/completions", headers=HEADERS, content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_conversation_that_exceeds_the_context_is_an_error_with_that_code(endpoint):
    answer = ask(endpoint, messages=[{"role": "user", "content": "word " * 600}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_what_is_not_there_is_an_error_object_and_the_models_are_listed(endpoint):
    missing = httpx.post(endpoint + "/embeddings", headers=HEADERS)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    listed = httpx.get(endpoint + "/models", headers=HEADERS).json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert model.keys() == {"id", "object", "created", "owned_by"}
    assert (model["object"], model["owned_by"]) == ("model", "k3rl")
