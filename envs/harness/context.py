"""What becomes of a conversation that grows too long; each cut begins a new branch.

A policy of this kind looks at the conversation after a turn and its token count. It answers None (go on), new
messages that take the conversation's place, or a question to ask first, whose answer `resumed` then uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from k3rl.config import Config
from k3rl.types import Message

REMOVED = "[removed to save space]"
Conversation: TypeAlias = tuple[Message, ...]


class Everything(Config):
    """Nothing is ever removed."""

    type: Literal["everything"] = "everything"

    def cut(self, conversation: Sequence[Message], tokens: int) -> Conversation | None:
        """Never."""
        return None

    @property
    def question(self) -> str | None:
        """What to ask before a cut."""
        return None


class KeepLast(Config):
    """Results of tools but the last `n` are removed once the context has `at_tokens`."""

    type: Literal["keep_last"] = "keep_last"
    n: int = Field(default=3, ge=0)
    at_tokens: int = Field(default=16_384, ge=1)

    def cut(self, conversation: Sequence[Message], tokens: int) -> Conversation | None:
        """The conversation with old results emptied, None while it is short or nothing is left to empty."""
        if tokens < self.at_tokens:
            return None
        results = [place for place, message in enumerate(conversation) if message.role == "tool"]
        old = [place for place in results[: len(results) - self.n] if conversation[place].content != REMOVED]
        if not old:
            return None
        shorter = list(conversation)
        for place in old:
            shorter[place] = dataclasses.replace(shorter[place], content=REMOVED)
        return tuple(shorter)

    @property
    def question(self) -> str | None:
        """Nothing."""
        return None


class Discard(Config):
    """Everything but the request is removed once the context has `at_tokens`; files are the only memory."""

    type: Literal["discard"] = "discard"
    at_tokens: int = Field(default=16_384, ge=1)

    def cut(self, conversation: Sequence[Message], tokens: int) -> Conversation | None:
        """The request and a note."""
        if tokens < self.at_tokens:
            return None
        note = "What you said and saw so far was removed to save space. The workspace is as you left it; go on."
        return (*opening(conversation), Message("user", note))

    @property
    def question(self) -> str | None:
        """Nothing."""
        return None


class Summarize(Config):
    """The policy is asked for a summary once the context has `at_tokens`, and goes on from the request and that."""

    type: Literal["summarize"] = "summarize"
    at_tokens: int = Field(default=16_384, ge=1)

    def cut(self, conversation: Sequence[Message], tokens: int) -> Conversation | None:
        """The request; the summary is put after it."""
        return opening(conversation) if tokens >= self.at_tokens else None

    @property
    def question(self) -> str | None:
        """What the policy is asked."""
        return (
            "The conversation is about to be removed to save space. Write down, without calling a tool, what you need "
            "to go on: what you found, what you changed, what is left to do."
        )


ContextConfig: TypeAlias = Annotated[Everything | KeepLast | Discard | Summarize, Field(discriminator="type")]


def opening(conversation: Sequence[Message]) -> Conversation:
    """The messages before the policy's first turn."""
    first = next((place for place, message in enumerate(conversation) if message.role == "assistant"), None)
    return tuple(conversation[:first])


def resumed(kept: Sequence[Message], summary: str) -> Conversation:
    """The conversation that begins with a summary that the policy wrote."""
    return (
        *kept,
        Message("user", f"Your summary of the work so far:\n{summary}\nThe workspace is as you left it; go on."),
    )
