"""Stop strings, found in the bytes of sampled tokens.

A match is byte-exact and may begin and end inside a token. Markup is no text (`k3rl.tokens.turn_text`): none is part of
a match, and no match reaches across it, so that a text like "response" or "call" ends neither an answer nor a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3rl.tokens import Tokenizer, turn_text


class StopStrings:
    """Watches the tokens of one request."""

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer) -> None:
        self._stop = [(text.encode(), text) for text in stop]
        self._keep = max(len(text) for text, _ in self._stop) - 1  # bytes that a later token could complete
        self._text = turn_text(tokenizer)
        self._tail = b""

    def feed(self, token: int) -> str | None:
        """Takes the next sampled id; the stop string that it completes, or None.

        Of several the one that ends first, of those that end together the longest.
        """
        data = self._text.feed(token)
        if data is None:
            self._tail = b""
            return None
        text = self._tail + data
        found = [(text.find(stop) + len(stop), -len(stop), name) for stop, name in self._stop if stop in text]
        self._tail = text[-self._keep :] if self._keep else b""
        return min(found)[2] if found else None
