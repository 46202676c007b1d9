"""A row of chat data, in any of the forms that people store, as one conversation in the OpenAI form.

messages            {"messages": [{"role", "content", ...}], "tools": [...]}
ShareGPT            {"conversations": [{"from", "value"}], "system", "tools"}
prompt, completion  {"prompt", "completion"}: texts, or lists of messages; of those only the completion is trained
Alpaca              {"instruction", "input", "output", "system"}

A form that is known by its keys and not read is refused by name, with what to write instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from k3rl.data.chat_files import DatasetError, RawRow
from k3rl.tokens import LOSS_KEYS, nearest_key
from k3rl.types import Message

Messages: TypeAlias = Sequence[Message | Mapping[str, Any]]

_TALKS = ("conversations", "conversation")
_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
# Columns whose content would be left out: what to do with them instead.
_UNREAD = {
    "functions": "declare tools under tools, as [{type: function, function: {...}}]",
    "function_call": "say it in a message, under tool_calls",
    "images": "put each image into its message, as an image_url part",
    "videos": "k3rl trains no videos",
    "audios": "k3rl trains no sound",
    "history": "write the earlier turns as messages",
    **dict.fromkeys(LOSS_KEYS, "say it in the message that it is about"),
}
# Keys of forms that are known and not read: what they are, and what to write.
_OTHERS = (
    ({"chosen", "rejected"}, "preference data", 'sft trains one answer: write {"prompt": ..., "completion": chosen}'),
    ({"question", "answer"}, "a question with its answer", 'write {"prompt": question, "completion": answer}'),
    ({"query", "response"}, "a query with its response", 'write {"prompt": query, "completion": response}'),
    ({"prompt", "response"}, "a prompt with its response", 'write {"prompt": prompt, "completion": response}'),
    ({"input", "output"}, "an input with its output", 'write {"prompt": input, "completion": output}'),
    ({"contents"}, "a request in Gemini's form", 'write {"messages": [{"role", "content"}]}'),
    ({"text"}, "plain text without turns", 'write {"messages": [{"role", "content"}]}'),
)


@dataclass(frozen=True, slots=True)
class ChatExample:
    """One conversation to learn from. `meta` is every other column of its row (task_id, family, level, ...).

    form: which of the forms the row had.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    row: int = 0
    form: str = "messages"


def example_of(raw: RawRow, path: Path) -> ChatExample:
    """The conversation of a row. Raises DatasetError, which names the row and the key."""
    row = raw.value(path)

    def refused(reason: str, found: str = "") -> DatasetError:
        at = f" ({raw.place})" if raw.place else ""
        return DatasetError(path, raw.row, reason + at, found)

    if not isinstance(row, dict):
        raise refused(f"is a JSON {type(row).__name__}; wanted an object with messages")
    if raw.columns is not None:
        for column in ("messages", *_TALKS, "tools"):
            _refuse_structs(row.get(column), column, refused)
    columns = {
        name: _parsed(value, name, refused)
        if isinstance(value, str) and name in ("messages", *_TALKS, "tools")
        else value
        for name, value in row.items()
    }
    tools = columns.pop("tools", None)
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise refused(f"has tools of type {type(tools).__name__}; wanted a list of declarations", "tools")
    messages, form = _messages(columns, refused)
    if system := columns.pop("system", None):
        if not isinstance(system, str) or messages[0].get("role") == "system":
            raise refused("has a system column that is no text, or beside a system message; keep one", "system")
        messages = [{"role": "system", "content": system}, *messages]
    for name, remedy in _UNREAD.items():
        if columns.get(name) not in (None, "", [], {}):
            raise refused(f"has the key {name!r}, which says nothing in a row; {remedy}", name)
    return ChatExample(messages, tools or None, columns, raw.row, form)


def _messages(columns: dict[str, Any], refused: Callable[..., DatasetError]) -> tuple[list[dict[str, Any]], str]:
    """The messages of a row and the form that they had; takes their columns away."""
    if columns.get("messages") is not None:
        return _listed(columns.pop("messages"), "messages", refused), "messages"
    for name in _TALKS:
        if columns.get(name) is not None:
            said = _listed(columns.pop(name), name, refused)
            if all("role" in turn for turn in said):
                return said, "messages"
            return [_turn(turn, number, refused) for number, turn in enumerate(said)], "ShareGPT"
    if columns.get("prompt") is not None and columns.get("completion") is not None:
        asked, answered = columns.pop("prompt"), columns.pop("completion")
        return [*_side(asked, "prompt", refused), *_side(answered, "completion", refused)], "prompt and completion"
    if columns.get("instruction") is not None and columns.get("output") is not None:
        parts = [columns.pop("instruction"), columns.pop("input", None) or "", columns.pop("output")]
        if not all(isinstance(part, str) for part in parts):
            raise refused("has an instruction, input or output that is no text", "instruction")
        asked = "\n\n".join(part for part in parts[:2] if part)
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": parts[2]}], "Alpaca"
    for keys, what, remedy in _OTHERS:
        if keys <= columns.keys():
            raise refused(f"has no messages; it looks like {what}: {remedy}", min(keys))
    found = next((key for key in columns if nearest_key(key, ("messages",))), "")
    near = f", whose name is near to {found!r} here" if found else ""
    there = ", ".join(map(repr, list(columns)[:6])) or "no key"
    raise refused(f"has no messages{near}; it has {there}, and wanted is a list of {{role, content, ...}}", found)


def _listed(value: Any, name: str, refused: Callable[..., DatasetError]) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise refused(f"has no messages; under {name} wanted is a list of {{role, content, ...}}", name)
    return [{**said, "role": "system"} if said.get("role") == "developer" else said for said in value]


def _turn(turn: dict[str, Any], number: int, refused: Callable[..., DatasetError]) -> dict[str, Any]:
    """A turn of ShareGPT as a message; keys beside from and value stay and are checked like those of any message."""
    speaker, rest = turn.get("from"), {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker == "function_call":
        reason = f"turn {number} is from function_call; write an assistant message with tool_calls"
        raise refused(reason, "from")
    if speaker not in _SPEAKERS:
        wanted = f"wanted one of {', '.join(_SPEAKERS)}"
        raise refused(f"turn {number} is from {speaker!r:.40}; {wanted}", "from")
    if "value" not in turn:
        raise refused(f"turn {number} has no value; it has {', '.join(map(repr, turn))}", next(iter(rest), "value"))
    return {**rest, "role": _SPEAKERS[speaker], "content": turn["value"]}


def _side(value: Any, name: str, refused: Callable[..., DatasetError]) -> list[dict[str, Any]]:
    """A prompt or a completion as messages. Assistant turns of a prompt are context."""
    role = "assistant" if name == "completion" else "user"
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    said = _listed(value, name, refused)
    if name == "completion":
        return said
    return [{**turn, "weight": 0} if turn.get("role") == "assistant" else turn for turn in said]


def _parsed(text: str, what: str, refused: Callable[..., DatasetError]) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"{what} is not JSON: {error}", what) from error


def _refuse_structs(value: Any, column: str, refused: Callable[..., DatasetError]) -> None:
    """Parquet gives every struct of a column the same keys, so an argument that is absent reads as null."""
    if not isinstance(value, list):
        return
    calls = [call for message in value if isinstance(message, dict) for call in message.get("tool_calls") or ()]
    arguments = [(call.get("function") or call).get("arguments") for call in calls if isinstance(call, dict)]
    if column == "tools" or any(isinstance(item, dict) for item in arguments):
        what = "tools" if column == "tools" else "tool call arguments"
        raise refused(
            f"{what} are Parquet structs, which cannot say that a key is absent; store them as JSON strings",
            "tools" if column == "tools" else "tool_calls",
        )
