"""Sampled tokens to the text of an answer, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from k3rl.tokens.markup import turn_text
from k3rl.tokens.tokenizer import Tokenizer


class TextCutter:
    """Bytes of one text as they come -> text that is safe to show: whole characters, and nothing of a stop string.

    Of several stop strings it is cut before the one that the engine stopped at (`StopStrings`).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._done = False

    def feed(self, data: bytes, final: bool = False) -> str:
        """New text; what may be the beginning of a stop string is held back until `final`."""
        if self._done:
            return ""
        text = self._held + self._decoder.decode(data, final)
        cuts = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if cuts:
            self._done = True
            return text[: min(cuts)[1]]
        hold = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def pass_over(self, data: bytes = b"") -> str:
        """The text of markup, in which no stop string is found, nor across it, and of what was held back before."""
        if self._done:
            return ""
        text, self._held = self._held + self._decoder.decode(data), ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class PlainText:
    """Sampled ids -> ("text", piece) pairs; special tokens stand for nothing.

    offsets: of each id, the whole characters before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._cutter, self._markup = tokenizer, TextCutter(stop), turn_text(tokenizer)
        self._whole = TextCutter(())
        self._characters = 0
        self.offsets: list[int] = []

    def feed(self, ids: Iterable[int], final: bool = False) -> list[tuple[str, str]]:
        """The text that these ids add; `final` with the last ones."""
        text = ""
        for token in ids:
            piece = token_bytes(self._tokenizer, token)
            self.offsets.append(self._characters)
            self._characters += len(self._whole.feed(piece))
            marks = self._markup.feed(token) is None
            text += self._cutter.pass_over(piece) if marks else self._cutter.feed(piece)
        text += self._cutter.feed(b"", True) if final else ""
        return [("text", text)] if text else []


def channels(tokenizer: Tokenizer, stop: Sequence[str], thinking: bool) -> Channels | K2Channels:
    """What reads an assistant turn in the tokenizer's chat form. thinking: it begins in the think channel."""
    return Channels(tokenizer, stop, thinking) if tokenizer.form == "xtml" else K2Channels(tokenizer, stop)


class K2Channels:
    """`Channels` for K2's form, whose turns are content, and tool calls, which are left to the parser."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._cutter, self._text = tokenizer, TextCutter(stop), turn_text(tokenizer)

    def feed(self, ids: Iterable[int], final: bool = False) -> list[tuple[str, str]]:
        """The text that these ids add; `final` with the last ones."""
        text = ""
        for token in ids:
            piece = self._text.feed(token)
            text += self._cutter.pass_over() if piece is None else self._cutter.feed(piece)
        text += self._cutter.feed(b"", True) if final else ""
        return [("content", text)] if text else []


class Channels:
    """Sampled ids of an assistant turn -> (channel, piece) pairs of "reasoning_content" and "content".

    Shows what there is of a turn that is cut off or malformed, too; tool calls are left to `xtml.parse`. This one knows
    XTML.
    """

    _NAMES = {"think": "reasoning_content", "response": "content"}

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], thinking: bool) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._channel: str | None = "reasoning_content" if thinking else "content"
        self._cutter = TextCutter(stop)
        self._header: bytes | None = None  # of the tag being read
        self._opens = False

    def feed(self, ids: Iterable[int], final: bool = False) -> list[tuple[str, str]]:
        """The text that these ids add, in order; `final` with the last ones."""
        found: list[tuple[str, str]] = []
        for token in ids:
            name = self._tokenizer.special_name(token) if token < self._tokenizer.vocab_size else ""
            if name is None and self._header is not None:
                self._header += self._tokenizer.decode_bytes([token])
            elif name is None:
                self._add(found, self._tokenizer.decode_bytes([token]), False)
            elif name in ("open", "close", "end_of_msg"):
                self._add(found, b"", True)
                self._header, self._opens, self._channel = b"", name == "open", None
            elif name == "sep" and self._header is not None:
                tag = self._header.decode("utf-8", "replace")
                self._header = None
                self._channel = self._NAMES.get(tag) if self._opens else None
                self._cutter = TextCutter(self._stop)
            elif self._channel is not None and (text := self._cutter.pass_over()):
                found.append((self._channel, text))
        if final:
            self._add(found, b"", True)
        return found

    def _add(self, found: list[tuple[str, str]], data: bytes, final: bool) -> None:
        if self._channel is not None and (text := self._cutter.feed(data, final)):
            found.append((self._channel, text))


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of an ordinary token; none for a special one or one that only the model knows."""
    if token >= tokenizer.vocab_size or tokenizer.special_name(token) is not None:
        return b""
    return tokenizer.decode_bytes([token])
