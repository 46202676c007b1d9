"""The chat form of a checkpoint: how its conversations are written, and its sampled turns read.

Which one is a matter of the tokenizer's special tokens, and so of the checkpoint, never of a flag: XTML
(`k3rl.tokens.xtml`) for K3, K2's (`k3rl.tokens.k2`) for Kimi Linear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from k3rl.tokens import k2, xtml
from k3rl.tokens.message_keys import ChatError
from k3rl.tokens.reader import ParseError
from k3rl.tokens.segments import Segment
from k3rl.tokens.tokenizer import Tokenizer
from k3rl.types import Message

Messages: TypeAlias = Sequence[Message | Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None


class ChatFormat(Protocol):
    """Conversations to segments, and sampled ids to messages. What a form has no place for raises ChatError.

    The arguments are those of `xtml.render`; a prompt that is continued begins with the tokens of the prompt before it,
    followed by what was sampled.
    """

    @property
    def thinks(self) -> bool:
        """Whether turns can have a think channel."""
        ...

    @property
    def stop_id(self) -> int:
        """The id that ends an assistant turn."""
        ...

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        thinking: bool = False,
        thinking_effort: str | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
        image_prompts: Sequence[str] | None = None,
    ) -> list[Segment]:
        """A conversation through the generation prefix."""
        ...

    def render_trained(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        thinking: bool = False,
        thinking_effort: str | None = None,
        image_prompts: Sequence[str] | None = None,
    ) -> tuple[list[Segment], list[bool]]:
        """A whole conversation, and for each segment whether the policy would have sampled it."""
        ...

    def continuation(
        self,
        history: Messages,
        new_messages: Messages,
        *,
        thinking: bool = False,
        thinking_effort: str | None = None,
        tool_choice: Any = None,
        image_prompts: Sequence[str] | None = None,
    ) -> list[Segment]:
        """What to append, through the generation prefix, to the tokens of `history`, which ends with a sampled turn."""
        ...

    def sampled(self, message: Message, *, thinking: bool = False) -> list[Segment]:
        """What a policy would sample for an assistant message, after the generation prefix."""
        ...

    def parse(self, token_ids: Sequence[int], *, thinking: bool = False) -> Message | ParseError:
        """The message that was sampled. Never raises for any ids."""
        ...


@lru_cache(maxsize=16)
def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The form that the tokenizer's special tokens are made for, in the style of its chat template.

    Raises TokenizerError for a template that renders another form.
    """
    return XTMLFormat(tokenizer) if tokenizer.form == "xtml" else K2Format(tokenizer)


class XTMLFormat:
    """`ChatFormat` by `k3rl.tokens.xtml`."""

    thinks = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def stop_id(self) -> int:
        """See `ChatFormat`."""
        return xtml.stop_id(self._tokenizer)

    def render(self, messages: Messages, *, thinking: bool = False, **given: Any) -> list[Segment]:
        """See `ChatFormat`."""
        return xtml.render(messages, thinking=thinking, **given)

    def render_trained(
        self, messages: Messages, *, thinking: bool = False, **given: Any
    ) -> tuple[list[Segment], list[bool]]:
        """See `ChatFormat`."""
        return xtml.render_trained(messages, thinking=thinking, add_generation_prompt=False, **given)

    def continuation(
        self, history: Messages, new_messages: Messages, *, thinking: bool = False, **given: Any
    ) -> list[Segment]:
        """See `ChatFormat`."""
        return xtml.continuation(history, new_messages, thinking=thinking, **given)

    def sampled(self, message: Message, *, thinking: bool = False) -> list[Segment]:
        """See `ChatFormat`."""
        prefix = xtml.render([], thinking=thinking)
        alone = dataclasses.replace(message, name=None)
        return xtml.render([alone], thinking=thinking, add_generation_prompt=False)[len(prefix) :]

    def parse(self, token_ids: Sequence[int], *, thinking: bool = False) -> Message | ParseError:
        """See `ChatFormat`."""
        return xtml.parse(token_ids, self._tokenizer, thinking=thinking)


class K2Format:
    """`ChatFormat` by `k3rl.tokens.k2`."""

    thinks = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._style = tokenizer, k2.style_of(tokenizer.chat_template)

    @property
    def stop_id(self) -> int:
        """See `ChatFormat`."""
        return self._tokenizer.special("im_end")

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        thinking: bool = False,
        thinking_effort: str | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
        image_prompts: Sequence[str] | None = None,
    ) -> list[Segment]:
        """See `ChatFormat`. A response format is for a constraint to keep: it is not written."""
        _refuse_foreign(thinking, thinking_effort, tool_choice)
        return k2.render(messages, tools=tools, style=self._style)

    def render_trained(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        thinking: bool = False,
        thinking_effort: str | None = None,
        image_prompts: Sequence[str] | None = None,
    ) -> tuple[list[Segment], list[bool]]:
        """See `ChatFormat`."""
        _refuse_foreign(thinking, thinking_effort)
        return k2.render_trained(messages, tools=tools, add_generation_prompt=False, style=self._style)

    def continuation(
        self,
        history: Messages,
        new_messages: Messages,
        *,
        thinking: bool = False,
        thinking_effort: str | None = None,
        tool_choice: Any = None,
        image_prompts: Sequence[str] | None = None,
    ) -> list[Segment]:
        """See `ChatFormat`."""
        _refuse_foreign(thinking, thinking_effort, tool_choice)
        return k2.continuation(history, new_messages, style=self._style)

    def sampled(self, message: Message, *, thinking: bool = False) -> list[Segment]:
        """See `ChatFormat`."""
        return k2.sampled(message)

    def parse(self, token_ids: Sequence[int], *, thinking: bool = False) -> Message | ParseError:
        """See `ChatFormat`."""
        return k2.parse(token_ids, self._tokenizer)


def _refuse_foreign(thinking: bool, effort: str | None, tool_choice: Any = None) -> None:
    """What K2's form has no words for."""
    if thinking or effort is not None:
        asked = f"thinking_effort {effort}" if effort is not None else "thinking"
        raise ChatError(f"{asked} was asked for, and the K2 chat form has no think channel; leave it off")
    if tool_choice in ("required", "none"):
        raise ChatError(f"the tool choice {tool_choice!r} has no words in the K2 chat form; leave it out")
