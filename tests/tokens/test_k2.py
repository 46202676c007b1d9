"""K2's chat form: equal to what a chat template renders, append-only, total, and chosen by the checkpoint."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from k3rl.tokens import ChatError, ParseError, Special, Text, Tokenizer, TokenizerError, chat_format, k2, turn_text
from k3rl.types import Message, ToolCall
from tests.model import kimi_hub

SMALL = Tokenizer.builtin("k2")
CHAT = chat_format(SMALL)
MARKS = {text: name for name, text in kimi_hub.strings().items()}
MARK = re.compile("(" + "|".join(map(re.escape, MARKS)) + ")")

# Text with everything that could be mistaken for structure.
words = [
    "<|im_end|>",
    "<|im_user|>",
    "<|tool_call_begin|>",
    "## Return of functions.f:0",
    "functions.f:0",
    "[EOS]",
    "é",
]
texts = st.text(max_size=12) | st.lists(st.sampled_from([*words, " ", "\n", "🙂"]), max_size=5).map("".join)
plain_texts = texts.map(lambda text: MARK.sub("", text))  # a template cannot tell such text from structure
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | plain_texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(plain_texts, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(plain_texts, json_values, max_size=3)


@st.composite
def conversations(draw):
    """OpenAI-form messages whose calls have ids of the form, numbered through the conversation."""
    said = draw(st.lists(st.builds(lambda text: {"role": "system", "content": text}, plain_texts), max_size=1))
    count = 0
    for _ in range(draw(st.integers(1, 3))):
        parts = st.lists(plain_texts.map(lambda text: {"type": "text", "text": text}), max_size=2)
        said.append({"role": "user", "content": draw(plain_texts | parts)})
        if draw(st.booleans()):
            said[-1]["name"] = draw(names)
        turn = {"role": "assistant", "content": draw(plain_texts)}
        calls = []
        for name in draw(st.lists(names, max_size=2)):
            arguments = draw(objects | objects.map(json.dumps) | objects.map(lambda v: json.dumps(v, indent=1)))
            call = {"name": name, "arguments": arguments}
            calls.append({"id": f"functions.{name}:{count}", "type": "function", "function": call})
            count += 1
        if calls and draw(st.booleans()):
            turn["content"] = None
        said.append(turn | ({"tool_calls": calls} if calls else {}))
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": draw(plain_texts)}
            said.append(result | ({"name": call["function"]["name"]} if draw(st.booleans()) else {}))
        if calls:
            said.append({"role": "assistant", "content": draw(plain_texts)})
    return said


tools = st.none() | st.lists(
    st.builds(lambda name, about: {"type": "function", "function": {"name": name, **about}}, names, objects), max_size=2
)


def written(segments):
    text = {name: text for text, name in MARKS.items()}
    return "".join(text[one.name] if isinstance(one, Special) else one.text for one in segments)


@pytest.mark.parametrize("default", [None, kimi_hub.SYSTEM])
def test_prompts_are_those_of_the_chat_template(default):
    style = k2.K2Style(default)

    @settings(max_examples=60)
    @given(conversations(), tools, st.booleans())
    def equal(said, tools, prompt):
        theirs, _ = render_jinja_template(
            [said], tools=tools, chat_template=kimi_hub.template(default), add_generation_prompt=prompt
        )
        segments = k2.render(said, tools=tools, add_generation_prompt=prompt, style=style)
        assert written(segments) == theirs[0]
        # The released tokenizers cut a prompt at its special tokens, and encode what is between them in one piece.
        if default is None:
            pieces = [Special(MARKS[piece]) if piece in MARKS else Text(piece) for piece in MARK.split(theirs[0])]
            assert SMALL.encode_segments(segments) == SMALL.encode_segments([p for p in pieces if p != Text("")])

    equal()


def as_message(said):
    """The message of an OpenAI dict."""
    calls = tuple(
        ToolCall(one["function"]["name"], one["function"]["arguments"], one["id"]) for one in said.get("tool_calls", ())
    )
    return Message(said["role"], said["content"] or "", None, calls, said.get("name"), said.get("tool_call_id"))


@settings(max_examples=60)
@given(conversations(), tools)
def test_a_longer_conversation_begins_with_the_shorter_one_and_what_was_sampled(said, tools):
    messages = [as_message(one) for one in said]
    ids: list[int] = []
    heard = 0
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        if heard:
            new = CHAT.continuation(messages[: heard + 1], messages[heard + 1 : place])
        else:
            ids, new = [], CHAT.render(messages[:place], tools=tools)
        ids += SMALL.encode_segments(new)
        assert ids == SMALL.encode_segments(CHAT.render(messages[:place], tools=tools))
        sampled = SMALL.encode_segments(CHAT.sampled(message))
        parsed = CHAT.parse(sampled)
        assert parsed.content == message.content
        assert [call.id for call in parsed.tool_calls] == [call.id for call in message.tool_calls]
        messages[place] = parsed  # as a client sends it back
        ids += sampled
        heard = place


@settings(max_examples=60)
@given(texts, st.lists(st.tuples(names, st.dictionaries(texts, json_values, max_size=2), st.booleans()), max_size=3))
def test_what_is_sampled_is_read_back(content, calls):
    """Names of special tokens in it stay text, and arguments keep their spelling."""
    given = tuple(
        ToolCall(name, value, f"functions.{name}:{n}", json.dumps(value, separators=(",", ":")) if tight else None)
        for n, (name, value, tight) in enumerate(calls)
    )
    message = Message("assistant", content, tool_calls=given)
    segments = CHAT.sampled(message)
    ids = SMALL.encode_segments(segments)
    assert sum(SMALL.special_name(token) is not None for token in ids) == 1 + 2 * bool(calls) + 3 * len(calls)
    parsed = CHAT.parse(ids)
    assert parsed == message
    assert SMALL.encode_segments(CHAT.sampled(parsed)) == ids
    whole, trained = CHAT.render_trained([Message("user", "-"), message])
    assert [one for one, own in zip(whole, trained, strict=True) if own] == segments


@settings(max_examples=200)
@given(st.lists(st.integers(-2, 520) | st.integers(499, 511), max_size=30))
def test_any_ids_are_a_message_or_an_error(ids):
    assert isinstance(CHAT.parse(ids), Message | ParseError)


@settings(max_examples=200)
@given(st.data())
def test_damaged_messages_never_raise(data):
    call = ToolCall("f", {"a": [1, "<|im_end|>"]}, "functions.f:0")
    segments = CHAT.sampled(Message("assistant", "so", tool_calls=(call, ToolCall("g", "{no", "functions.g:1"))))
    place = data.draw(st.integers(0, len(segments) - 1))
    other = data.draw(st.sampled_from([*map(Special, MARKS.values()), Text("x"), Text("functions.f:0"), Text("[1]")]))
    if isinstance(other, Special) and other.name in ("eot", "unk"):  # which the small table does not have
        other = Special("pad")
    replacement = data.draw(st.sampled_from([[], [segments[place]] * 2, [other], [other, segments[place]]]))
    ids = SMALL.encode_segments([*segments[:place], *replacement, *segments[place + 1 :]])
    found = CHAT.parse(ids)
    assert isinstance(found, Message | ParseError)
    assert isinstance(CHAT.parse(ids[: data.draw(st.integers(0, len(ids) - 1))]), ParseError)


def ids_of(text):
    return SMALL.encode_segments([Special(MARKS[p]) if p in MARKS else Text(p) for p in MARK.split(text) if p])


CALL = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|><|im_end|>"


@pytest.mark.parametrize(
    ("sampled", "position", "reason"),
    [
        ("no end", None, r"expected <\|im_end\|>, found the end"),
        ("x<|im_end|>y", 2, "tokens follow"),
        ("x<|im_user|>user<|im_middle|>", 1, r"expected <\|im_end\|>, found <\|im_user\|>"),
        (SECTION.replace("{}", ""), 1, r"expected <\|tool_call_begin\|>"),
        (SECTION.replace("{}", CALL.replace("functions.", "")), 2, "has the id 'f:0'; wanted functions.NAME:INDEX"),
        (SECTION.replace("{}", CALL.replace("f:0", "f")), 2, "has the id 'functions.f'"),
        (SECTION.replace("{}", CALL * 2), None, "two calls have the id 'functions.f:0'"),
        (SECTION.replace("{}", CALL.replace("{}", "[1]")), None, r"the arguments are '\[1\]'; wanted a JSON object"),
        (SECTION.replace("{}", CALL.replace("{}", "[" * 5000 + "]" * 5000)), None, "^$"),
        (SECTION.replace("{}", CALL).replace("<|im_end|>", "more<|im_end|>"), None, "found text"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(sampled, position, reason):
    found = CHAT.parse(ids_of(sampled))
    if reason == "^$":  # nested too deep for JSON: text, as any other that is not JSON
        assert found.tool_calls[0].arguments.startswith("[[")
        return
    assert re.search(reason, found.reason)
    assert position is None or found.position == position


def test_calls_in_any_other_form_are_written_so_that_they_name_what_is_called():
    said = [
        Message("user", "go"),
        Message("assistant", "", tool_calls=(ToolCall("f", {}, "call_a"), ToolCall("g", {}))),
        Message("tool", "1", tool_call_id="call_a"),
        Message("tool", "2"),
        Message("assistant", "", tool_calls=(ToolCall("f", {}, "functions.g:0"),)),
        Message("tool", "3", name="f"),
    ]
    text = written(CHAT.render(said))
    assert re.findall(r"begin\|>(functions[^<]*)", text) == ["functions.f:0", "functions.g:1", "functions.f:2"]
    results = re.findall(r"<\|im_system\|>(\w+)<\|im_middle\|>## Return of (\S+)\n(\d)", text)
    assert results == [("tool", "functions.f:0", "1"), ("tool", "functions.g:1", "2"), ("f", "functions.f:2", "3")]
    assert text.endswith(written(CHAT.continuation(said[:5], said[5:])))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Message("assistant", "4", reasoning="2 + 2"), "has reasoning, and the K2 chat form has no channel"),
        (Message("user", [{"type": "image", "image": b""}]), "shows an image"),
        ({"role": "system", "content": "", "tools": [{}]}, "declares tools"),
        (Message("tool", "4"), "without a tool_call_id, and the last assistant turn has 0 calls"),
    ],
)
def test_what_the_form_has_no_place_for_is_refused(message, why):
    with pytest.raises(ChatError, match=why):
        CHAT.render([Message("user", "go"), message])


@pytest.mark.parametrize("asked", [{"thinking": True}, {"thinking_effort": "low"}, {"tool_choice": "required"}])
def test_what_the_form_has_no_words_for_is_refused(asked):
    with pytest.raises(ChatError, match="the K2 chat form"):
        CHAT.render([Message("user", "go")], **asked)
    with pytest.raises(ChatError, match="the K2 chat form"):
        CHAT.continuation([Message("assistant", "a")], [Message("user", "go")], **asked)


def test_arguments_that_are_not_json_are_not_trained():
    turn = Message("assistant", "", tool_calls=(ToolCall("f", "{no"), ToolCall("g", {"a": 1})))
    segments, trained = CHAT.render_trained([Message("user", "go"), turn])
    masked = [one.text for one, own in zip(segments, trained, strict=True) if not own and isinstance(one, Text)]
    assert masked == ["user", "go", "assistant", "{no"]


def test_markup_is_no_text():
    reader = turn_text(SMALL)
    seen = [reader.feed(token) for token in ids_of("<|im_user|>user<|im_middle|>a" + SECTION.replace("{}", CALL))]
    assert b"".join(piece for piece in seen if piece) == b"a"


# ---------------------------------------------------------------------------------------------- of a checkpoint


def test_a_hub_directory_speaks_k2_with_the_released_ids(tmp_path):
    loaded = Tokenizer.load(kimi_hub.write_tokenizer(tmp_path))
    assert loaded.form == "k2"
    prompt = loaded.encode_segments(chat_format(loaded).render([Message("user", "A")]))
    released = [value - kimi_hub.SHIFT for value in prompt if value >= kimi_hub.RANKS]
    assert released == [163587, 163601, 163586, 163588, 163601]  # as `transformers` expects of the released one
    loaded.save(tmp_path / "copy")
    again = Tokenizer.load(tmp_path / "copy")
    assert again.hash == loaded.hash != SMALL.hash
    assert again.chat_template.source == loaded.chat_template.source


def test_the_model_beside_ranks_says_their_form_where_no_file_names_special_tokens(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(kimi_hub.files()["tiktoken.model"])
    assert Tokenizer.load(tmp_path).form == "xtml"
    (tmp_path / "config.json").write_text('{"model_type": "kimi_linear"}')
    assert Tokenizer.load(tmp_path).form == "k2"


def test_the_templates_system_turn_is_rendered_and_nothing_in_it_is_structure(tmp_path):
    loaded = Tokenizer.load(kimi_hub.write_tokenizer(tmp_path, kimi_hub.SYSTEM))
    ids = loaded.encode_segments(chat_format(loaded).render([Message("user", "A")]))
    assert ids.count(loaded.special("im_end")) == 2
    assert kimi_hub.SYSTEM in loaded.decode(ids)
    named = kimi_hub.files()["tokenizer_config.json"]
    older = json.loads(named) | {"chat_template": [{"name": "default", "template": kimi_hub.template("Old.")}]}
    folder = kimi_hub.write_tokenizer(tmp_path / "old", tokenizer_config_json=json.dumps(older).encode())
    (folder / "chat_template.jinja").unlink()
    assert "Old." in written(chat_format(Tokenizer.load(folder)).render([Message("user", "A")]))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages[0]['content'] }}", "does not render K2's chat form, .* at character 0"),
        (kimi_hub.template().replace("im_middle|>'", "im_middle|> '"), "and the form '2 \\+ 2"),
        ("{% for m in", "does not render a plain conversation"),
        ("{{ raise_exception('only for cats') }}", "only for cats"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does not render a plain conversation.*unsafe"),
    ],
)
def test_a_template_of_another_form_is_refused_with_its_file(source, why, tmp_path):
    loaded = Tokenizer.load(kimi_hub.write_tokenizer(tmp_path, chat_template_jinja=source.encode()))
    with pytest.raises(TokenizerError, match=why) as caught:
        chat_format(loaded)
    assert str(tmp_path / "chat_template.jinja") in str(caught.value)


def test_a_template_that_writes_tools_in_another_way_refuses_those_conversations_alone(tmp_path):
    source = kimi_hub.template().replace("## Return of ", "## Result of ")
    chat = chat_format(Tokenizer.load(kimi_hub.write_tokenizer(tmp_path, chat_template_jinja=source.encode())))
    assert chat.render([Message("user", "A"), Message("assistant", "B")])
    called = Message("assistant", "", tool_calls=(ToolCall("f", {}),))
    for refused in (
        lambda: chat.render([Message("user", "A")], tools=[{}]),
        lambda: chat.render([Message("user", "A"), called]),
        lambda: chat.continuation([called], [Message("tool", "4")]),
    ):
        with pytest.raises(ChatError, match=r"this conversation has tools, and .* does not write tools as"):
            refused()


def test_declarations_are_spaced_as_the_template_has_them(tmp_path):
    source = kimi_hub.template().replace("tojson(separators=(',', ':'))", "tojson")
    chat = chat_format(Tokenizer.load(kimi_hub.write_tokenizer(tmp_path, chat_template_jinja=source.encode())))
    assert '[{"b": 1, "a": 2}]' in written(chat.render([Message("user", "A")], tools=[{"b": 1, "a": 2}]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"502": {"content": "<|im_end|>"}}, r"gives <\|im_end\|> the id 502, the ranks beside it give 501"),
        ({"503": {"content": "<|end_of_msg|>"}}, "which are of two chat forms"),
    ],
)
def test_files_of_two_tokenizers_are_refused(change, why, tmp_path):
    said = json.loads(kimi_hub.files()["tokenizer_config.json"])
    said["added_tokens_decoder"] |= change
    kimi_hub.write_tokenizer(tmp_path, tokenizer_config_json=json.dumps(said).encode())
    with pytest.raises(TokenizerError, match=why):
        Tokenizer.load(tmp_path)
