"""Sampled token ids back to an assistant message of K2's chat form. Use through `k3rl.tokens.k2`.

Total: every sequence of ints gives a Message or a ParseError, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from k3rl.tokens.reader import ParseError, Reader, Refused
from k3rl.tokens.tokenizer import Tokenizer
from k3rl.tokens.xtml_normalize import load_json
from k3rl.types import Message, ToolCall

CALL_ID = re.compile(r"functions\.(?P<name>.+):(?P<index>[0-9]+)", re.DOTALL)


def parse(token_ids: Sequence[int], tokenizer: Tokenizer) -> Message | ParseError:
    """The assistant message that the policy sampled after the generation prefix.

    token_ids: sampled ids through im_end; they may include the generation prefix. A call keeps its id and, as `text`,
    its arguments as they were sampled; `arguments` is the mapping that they say, or the text where that is not JSON.
    Never raises for any ids.
    """
    reader = Reader([int(value) for value in token_ids], tokenizer)
    try:
        return _message(reader)
    except Refused as refused:
        return ParseError(refused.position, refused.reason)


def _message(reader: Reader) -> Message:
    name = None
    if reader.peek() == "im_assistant":
        reader.take("im_assistant")
        said = reader.text()
        name = None if said in ("", "assistant") else said
        reader.take("im_middle")
    content = reader.text()
    calls = _calls(reader) if reader.peek() == "tool_calls_section_begin" else ()
    reader.take("im_end")
    if reader.peek() is not None:
        reader.refuse("tokens follow the end of the message")
    return Message("assistant", content, tool_calls=calls, name=name)


def _calls(reader: Reader) -> tuple[ToolCall, ...]:
    reader.take("tool_calls_section_begin")
    calls: dict[str, ToolCall] = {}
    while not calls or reader.peek() == "tool_call_begin":
        reader.take("tool_call_begin")
        start = reader.position
        call_id = reader.text()
        found = CALL_ID.fullmatch(call_id)
        if found is None:
            reader.refuse(f"a call has the id {call_id[:60]!r}; wanted functions.NAME:INDEX", start)
        if call_id in calls:
            reader.refuse(f"two calls have the id {call_id[:60]!r}", start)
        reader.take("tool_call_argument_begin")
        calls[call_id] = _call(reader, found["name"], call_id)
        reader.take("tool_call_end")
    reader.take("tool_calls_section_end")
    return tuple(calls.values())


def _call(reader: Reader, name: str, call_id: str) -> ToolCall:
    """With the arguments at the cursor. Nothing at all means none; JSON that is no object has no meaning."""
    start = reader.position
    text = reader.text()
    try:
        value = load_json(text) if text.strip() else {}
    except ValueError:
        return ToolCall(name, text, call_id, text)
    if not isinstance(value, dict):
        reader.refuse(f"the arguments are {text[:60]!r}; wanted a JSON object", start)
    return ToolCall(name, value, call_id, text)
