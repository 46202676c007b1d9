"""Conversations to XTML segments (k3.md 10.2). Use through `k3rl.tokens.xtml`.

Order of a prompt: tool declarations, thinking effort, the conversation, the one-shot notes (tool choice,
response format), the unclosed assistant message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from k3rl.tokens.segments import Segment, Special, Text
from k3rl.tokens.xtml_normalize import (
    ContentPart,
    NormalizedCall,
    NormalizedMessage,
    XTMLError,
    dump_json,
    normalize,
    order_results,
    plain,
)
from k3rl.types import Message

Messages: TypeAlias = Sequence[Message | Mapping[str, Any]]

# What a caller leaves in text for an image; `image_prompts` replace it. Ordinary text when there are none.
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
_MEDIA = re.compile(r"(<\|media_(?:begin|content|pad|end)\|>)")

EFFORTS = ("low", "high", "max")  # `medium` is named in the note and rejected by the released encoder

_DECLARE = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_DECLARE_MORE = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def render(
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    add_generation_prompt: bool = True,
    tool_choice: Any = None,
    response_format: Any = None,
    image_prompts: Sequence[str] | None = None,
) -> list[Segment]:
    """The segments of a conversation, byte-exact as K3 was trained on.

    messages: `Message` values or OpenAI-form dicts (roles system, user, assistant, tool). tools: JSON-schema
    declarations. thinking: assistant turns have a think channel. thinking_effort: low, high or max.
    tool_choice: "required" and "none" add a note, anything else does not. response_format: "json_object",
    "json_schema" or the OpenAI dict. image_prompts: the media block (`image_prompt`) of the i-th image part or
    placeholder, all conversation long; when there are as many as image parts, a placeholder in text is ordinary text,
    so that nobody who is quoted can move an image. Raises XTMLError for a conversation that has no such form.
    """
    return render_trained(
        messages,
        tools=tools,
        thinking=thinking,
        thinking_effort=thinking_effort,
        add_generation_prompt=add_generation_prompt,
        tool_choice=tool_choice,
        response_format=response_format,
        image_prompts=image_prompts,
    )[0]


def render_trained(
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    add_generation_prompt: bool = True,
    tool_choice: Any = None,
    response_format: Any = None,
    image_prompts: Sequence[str] | None = None,
) -> tuple[list[Segment], list[bool]]:
    """`render`, and for each segment whether the policy would have sampled it.

    Sampled is an assistant message after the generation prefix, its END_OF_MSG included, without images and
    without `json` elements (arguments that are not JSON; k3.md 10.2 keeps those out of the loss). A turn whose own
    keys say so (`weight` 0, `train` or `loss` false, `masked` true) is context like a user's.
    """
    effort = _checked_effort(thinking, thinking_effort)
    writer = _Writer(image_prompts)
    if tools:
        writer.note("tool-declare", _DECLARE.format(_compact(tools)))
    if effort is not None:
        writer.note("thinking-effort", _EFFORT.format(effort))
    writer.conversation(order_results(normalize(messages)), thinking)
    writer.ending(thinking, add_generation_prompt, tool_choice, response_format)
    return writer.segments, writer.trained


def continuation(
    history: Messages,
    new_messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    add_generation_prompt: bool = True,
    tool_choice: Any = None,
    response_format: Any = None,
    image_prompts: Sequence[str] | None = None,
) -> list[Segment]:
    """What to append to the tokens of `history`, whose last message is an assistant turn with its END_OF_MSG.

    Equal to rendering `[*history, *new_messages]` without the part that renders `history` alone (no notes, no
    generation prefix). Only the last assistant turn is looked at: its calls give tool results their order, name
    and index. `image_prompts` are those of the new messages. `tools` and `thinking_effort` stand at the head of a
    conversation and add nothing here. Raises XTMLError as `render` does, and when history does not end with an
    assistant turn, because tool results before it could still be re-sorted.
    """
    _checked_effort(thinking, thinking_effort)
    last = normalize(history[-1:])
    if not last or last[0].role != "assistant":
        raise XTMLError(
            f"history ends with {last[0].role if last else 'nothing'}; a continuation follows an assistant turn, "
            "use render for the first prompt"
        )
    writer = _Writer(image_prompts)
    writer.calls = last[0].calls
    writer.conversation(order_results([*last, *normalize(new_messages, first=len(history))])[1:], thinking)
    writer.ending(thinking, add_generation_prompt, tool_choice, response_format)
    return writer.segments


def image_prompt(width: int, height: int) -> str:
    """The media block of an image of this original size in pixels, an element of `image_prompts` (k3.md 11)."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


class _Writer:
    """Collects segments. `calls` are those of the last assistant turn, `results` the tool results since."""

    def __init__(self, image_prompts: Sequence[str] | None) -> None:
        self.segments: list[Segment] = []
        self.trained: list[bool] = []
        self.calls: tuple[NormalizedCall, ...] = ()
        self.results = 0
        self._learn = False
        self._images = image_prompts
        self._images_used = 0
        self._only_parts = False  # the image parts alone use up the image prompts

    def special(self, name: str) -> None:
        self.segments.append(Special(name))
        self.trained.append(self._learn)

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Text(text))
            self.trained.append(self._learn)

    def open(self, tag: str, **attributes: str) -> None:
        self.special("open")
        self.text(tag)
        for key, value in attributes.items():
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.special("sep")

    def close(self, tag: str) -> None:
        self.special("close")
        self.text(tag)
        self.special("sep")

    def content(self, text: str) -> None:
        """Text that someone wrote, with a media block for each placeholder when there are image prompts."""
        if self._images is None or self._only_parts:
            self.text(text)
            return
        first, *others = text.split(IMAGE_PLACEHOLDER)
        self.text(first)
        for part in others:
            self.image()
            self.text(part)

    def image(self) -> None:
        """The media block of the next image, never trained; the placeholder when there are no image prompts."""
        if self._images is None:
            self.text(IMAGE_PLACEHOLDER)
            return
        if self._images_used == len(self._images):
            raise XTMLError(f"the conversation has more images than the {len(self._images)} image prompts given")
        learn, self._learn = self._learn, False
        for piece in _MEDIA.split(self._images[self._images_used]):
            if _MEDIA.fullmatch(piece):
                self.special(piece[2:-2])
            else:
                self.text(piece)
        self._learn = learn
        self._images_used += 1

    def parts(self, parts: Sequence[ContentPart]) -> None:
        for part in parts:
            if part.text is None:
                self.image()
            else:
                self.content(part.text)

    def note(self, kind: str, body: str) -> None:
        """A system message that the request, not the conversation, asks for."""
        self.open("message", role="system", type=kind)
        self.text(body)
        self.end_message()

    def end_message(self) -> None:
        self.close("message")
        self.special("end_of_msg")

    def conversation(self, turns: Sequence[NormalizedMessage], thinking: bool) -> None:
        parts = sum(part.text is None for said in turns for part in said.parts)
        self._only_parts = self._images is not None and parts == len(self._images)
        for said in turns:
            if said.role == "assistant":
                self.assistant(said, thinking)
            elif said.role == "tool":
                self.tool_result(said)
            elif said.tools:
                self.note("tool-declare", _DECLARE_MORE.format(_compact(said.tools)))
            else:
                self.open("message", role=said.role, **_name(said))
                self.parts(said.parts)
                self.end_message()

    def assistant(self, said: NormalizedMessage, thinking: bool) -> None:
        self.calls, self.results = said.calls, 0
        self.open("message", role="assistant", **_name(said))
        if thinking:
            self.open("think")
            self._learn = said.trained
            self.content(said.reasoning if said.reasoning.strip() else "")
            self.close("think")
        self.open("response")
        self._learn = said.trained
        self.parts(said.parts)
        self.close("response")
        if said.calls:
            self.open("tools")
            for index, call in enumerate(said.calls, start=1):
                self.call(call, index, said.trained)
            self.close("tools")
        self.end_message()
        self._learn = False

    def call(self, call: NormalizedCall, index: int, learn: bool) -> None:
        self.open("call", tool=call.name, index=str(index))
        if call.raw is not None:
            self._learn = False
            self.open("json", type="object")
            self.content(call.raw)
            self.close("json")
            self._learn = learn
        for key, value in call.arguments.items():
            kind, text = _argument(value)
            self.open("argument", key=key, type=kind)
            self.content(text)
            self.close("argument")
        self.close("call")

    def tool_result(self, said: NormalizedMessage) -> None:
        self.results += 1
        name = said.name
        if name is None and self.results <= len(self.calls):
            name = self.calls[self.results - 1].name
        if name is None:
            raise XTMLError(
                f"tool result {self.results} has no name and the last assistant turn has {len(self.calls)} calls; "
                "give it a name, or a tool_call_id of one of those calls"
            )
        self.open("message", role="tool", tool=name, index=str(self.results))
        self.parts(said.parts)
        self.end_message()

    def ending(self, thinking: bool, prompt: bool, tool_choice: Any, response_format: Any) -> None:
        """The one-shot notes, the generation prefix, and the check that every image prompt was used."""
        if isinstance(tool_choice, str) and tool_choice in _CHOICE:
            self.note("tool-choice", _CHOICE[tool_choice])
        kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
        if kind == "json_object":
            self.note("response-format", _FORMAT.format(kind))
        elif kind == "json_schema":
            self.note("response-format", _FORMAT.format(kind) + _SCHEMA.format(_compact(_schema(response_format))))
        if prompt:
            self.open("message", role="assistant")
            self.open("think" if thinking else "response")
        if self._images is not None and self._images_used != len(self._images):
            raise XTMLError(f"{len(self._images)} image prompts were given for {self._images_used} images")


def _name(said: NormalizedMessage) -> dict[str, str]:
    return {"name": said.name} if said.name else {}


def _checked_effort(thinking: bool, effort: str | None) -> str | None:
    """The effort to write, None when thinking is off or nothing was asked for."""
    if not thinking or effort is None:
        return None
    if effort not in EFFORTS:
        raise XTMLError(f"thinking_effort is {effort!r}; K3 accepts {', '.join(EFFORTS)}")
    return effort


def _compact(value: Any) -> str:
    """JSON without spaces, keys sorted at every depth, as declarations and schemas are written."""
    return dump_json(plain(value), compact=True)


def _schema(response_format: Any) -> Any:
    """The schema of an OpenAI response format: under json_schema.schema, or json_schema itself."""
    outer = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    if outer is None:
        raise XTMLError('response_format "json_schema" has no json_schema; give {"type": ..., "json_schema": {...}}')
    if isinstance(outer, Mapping):
        return outer.get("schema", outer.get("json_schema", outer))
    return outer


def _argument(value: Any) -> tuple[str, str]:
    """The type attribute and the body of one argument: strings raw, the rest as JSON with Python's separators."""
    if isinstance(value, str):
        return "string", value
    if isinstance(value, bool):
        kind = "boolean"
    elif value is None:
        kind = "null"
    elif isinstance(value, int | float):
        kind = "number"
    else:
        kind = "object" if isinstance(value, dict) else "array"
    return kind, dump_json(value)
