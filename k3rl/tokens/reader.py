"""A cursor over sampled ids, for the parsers of chat forms. Only special ids are structure; the rest is text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from k3rl.tokens.tokenizer import Tokenizer
from k3rl.tokens.vocab import TokenizerError, special_string


@dataclass(frozen=True, slots=True)
class ParseError:
    """Why ids are not an assistant message. `position` indexes the ids given; their length means they ended early."""

    position: int
    reason: str


class Refused(Exception):
    """Leaves the grammar; a parser turns it into a ParseError."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason


class Reader:
    """At each place of the ids is either ordinary text or one special token. What does not fit raises Refused."""

    def __init__(self, ids: list[int], tokenizer: Tokenizer) -> None:
        self._ids = ids
        self._tokenizer = tokenizer
        self.position = 0

    def refuse(self, reason: str, position: int | None = None) -> NoReturn:
        """Raises Refused, of this place or the one at the cursor."""
        raise Refused(self.position if position is None else position, reason)

    def peek(self) -> str | None:
        """The special name at the cursor, "" for an ordinary id, None at the end."""
        if self.position == len(self._ids):
            return None
        try:
            return self._tokenizer.special_name(self._ids[self.position]) or ""
        except TokenizerError as error:
            self.refuse(str(error))

    def take(self, name: str) -> None:
        """Step over the special token `name`, or refuse."""
        found = self.peek()
        if found != name:
            what = {None: "the end", "": "text"}.get(found) or special_string(str(found))
            self.refuse(f"expected {special_string(name)}, found {what}")
        self.position += 1

    def text(self) -> str:
        """Ordinary text up to the next special token or the end; refuses bytes that are not UTF-8."""
        start = self.position
        self.position = self._tokenizer.text_end(self._ids, start)
        self.peek()  # refuses an id out of range
        data = self._tokenizer.decode_bytes(self._ids[start : self.position])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.refuse(f"text is not UTF-8: {error.reason}", self._position_of_byte(start, error.start))

    def _position_of_byte(self, start: int, offset: int) -> int:
        position = start
        while (size := len(self._tokenizer.decode_bytes([self._ids[position]]))) <= offset:
            offset -= size
            position += 1
        return position
