"""What of a sampled turn is text, and what is markup: special tokens, tags, and tool calls with their arguments."""

from __future__ import annotations

from k3rl.tokens.tokenizer import Tokenizer


def turn_text(tokenizer: Tokenizer) -> TurnText:
    """The reader of turns in the tokenizer's chat form."""
    return TurnText(tokenizer) if tokenizer.form == "xtml" else K2TurnText(tokenizer)


class TurnText:
    """Reads the tokens of a turn in their order. Without any special token all of it is text. This one knows XTML."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._header: bytes | None = None  # of the tag being read
        self._opens = self._calls = False

    def feed(self, token: int) -> bytes | None:
        """The bytes of a token that is text; None for markup and for ids that only the model knows."""
        if token >= self._tokenizer.vocab_size:
            return None
        name = self._tokenizer.special_name(token)
        if name is None:
            data = self._tokenizer.decode_bytes([token])
            if self._header is not None:
                self._header += data
            return None if self._header is not None or self._calls else data
        if name in ("open", "close"):
            self._header, self._opens = b"", name == "open"
        elif name == "sep" and self._header is not None:
            self._calls = self._opens if self._header == b"tools" else self._calls
            self._header = None
        elif name == "end_of_msg":
            self._header, self._calls = None, False
        return None


class K2TurnText(TurnText):
    """In K2's form: neither the head of a turn nor a tool call is text."""

    _BEGINS = ("im_user", "im_assistant", "im_system", "tool_calls_section_begin")
    _ENDS = ("im_middle", "im_end", "tool_calls_section_end")

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._inside = False

    def feed(self, token: int) -> bytes | None:
        """See `TurnText.feed`."""
        if token >= self._tokenizer.vocab_size:
            return None
        name = self._tokenizer.special_name(token)
        if name is None:
            return None if self._inside else self._tokenizer.decode_bytes([token])
        if name in self._BEGINS or name in self._ENDS:
            self._inside = name in self._BEGINS
        return None
