"""The two kinds of piece a prompt is made of: structure (`Special`) and ordinary text (`Text`).

The split is what keeps content from forging structure: only a `Special` becomes a special id, and only this
package's renderer makes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Special:
    """One special token by name: open, close, sep, end_of_msg, media_begin, media_content, media_pad, media_end."""

    name: str


@dataclass(frozen=True, slots=True)
class Text:
    """Ordinary text, tokenized on its own: joining neighbours would change token ids. Never empty in a rendering."""

    text: str


Segment: TypeAlias = Special | Text
