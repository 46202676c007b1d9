"""Messages of either form (`Message` or OpenAI dict) to the one form that the renderer writes (k3.md 10.2).

Also the order of tool results: XTML numbers results by position, so a run of them is sorted into call order.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3rl.tokens.message_keys import ROLES, XTMLError, check_call_keys, check_keys, nearest_key, trained
from k3rl.types import Message, ToolCall

_TEXT_KINDS = (None, "text", "input_text", "output_text")  # types of a content part that is text
MAX_DEPTH = 100  # levels of JSON nesting; far above any tool's arguments, far below Python's recursion limit


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Text, or an image when `text` is None."""

    text: str | None


@dataclass(frozen=True, slots=True)
class NormalizedCall:
    """One tool call. `raw` is the argument string when it is not JSON; `arguments` is then empty."""

    name: str
    arguments: Mapping[str, Any]
    raw: str | None
    id: str | None


@dataclass(frozen=True, slots=True)
class NormalizedMessage:
    """One message in the renderer's form. `name` is the tool's name on a tool result."""

    role: str
    parts: tuple[ContentPart, ...]
    reasoning: str = ""
    calls: tuple[NormalizedCall, ...] = ()
    name: str | None = None
    call_id: str | None = None
    tools: Any = None
    trained: bool = True  # unless its own keys say that it carries no loss


def normalize(messages: Sequence[Message | Mapping[str, Any]], first: int = 0) -> list[NormalizedMessage]:
    """Each message in the renderer's form. `first` is the number of the first one, for error messages."""
    return [_said(message, f"message {number}") for number, message in enumerate(messages, start=first)]


def order_results(turns: Sequence[NormalizedMessage]) -> list[NormalizedMessage]:
    """Sort each run of tool results into the order of the calls they answer, and take the calls' names.

    A run with any result whose call is not among those of the last assistant turn keeps its order and names.
    """
    ordered: list[NormalizedMessage] = []
    run: list[NormalizedMessage] = []
    places: dict[str, int] = {}
    calls: tuple[NormalizedCall, ...] = ()

    def flush() -> None:
        if all(said.call_id in places for said in run):
            run.sort(key=lambda said: places[str(said.call_id)])
            run[:] = [dataclasses.replace(said, name=calls[places[str(said.call_id)]].name) for said in run]
        ordered.extend(run)
        run.clear()

    for said in turns:
        if said.role == "tool":
            run.append(said)
            continue
        flush()
        ordered.append(said)
        if said.role == "assistant":
            calls, places = said.calls, {}
            for place, call in enumerate(calls):
                if call.id is not None:
                    places.setdefault(call.id, place)
    flush()
    return ordered


def load_json(text: str) -> Any:
    """The JSON value in `text`. Raises ValueError for other text, and for nesting deeper than MAX_DEPTH levels.

    A policy may sample any text: without the bound, deep brackets would end a run in a RecursionError.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return value
    raise ValueError("nested too deeply")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def plain(value: Any, depth: int = 0) -> Any:
    """`value` with mappings as dicts and tuples as lists, so that json can print it. Raises XTMLError."""
    if depth > MAX_DEPTH:
        raise XTMLError(f"a JSON value is nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise XTMLError(f"a JSON object has the key {key!r} of type {type(key).__name__}; keys are strings")
        return {key: plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise XTMLError(f"{value!r} of type {type(value).__name__} has no JSON form")


def dump_json(value: Any, *, compact: bool = False) -> str:
    """JSON text, non-ASCII kept: with Python's separators, or compact with keys sorted at every depth.

    Raises XTMLError for an integer that Python refuses to print (more than 4,300 digits).
    """
    try:
        if compact:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        return json.dumps(value, ensure_ascii=False)
    except ValueError as error:
        raise XTMLError(f"a value has no JSON text: {error}") from error


def _said(message: Message | Mapping[str, Any], where: str) -> NormalizedMessage:
    role: Any
    content: Any
    reasoning: Any
    calls: Any
    if isinstance(message, Message):
        role, content, reasoning, calls = message.role, message.content, message.reasoning, message.tool_calls
        name, call_id, tools = message.name, message.tool_call_id, None
    elif isinstance(message, Mapping):
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if (other := message.get("reasoning")) and other != reasoning:
            raise XTMLError(f"{where} has a reasoning_content and another reasoning; keep one", "reasoning")
        name = _first(message, "tool", "name") if role == "tool" else message.get("name")
        call_id, tools = _first(message, "tool_call_id", "id"), message.get("tools")
    else:
        raise XTMLError(f"{where} is of type {type(message).__name__}; wanted a Message or a dict in OpenAI form")
    if role not in ROLES:
        near = nearest_key(role, ROLES) if isinstance(role, str) else None
        meant = f"; the nearest is {near}" if near else ""
        raise XTMLError(f"{where} has the role {role!r}; wanted one of {', '.join(ROLES)}{meant}", "role")
    learn = True
    if isinstance(message, Mapping):
        check_keys(message, where)
        learn = trained(message, where)
    if reasoning is not None and not isinstance(reasoning, str):
        raise XTMLError(f"{where} has reasoning of type {type(reasoning).__name__}; wanted text", "reasoning_content")
    if calls is not None and not isinstance(calls, list | tuple):
        raise XTMLError(f"{where} has tool_calls of type {type(calls).__name__}; wanted a list", "tool_calls")
    thought, parts = _parts(content, where, role == "assistant")
    if thought and reasoning:
        raise XTMLError(f"{where} has both reasoning_content and a thinking part; keep one", "reasoning_content")
    return NormalizedMessage(
        role=str(role),
        parts=parts,
        reasoning=reasoning or thought,
        calls=tuple(_call(call, where) for call in calls or ()) if role == "assistant" else (),
        name=None if name is None else str(name),
        call_id=None if call_id is None else str(call_id),
        tools=tools if role == "system" else None,
        trained=learn,
    )


def _first(message: Mapping[str, Any], *keys: str) -> Any:
    return next((message[key] for key in keys if message.get(key) is not None), None)


def _parts(content: Any, where: str, thinks: bool) -> tuple[str, tuple[ContentPart, ...]]:
    """(what thinking parts say, the parts of the content). thinks: whether thinking parts may come first."""
    if content is None:
        return "", ()
    if isinstance(content, str):
        return "", (ContentPart(content),)
    if not isinstance(content, list | tuple):
        raise XTMLError(
            f"{where} has content of type {type(content).__name__}; wanted text or a list of parts", "content"
        )
    thought, parts = "", list[ContentPart]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image", "image_url"):
            parts.append(ContentPart(None))
        elif kind == "thinking" and thinks and not parts and isinstance(part.get("thinking"), str):
            thought += part["thinking"]
        elif isinstance(part, Mapping) and kind in _TEXT_KINDS and isinstance(part.get("text"), str):
            parts.append(ContentPart(part["text"]))
        else:
            wanted = "a text, image or image_url part" + (", or thinking parts before them" if thinks else "")
            raise XTMLError(f"{where} has the content part {part!r:.80}; wanted {wanted}", "content")
    return thought, tuple(parts)


def _call(call: Any, where: str) -> NormalizedCall:
    name: Any
    arguments: Any
    if isinstance(call, ToolCall):
        name, arguments, call_id = call.name, call.arguments, call.id
    elif isinstance(call, Mapping):
        function = call.get("function", call)
        if not isinstance(function, Mapping):
            raise XTMLError(
                f"{where} has a tool call whose function is {function!r:.80}; wanted an object", "tool_calls"
            )
        name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
        check_call_keys(call, function, where)
    else:
        raise XTMLError(
            f"{where} has a tool call of type {type(call).__name__}; wanted a ToolCall or a dict", "tool_calls"
        )
    if not isinstance(name, str) or not name:
        raise XTMLError(f"{where} has a tool call named {name!r}; wanted a non-empty name", "tool_calls")
    parsed, raw = _arguments(arguments, f"{where}, call of {name}")
    return NormalizedCall(name, parsed, raw, None if call_id is None else str(call_id))


def _arguments(arguments: Any, where: str) -> tuple[dict[str, Any], str | None]:
    """(arguments, None), or ({}, raw text) for a string that is not JSON."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}, None
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments)
        except ValueError:
            return {}, arguments
    if not isinstance(arguments, Mapping):
        raise XTMLError(f"{where}: the arguments are {arguments!r:.80}; wanted a JSON object", "tool_calls")
    parsed: dict[str, Any] = plain(arguments)
    return parsed, None
