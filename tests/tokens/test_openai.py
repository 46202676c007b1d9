"""The OpenAI dialect: what it makes of tokens, of fields and of conversations."""

from __future__ import annotations

import json

import pytest

from k3rl.tokens import Tokenizer, xtml
from k3rl.tokens.openai import Channels, ChatRequest, Conversation, PlainText, TextCutter, chunks_of, event, event_data
from k3rl.types import SamplingParams

TOKENIZER = Tokenizer.builtin()


@pytest.mark.parametrize("cuts", [1, 2, 3, 5])
def test_text_in_pieces_never_shows_a_stop_string_or_half_a_character(cuts):
    text = "a\u00e9b STO x STOP rest"
    cutter = TextCutter(["STOP", "zz"])
    data = text.encode()
    pieces = [cutter.feed(data[i : i + cuts], final=i + cuts >= len(data)) for i in range(0, len(data), cuts)]
    assert "".join(pieces) == "a\u00e9b STO x "
    assert all("\ufffd" not in piece for piece in pieces)


def test_the_text_ends_before_the_stop_string_that_ended_it_however_it_is_cut():
    for stop in (["abcd", "bc"], ["bc", "abcd"]):
        cutter = TextCutter(stop)
        assert "".join(cutter.feed(bytes([byte])) for byte in b"xabcd") == TextCutter(stop).feed(b"xabcd") == "xa"


def test_offsets_count_the_characters_of_the_text_before_each_token():
    text = PlainText(TOKENIZER, [])
    data = "\u00e9a\U0001f600b".encode()
    for byte in data:
        text.feed([byte])
    assert text.offsets == [0, 0, 1, 2, 2, 2, 2, 3]


def test_fields_that_are_null_are_not_given_and_the_least_limit_holds():
    body = {"messages": [{"role": "developer", "content": "x"}], "top_k": None, "stop_token_ids": None, "x": None}
    chat = ChatRequest.model_validate_json(json.dumps({**body, "max_tokens": 9, "max_completion_tokens": 4}))
    assert chat.messages[0]["role"] == "system"
    assert chat.params(100, 502) == SamplingParams(max_tokens=4, stop_ids=(502,))


def test_channels_of_a_turn_without_thinking_and_of_a_malformed_one():
    plain = Channels(TOKENIZER, [], thinking=False)
    assert plain.feed(TOKENIZER.encode("hi"), final=True)[0][0] == "content"
    odd = Channels(TOKENIZER, [], thinking=True)
    sep, close, opened = (TOKENIZER.special(name) for name in ("sep", "close", "open"))
    ids = [*TOKENIZER.encode("x"), close, *TOKENIZER.encode("nonsense"), sep, *TOKENIZER.encode("lost"), opened, 9999]
    assert odd.feed(ids, final=True) == [("reasoning_content", "x")]


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"b": "\u00e9", "a": [1]}'}}
ODD_CALL = {"id": "d", "type": "function", "function": {"name": "say", "arguments": "no JSON"}}


def test_a_conversation_as_values_is_rendered_as_its_rows_are():
    rows = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Ann"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL, ODD_CALL]},
        {"role": "tool", "tool_call_id": "d", "content": "fine"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "it is "}, {"type": "text", "text": "3"}]},
        {"role": "user", "content": ""},
    ]
    given = Conversation.model_validate({"messages": rows})
    as_rows = TOKENIZER.encode_segments(xtml.render(given.messages))
    assert TOKENIZER.encode_segments(xtml.render(given.as_messages())) == as_rows


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"role": "system", "content": "x", "tools": [{"type": "function"}]}, "message 0 declares tools"),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": "data:"}]}, "message 0 shows an image"),
    ],
)
def test_what_no_value_can_say_is_refused(row, says):
    with pytest.raises(xtml.XTMLError, match=says):
        Conversation.model_validate({"messages": [row]}).as_messages()


def test_events_are_read_as_they_were_written():
    lines = (event({"a": "\u00e9\n"}) + ": a comment\n\n" + event("[DONE]")).splitlines()
    assert [data for line in lines if (data := event_data(line)) is not None] == ['{"a": "\u00e9\\n"}', "[DONE]"]


def test_a_whole_answer_in_chunks_has_its_usage_only_where_that_is_wanted():
    choice = {"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}, "finish_reason": "tool_calls"}
    answer = {"id": "i", "created": 1, "model": "m", "choices": [choice], "usage": {"total_tokens": 3}}
    *chunks, last = chunks_of(answer, include_usage=True)
    assert chunks == chunks_of(answer, include_usage=False)
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 3})
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, **CALL}]},
        {},
    ]
