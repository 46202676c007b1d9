"""K3's chat form, XTML (k3.md 10.2): conversations to segments and sampled ids back to messages.

An element is OPEN tag ` key="value"` ... SEP body CLOSE tag SEP, a message ends with END_OF_MSG. Those four are
special tokens; tag names, attributes and content are ordinary text, each piece tokenized on its own.

render          a whole conversation, ending in the unclosed assistant message that the policy continues
continuation    only what follows an assistant turn, so that sampled tokens are never rendered again
parse           sampled ids to a Message, or a ParseError that says where and why
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3rl.tokens.message_keys import XTMLError
from k3rl.tokens.tokenizer import Tokenizer
from k3rl.tokens.xtml_normalize import normalize
from k3rl.tokens.xtml_parse import ParseError, parse
from k3rl.tokens.xtml_render import (
    IMAGE_PLACEHOLDER,
    continuation,
    image_prompt,
    render,
    render_trained,
)
from k3rl.types import Message

__all__ = [
    "IMAGE_PLACEHOLDER",
    "ParseError",
    "XTMLError",
    "check",
    "continuation",
    "image_prompt",
    "parse",
    "render",
    "render_trained",
    "stop_id",
]


def stop_id(tokenizer: Tokenizer) -> int:
    """The id that ends an assistant turn, END_OF_MSG."""
    return tokenizer.special("end_of_msg")


def check(message: Message | Mapping[str, Any], number: int) -> None:
    """Raises XTMLError for a message that has no form, as message `number` of its conversation."""
    normalize([message], number)
