"""Removes secrets from text before it is written to a run directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"
_SECRET_WORDS = {"token", "secret", "password", "passwd", "credential", "credentials", "apikey"}
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHORTEST_SECRET = 8  # a shorter value would blank out common words


def is_secret_name(name: str) -> bool:
    """Whether a flag or environment variable of this name holds a secret: `--hub.api-key`, `RAY_AUTH_TOKEN`.

    `max_tokens` and `tokenizer` are not secrets; the word must stand alone.
    """
    words = re.split(r"[^a-z]+", name.lower())
    return any(word in _SECRET_WORDS for word in words) or words[-2:] in (["api", "key"], ["access", "key"])


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without the values of secret environment variables and without user:password in URLs."""
    environ = os.environ if environ is None else environ
    values = [value for name, value in environ.items() if is_secret_name(name) and len(value) >= _SHORTEST_SECRET]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _USERINFO.sub(HIDDEN, text)


def redact_words(words: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """A command line without secrets: also the value after a flag with a secret name, or behind its `=`."""
    safe: list[str] = []
    hide_next = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            safe.append(HIDDEN)
            hide_next = False
            continue
        secret = word.startswith("--") and is_secret_name(flag)
        safe.append(f"{flag}={HIDDEN}" if secret and equals else redact(word, environ))
        hide_next = secret and not equals
    return safe
