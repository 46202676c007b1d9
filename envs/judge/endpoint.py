"""A judge behind an OpenAI-compatible server."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Protocol

MAX_REPLY_BYTES = 4 * 2**20


class JudgeFailed(RuntimeError):
    """The judge gave nothing that can be used: the answers it was asked about have no reward."""


class Endpoint(Protocol):
    """Who judges."""

    def complete(self, messages: Sequence[dict[str, str]]) -> str:
        """The text of one reply. Raises JudgeFailed. Called from several threads."""
        ...


class HTTPEndpoint:
    """Chat completions over HTTP. A busy or failing server is asked again, `attempts` times in all.

    key_variable: the environment variable that holds the key; it is read when a request is made.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key_variable: str = "OPENAI_API_KEY",
        temperature: float = 0.0,
        max_tokens: int = 2048,
        timeout_s: float = 120.0,
        attempts: int = 3,
        pause_s: float = 1.0,
    ) -> None:
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._model = model
        self._key_variable = key_variable
        self._temperature, self._max_tokens = temperature, max_tokens
        self._timeout_s, self._attempts, self._pause_s = timeout_s, attempts, pause_s

    def complete(self, messages: Sequence[dict[str, str]]) -> str:
        """See Endpoint."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "temperature": self._temperature,
            "max_tokens": self._max_tokens,
        }
        request = urllib.request.Request(
            self._url,
            json.dumps(body).encode(),
            {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {os.environ.get(self._key_variable, 'none')}",
            },
        )
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(self._pause_s * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                    return _content(reply.read(MAX_REPLY_BYTES + 1))
            except urllib.error.HTTPError as error:
                said = error.read(500).decode("utf-8", "replace")
                failure = f"status {error.code}: {said}"
                if error.code not in (408, 409, 429) and error.code < 500:
                    break
            except (OSError, http.client.HTTPException) as error:  # a timeout is an OSError
                failure = f"{type(error).__name__}: {error}"
        raise JudgeFailed(f"the judge at {self._url} gave no reply: {failure}"[:500])


def _content(data: bytes) -> str:
    try:
        content = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise JudgeFailed(f"the judge's server gave no chat completion: {data[:200]!r}") from None
    if not isinstance(content, str):
        raise JudgeFailed("the judge's message has no text")
    return content
