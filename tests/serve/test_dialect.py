"""What the dialect makes of tokens and of fields, without a server."""

from __future__ import annotations

import asyncio
import json

import pytest

from k3rl.serve.events import EventStream
from k3rl.serve.metrics import ServerMetrics
from k3rl.tokens import Tokenizer
from k3rl.tokens.openai import Channels, ChatRequest, PlainText, TextCutter
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


async def test_whoever_takes_nothing_of_a_stream_loses_its_request():
    ended = []

    async def events():
        while True:
            yield {}

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            await receive()

    await asyncio.wait_for(EventStream(events(), lambda: ended.append(1), 0.05)({}, receive, send), 10)
    assert ended == [1]


def test_fields_that_are_null_are_not_given_and_the_least_limit_holds():
    body = {"messages": [{"role": "developer", "content": "x"}], "top_k": None, "stop_token_ids": None, "x": None}
    chat = ChatRequest.model_validate_json(json.dumps({**body, "max_tokens": 9, "max_completion_tokens": 4}))
    assert chat.messages[0]["role"] == "system"
    assert chat.params(100, 502) == SamplingParams(max_tokens=4, stop_ids=(502,))


def test_counters_are_written_with_all_their_digits():
    text = ServerMetrics().text({"g": ("A gauge.", 0.1)}, {"c_total": ("A counter.", 1234567.0)})
    assert {"c_total 1234567", "g 0.1"} <= set(text.splitlines())


def test_channels_of_a_turn_without_thinking_and_of_a_malformed_one():
    plain = Channels(TOKENIZER, [], thinking=False)
    assert plain.feed(TOKENIZER.encode("hi"), final=True)[0][0] == "content"
    odd = Channels(TOKENIZER, [], thinking=True)
    sep, close, opened = (TOKENIZER.special(name) for name in ("sep", "close", "open"))
    ids = [*TOKENIZER.encode("x"), close, *TOKENIZER.encode("nonsense"), sep, *TOKENIZER.encode("lost"), opened, 9999]
    assert odd.feed(ids, final=True) == [("reasoning_content", "x")]
