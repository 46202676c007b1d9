"""Anthropic's dialect over loopback: the same turns as in the chat dialect, whole and as events."""

from __future__ import annotations

import json

import httpx
import pytest
from serving import CALLS, HEADERS, TOKEN, TOKENIZER, TURN, Scripted, running, turn_ids, wait_until

from k3rl.tokens import anthropic, xtml

TOOLS = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
BODY = {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "What is it?"}], "tools": TOOLS}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture(scope="module")
def url(build_model):
    model = build_model(vocab_size=512, media_placeholder_token_id=509, pad_token_id=511, max_position_embeddings=1024)
    Scripted.script = turn_ids(TURN)
    with running(lambda: Scripted(model, tokenizer=TOKENIZER)) as (address, _):
        wait_until(lambda: httpx.get(address + "/ready").status_code == 200)
        yield address + "/v1/messages"


def check(message) -> None:
    thought, text, *used = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", TURN.reasoning)
    assert (text["type"], text["text"]) == ("text", TURN.content)
    assert [(block["type"], block["name"], block["input"]) for block in used] == [
        ("tool_use", call.name, call.arguments) for call in CALLS
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens"] == len(turn_ids(TURN))


def test_a_turn_comes_as_blocks_to_who_has_the_key(url):
    answer = httpx.post(url, headers={"x-api-key": TOKEN}, json={**BODY, **THINKS}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["type"], answer.json()["role"], answer.json()["model"]) == ("message", "assistant", "tiny")
    check(answer.json())


def test_events_add_up_to_the_whole_message(url):
    answer = httpx.post(url, headers=HEADERS, json={**BODY, **THINKS, "stream": True}, timeout=60)
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start", "message_delta", "message_stop"
    ]  # fmt: skip
    blocks: list[dict] = []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            for key, value in event["delta"].items():
                if key != "type":
                    own = "json" if key == "partial_json" else key
                    blocks[event["index"]][own] += value
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    check({"content": blocks, **events[-2]["delta"], "usage": events[-2]["usage"]})


def test_a_stop_sequence_is_named(url):
    answer = httpx.post(url, headers=HEADERS, json={**BODY, **THINKS, "stop_sequences": ["done"]}, timeout=60).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "done")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": [{"role": "user", "text": "hi"}]}, "'text'"),
        ({"messages": [{"role": "user", "content": []}]}, "says nothing"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role 'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"colour": 1}, "colour"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tool_choice": {"type": "tool", "name": "sub"}}, "'sub'"),
        ({"model": "other"}, "other"),
    ],
)
def test_what_is_not_served_is_refused_in_the_dialect(url, change, said):
    answer = httpx.post(url, headers=HEADERS, json={**BODY, **change}, timeout=60)
    assert answer.status_code in (400, 404)
    assert answer.json()["type"] == "error"
    assert said in answer.json()["error"]["message"]
    assert httpx.post(url, json=BODY).json()["error"]["type"] == "authentication_error"


def test_blocks_of_a_conversation_are_the_messages_of_the_chat_dialect():
    asked = anthropic.MessagesRequest.model_validate(
        {
            **BODY,
            "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "text", "text": "I add."},
                        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "4"},
                        {"type": "text", "text": "and?"},
                    ],
                },
            ],
            "tool_choice": {"type": "any"},
        }
    ).chat()
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    same = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "user", "content": "and?"},
    ]
    assert xtml.render(asked.messages) == xtml.render(same)
    assert (asked.tool_choice, asked.thinks, asked.limit) == ("required", False, 400)
