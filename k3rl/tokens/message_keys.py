"""Which keys a message in the OpenAI form may have, and what they say.

Whatever a message says under another key would be left out without a word, so every other key is refused by name,
with the nearest one that is known. A key whose value is null or empty says nothing and is let through.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
LOSS_KEYS = ("weight", "train", "loss", "masked")  # of an assistant turn: whether it carries loss
_COMMON = ("role", "content", "name", *LOSS_KEYS)
_OF_ROLE = {
    "system": ("tools",),
    "user": (),
    "assistant": ("reasoning_content", "reasoning", "tool_calls", "id"),
    "tool": ("tool_call_id", "tool", "id"),
}
_OF_CALL = ("id", "type", "index", "name", "arguments")
# Accounting of public dialects, which changes neither what is said nor what is trained.
_NOTES = ("id", "cache_control", "annotations", "provider_specific_fields", "timestamp", "created", "metadata")
# Names of other forms, whose spelling is not near.
_MEANT = {
    "text": "content",
    "value": "content",
    "message": "content",
    "body": "content",
    "parts": "content",
    "completion": "content",
    "from": "role",
    "speaker": "role",
    "author": "role",
    "thinking": "reasoning_content",
    "thought": "reasoning_content",
    "thoughts": "reasoning_content",
    "think": "reasoning_content",
    "analysis": "reasoning_content",
    "function_call": "tool_calls",
    "mask": "masked",
    "trainable": "train",
    "training": "train",
    "functions": "tools",
    "args": "arguments",
    "input": "arguments",
    "parameters": "arguments",
    "kwargs": "arguments",
}


class XTMLError(ValueError):
    """A conversation that has no XTML form; the message says which message and what it should be.

    key: of the message, where the error is of one.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that was probably meant; None where nothing is near."""
    names = list(known)
    plain = key.lower().strip().replace("-", "_")
    if plain in names:
        return plain
    if (meant := _MEANT.get(plain)) in names:
        return meant
    return next(iter(difflib.get_close_matches(plain, names, n=1)), None)


def check_keys(message: Mapping[str, Any], where: str) -> None:
    """Refuses a message that says something under a key that nothing reads, or that says nothing. Raises XTMLError."""
    role = message.get("role")
    known = _known(role)
    for key, value in message.items():
        if key in known or (_says_nothing(value) and key not in ("role", "content")):
            continue
        near = nearest_key(str(key), known)
        meant = f"; the nearest known key is {near!r}" if near else ""
        raise XTMLError(
            f"{where} has the key {str(key)!r:.60}, which says nothing here{meant}. "
            f"A message of the role {role} has {', '.join(_shown(role))}",
            key=str(key),
        )
    if message.get("content") is not None:
        if role == "system" and message.get("tools") and message["content"]:
            raise XTMLError(
                f"{where} has both tools and content, of which only the tools are said; split it in two", "tools"
            )
        return
    if role == "assistant" and message.get("tool_calls"):
        return
    if role == "system" and message.get("tools"):
        return
    found = "content is null" if "content" in message else "it has no content"
    more = ", or give it tool_calls" if role == "assistant" else ""
    raise XTMLError(
        f"{where}, of the role {role}, says nothing: {found}; wanted text or a list of parts{more}", "content"
    )


def check_call_keys(call: Mapping[str, Any], function: Mapping[str, Any], where: str) -> None:
    """Refuses a tool call that says something under a key that nothing reads. Raises XTMLError."""
    kind = call.get("type")
    if kind not in (None, "function"):
        raise XTMLError(f"{where} has a tool call of the type {kind!r:.40}; wanted function", "tool_calls")
    outer = () if function is call else ("function",)
    for said, known in ((call, (*_OF_CALL, *outer)), (function, _OF_CALL)):
        for key, value in said.items():
            if key in known or _says_nothing(value):
                continue
            near = nearest_key(str(key), known)
            meant = f"; the nearest known key is {near!r}" if near else ""
            raise XTMLError(
                f"{where} has a tool call with the key {str(key)!r:.60}, which says nothing here{meant}", str(key)
            )


def trained(message: Mapping[str, Any], where: str) -> bool:
    """Whether the loss keys of a message let its tokens carry loss: an assistant turn does unless they say no.

    Raises XTMLError for values that are not yes or no, that contradict each other, or that ask for the loss of a turn
    which the policy does not sample.
    """
    said: dict[str, bool] = {}
    for key in LOSS_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise XTMLError(f"{where} has {key} {value!r:.40}; wanted 0 or 1, or false or true", key)
        said[key] = bool(value) != (key == "masked")
    if len(set(said.values())) > 1:
        raise XTMLError(
            f"{where} says with {' and '.join(said)} that it is trained and that it is not", next(iter(said))
        )
    asked = next(iter(said.values()), True)
    if said and asked and message.get("role") != "assistant":
        key = next(iter(said))
        raise XTMLError(
            f"{where} of the role {message.get('role')} has {key}; only assistant turns can be trained", key
        )
    return asked


def _known(role: Any) -> tuple[str, ...]:
    return (*_COMMON, *_OF_ROLE.get(role, ()), *_NOTES)


def _shown(role: Any) -> tuple[str, ...]:
    return (*_COMMON, *_OF_ROLE.get(role, ()))


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)
