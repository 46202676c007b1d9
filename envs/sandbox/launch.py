"""This process's end of the launcher: started with the first sandbox, ended soon after the last one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3rl.envs.sandbox.base import SandboxDied

LINGER_S = 0.3  # sandboxes that follow each other share a launcher
GONE_S = 5.0
_GONE = "the process that starts sandboxes has ended"
_SCRIPT = Path(__file__).with_name("launcher.py")


@dataclass(frozen=True, slots=True)
class Order:
    """What to start. `limits`: soft and hard by the names of `resource`; `groups`: cgroup.procs files to enter."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = "/"
    groups: Sequence[str] = ()
    uid: int | None = None
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def text(self) -> bytes:
        """As the launcher reads it."""
        return json.dumps(
            {
                "argv": list(self.argv),
                "env": dict(self.env),
                "cwd": self.cwd,
                "groups": list(self.groups),
                "uid": self.uid,
                "limits": dict(self.limits),
            }
        ).encode()


class Launched:
    """A command that was ordered. `started` gives its process id, `ended` its status (negative for a signal)."""

    def __init__(self, launcher: Launcher, number: int) -> None:
        loop = asyncio.get_running_loop()
        self._launcher, self._number, self._loop = launcher, number, loop
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()

    def kill(self) -> None:
        """End it and its session; nothing happens when it has ended."""
        self._launcher.send({"kill": self._number})

    def tell(self, future: asyncio.Future[int], value: int | SandboxDied) -> None:
        """From the launcher's thread: settle a future in its own loop."""
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits
            self._loop.call_soon_threadsafe(_settle, future, value)


def _settle(future: asyncio.Future[int], value: int | SandboxDied) -> None:
    if future.done():
        return
    if isinstance(value, SandboxDied):
        future.set_exception(value)
        future.exception()  # whoever awaits it hears of it; nobody else needs to
    else:
        future.set_result(value)


class Launcher:
    """One launcher process and the thread that listens to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_SCRIPT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.control = ours
        self.alive = True
        self._lock = threading.Lock()
        self._numbers = 0
        self._open: dict[int, Launched] = {}
        self._thread = threading.Thread(target=self._listen, name="sandbox-launcher", daemon=True)
        self._thread.start()

    def start(self, order: Order, descriptors: Sequence[int]) -> Launched:
        """Send an order; the descriptors become 0, 1, 2, ... of the command."""
        body = os.memfd_create("order", os.MFD_CLOEXEC)
        try:
            with open(body, "wb", closefd=False) as file:
                file.write(order.text())
            os.lseek(body, 0, os.SEEK_SET)
            with self._lock:
                if not self.alive:
                    raise SandboxDied(_GONE)
                self._numbers += 1
                launched = Launched(self, self._numbers)
                self._open[self._numbers] = launched
            self.send({"start": launched._number}, [body, *descriptors])
        finally:
            os.close(body)
        return launched

    def send(self, what: Mapping[str, int], descriptors: Sequence[int] = ()) -> None:
        """A message; when the launcher is gone, whoever waits for it hears so from `_listen`."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.control, [json.dumps(what).encode()], list(descriptors))

    def _listen(self) -> None:
        while message := self._receive():
            said = json.loads(message)
            with self._lock:
                number = said.get("started", said.get("ended"))
                launched = self._open.pop(number, None) if "ended" in said else self._open.get(number)
            if launched is not None:
                launched.tell(
                    launched.ended if "ended" in said else launched.started, said.get("code", said.get("pid"))
                )
        with self._lock:
            self.alive = False
            lost, self._open = self._open, {}
        for launched in lost.values():
            for future in (launched.started, launched.ended):
                launched.tell(future, SandboxDied(_GONE))

    def _receive(self) -> bytes:
        try:
            return self.control.recv(4096)
        except OSError:
            return b""

    def close(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._thread.join(GONE_S)
        self.control.close()


class _Shared:
    """The launcher of this process, while someone uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._launcher: Launcher | None = None
        self._users = 0

    def enter(self) -> None:
        """One more user."""
        with self._lock:
            if self._pid != os.getpid():  # a fork has its parent's launcher and may not use it
                self._pid, self._launcher, self._users = os.getpid(), None, 0
            self._users += 1

    def leave(self) -> None:
        """One user less; with the last one the launcher goes, after a moment."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._launcher is not None:
                timer = threading.Timer(LINGER_S, self._close_if_idle, [self._launcher])
                timer.daemon = True
                timer.start()

    def get(self) -> Launcher:
        """The launcher, started when there is none."""
        with self._lock:
            if self._launcher is None or not self._launcher.alive:
                dead, self._launcher = self._launcher, Launcher()
            else:
                dead = None
            launcher = self._launcher
        if dead is not None:
            dead.close()
        return launcher

    def _close_if_idle(self, launcher: Launcher) -> None:
        with self._lock:
            if self._users or self._launcher is not launcher:
                return
            self._launcher = None
        launcher.close()


_shared = _Shared()
enter, leave = _shared.enter, _shared.leave


def launcher() -> Launcher:
    """The process that starts the commands of this one. Call it between `enter` and `leave`."""
    return _shared.get()


def launch(order: Order, descriptors: Sequence[int]) -> Launched:
    """Start a command. Call it between `enter` and `leave`, with a running event loop."""
    return launcher().start(order, descriptors)
