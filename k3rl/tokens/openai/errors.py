"""Requests that cannot be served, and the error object that says so."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from k3rl.config import K3Error
from k3rl.tokens.images import ImageError
from k3rl.tokens.message_keys import ChatError
from k3rl.tokens.vocab import TokenizerError

NO_TOKENS = (ChatError, TokenizerError, ImageError)  # what a conversation raises that has no tokens
MALFORMED = (ValidationError, *NO_TOKENS)


class RequestError(K3Error, ValueError):
    """A request that cannot be served as it is. status: HTTP; code and param: of the error object."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The error object."""
        return error_object(str(self), self.status, self.code, self.param)


def _names(part: int | str) -> bool:
    """Whether a place in a body is named, and not one of the forms that it may have (`NamedTool`, `literal[...]`)."""
    return isinstance(part, int) or (part.isidentifier() and not part[0].isupper())


def request_error(error: Exception, code: str | None = None) -> RequestError:
    """A RequestError as it is, and one of MALFORMED as a RequestError with this code."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, takewhile(_names, first["loc"])))
        return RequestError(f"{where or 'the body'}: {first['msg']}", code=code, param=where or None)
    return RequestError(str(error), code=code, param="messages")


def too_large(limit: int) -> RequestError:
    """A body of more than `limit` bytes."""
    return RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")


def error_object(message: str, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The error object of an HTTP status."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_message(body: Any) -> Any:
    """What a server says in an error object, or in whatever stands in its place."""
    if not isinstance(body, Mapping):
        return body
    inner = body.get("error", body.get("detail", body))
    return inner.get("message", inner) if isinstance(inner, Mapping) else inner
