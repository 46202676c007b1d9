"""K2's chat form, that of Kimi K2 and Kimi Linear: conversations to segments and sampled ids back to messages.

A turn is im_user, im_assistant or im_system, a name, im_middle, the content, im_end. All but name and content are
special tokens; text between two of them is tokenized in one piece, as the released tokenizers do. Tools are declared in
a first system turn named tool_declare. The calls of an assistant turn follow its content in one section of special
tokens, each with an id `functions.NAME:INDEX`; a result is a system turn that begins with the id it answers. There is
no think channel, and nothing is said of a tool choice or a response format.

An id of another form is written as `functions.NAME:INDEX`, where INDEX counts the calls of the conversation: the name
of what is called stands nowhere else. Arguments are written as they came, those that came as a mapping as JSON with
Python's separators.

render, render_trained, continuation, sampled, parse       as in `k3rl.tokens.xtml`
style_of                                                   what the checkpoint's own chat template asks for
"""

from __future__ import annotations

import re
from typing import Any

from k3rl.tokens.chat_template import ChatTemplate
from k3rl.tokens.k2_parse import parse
from k3rl.tokens.k2_render import K2Style, Messages, Tools, continuation, render_trained, sampled
from k3rl.tokens.segments import Segment, Special
from k3rl.tokens.vocab import TokenizerError, special_string

__all__ = ["K2Style", "continuation", "parse", "render", "render_trained", "sampled", "style_of"]

_SYSTEM = re.compile(r"<\|im_system\|>system<\|im_middle\|>(?P<text>.*)<\|im_end\|>", re.DOTALL)
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "2 + 2?"}]
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"n": {}}}}}
]
_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Add."},
    *_ASKED,
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": f"functions.add:{n}", "type": "function", "function": {"name": "add", "arguments": '{"n":2}'}}
            for n in range(2)
        ],
    },
    {"role": "tool", "tool_call_id": "functions.add:0", "content": "4"},
    {"role": "tool", "tool_call_id": "functions.add:1", "content": "4"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Thanks."},
]


def render(
    messages: Messages, *, tools: Tools = None, add_generation_prompt: bool = True, style: K2Style | None = None
) -> list[Segment]:
    """The segments of a conversation. messages: `Message` values or OpenAI-form dicts. Raises ChatError."""
    return render_trained(messages, tools=tools, add_generation_prompt=add_generation_prompt, style=style)[0]


def style_of(template: ChatTemplate | None) -> K2Style:
    """The style with which conversations come out as the template has them; the plain one without a template.

    A template that writes tools in another way, or not at all, gives a style that refuses them. Raises TokenizerError
    for one that renders anything else than this form: a run would train one text and another program read another.
    """
    if template is None:
        return K2Style()
    asked, rest = template.render(_ASKED), _text(render(_ASKED))
    found = _SYSTEM.fullmatch(asked.removesuffix(rest)) if asked.endswith(rest) else None
    plain = K2Style(None if found is None else found["text"])
    for messages in (_ASKED, _TALK[:2] + _TALK[-2:]):
        wrong = _difference(template.render(messages), _text(render(messages, style=plain)))
        if wrong:
            raise TokenizerError(
                f"{template.where} does not render K2's chat form, of which its tokens are: {wrong}. Remove the "
                "template to have that form all the same"
            )
    try:
        wanted = template.render(_TALK, _TOOLS)
    except TokenizerError as error:
        return K2Style(plain.default_system, no_tools=str(error))
    for compact in (True, False):
        style = K2Style(plain.default_system, compact)
        wrong = _difference(wanted, _text(render(_TALK, tools=_TOOLS, style=style)))
        if not wrong:
            return style
    return K2Style(
        plain.default_system,
        no_tools=f"{template.where} does not write tools as K2's chat form has them: {wrong}. Remove the template to "
        "have them written so all the same",
    )


def _difference(theirs: str, ours: str) -> str:
    """Where two texts begin to differ; empty where they do not."""
    if theirs == ours:
        return ""
    place = next((n for n, pair in enumerate(zip(theirs, ours, strict=False)) if len(set(pair)) > 1), None)
    place = min(len(theirs), len(ours)) if place is None else place
    return (
        f"at character {place} of a test conversation it has {theirs[place : place + 40]!r}, and the form "
        f"{ours[place : place + 40]!r}"
    )


def _text(segments: list[Segment]) -> str:
    return "".join(special_string(one.name) if isinstance(one, Special) else one.text for one in segments)
