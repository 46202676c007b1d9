"""A process that speaks for a foreign environment, in the Python that has its package.

`Bridge` starts `sandboxed/bridge_server.py` and exchanges JSON lines with it. Every call has a deadline; a call that
raises, hangs, dies or answers nonsense is a `BridgeError` of its own kind, and the whole process group ends with the
bridge. `BlockingBridge` is the same for callers without an event loop. The foreign code is the user's own choice and
runs as the user, apart from this process but in no sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from k3rl.config import K3Error, MissingResource

SERVER = Path(__file__).with_name("sandboxed") / "bridge_server.py"
PROTOCOL = 1
MAX_LINE = 16 * 2**20  # bytes of one answer
TAIL = 4_000  # bytes kept of what the foreign side prints
CLOSE_S = 5.0
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE")
T = TypeVar("T")


class BridgeError(K3Error):
    """A foreign environment did not do its part. Never a reward: an episode that meets one is Failed."""


class ForeignRaised(BridgeError):
    """Foreign code raised."""


class ForeignHung(BridgeError):
    """No answer within the deadline; the process was killed."""


class ForeignDied(BridgeError):
    """The process ended in the middle of a call."""


class ForeignLied(BridgeError):
    """The answer is not what the protocol or the declared range allows: NaN, infinity, a wrong type."""


class InvalidAction(BridgeError):
    """The policy's text is no action of this environment. The policy's own mistake: it is told and may try again."""


@dataclass(frozen=True, slots=True)
class BridgeSpec:
    """What to start.

    kind: which serve_KIND; options: plain JSON values for it; package: what pip installs, `-` in it being `_` where it
    is imported. python: the interpreter of
    the virtual environment that has it, "" for this one. paths: folders of the user's own modules. variables: names of
    environment variables to pass on; besides the usual few, none are. start_s, call_s: deadlines in seconds.
    """

    kind: str
    package: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""
    paths: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    start_s: float = 120.0
    call_s: float = 60.0

    def interpreter(self) -> str:
        """The program to run. Raises MissingResource when there is no such program."""
        if not self.python:
            return sys.executable
        found = shutil.which(self.python)
        if found is None:
            raise MissingResource(
                f"python = {self.python!r} is no program; give the bin/python of the virtual environment in which "
                f"{self.package} is installed"
            )
        return found

    def check(self) -> None:
        """Raises MissingResource when the package is not there. Looks for it and does not import it."""
        program = "import sys; from importlib.util import find_spec; sys.exit(find_spec(sys.argv[1]) is None)"
        words = [self.interpreter(), "-c", program, self.package.replace("-", "_")]
        try:
            done = subprocess.run(
                words, env=self.environment(), timeout=self.start_s, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            raise ForeignHung(f"{words[0]} did not start within {self.start_s:g} s") from None
        if done.returncode == 1 and not done.stderr:
            raise self.missing(self.package)
        if done.returncode != 0:
            raise ForeignDied(f"{words[0]} does not run: {done.stderr.strip()[-500:]}")

    def missing(self, package: str) -> MissingResource:
        """The error for a package that is not installed."""
        return MissingResource(
            f"{package} is not installed in {self.python or 'this Python'}; install it (pip install {package}), or "
            "give python = the bin/python of a virtual environment that has it"
        )

    def environment(self) -> dict[str, str]:
        """Its environment variables: this interpreter finds its modules again, another one its own programs first."""
        names = (*_PASSED, *self.variables)
        found = {name: os.environ[name] for name in names if name in os.environ} | {"PYTHONHASHSEED": "0"}
        ours = () if self.python else tuple(filter(None, [os.environ.get("PYTHONPATH")]))
        if paths := [*map(os.path.abspath, self.paths), *ours]:
            found["PYTHONPATH"] = os.pathsep.join(paths)  # for processes that the package starts, too
        if self.python:
            found["PATH"] = os.pathsep.join([os.path.dirname(self.interpreter()), found.get("PATH", os.defpath)])
        return found


class Bridge:
    """One foreign process for one event loop. Not for two calls at a time."""

    def __init__(self, spec: BridgeSpec) -> None:
        self.spec = spec
        self.about: Mapping[str, Any] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._errors: asyncio.Task[None] | None = None
        self._tail = bytearray()
        self._number = 0
        self._scratch: tempfile.TemporaryDirectory[str] | None = None  # for the temporary files of foreign code

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """The number of its process, which leads a group of its own; None before `start` and after `close`."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and import the package. Raises MissingResource when it is not installed there."""
        self._scratch = tempfile.TemporaryDirectory(prefix="k3rl-foreign-", ignore_cleanup_errors=True)
        self._process = await asyncio.create_subprocess_exec(
            self.spec.interpreter(),
            "-u",
            str(SERVER),
            self.spec.kind,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**self.spec.environment(), "TMPDIR": self._scratch.name},
            start_new_session=True,
            limit=MAX_LINE,
        )
        self._errors = asyncio.create_task(self._drain(self._process))
        try:
            self.about = await self.call("hello", deadline_s=self.spec.start_s, options=dict(self.spec.options))
        except BaseException:
            await self.close()
            raise
        if self.about.get("protocol") != PROTOCOL:
            await self.close()
            raise ForeignLied(f"the bridge speaks protocol {self.about.get('protocol')!r}, not {PROTOCOL}")

    async def call(self, method: str, *, deadline_s: float | None = None, **params: Any) -> Any:
        """What the method gives, as JSON values.

        Raises BridgeError; after anything but ForeignRaised and InvalidAction the process is gone.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None or not self.alive:
            raise ForeignDied(f"the process of {self.spec.package} is not running{self._said()}")
        self._number += 1
        limit = self.spec.call_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit):
                line = json.dumps({"id": self._number, "method": method, "params": params}) + "\n"
                with contextlib.suppress(ConnectionError):  # it has died; reading tells so, and why
                    process.stdin.write(line.encode())
                    await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            await self.close(grace_s=0.0)
            raise ForeignHung(f"{self.spec.package}: {method} took more than {limit:g} s{self._said()}") from None
        except ValueError:
            await self.close(grace_s=0.0)
            raise ForeignLied(f"{self.spec.package}: {method} answered more than {MAX_LINE} bytes") from None
        except BaseException:  # cancelled: the answer that is on its way belongs to nobody
            await self.close(grace_s=0.0)
            raise
        if not answer.endswith(b"\n"):
            code = await self.close()
            raise ForeignDied(f"{self.spec.package}: the process ended ({code}) during {method}{self._said()}")
        return await self._read(method, answer)

    async def close(self, grace_s: float = CLOSE_S) -> int | None:
        """End the process and all that it started in its group; its exit status. Idempotent.

        grace_s: how long it may take to end by itself.
        """
        process, self._process = self._process, None
        scratch, self._scratch = self._scratch, None
        if process is None:
            return None
        if process.stdin is not None:
            process.stdin.close()
        finished = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait([finished], timeout=grace_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = await finished
        if self._errors is not None:
            await asyncio.wait([self._errors], timeout=1.0)
            self._errors.cancel()
        if scratch is not None:
            scratch.cleanup()
        return code

    async def _read(self, method: str, line: bytes) -> Any:
        try:
            answer = json.loads(line)
            if answer["id"] != self._number:
                raise ValueError("answer to another request")
            if "error" not in answer:
                return answer["result"]
            kind, name, message = (str(answer["error"][key]) for key in ("kind", "type", "message"))
        except (ValueError, KeyError, TypeError) as error:
            await self.close(grace_s=0.0)
            raise ForeignLied(f"{self.spec.package}: {method} answered {line[:200]!r}: {error}") from None
        if kind == "missing":
            raise self.spec.missing(message)
        if kind == "invalid":
            raise InvalidAction(message)
        raise ForeignRaised(f"{self.spec.package}: {method} raised {name}: {message}")

    async def _drain(self, process: asyncio.subprocess.Process) -> None:
        """Keep the end of what is printed, so that a flood neither blocks the process nor fills memory."""
        if process.stderr is None:
            return
        while chunk := await process.stderr.read(65_536):
            self._tail += chunk
            del self._tail[:-TAIL]

    def _said(self) -> str:
        text = self._tail.decode("utf-8", "replace").strip()
        return f"; it printed last: {text[-500:]}" if text else ""


class BlockingBridge:
    """The same for callers without an event loop: starts at the first call, and anew after its process is gone.

    Calls from several threads wait for each other. It ends with `close`, when nobody holds it, or at exit.
    """

    def __init__(self, spec: BridgeSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._holder: _Holder | None = None
        self._finish: weakref.finalize[Any, BlockingBridge] | None = None

    def call(self, method: str, *, deadline_s: float | None = None, **params: Any) -> Any:
        """As `Bridge.call`."""
        with self._lock:
            if self._holder is None:
                self._holder = _Holder(self.spec)
                self._finish = weakref.finalize(self, self._holder.end)
            return self._holder.run(self._holder.call(method, deadline_s, params))

    @property
    def pid(self) -> int | None:
        """As `Bridge.pid`."""
        with self._lock:
            return None if self._holder is None else self._holder.bridge.pid

    def close(self) -> None:
        """End the process. Idempotent; a later call starts another one."""
        with self._lock:
            if self._finish is not None:
                self._finish()
            self._holder = self._finish = None


class _Holder:
    """A thread with an event loop, and the bridge that lives there."""

    def __init__(self, spec: BridgeSpec) -> None:
        self.bridge = Bridge(spec)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"bridge-{spec.kind}", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def call(self, method: str, deadline_s: float | None, params: Mapping[str, Any]) -> Any:
        if not self.bridge.alive:
            await self.bridge.close()
            await self.bridge.start()
        return await self.bridge.call(method, deadline_s=deadline_s, **params)

    def end(self) -> None:
        self.run(self.bridge.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
