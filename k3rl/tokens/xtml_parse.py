"""Sampled token ids back to an assistant message (k3.md 10.2). Use through `k3rl.tokens.xtml`.

Total: every sequence of ints gives a Message or a ParseError, and nothing is guessed. Only special ids are
structure; tag names and attributes are read as text, so any split of their bytes into tokens is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from k3rl.tokens.reader import ParseError, Reader, Refused
from k3rl.tokens.tokenizer import Tokenizer
from k3rl.tokens.xtml_normalize import load_json
from k3rl.types import Message, ToolCall

_HEADER = re.compile(r'(?P<tag>[^\s"=]+)(?P<attributes>(?: [^\s"=]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([^\s"=]+)="([^"]*)"')
_JSON_KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def parse(token_ids: Sequence[int], tokenizer: Tokenizer, *, thinking: bool = True) -> Message | ParseError:
    """The assistant message that the policy sampled after the generation prefix.

    token_ids: sampled ids through END_OF_MSG. They may include the generation prefix; the channels are then read
    from it and `thinking` is not used. An empty think channel gives `reasoning` None. Tool calls have no id:
    results are joined to them by order, or the caller gives ids. Never raises for any ids.
    """
    reader = _Reader([int(value) for value in token_ids], tokenizer)
    try:
        return _message(reader, thinking)
    except Refused as refused:
        return ParseError(refused.position, refused.reason)


class _Reader(Reader):
    """A cursor that knows tags."""

    def open(self) -> tuple[str, dict[str, str]]:
        """An opening tag: its name and its attributes, unescaped."""
        self.take("open")
        start = self.position
        header = self.text()
        match = _HEADER.fullmatch(header)
        if match is None:
            self.refuse(f'a tag reads {header[:60]!r}; wanted NAME, then KEY="VALUE" each after one space', start)
        pairs = _ATTRIBUTE.findall(match["attributes"])
        attributes = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in pairs}
        if len(attributes) != len(pairs):
            self.refuse(f"a tag has an attribute twice: {header[:60]!r}", start)
        self.take("sep")
        return match["tag"], attributes

    def open_one(self, tag: str, *keys: str) -> dict[str, str]:
        """An opening tag that must be `tag` with exactly the attributes `keys`."""
        start = self.position
        found, attributes = self.open()
        if found != tag or tuple(attributes) != keys:
            wanted = " ".join([tag, *keys])
            self.refuse(f"expected the tag {wanted!r}, found {' '.join([found, *attributes])[:60]!r}", start)
        return attributes

    def close(self, tag: str) -> None:
        """The closing tag of `tag`."""
        self.take("close")
        start = self.position
        found = self.text()
        if found != tag:
            self.refuse(f"expected to close {tag!r}, found {found[:60]!r}", start)
        self.take("sep")

    def body(self, tag: str) -> str:
        """The text of an element that is open, through its closing tag."""
        text = self.text()
        self.close(tag)
        return text


def _message(reader: _Reader, thinking: bool) -> Message:
    name = None
    opened = "think" if thinking else "response"
    if reader.peek() == "open":
        name, opened = _prefix(reader)
    reasoning = None
    if opened == "think":
        reasoning = reader.body("think") or None
        reader.open_one("response")
    content = reader.body("response")
    calls = _calls(reader) if reader.peek() == "open" else ()
    reader.close("message")
    reader.take("end_of_msg")
    if reader.peek() is not None:
        reader.refuse("tokens follow the end of the message")
    return Message("assistant", content, reasoning=reasoning, tool_calls=calls, name=name)


def _prefix(reader: _Reader) -> tuple[str | None, str]:
    """The generation prefix: (name of the speaker if given, the channel that it opens)."""
    start = reader.position
    tag, attributes = reader.open()
    if tag != "message" or attributes.get("role") != "assistant" or not set(attributes) <= {"role", "name"}:
        reader.refuse("expected an assistant message", start)
    start = reader.position
    channel, others = reader.open()
    if channel not in ("think", "response") or others:
        reader.refuse(f"expected the think or the response channel, found {channel[:60]!r}", start)
    return attributes.get("name"), channel


def _calls(reader: _Reader) -> tuple[ToolCall, ...]:
    reader.open_one("tools")
    calls: list[ToolCall] = []
    while reader.peek() == "open":
        start = reader.position
        head = reader.open_one("call", "tool", "index")
        if head["index"] != str(len(calls) + 1):
            reader.refuse(f"call {len(calls) + 1} has the index {head['index'][:20]!r}", start)
        if not head["tool"]:
            reader.refuse("a call names no tool", start)
        calls.append(ToolCall(head["tool"], _call_arguments(reader)))
        reader.close("call")
    if not calls:
        reader.refuse("the tools channel holds no call")
    reader.close("tools")
    return tuple(calls)


def _call_arguments(reader: _Reader) -> dict[str, Any] | str:
    arguments: dict[str, Any] = {}
    while reader.peek() == "open":
        start = reader.position
        tag, head = reader.open()
        if tag == "json" and head == {"type": "object"} and not arguments:
            return _raw_arguments(reader)
        if tag != "argument" or tuple(head) != ("key", "type"):
            reader.refuse(f"expected an argument with key and type, found {tag[:60]!r}", start)
        if head["key"] in arguments:
            reader.refuse(f"the argument {head['key'][:60]!r} is given twice", start)
        arguments[head["key"]] = _value(reader, head["type"])
    return arguments


def _value(reader: _Reader, kind: str) -> Any:
    start = reader.position
    text = reader.body("argument")
    if kind == "string":
        return text
    if kind not in _JSON_KINDS:
        reader.refuse(f"an argument has the type {kind[:60]!r}", start)
    try:
        value = load_json(text)
    except ValueError:
        reader.refuse(f"an argument of type {kind} is not JSON: {text[:60]!r}", start)
    if type(value) not in _JSON_KINDS[kind]:
        reader.refuse(f"an argument of type {kind} holds {text[:60]!r}", start)
    return value


def _raw_arguments(reader: _Reader) -> dict[str, Any] | str:
    """A json element: text that is not JSON stays text; an object is what it says; other JSON has no meaning."""
    start = reader.position
    text = reader.body("json")
    try:
        value = load_json(text)
    except ValueError:
        value = text if text.strip() else None
    if not isinstance(value, dict | str) or (isinstance(value, str) and value is not text):
        reader.refuse("the arguments are neither a JSON object nor text that is not JSON", start)
    return value
