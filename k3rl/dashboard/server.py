"""The dashboard over HTTP: pages, JSON answers, one stream of notices, files to keep. It reads, and writes nothing.

`create_app` gives an ASGI application, `serve_dashboard` runs it. Needs the packages starlette and uvicorn (extra
`dashboard`).
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from k3rl.config import K3Error
from k3rl.dashboard import queries, sft_data
from k3rl.dashboard.catalogue import Catalogue
from k3rl.dashboard.episodes import WINDOW, Bodies, special_tokens
from k3rl.dashboard.export import episode_html, run_html
from k3rl.dashboard.live import MOST_VIEWERS, Watcher, new_turns
from k3rl.dashboard.run_reader import RunReader, UnknownRun
from k3rl.dashboard.security import LOOPBACK, Guarded
from k3rl.dashboard.timeline import times, trace_events
from k3rl.data import load_reader

STATIC = files("k3rl.dashboard") / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_ASSET = re.compile(r"(vendor/)?[\w.-]+\.(js|css|svg)")
_ANSWERS = (
    *("runs", "run", "metrics", "times", "log", "experts", "episodes", "step", "group", "task", "diff", "search"),
    *("episode", "tokens", "turns", "sft"),
)
Answer = Callable[[Request], Any]


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """Where the server listens: port 0 takes a free one. token: what a viewer must know. hosts: names in a Host header
    besides those of the loopback and `host`, for a server behind an SSH tunnel or a proxy of another name."""

    host: str = "127.0.0.1"
    port: int = 7860
    token: str = ""
    hosts: tuple[str, ...] = ()


class Dashboard:
    """The endpoints over one catalogue of runs."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.bodies = Bodies()
        self.watcher = Watcher(catalogue)

    # ---------------------------------------------------------------------------------------------------- answers

    def _run(self, request: Request) -> RunReader:
        return self.catalogue.run(_text(request, "run"))

    def runs(self, request: Request) -> Any:
        return {"root": str(self.catalogue.root), "runs": self.catalogue.summaries()}

    def run(self, request: Request) -> Any:
        run = self._run(request)
        return run.about() | {"data_files": sft_data.data_files(run)}

    def metrics(self, request: Request) -> Any:
        return self._run(request).metrics()

    def times(self, request: Request) -> Any:
        return times(self._run(request).metric_rows())

    def log(self, request: Request) -> Any:
        return {"text": self._run(request).log()}

    def experts(self, request: Request) -> Any:
        return self._run(request).expert_load(_text(request, "stage"))

    def episodes(self, request: Request) -> Any:
        return queries.list_episodes(
            self._run(request),
            _filter(request),
            sort=request.query_params.get("sort", "t"),
            descending=request.query_params.get("order", "desc") != "asc",
            offset=_number(request, "offset", 0),
            limit=_number(request, "limit", queries.PAGE),
        )

    def step(self, request: Request) -> Any:
        return queries.step_outline(self._run(request), _text(request, "stage"), _number(request, "step"))

    def group(self, request: Request) -> Any:
        return queries.group_outline(self._run(request), self.bodies, _text(request, "group"))

    def task(self, request: Request) -> Any:
        return {"rows": queries.task_history(self._run(request), _text(request, "task"))}

    def diff(self, request: Request) -> Any:
        return queries.text_diff(self._run(request), self.bodies, _text(request, "a"), _text(request, "b"))

    def search(self, request: Request) -> Any:
        text = _text(request, "q")
        if not text:
            raise queries.BadQuery("q is empty; wanted the text to look for")
        wanted = _filter(request, text=None)
        return queries.search_texts(self._run(request), wanted, text, after=_number(request, "after", 0))

    def _attempt(self, request: Request) -> int | None:
        return _number(request, "attempt", 0) or None

    def episode(self, request: Request) -> Any:
        run = self._run(request)
        body = self.bodies.body(run, _text(request, "episode"), self._attempt(request))
        annotation = run.annotation(body.entry) or {}
        trained = {"advantage": run.advantage(body.entry), "trained_version": annotation.get("version")}
        return body.outline() | trained

    def tokens(self, request: Request) -> Any:
        run = self._run(request)
        body = self.bodies.body(run, _text(request, "episode"), self._attempt(request))
        branch = _text(request, "branch")
        if branch not in body.branches:
            raise UnknownRun(f"episode {body.entry.id} has no branch {branch!r}")
        found = body.branches[branch].window(_number(request, "start", 0), _number(request, "count", WINDOW))
        return found | {"special": special_tokens(run, found["ids"])}

    def turns(self, request: Request) -> Any:
        after = request.query_params.get("after")
        return new_turns(self._run(request), None if after is None else _number(request, "after"))

    def sft(self, request: Request) -> Any:
        return sft_data.conversations(self._run(request), _text(request, "file"), _number(request, "offset", 0))

    # ------------------------------------------------------------------------------------------------------ files

    def episode_file(self, request: Request) -> Response:
        run, name = self._run(request), _text(request, "episode")
        return _download(episode_html(run, self.bodies, name, self._attempt(request)), f"{name}.html", "text/html")

    def run_file(self, request: Request) -> Response:
        run = self._run(request)
        return _download(run_html(run, self.bodies), f"{_file_stem(run)}.html", "text/html")

    def perfetto_file(self, request: Request) -> Response:
        run = self._run(request)
        text = json.dumps(_plain(trace_events(run)), allow_nan=False)
        return _download(text, f"{_file_stem(run)}.trace.json", "application/json")

    # ----------------------------------------------------------------------------------------------------- stream

    async def events(self, request: Request) -> Response:
        if self.watcher.viewers >= MOST_VIEWERS:
            return _json({"error": f"{MOST_VIEWERS} streams are open; close some pages"}, 503)
        return StreamingResponse(self.watcher.notices(), media_type="text/event-stream")


class DashboardApp(Guarded):
    """The guarded application, with the dashboard behind it."""

    def __init__(self, dashboard: Dashboard, app: ASGIApp, options: DashboardOptions) -> None:
        hosts = {*LOOPBACK, options.host, *options.hosts}
        super().__init__(app, options.token, hosts, f"k3rl-dashboard-{options.port}")
        self.dashboard = dashboard


def create_app(root: Path, options: DashboardOptions) -> DashboardApp:
    """The application over the runs in `root`. Raises MissingResource when that is no folder."""
    dashboard = Dashboard(Catalogue(root))
    routes = [Route(f"/api/{name}", _answering(getattr(dashboard, name))) for name in _ANSWERS]
    routes += [
        Route("/api/events", dashboard.events),
        Route("/export/episode", _answering(dashboard.episode_file)),
        Route("/export/run", _answering(dashboard.run_file)),
        Route("/export/perfetto", _answering(dashboard.perfetto_file)),
        Route("/static/{name:path}", _asset),
        Route("/", _page),
    ]
    return DashboardApp(dashboard, Starlette(routes=routes, exception_handlers={Exception: _crashed}), options)


def serve_dashboard(root: Path, options: DashboardOptions, ready: Callable[[int], object] | None = None) -> None:
    """Serves until interrupted. ready: called with the port as soon as connections are taken.

    Raises MissingResource when `root` is no folder, OSError when the port is taken.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
        listener.listen(128)
        port = listener.getsockname()[1]
        app = create_app(root, replace(options, port=port))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        threading.Thread(target=load_reader, name="load-reader", daemon=True).start()
        if ready is not None:
            ready(port)
        with suppress(KeyboardInterrupt):
            _Server(config, app.dashboard.watcher).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends its streams before it waits for them."""

    def __init__(self, config: uvicorn.Config, watcher: Watcher) -> None:
        super().__init__(config)
        self._watcher = watcher

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._watcher.close()
        super().handle_exit(sig, frame)


def _answering(answer: Answer) -> Callable[[Request], Any]:
    """An endpoint whose work is done in a thread, with errors as JSON: {"error": a sentence}."""

    async def endpoint(request: Request) -> Response:
        try:
            found = await run_in_threadpool(answer, request)
        except UnknownRun as error:
            return _json({"error": str(error)}, 404)
        except K3Error as error:
            return _json({"error": str(error)}, 400)
        return found if isinstance(found, Response) else _json(found)

    return endpoint


async def _crashed(_request: Request, error: Exception) -> Response:
    """The error is in the log, too: Starlette raises it again."""
    return _json({"error": f"the dashboard failed: {type(error).__name__}: {error}"}, 500)


def _json(value: Any, status: int = 200) -> Response:
    """JSON that a browser can read: what is not finite is a text, as in the files."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Response(text.encode("utf-8", "backslashreplace"), status, media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _download(text: str, name: str, kind: str) -> Response:
    """A file to keep. A browser never shows it as a page of this server."""
    safe = re.sub(r"[^\w.-]", "_", name)
    headers = {"content-disposition": f'attachment; filename="{safe}"'}
    return Response(text.encode("utf-8", "backslashreplace"), media_type=f"{kind}; charset=utf-8", headers=headers)


def _file_stem(run: RunReader) -> str:
    return run.root.name


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if not _ASSET.fullmatch(name) or not (STATIC / name).is_file():
        return PlainTextResponse("there is no such file\n", 404)
    return Response((STATIC / name).read_bytes(), media_type=_TYPES[Path(name).suffix])


async def _page(_request: Request) -> Response:
    return Response((STATIC / "index.html").read_bytes(), media_type=_TYPES[".html"])


def _text(request: Request, name: str) -> str:
    if (value := request.query_params.get(name)) is None:
        raise queries.BadQuery(f"{name} is missing from the address")
    return value


def _number(request: Request, name: str, default: int | None = None) -> int:
    value = request.query_params.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isascii() or not value.isdecimal() or len(value) > 15:
        raise queries.BadQuery(f"{name} is {value!r}; wanted a whole number from 0")
    return int(value)


def _filter(request: Request, **fixed: Any) -> queries.Filter:
    """The filter that the parameters of a request say; empty ones take any."""
    values: dict[str, Any] = {}
    for name in queries.Filter.__dataclass_fields__:
        text = request.query_params.get(name)
        if not text:
            continue
        if name in ("step", "level"):
            values[name] = _number(request, name)
        elif name in ("reward_min", "reward_max"):
            try:
                values[name] = float(text)
            except ValueError:
                raise queries.BadQuery(f"{name} is {text!r}; wanted a number") from None
        else:
            values[name] = text
    return queries.Filter(**values | fixed)
