"""Runs many tiny programs, about a millisecond each, in one sandbox per worker.

A `ProgramJob` is source, the name of a function in it, and argument lists; a `ProgramOutcome` is what the function
returned for each, or how the program failed. Programs share nothing: each is a fork of a server that holds no
job (`sandboxed/program_server.py`), nothing is writable, and everything it started is killed before the next one.
Equal jobs of one call run once. What is expected of a program stays on this side.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from k3rl.envs.sandbox.base import MEBIBYTE, ProgramServerProcess, SandboxDied, SandboxProvider, SandboxUnavailable
from k3rl.envs.sandbox.sandboxed.program_server import decode, encode

_RANDOM = secrets.SystemRandom()


class ProgramStatus(StrEnum):
    """How a program ended. Only `SANDBOX_DIED` is not its own doing."""

    RETURNED = "returned"  # every call gave a value or an exception
    ERROR = "error"  # the source does not compile, raises at import, or lacks the function
    TIMEOUT = "timeout"  # wall or CPU time
    CRASHED = "crashed"  # ended without a result: os._exit, a signal, out of memory
    OUTPUT_LIMIT = "output_limit"  # printed or returned too much
    FORGED = "forged"  # wrote to the result channel itself
    SANDBOX_DIED = "sandbox_died"  # also after one retry in a fresh sandbox


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Per program. Sizes in bytes, times in seconds; `cpu_s` is whole seconds."""

    wall_s: float = 3.0
    cpu_s: int = 1
    memory_bytes: int = 256 * MEBIBYTE
    processes: int = 8
    output_bytes: int = 64 * 1024
    result_bytes: int = 1 * MEBIBYTE

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"program limit {name} is {getattr(self, name)}; it must be positive")


@dataclass(frozen=True, slots=True)
class ProgramJob:
    """Call `entry` of `source` once per element of `calls`, each a tuple of arguments."""

    source: str
    entry: str
    calls: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """What one call gave: a value, or `error` (type and message of what it raised)."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """`calls` is as long as the job's when status is RETURNED, else empty. Times in seconds."""

    status: ProgramStatus
    calls: tuple[Call, ...] = ()
    detail: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0


def same_value(one: Any, other: Any) -> bool:
    """Equality in which types count: True is not 1, 1.0 is not 1, a tuple is not a list, NaN is nothing."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same_value(key, other_key) and same_value(value, other_value)
            for (key, value), (other_key, other_value) in zip(
                sorted(one.items(), key=repr), sorted(other.items(), key=repr), strict=True
            )
        )
    return bool(one == other)


class ProgramRunner:
    """Runs jobs on `workers` sandboxes that start when first needed. Thread-safe; `close` always.

    Raises SandboxUnavailable from `run_batch` when no sandbox can be made. A sandbox that dies is replaced and
    the job tried once more; a second death is the outcome SANDBOX_DIED, which is never the program's reward.
    """

    def __init__(self, provider: SandboxProvider, *, workers: int = 1, limits: ProgramLimits | None = None) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; a program runner needs at least 1")
        self.limits = limits or ProgramLimits()
        self._provider = provider
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="programs")
        self._local = threading.local()
        self._servers: set[_Server] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run_batch(self, jobs: Sequence[ProgramJob]) -> list[ProgramOutcome]:
        """One outcome per job, in the order of the jobs."""
        return [future.result() for future in self._submit(jobs)]

    async def run(self, jobs: Sequence[ProgramJob]) -> list[ProgramOutcome]:
        """`run_batch` for an event loop."""
        return list(await asyncio.gather(*map(asyncio.wrap_future, self._submit(jobs))))

    def close(self) -> None:
        """End all sandboxes. Idempotent."""
        with self._lock:
            self._closed = True
            servers, self._servers = self._servers, set()
        for server in servers:
            server.kill()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> ProgramRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, jobs: Sequence[ProgramJob]) -> list[Future[ProgramOutcome]]:
        if self._closed:
            raise RuntimeError("this program runner is closed")
        pending: dict[str, Future[ProgramOutcome]] = {}
        futures = []
        for job in jobs:
            body = _body(job)
            if body not in pending:
                pending[body] = self._threads.submit(self._run, job, body)
            futures.append(pending[body])
        return futures

    def _run(self, job: ProgramJob, body: str) -> ProgramOutcome:
        """In a worker thread, which owns one server and lives as long as the runner."""
        deaths: list[str] = []
        while len(deaths) < 2:
            try:
                server = self._server()
                return server.run(job, body)
            except SandboxDied as error:
                deaths.append(str(error))
                self._drop()
        return ProgramOutcome(ProgramStatus.SANDBOX_DIED, detail=" / ".join(deaths))

    def _server(self) -> _Server:
        server: _Server | None = getattr(self._local, "server", None)
        if server is None:
            server = _Server(self._provider.start_program_server(), self.limits)
            with self._lock:
                closed = self._closed
                self._servers.add(server)
            if closed:
                server.kill()
                raise RuntimeError("this program runner was closed while a job ran")
            self._local.server = server
        return server

    def _drop(self) -> None:
        server: _Server | None = getattr(self._local, "server", None)
        self._local.server = None
        if server is not None:
            server.kill()
            with self._lock:
                self._servers.discard(server)


def _body(job: ProgramJob) -> str:
    """The job as text; equal jobs have equal text."""
    return json.dumps([job.source, job.entry, [encode(list(arguments)) for arguments in job.calls]])


class _Server:
    """This side of one program server; used by one thread."""

    START_S = 20.0  # for the first message; a loaded machine takes long to start an interpreter
    GRACE_S = 10.0  # past a program's own limit before the server counts as dead

    def __init__(self, server: ProgramServerProcess, limits: ProgramLimits) -> None:
        self._server = server
        self._limits = limits
        self._jobs = 0
        if not self._receive(time.monotonic() + self.START_S):
            complaint = self._server.complaint()
            self.kill()
            raise SandboxUnavailable(self._server.explain(complaint))

    def run(self, job: ProgramJob, body: str) -> ProgramOutcome:
        """Run one job. Raises SandboxDied."""
        source, entry, calls = json.loads(body)
        nonce = secrets.token_hex(16)
        ids = [secrets.token_hex(8) for _ in calls]
        with contextlib.ExitStack() as stack:
            result, output = _Pipe(stack, self._limits.result_bytes), _Pipe(stack, self._limits.output_bytes)
            cases = list(zip(ids, calls, strict=True))
            _RANDOM.shuffle(cases)
            text = {"nonce": nonce, "source": source, "entry": entry, "cases": cases}
            report = self._ask(json.dumps(text).encode(), result, output)
        if output.over or result.over:
            return _outcome(
                report, ProgramStatus.OUTPUT_LIMIT, "printed too much" if output.over else "returned too much"
            )
        return _judge(report, bytes(result.data), nonce, ids)

    def kill(self) -> None:
        """End the sandbox. Idempotent."""
        self._server.kill()

    def _ask(self, body: bytes, result: _Pipe, output: _Pipe) -> dict[str, Any]:
        """Send the job, collect what comes through the pipes until the server reports that the program ended."""
        self._jobs += 1
        limits = self._limits
        header = {
            "id": self._jobs,
            "wall_s": limits.wall_s,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "processes": limits.processes,
        }
        job = os.memfd_create("job", os.MFD_CLOEXEC)
        try:
            with open(job, "wb", closefd=False) as file:
                file.write(body)
            os.lseek(job, 0, os.SEEK_SET)
            socket.send_fds(self._server.control, [json.dumps(header).encode()], [job, result.write, output.write])
        except OSError as error:
            raise SandboxDied(f"the program server is gone: {error}; {self._server.complaint()}") from error
        finally:
            os.close(job)
            result.close_write()
            output.close_write()
        deadline = time.monotonic() + limits.wall_s + self.GRACE_S
        report = self._receive(deadline, (result, output))
        if not report or report.get("id") != self._jobs:
            self.kill()
            raise SandboxDied(f"the program server gave no report; {self._server.complaint()}")
        result.drain()
        output.drain()
        return report

    def _receive(self, deadline: float, pipes: Sequence[_Pipe] = ()) -> dict[str, Any]:
        """The next message of the server, {} when it is gone or the deadline passes; reads pipes meanwhile."""
        watched = select.poll()
        control = self._server.control.fileno()
        watched.register(control, select.POLLIN)
        by_number = {pipe.read: pipe for pipe in pipes}
        for number in by_number:
            watched.register(number, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            for number, _ in watched.poll(left * 1000):
                if number == control:
                    message = self._server.receive()
                    parsed: dict[str, Any] = json.loads(message) if message else {}
                    return parsed
                if not by_number[number].fill():
                    watched.unregister(number)
        return {}


class _Pipe:
    """A pipe whose reading end is read up to a limit and then closed, so that a flood stops."""

    def __init__(self, stack: contextlib.ExitStack, limit: int) -> None:
        self.read, self.write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read, False)
        self.data = bytearray()
        self.over = False
        self._limit = limit
        self._open = {self.read, self.write}
        stack.callback(self.close)

    def fill(self) -> bool:
        """Read what is there; False when nothing more will be read."""
        try:
            part = os.read(self.read, 65536)
        except BlockingIOError:
            return True
        self.data += part
        if len(self.data) > self._limit:
            self.over = True
        if part and not self.over:
            return True
        self._close(self.read)
        return False

    def drain(self) -> None:
        """Read what is left after the writers have ended."""
        watched = select.poll()
        watched.register(self.read, select.POLLIN)
        while self.read in self._open and watched.poll(0) and self.fill():
            continue

    def close_write(self) -> None:
        self._close(self.write)

    def close(self) -> None:
        for number in list(self._open):
            self._close(number)

    def _close(self, number: int) -> None:
        if number in self._open:
            self._open.remove(number)
            os.close(number)


def _outcome(
    report: dict[str, Any], status: ProgramStatus, detail: str = "", calls: tuple[Call, ...] = ()
) -> ProgramOutcome:
    return ProgramOutcome(status, calls, detail, report["cpu_s"], report["wall_s"])


def _judge(report: dict[str, Any], data: bytes, nonce: str, ids: Sequence[str]) -> ProgramOutcome:
    """What a result frame `nonce JSON newline` says. Nothing in it is trusted but the values themselves."""
    if report["timeout"]:
        return _outcome(report, ProgramStatus.TIMEOUT, "wall time")
    head = nonce.encode()
    if data[: len(head)] != head[: len(data)]:
        return _outcome(report, ProgramStatus.FORGED, f"result channel holds {data[:80]!r}")
    if not data.endswith(b"\n"):
        if report["signal"] in (9, 24):  # SIGKILL or SIGXCPU at the CPU limit
            return _outcome(report, ProgramStatus.TIMEOUT, "CPU time")
        return _outcome(report, ProgramStatus.CRASHED, f"no result; signal {report['signal']}")
    try:
        frame = json.loads(data[len(head) :])
        if "error" in frame:
            return _outcome(report, ProgramStatus.ERROR, str(frame["error"])[:200])
        results = frame["results"]
        calls = tuple(_call(*results.pop(case)) for case in ids)
        if results:
            raise ValueError("results of unknown cases")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return _outcome(report, ProgramStatus.FORGED, f"result frame: {type(error).__name__}: {error}"[:200])
    return _outcome(report, ProgramStatus.RETURNED, calls=calls)


def _call(kind: str, content: Any) -> Call:
    if kind == "error":
        return Call(error=str(content)[:200])
    if kind != "value":
        raise ValueError(f"a result is {str(kind)[:20]!r}")
    return Call(value=decode(content))
