"""Who may read the dashboard: a token, the right Host, no other site; and what a browser may do with its pages."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Guarded:
    """An ASGI application behind the checks; nothing behind it changes anything, so only GET and HEAD pass.

    hosts: names by which the server may be called; another one in the Host header is a page that had its name point
    here (DNS rebinding). cookie: its name; it holds the token after a first visit with `?token=`.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str], cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets here
            return
        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that goes no further, or None."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if _host_name(headers.get("host", "")) not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            return PlainTextResponse(f"this server is not called so; use one of {names}\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard only reads; use GET\n", 405, {"allow": "GET, HEAD"})
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and given:
            return self._welcome(given)
        if _from_elsewhere(headers, scope["path"]):
            return PlainTextResponse("other sites may not read the dashboard\n", 403)
        if not self._knows(headers):
            return PlainTextResponse("open the address with ?token=... that `k3rl dashboard` printed\n", 401)
        return None

    def _welcome(self, given: str) -> Response:
        """Puts the token into a cookie and takes it out of the address."""
        if not self._equal(given):
            return PlainTextResponse("that is not the token of this server; it was started again since\n", 401)
        response = RedirectResponse("/", 303)
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return response

    def _knows(self, headers: dict[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._equal(bearer.strip()):
            return True
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return found is not None and self._equal(found.value)

    def _equal(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def _host_name(header: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


def _from_elsewhere(headers: dict[str, str], path: str) -> bool:
    """Whether a browser says that another site asks. A link to the page itself may come from anywhere."""
    site = headers.get("sec-fetch-site", "none")
    if path == "/" and headers.get("sec-fetch-mode") == "navigate":
        return False
    return site not in ("same-origin", "none")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [
                (name, value) for name, value in message["headers"] if name.decode("latin-1").lower() not in _HEADERS
            ]
            message["headers"] = own + [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        await send(message)

    return sending
