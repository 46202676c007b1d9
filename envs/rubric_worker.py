"""The process in which reward functions run: it loads them once, forks for each call, and ends what hangs.

It has one thread. A call runs in a session of its own, with a temporary folder that is removed after it; what it
started is killed when it ends, however far it ran away, because orphans come to this process (subreaper).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from k3rl.envs.rubric_values import decode, encode

PRINTED_BYTES = 2**20  # what one call may print before it counts as a flood
RESULT_BYTES = 2**20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def send(control: socket.socket, value: Any) -> None:
    """One JSON value, behind its length."""
    data = json.dumps(value).encode()
    control.sendall(struct.pack("!Q", len(data)) + data)


def receive(control: socket.socket) -> Any:
    """The next value; None when the other side is gone. TimeoutError as the socket says."""
    head = _exactly(control, 8)
    body = None if head is None else _exactly(control, struct.unpack("!Q", head)[0])
    return None if body is None else json.loads(body)


def _exactly(control: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = control.recv(min(size - len(data), 2**20))
        if not part:
            return None
        data += part
    return bytes(data)


def load(place: Mapping[str, str]) -> Callable[..., Any]:
    """The function at {module, file, name}; the module is imported by its name if that leads to the same file."""
    found: Any = _module(place["module"], place["file"])
    for part in place["name"].split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _module(name: str, file: str) -> ModuleType:
    known = sys.modules.get(name)
    if known is not None and os.path.realpath(getattr(known, "__file__", None) or "") == file:
        return known
    if known is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == file:
            return importlib.import_module(name)
    else:
        name = f"k3rl_reward_{name}"  # a script, which is `__main__` where it was started
        if name in sys.modules:
            return sys.modules[name]
    folders = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(number: int) -> None:
    """Serve until the other side closes the socket."""
    control = socket.socket(fileno=number)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        functions = [load(place) for place in receive(control)]
    except Exception as error:
        send(control, {"error": f"{type(error).__name__}: {error}"[:500]})
        return
    send(control, {"ready": len(functions)})
    while (job := receive(control)) is not None:
        folder = tempfile.mkdtemp(prefix="k3rl-reward-")
        os.chmod(folder, 0o755)  # sandboxes made in it run as other users
        try:
            report = _call(control, libc, functions[job["function"]], job, folder)
        finally:
            _end_descendants()
            shutil.rmtree(folder, ignore_errors=True)
        send(control, report)


def _call(
    control: socket.socket, libc: Any, function: Callable[..., Any], job: Mapping[str, Any], folder: str
) -> dict[str, Any]:
    """Run one call in a fork and say how it went: {"value"} or {"error"}, each with "status"."""
    result_read, result_write = os.pipe()
    output_read, output_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _child(function, job, folder, result_write, output_write)
        finally:
            os._exit(70)
    os.close(result_write)
    os.close(output_write)
    try:
        status, result = _watch(pid, control, result_read, output_read, job["timeout_s"])
    finally:
        os.close(result_read)
        os.close(output_read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, code = os.waitpid(pid, 0)
    if status != "ended":
        return {"status": status}
    try:
        report: dict[str, Any] = json.loads(result)
    except ValueError:
        how = (
            f"signal {os.WTERMSIG(code)}" if os.WIFSIGNALED(code) else f"exit status {os.waitstatus_to_exitcode(code)}"
        )
        return {"status": "died", "error": how}
    return report


def _child(function: Callable[..., Any], job: Mapping[str, Any], folder: str, result: int, output: int) -> NoReturn:
    """In the fork. Does not return."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if job["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (job["memory_bytes"],) * 2)
    own = os.getpid()
    try:
        value = _value(function, job)
        report = {"status": "value", "value": encode(value)}
    except BaseException as error:
        report = {"status": "raised", "error": f"{type(error).__name__}: {error}"[:500]}
    if os.getpid() == own:  # a fork of the function that got here has no say
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        data = json.dumps(report).encode()
        while data:
            data = data[os.write(result, data) :]
    os._exit(0)


def _value(function: Callable[..., Any], job: Mapping[str, Any]) -> Any:
    arguments = decode(job["arguments"])
    if not job["sandbox"]:
        return _settled(function(**arguments))
    from k3rl.envs.rubric_sandbox import GraderSandbox

    with GraderSandbox(job["sandbox"], arguments.pop("sandbox_files")) as sandbox:
        return _settled(function(**arguments, sandbox=sandbox))


def _settled(value: Any) -> Any:
    async def waited() -> Any:
        return await value

    return asyncio.run(waited()) if inspect.isawaitable(value) else value


def _watch(pid: int, control: socket.socket, result: int, output: int, timeout_s: float) -> tuple[str, bytes]:
    """("ended", result) of a call, or "timeout" or "flood". Ends this process when the other side is gone."""
    deadline = time.monotonic() + timeout_s
    watched = select.poll()
    pidfd = os.pidfd_open(pid)
    for number in (pidfd, result, output):
        watched.register(number, select.POLLIN)
    watched.register(control, select.POLLHUP | select.POLLRDHUP)
    kept = {result: bytearray(), output: bytearray()}
    limits = {result: RESULT_BYTES, output: PRINTED_BYTES}
    try:
        while (left := deadline - time.monotonic()) > 0:
            for number, _ in watched.poll(left * 1000):
                if number == control.fileno():
                    os.kill(pid, signal.SIGKILL)
                    _end_descendants()
                    os._exit(0)
                if number == pidfd:
                    _drain(result, kept[result])
                    return "ended", bytes(kept[result])
                part = os.read(number, 65536)
                kept[number] += part
                if not part:
                    watched.unregister(number)
                if len(kept[number]) > limits[number]:
                    return "flood", b""
        return "timeout", b""
    finally:
        os.close(pidfd)


def _drain(number: int, kept: bytearray) -> None:
    """What is still in a pipe; others may hold its other end open."""
    os.set_blocking(number, False)
    with contextlib.suppress(BlockingIOError):
        while len(kept) <= RESULT_BYTES and (part := os.read(number, 65536)):
            kept += part


def _end_descendants() -> None:
    """Kill and reap children until there is none; grandchildren become children when their parents are gone."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> Sequence[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):  # a module that was loaded may have started threads
        with open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found
