"""Runs inside a sandbox: forks once per program. Plain standard library, started with `python -I -S`.

The host sends a header (limits) and three descriptors over the control socket: the job, a pipe for the result,
a pipe for what the program prints. The server hands them to a fork and never reads them, so nothing of one
program is in memory when the next one runs. It is PID 1 of its namespace: when the fork has ended or its time
is over, it kills everything that is left and answers how the fork ended. Expected answers never come here.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would make every fork dearer
    from typing import Any, NoReturn

HEADER_BYTES = 4096
DESCRIPTORS = 3
PR_SET_DUMPABLE = 4
_PLAIN = (type(None), bool, int, float, str)


def encode(value: Any) -> Any:
    """A value as JSON that keeps its exact types; raises TypeError for any type that is not listed here."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple:
        return {"tuple": [encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError(f"a result may not hold a {kind.__name__}")


def decode(value: Any) -> Any:
    """The inverse of `encode`. Raises ValueError for JSON that `encode` never makes."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [decode(item) for item in value]
    if list(value) == ["tuple"]:
        return tuple(decode(item) for item in value["tuple"])
    if list(value) == ["dict"]:
        return {decode(key): decode(item) for key, item in value["dict"]}
    raise ValueError("not an encoded value")


def describe(error: BaseException) -> str:
    """Type and message of an exception, short."""
    return f"{type(error).__name__}: {error}"[:200]


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What the program gives for each case: {case id: ["value", v] or ["error", text]}, or {"error": text}."""
    scope: dict[str, Any] = {"__name__": "submission"}
    try:
        exec(compile(job["source"], "submission", "exec", dont_inherit=True), scope)
        function = scope[job["entry"]]
    except BaseException as error:
        return {"error": describe(error)}
    results: dict[str, Any] = {}
    for case, arguments in job["cases"]:
        try:
            results[case] = ["value", encode(function(*decode(arguments)))]
        except BaseException as error:
            results[case] = ["error", describe(error)]
    return {"results": results}


def run_job(header: dict[str, Any], job_fd: int, result_fd: int, output_fd: int) -> NoReturn:
    """In the fork: limits, then the program, then its result. Does not return."""
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    for limit, value in (
        (resource.RLIMIT_AS, header["memory_bytes"]),
        (resource.RLIMIT_CPU, header["cpu_s"]),
        (resource.RLIMIT_NPROC, header["processes"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    with open(job_fd, "rb") as file:
        job = json.loads(file.read())
    nonce = job.pop("nonce")
    own = os.getpid()
    result = answer(job)
    if os.getpid() != own:  # a fork of the program got here; it has no say
        os._exit(0)
    try:
        text = json.dumps(result)
    except BaseException as error:
        text = json.dumps({"error": describe(error)})
    frame = f"{nonce}{text}\n".encode("utf-8", "backslashreplace")
    while frame:
        frame = frame[os.write(result_fd, frame) :]
    os._exit(0)


def end_all() -> None:
    """Kill and reap every other process of the namespace (only children when the server is not PID 1)."""
    while True:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def wait(pid: int, control: socket.socket, wall_s: float) -> str:
    """Wait for the fork: "exited", or "timeout" when its time is over. Ends the server when the host is gone."""
    watched = select.poll()
    pidfd = os.pidfd_open(pid)
    watched.register(pidfd, select.POLLIN)
    watched.register(control, select.POLLHUP)
    deadline = time.monotonic() + wall_s
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            for descriptor, _ in watched.poll(left * 1000):
                if descriptor == pidfd:
                    return "exited"
                end_group(pid)
                os._exit(0)
    finally:
        os.close(pidfd)


def end_group(pid: int) -> None:
    """Kill the fork and what shares its process group; `end_all` does the rest where there is a namespace."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def serve(control: socket.socket) -> None:
    """Answer jobs until the host closes the control socket."""
    control.send(json.dumps({"ready": sys.version.split()[0]}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, HEADER_BYTES, DESCRIPTORS)
        if not message:
            return
        header = json.loads(message)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                control.close()
                run_job(header, *descriptors)
            finally:
                os._exit(70)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the fork does the same; whoever is first
            os.setpgid(pid, pid)
        how = wait(pid, control, header["wall_s"])
        end_group(pid)
        _, status, usage = os.wait4(pid, 0)
        end_all()
        report = {
            "id": header["id"],
            "timeout": how == "timeout",
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "wall_s": time.monotonic() - started,
        }
        control.send(json.dumps(report).encode())


def protect() -> None:
    """Nobody in the sandbox may signal, trace or read the server."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE}:
        signal.signal(number, signal.SIG_DFL)  # which PID 1 ignores when it comes from inside


def warm_up() -> None:
    """What a first `compile` and a first encoding set up is done once here, not in every fork."""
    job = {"source": "def f(a):\n return [x for x in a]", "entry": "f", "cases": [["0", [[1]]]]}
    json.loads(json.dumps(answer(job)))
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    protect()
    warm_up()
    serve(socket.socket(fileno=int(sys.argv[1])))
