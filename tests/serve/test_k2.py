"""A Kimi Linear is served in K2's chat form: tool calls, streams, tool choices, and conversations that go on."""

from __future__ import annotations

import json

import httpx
import jsonschema
import openai
import pytest
import torch
from serving import HEADERS, MESSAGES, TOKEN, TOOLS, Scripted, listening, wait_until

from k3rl.engine import Engine, PrefixCache
from k3rl.engine.prefix import MemoryTier
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.serve import create_app
from k3rl.tokens import Tokenizer, chat_format
from k3rl.types import Constraint, Message, SamplingParams, StopReason, ToolCall

TOKENIZER = Tokenizer.builtin("k2")
CHAT = chat_format(TOKENIZER)
STOP = CHAT.stop_id
CALLS = (
    ToolCall("add", {"a": 1, "b": "x\u00e9"}, "functions.add:0", '{"a":1,"b":"x\u00e9"}'),
    ToolCall("now", {}, "functions.now:1", "{}"),
)
TURN = Message("assistant", "It is \u00e9 <|im_end|>.", tool_calls=CALLS)
SCHEMA = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def linear():
    made = K3ForCausalLM(K3Config.named("kimi-linear-nano"), dtype=torch.float32)
    made.init_weights(1)
    return made


def app(load):
    return create_app(load, TOKENIZER, model_name="tiny", token=TOKEN)


@pytest.fixture(scope="module")
def client(linear):
    Scripted.script = TOKENIZER.encode_segments(CHAT.sampled(TURN))
    with listening(
        app(lambda: Scripted(linear, tokenizer=TOKENIZER, prefix_cache=PrefixCache([MemoryTier(2**24)])))
    ) as url:
        wait_until(lambda: httpx.get(url + "/ready").status_code == 200)
        yield openai.OpenAI(base_url=url + "/v1", api_key=TOKEN, max_retries=0)


def called(calls):
    return [(call.id, call.function.name, call.function.arguments) for call in calls]


WANTED = [(call.id, call.name, call.text) for call in CALLS]


def test_a_turn_with_tool_calls_and_the_next_prompt_begins_with_its_tokens(client):
    ids = {"return_token_ids": True}
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, extra_body=ids)
    message = first.choices[0].message
    assert (message.content, called(message.tool_calls)) == (TURN.content, WANTED)
    assert first.choices[0].finish_reason == "tool_calls"
    assert getattr(message, "reasoning_content", None) is None
    assert first.prompt_token_ids == TOKENIZER.encode_segments(CHAT.render(MESSAGES, tools=TOOLS))
    results = [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in message.tool_calls]
    said = [*MESSAGES, message.model_dump(exclude_none=True), *results]
    second = client.chat.completions.create(model="tiny", messages=said, tools=TOOLS, extra_body=ids)
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert second.usage.prompt_tokens_details.cached_tokens >= len(before) - 1


def test_a_streamed_turn_adds_up_to_the_whole_one(client):
    content, calls, finish, chunks = "", [], None, 0
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, stream=True):
        for choice in chunk.choices:
            chunks += 1
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    assert (content, called(calls), finish) == (TURN.content, WANTED, "tool_calls")
    assert [call.index for call in calls] == [0, 1]
    assert chunks > 5, "it came in pieces"


def test_stop_strings_are_found_in_the_content_alone(client):
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
    whole = client.chat.completions.create(**asked, stop=["functions", "add"]).choices[0]
    assert called(whole.message.tool_calls) == WANTED
    cut = client.chat.completions.create(**asked, stop=["is"]).choices[0]
    assert (cut.message.content, cut.message.tool_calls, cut.finish_reason) == ("It ", None, "stop")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"reasoning_effort": "low"}, "this model's chat form has no think channel"),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b"}]}, "has reasoning"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "without a tool_call_id"),
    ],
)
def test_what_the_form_cannot_say_is_a_bad_request(client, body, why):
    url = str(client.base_url) + "chat/completions"
    answer = httpx.post(url, headers=HEADERS, json={"model": "tiny", "messages": MESSAGES, **body})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_a_tool_choice_and_a_response_format_are_kept(linear):
    """Whatever the model: its weights are random, and it is asked for what it would never say."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    with listening(app(lambda: Engine(linear, tokenizer=TOKENIZER))) as url:
        wait_until(lambda: httpx.get(url + "/ready").status_code == 200)

        def ask(**body):
            body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "seed": 2, **body}
            begins = {str(TOKENIZER.special("tool_calls_section_begin")): 20.0}
            answer = httpx.post(
                url + "/v1/chat/completions", headers=HEADERS, json={"logit_bias": begins, **body}, timeout=60
            )
            return answer.json()["choices"][0]

        must = ask(tool_choice="required", logit_bias={}, temperature=0.3)
        assert not must["message"]["content"] or must["finish_reason"] in ("tool_calls", "length")
        said = ask(tool_choice="none", return_token_ids=True)
        assert TOKENIZER.special("tool_calls_section_begin") not in said["token_ids"]
        told = ask(response_format=form, tool_choice="none", logit_bias={})
        jsonschema.validate(json.loads(told["message"]["content"]), SCHEMA)
        assert told["finish_reason"] == "stop"


@pytest.mark.parametrize("calls", [False, True, "only"])
def test_a_constrained_turn_is_valid(linear, calls):
    engine = Engine(linear, tokenizer=TOKENIZER)
    names = ("tool_calls_section_begin", "tool_calls_section_end", "tool_call_argument_begin", "tool_call_end")
    bias = tuple((TOKENIZER.special(name), 9.0) for name in names)  # short texts, short calls
    own = [
        SamplingParams(
            max_tokens=150,
            seed=seed,
            stop_ids=(STOP,),
            constraint=Constraint("regex", "[0-9]{3}", "response", calls),
            logit_bias=bias,
        )
        for seed in range(4)
    ]
    done = [one for one in engine.generate([[3, 4]] * 4, own) if one.stop_reason is StopReason.STOP]
    assert done
    for completion in done:
        message = CHAT.parse(completion.token_ids)
        assert isinstance(message, Message)
        assert bool(message.tool_calls) == (calls == "only") or calls is True
        if not message.tool_calls:
            assert len(message.content) == 3
        for call in message.tool_calls:
            assert isinstance(call.arguments, dict)
