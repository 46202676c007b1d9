"""A checkpoint's own chat template (Jinja), as far as this program runs it: to see that it and a chat form agree.

Conversations are rendered by code of ours, which tells markup from text and trained from given; a template cannot. It
runs in Jinja's sandbox, as `transformers` runs it, on conversations that are written here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from k3rl.tokens.vocab import CONFIG_FILE, TEMPLATE_FILE, TokenizerError, Vocabulary


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """source: the text; where: the file that has it, for messages."""

    source: str
    where: str

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text of a conversation through the generation prompt. Raises TokenizerError where it fails."""
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        world.filters["tojson"] = _to_json
        world.globals["raise_exception"] = _refuse
        try:
            return world.from_string(self.source).render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TokenizerError(f"{self.where} does not render a plain conversation: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **others: Any) -> str:
    """JSON as templates of the hub mean it: not escaped for HTML, and not sorted unless asked for."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **others)


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def find_template(vocabulary: Vocabulary) -> ChatTemplate | None:
    """The default template among the companion files. Raises TokenizerError for one that is not text."""
    folder = f"{vocabulary.folder}/" if vocabulary.folder else ""
    given: Any = vocabulary.companions.get(TEMPLATE_FILE)
    where = f"{folder}{TEMPLATE_FILE}"
    try:
        if given is not None:
            return ChatTemplate(given.decode("utf-8"), where)
        where = f"{folder}{CONFIG_FILE}"
        given = json.loads(vocabulary.companions.get(CONFIG_FILE, b"{}")).get("chat_template")
        if isinstance(given, list):
            given = {one["name"]: one["template"] for one in given}.get("default")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{where} has no chat template that can be read: {error!r}") from error
    if given is None:
        return None
    if not isinstance(given, str):
        raise TokenizerError(f"{where} has a chat template of type {type(given).__name__}; wanted text")
    return ChatTemplate(given, where)
