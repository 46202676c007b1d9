"""Makes text of unknown origin safe to print: what a model or a tool wrote must not steer the reader's terminal."""

from __future__ import annotations

import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, format (bidi, zero width), surrogate, unassigned


def visible(text: str) -> str:
    """`text` with every character that prints nothing, or that moves or reorders what is printed, made visible.

    Newlines stay. Control characters become their pictures (escape is U+241B), the others `<U+202E>`.
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if unicodedata.category(character) in _HIDDEN:
        return f"<U+{code:04X}>"
    return character


def framed(text: str, margin: str) -> str:
    """`visible(text)` with `margin` before each line, so that it cannot pass for the program's own lines."""
    return "\n".join(margin + line for line in visible(text).split("\n"))
