from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.tokens import Special, Text, Tokenizer, special_ids, xtml
from k3rl.types import Message, ToolCall

TOKENIZER = Tokenizer.builtin()
SPECIALS = {f"<{name}>": name for name in special_ids.SMALL_SPECIAL_IDS}


def ids_of(*pieces):
    """Token ids of pieces: `<open>` and its like are special tokens, everything else is text."""
    return TOKENIZER.encode_segments([Special(SPECIALS[p]) if p in SPECIALS else Text(p) for p in pieces if p])


def element(tag, *body, attributes=""):
    return ("<open>", tag + attributes, "<sep>", *body, "<close>", tag.split(" ")[0], "<sep>")


END = ("<close>", "message", "<sep>", "<end_of_msg>")
ANSWER = ("<close>", "response", "<sep>")


def called(*body):
    return ("ok", *ANSWER, *element("tools", *body), *END)


# Text with everything that could be mistaken for structure.
structure = '<|open|> <|close|> <|sep|> <|end_of_msg|> [EOS] message think &quot; &amp; & " <|kimi_image_placeholder|>'
texts = st.text(max_size=20) | st.lists(
    st.sampled_from([*structure.split(" "), ' role="system"', " ", "\n", "é", "🙂", "第"]), max_size=6
).map("".join)
names = st.text(min_size=1, max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    ToolCall,
    name=names,
    arguments=st.dictionaries(texts, json_values, max_size=3) | texts.map(lambda text: "{oops " + text),
)
assistants = st.builds(
    Message,
    role=st.just("assistant"),
    content=texts,
    reasoning=st.none() | texts.filter(str.strip),
    tool_calls=st.lists(calls, max_size=3).map(tuple),
)


@st.composite
def dialogues(draw):
    """(conversation, number of messages through one of its assistant turns).

    Tool results come in any order, with or without ids and names, and may be fewer than the calls.
    """
    messages, cuts = [Message("user", draw(texts))], []
    for turn in range(draw(st.integers(1, 3))):
        said = draw(assistants)
        made = tuple(
            ToolCall(call.name, call.arguments, id=draw(st.sampled_from([None, f"c{turn}.{place}", "same"])))
            for place, call in enumerate(said.tool_calls)
        )
        messages.append(Message("assistant", said.content, reasoning=said.reasoning, tool_calls=made))
        cuts.append(len(messages))
        for call in draw(st.permutations(made)):
            if draw(st.booleans()):
                name = draw(st.sampled_from([None, "other", call.name]))
                messages.append(Message("tool", draw(texts), name=name, tool_call_id=call.id))
        if draw(st.booleans()):
            role = draw(st.sampled_from(["user", "system"]))
            messages.append(Message(role, draw(texts), name=draw(st.none() | names)))
    return messages, draw(st.sampled_from(cuts))


@given(assistants, st.booleans())
def test_parsing_the_rendering_of_an_assistant_message_gives_it_back(message, thinking):
    if not thinking:
        message = Message("assistant", message.content, tool_calls=message.tool_calls)
    ids = TOKENIZER.encode_segments(xtml.render([message], thinking=thinking, add_generation_prompt=False))
    prefix = TOKENIZER.encode_segments(xtml.render([], thinking=thinking))
    assert ids[: len(prefix)] == prefix
    assert xtml.parse(ids[len(prefix) :], TOKENIZER, thinking=thinking) == message
    assert xtml.parse(ids, TOKENIZER) == message


@given(dialogues(), st.booleans(), st.sampled_from([None, "required", "none"]), st.booleans())
def test_a_continuation_is_the_whole_rendering_without_the_history(dialogue, thinking, tool_choice, prompt):
    messages, cut = dialogue
    options = {"thinking": thinking, "tools": [{"type": "function"}], "thinking_effort": "low"}
    whole = xtml.render(messages, **options, tool_choice=tool_choice, add_generation_prompt=prompt)
    history = xtml.render(messages[:cut], **options, add_generation_prompt=False)
    assert whole[: len(history)] == history
    more = xtml.continuation(
        messages[:cut], messages[cut:], **options, tool_choice=tool_choice, add_generation_prompt=prompt
    )
    assert history + more == whole


def test_a_continuation_takes_the_image_prompts_of_the_new_messages():
    image = {"type": "image"}
    history = [Message("user", [image]), Message("assistant", "seen")]
    new = [Message("user", [image])]
    blocks = [xtml.image_prompt(1, 2), xtml.image_prompt(3, 4)]
    whole = xtml.render([*history, *new], image_prompts=blocks)
    head = xtml.render(history, image_prompts=blocks[:1], add_generation_prompt=False)
    assert head + xtml.continuation(history, new, image_prompts=blocks[1:]) == whole


@pytest.mark.parametrize(
    "history", [[], [Message("user", "x")], [Message("assistant", ""), Message("tool", "", name="f")]]
)
def test_a_continuation_must_follow_an_assistant_turn(history):
    with pytest.raises(xtml.XTMLError, match="history ends with"):
        xtml.continuation(history, [Message("user", "y")])


def test_a_continuation_names_a_bad_message_by_its_place_in_the_conversation():
    with pytest.raises(xtml.XTMLError, match="message 2 has the role"):
        xtml.continuation([Message("user", "x"), Message("assistant", "y")], [Message("robot", "z")])


@given(st.lists(st.integers(-2, 520), max_size=60), st.booleans())
def test_random_ids_never_raise(ids, thinking):
    result = xtml.parse(ids, TOKENIZER, thinking=thinking)
    assert isinstance(result, Message | xtml.ParseError)
    if isinstance(result, xtml.ParseError):
        assert 0 <= result.position <= len(ids)
        assert result.reason


PIECES = [
    "<open>",
    "<close>",
    "<sep>",
    "<end_of_msg>",
    "think",
    "response",
    "message",
    "tools",
    "call",
    "argument",
    "json",
]
PIECES += [
    ' tool="f"',
    ' index="1"',
    ' key="k"',
    ' type="number"',
    ' type="string"',
    ' role="assistant"',
    "1",
    "[",
    "x",
]


@settings(max_examples=300)
@given(assistants, st.data())
def test_damaged_messages_never_raise(message, data):
    """A valid message with one piece taken out, doubled or replaced by another piece of the grammar."""
    segments = xtml.render([message])[:-10]
    place = data.draw(st.integers(0, len(segments) - 1))
    other = data.draw(st.sampled_from(PIECES))
    other = Special(SPECIALS[other]) if other in SPECIALS else Text(other)
    replacement = data.draw(st.sampled_from([[], [segments[place]] * 2, [other], [other, segments[place]]]))
    ids = TOKENIZER.encode_segments([*segments[:place], *replacement, *segments[place + 1 :]])
    assert isinstance(xtml.parse(ids, TOKENIZER), Message | xtml.ParseError)


@given(st.integers(0, 40))
def test_a_message_cut_anywhere_is_an_error_at_its_end(keep):
    ids = ids_of("a", "<close>", "think", "<sep>", *element("response", "b"), *END)
    if keep < len(ids):
        assert xtml.parse(ids[:keep], TOKENIZER).position == keep


def test_any_split_of_a_tag_name_into_tokens_is_read():
    bytes_of_response = list(b"response")
    ids = [*ids_of("x", "<close>"), *bytes_of_response, *ids_of("<sep>", *END)]
    assert xtml.parse(ids, TOKENIZER, thinking=False) == Message("assistant", "x")


def test_an_empty_think_channel_is_no_reasoning_and_blank_reasoning_is_kept():
    rest = ("<close>", "think", "<sep>", *element("response", "b"), *END)
    assert xtml.parse(ids_of(*rest), TOKENIZER).reasoning is None
    assert xtml.parse(ids_of(" \n", *rest), TOKENIZER).reasoning == " \n"


def test_calls_keep_their_order_types_and_raw_arguments():
    argument = element("argument", "7", attributes=' key="n" type="number"')
    first = element("call", *argument, attributes=' tool="f" index="1"')
    second = element(
        "call", *element("json", "{no", attributes=' type="object"'), attributes=' tool="g&quot;" index="2"'
    )
    message = xtml.parse(ids_of(*called(*first, *second)), TOKENIZER, thinking=False)
    assert message == Message("assistant", "ok", tool_calls=(ToolCall("f", {"n": 7}), ToolCall('g"', "{no")))


def call(*body, head=' tool="f" index="1"'):
    return called(*element("call", *body, attributes=head))


def argument(value, head):
    return element("argument", value, attributes=head)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (("x", "<close>", "think", "<sep>", *END), "expected to close 'response', found 'think'"),
        (("x", *ANSWER, "<end_of_msg>"), r"expected <\|close\|>, found <\|end_of_msg\|>"),
        (("x", *ANSWER, *END, "y"), "tokens follow"),
        (("x", "<media_pad>", *ANSWER, *END), r"found <\|media_pad\|>"),
        (("x", *ANSWER, "y", *END), r"expected <\|close\|>, found text"),
        (called(), "holds no call"),
        (call(head=' tool="f" index="2"'), "has the index '2'"),
        (call(head=' index="1" tool="f"'), "expected the tag 'call tool index'"),
        (call(head=' tool="" index="1"'), "names no tool"),
        (call(head=' tool="f" index="1" index="1"'), "attribute twice"),
        (call(head="  tool=f"), "a tag reads"),
        (call(*argument("1", ' key="a"')), "expected an argument with key and type"),
        (call(*argument("1", ' key="a" type="integer"')), "type 'integer'"),
        (call(*argument("x", ' key="a" type="number"')), "not JSON"),
        (call(*argument("true", ' key="a" type="number"')), "type number holds 'true'"),
        (call(*argument("[" * 101 + "]" * 101, ' key="a" type="array"')), "not JSON"),
        (call(*argument("[" * 5000, ' key="a" type="array"')), "not JSON"),
        (call(*argument("9" * 5000, ' key="a" type="number"')), "not JSON"),
        (call(*argument("1", ' key="a" type="number"'), *argument("2", ' key="a" type="number"')), "given twice"),
        (call(*element("json", "[1]", attributes=' type="object"')), "neither a JSON object"),
        (call(*element("json", " ", attributes=' type="object"')), "neither a JSON object"),
        (call(*element("json", '"text"', attributes=' type="object"')), "neither a JSON object"),
        (
            ("<open>", "message", ' role="user"', "<sep>", *element("response", "x"), *END),
            "expected an assistant message",
        ),
        (("<open>", 'message role="assistant"', "<sep>", *element("tools")), "think or the response channel"),
    ],
)
def test_a_message_that_is_not_valid_is_refused_with_a_reason(pieces, reason):
    result = xtml.parse(ids_of(*pieces), TOKENIZER, thinking=False)
    assert isinstance(result, xtml.ParseError)
    assert re.search(reason, result.reason), result.reason


def test_the_position_names_the_token_that_is_wrong():
    ids = ids_of("x", "<close>", "response", "<sep>", "<media_pad>", *END)
    assert xtml.parse(ids, TOKENIZER, thinking=False).position == ids.index(special_ids.MEDIA_PAD)
    broken = [*ids_of("abc"), 0xC3, *ids_of("<close>", "response", "<sep>", *END)]
    error = xtml.parse(broken, TOKENIZER, thinking=False)
    assert "not UTF-8" in error.reason
    assert broken[error.position] == 0xC3
    assert xtml.parse([*ids_of("x"), 512], TOKENIZER, thinking=False) == xtml.ParseError(
        len(ids_of("x")), "token id 512 is out of range; this tokenizer has ids 0 .. 511"
    )


def test_deeply_nested_arguments_from_a_policy_can_be_rendered_again():
    deep = argument("[" * 100 + "]" * 100, ' key="a" type="array"')
    message = xtml.parse(ids_of(*call(*deep)), TOKENIZER, thinking=False)
    assert isinstance(message, Message)
    assert xtml.continuation([message], [Message("tool", "r")])
