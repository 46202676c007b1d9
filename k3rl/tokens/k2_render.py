"""Conversations to segments of K2's chat form. Use through `k3rl.tokens.k2`.

Order of a prompt: tool declarations, a default system turn where the checkpoint has one, the conversation, the
unclosed assistant turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from k3rl.tokens.k2_parse import CALL_ID
from k3rl.tokens.message_keys import ChatError
from k3rl.tokens.segments import Segment, Special, Text
from k3rl.tokens.xtml_normalize import NormalizedCall, NormalizedMessage, dump_json, normalize, plain
from k3rl.types import Message

Messages: TypeAlias = Sequence[Message | Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class K2Style:
    """In what the chat templates of checkpoints of this form differ.

    default_system: the system turn of a conversation that begins without one; None for no such turn.
    compact_tools: declarations are written without spaces. no_tools: why conversations with tools are refused; empty
    where they are not.
    """

    default_system: str | None = None
    compact_tools: bool = True
    no_tools: str = ""

    def check(self, turns: Sequence[NormalizedMessage], tools: Tools = None) -> None:
        """Raises ChatError for tools in a conversation whose checkpoint writes them in another way."""
        if self.no_tools and (tools or any(said.calls or said.role == "tool" for said in turns)):
            raise ChatError(f"this conversation has tools, and {self.no_tools}")


def render_trained(
    messages: Messages, *, tools: Tools = None, add_generation_prompt: bool = True, style: K2Style | None = None
) -> tuple[list[Segment], list[bool]]:
    """The segments of a conversation, and for each whether the policy would have sampled it.

    Sampled is an assistant turn after its head, im_end included, without arguments that are not JSON. Raises ChatError.
    """
    style = style or K2Style()
    writer = _Writer()
    if tools:
        writer.head("im_system", "tool_declare")
        writer.text(_declared(tools, style.compact_tools))
        writer.special("im_end")
    turns = normalize(messages)
    style.check(turns, tools)
    if turns and turns[0].role != "system" and style.default_system is not None:
        writer.head("im_system", "system")
        writer.text(style.default_system)
        writer.special("im_end")
    writer.conversation(turns, 0)
    if add_generation_prompt:
        writer.prefix()
    return writer.segments, writer.trained


def continuation(
    history: Messages, new_messages: Messages, *, add_generation_prompt: bool = True, style: K2Style | None = None
) -> list[Segment]:
    """What to append to the tokens of `history`, whose last message is an assistant turn with its im_end.

    Equal to rendering `[*history, *new_messages]` without the part that renders `history` alone. Raises ChatError, also
    when history does not end with an assistant turn.
    """
    turns = normalize(history)
    if not turns or turns[-1].role != "assistant":
        raise ChatError(
            f"history ends with {turns[-1].role if turns else 'nothing'}; a continuation follows an assistant turn, "
            "use render for the first prompt"
        )
    writer = _Writer()
    writer.count = sum(len(said.calls) for said in turns[:-1])
    writer.begin_calls(turns[-1].calls)
    following = normalize(new_messages, first=len(history))
    (style or K2Style()).check([turns[-1], *following])
    writer.conversation(following, len(history))
    if add_generation_prompt:
        writer.prefix()
    return writer.segments


def sampled(message: Message) -> list[Segment]:
    """What a policy would sample for an assistant message, after the generation prefix. Raises ChatError."""
    writer = _Writer()
    writer.conversation(normalize([dataclasses.replace(message, name=None)]), 0)
    head = _Writer()
    head.prefix()
    return writer.segments[len(head.segments) :]


class _Writer:
    """Collects segments. `calls` are the ids of the last assistant turn's calls, `count` the calls up to there."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.trained: list[bool] = []
        self.calls: list[str] = []
        self.count = 0
        self._renamed: dict[str, str] = {}  # ids that are not of this form -> those that are written
        self._results = 0
        self._learn = False

    def special(self, name: str) -> None:
        self.segments.append(Special(name))
        self.trained.append(self._learn)

    def text(self, text: str, learn: bool = True) -> None:
        if text:
            self.segments.append(Text(text))
            self.trained.append(self._learn and learn)

    def head(self, kind: str, name: str) -> None:
        self.special(kind)
        self.text(name)
        self.special("im_middle")

    def prefix(self) -> None:
        """The generation prefix."""
        self.head("im_assistant", "assistant")

    def conversation(self, turns: Sequence[NormalizedMessage], first: int) -> None:
        for number, said in enumerate(turns, start=first):
            _check(said, f"message {number}")
            name = said.name or said.role
            if said.role == "assistant":
                self.head("im_assistant", name)
                self.assistant(said)
            elif said.role == "tool":
                self.head("im_system", name)
                self.text(f"## Return of {self.call_id(said, number)}\n{_content(said)}")
            else:
                self.head("im_user" if said.role == "user" else "im_system", name)
                self.text(_content(said))
            self._learn = said.role == "assistant"
            self.special("im_end")
            self._learn = False

    def assistant(self, said: NormalizedMessage) -> None:
        self._learn = True
        self.text(_content(said))
        self.begin_calls(said.calls)
        if said.calls:
            self.special("tool_calls_section_begin")
            for call, call_id in zip(said.calls, self.calls, strict=True):
                self.special("tool_call_begin")
                self.text(call_id)
                self.special("tool_call_argument_begin")
                self.text(dump_json(plain(call.arguments)) if call.text is None else call.text, call.raw is None)
                self.special("tool_call_end")
            self.special("tool_calls_section_end")

    def begin_calls(self, calls: Sequence[NormalizedCall]) -> None:
        """An assistant turn that makes these calls: their ids, and those that their results are joined by."""
        self.calls, self._results = [], 0
        own = {call.id for call in calls if _names(call)}
        for call in calls:
            index, call_id = self.count, str(call.id)
            if not _names(call):
                while (call_id := f"functions.{call.name}:{index}") in own:
                    index += 1
            own.add(call_id)
            self.calls.append(call_id)
            if call.id is not None:
                self._renamed[call.id] = call_id
            self.count += 1

    def call_id(self, said: NormalizedMessage, number: int) -> str:
        """The id of the call that a result answers: its own, or that of the call in its place."""
        self._results += 1
        if said.call_id is not None:
            return self._renamed.get(said.call_id, said.call_id)
        if self._results > len(self.calls):
            raise ChatError(
                f"message {number} is tool result {self._results} without a tool_call_id, and the last assistant turn "
                f"has {len(self.calls)} calls; give it the id of the call that it answers"
            )
        return self.calls[self._results - 1]


def _names(call: NormalizedCall) -> bool:
    """Whether the id of a call is of this form, and so names what is called: nothing else in its rendering does."""
    found = None if call.id is None else CALL_ID.fullmatch(call.id)
    return found is not None and found["name"] == call.name


def _check(said: NormalizedMessage, where: str) -> None:
    """Refuses what this form has no place for: it would be lost without a word."""
    if said.reasoning.strip():
        raise ChatError(
            f"{where} has reasoning, and the K2 chat form has no channel for it; take it out of the messages"
        )
    if said.tools:
        raise ChatError(f"{where} declares tools; the K2 chat form has them at the head of the conversation alone")
    if any(part.text is None for part in said.parts):
        raise ChatError(f"{where} shows an image; a model of the K2 chat form reads text")


def _content(said: NormalizedMessage) -> str:
    return "".join(part.text or "" for part in said.parts)


def _declared(tools: Sequence[Mapping[str, Any]], compact: bool) -> str:
    """The declarations as JSON, keys in the order given: it is part of what the model reads."""
    given = plain(list(tools))
    return dump_json(given, separators=(",", ":")) if compact else dump_json(given)
