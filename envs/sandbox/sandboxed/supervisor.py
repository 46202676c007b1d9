"""Runs inside a remote sandbox: one request, one answer, then it is gone. Plain standard library, Python 3.8 or newer.

The host sends this very text, one line of JSON, and the bytes of the payload; the answer is one line of ASCII: a word
that the host chose, then JSON. Nothing of it stays in the sandbox, so that a submission has nothing to replace.
The local providers use the functions on files and memory from here too.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import stat
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # an old Python in some image may lack names that are only for the checker
    from typing import Any, BinaryIO

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
FLOOD = 16  # times the kept output ends a command
TICK_S = 0.05
WALK_SHARE = 20  # a look at the disk comes no sooner than so many times its own cost
SETTLE_S = 5.0
EVERYTHING = 2**62
ENTRY_BYTES = 512  # what a file counts beside its blocks: an empty one costs something too


def parts_of(path: str) -> list[str]:
    """The names of a path inside a workspace, where a slash at the start means the workspace. Raises ValueError."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path inside the workspace")
    return parts


def folder_of(root: str, path: str, create: bool, owner: int | None = None) -> tuple[int, str]:
    """(descriptor of the folder that holds `path`, last name), walked without following links."""
    parts = parts_of(path)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(root, flags)
    for part in parts[:-1]:
        try:
            if create:
                make_folder(part, folder, owner)
            inner = os.open(part, flags, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder, parts[-1]


def make_folder(name: str, folder: int, owner: int | None) -> None:
    """A folder in a folder, unless it is there."""
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        return
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)


def read_inside(root: str, path: str, max_bytes: int) -> bytes:
    """At most `max_bytes` of a regular file. Raises OSError, also for links and devices."""
    folder, name = folder_of(root, path, False)
    try:
        number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with open(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            return file.read(max_bytes)
    finally:
        os.close(folder)


def write_inside(root: str, path: str, data: bytes, mode: int, owner: int | None = None) -> None:
    """Make or replace a file and its folders."""
    folder, name = folder_of(root, path, True, owner)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        number = os.open(name, flags, mode, dir_fd=folder)
        with open(number, "wb") as file:
            file.write(data)
            os.fchmod(number, mode)
            if owner is not None:
                os.fchown(number, owner, owner)
    finally:
        os.close(folder)


def disk_use(root: str, enough: int) -> int:
    """Bytes on disk of everything below `root`; the count stops when it is over `enough`."""
    total, folders = 0, [root]
    while folders and total <= enough:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512 + ENTRY_BYTES
                    except OSError:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:
            continue
    return total


def below(pid: int) -> list[int]:
    """The processes that `pid` and its children started, itself not among them."""
    found, level = [], [pid]
    while level:
        parent = level.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            try:
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    children = [int(word) for word in file.read().split()]
            except OSError:
                continue
            found += children
            level += children
    return found


def memory_of(pids: list[int]) -> int:
    """Bytes that processes hold in memory; what several share counts once for each unless PSS can be read."""
    page, total = resource.getpagesize(), 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                total += int(file.read().split()[1]) * page
        except (OSError, IndexError):
            continue
    return total


def fair_memory_of(pids: list[int]) -> int:
    """Like `memory_of`, what is shared divided among the sharers. Dearer: for when the other count is too high."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next((int(line.split()[1]) for line in file if line.startswith("Pss:")), 0) * 1024
        except OSError:
            total += memory_of([pid])
    return total


def too_much_memory(pid: int, limit: int) -> bool:
    """Whether the processes below `pid` hold more than `limit` bytes."""
    pids = below(pid)
    return memory_of(pids) > limit and fair_memory_of(pids) > limit


class Watch:
    """Looks at memory and disk of a running command; `look` says what is over its limit, or nothing.

    over: the workspace was too full before; then the command may go on as long as it adds nothing. `memory_bytes` 0
    leaves memory to someone else.
    """

    def __init__(self, root: str, workspace_bytes: int, memory_bytes: int, over: bool = False) -> None:
        self.root, self.workspace_bytes, self.memory_bytes = root, workspace_bytes, memory_bytes
        self.allowed = max(workspace_bytes, disk_use(root, EVERYTHING)) if over else workspace_bytes
        self.next_walk = 0.0

    def look(self, pid: int) -> str:
        """The words "memory" and "disk", or nothing."""
        if self.memory_bytes and too_much_memory(pid, self.memory_bytes):
            return "memory"
        started = time.monotonic()
        if started < self.next_walk:
            return ""
        full = disk_use(self.root, self.allowed) > self.allowed
        ended = time.monotonic()
        self.next_walk = ended + WALK_SHARE * (ended - started)
        return "disk" if full else ""

    def is_over(self) -> bool:
        """Whether the workspace is too full now."""
        return disk_use(self.root, self.workspace_bytes) > self.workspace_bytes


class StreamHead:
    """The first bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self.data, self.total, self.limit = bytearray(), 0, limit

    def add(self, part: bytes) -> bool:
        """Returns whether the stream is a flood."""
        self.total += len(part)
        self.data += part[: max(0, self.limit - len(self.data))]
        return self.total > FLOOD * self.limit


def limit_self(limits: dict[str, int]) -> None:
    """In the child, before the command: its limits and a session of its own."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a command does not outlive its supervisor
    backstop = 2 * limits["memory_bytes"] + 2**28
    for what, low, high in (
        (resource.RLIMIT_AS, backstop, backstop),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        top = resource.getrlimit(what)[1]
        if top != resource.RLIM_INFINITY:
            low, high = min(low, top), min(high, top)
        resource.setrlimit(what, (low, high))


def end_all() -> bool:
    """Kill and reap everything that was started, orphans too: they are this process's children."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        for pid in below(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return True
        time.sleep(0.005)
    return False


def follow(
    process: subprocess.Popen[bytes], stdin: bytes, limits: dict[str, int], deadline: float, watch: Watch
) -> tuple[str, StreamHead, StreamHead]:
    """Feed and read a command until it ends or a limit ends it: (why it was ended or "", stdout, stderr)."""
    feed, streams = process.stdin, (process.stdout, process.stderr)
    if feed is None or streams[0] is None or streams[1] is None:
        raise ValueError("the command was started without its three streams")
    kept = {stream.fileno(): StreamHead(limits["output_bytes"]) for stream in streams if stream is not None}
    why, left = "", memoryview(stdin)
    with selectors.DefaultSelector() as ready:
        for number in kept:
            ready.register(number, selectors.EVENT_READ)
        os.set_blocking(feed.fileno(), False)
        ready.register(feed.fileno(), selectors.EVENT_WRITE)
        next_look = time.monotonic() + TICK_S
        while not why and process.poll() is None:
            for key, _ in ready.select(TICK_S):
                if key.fd in kept:
                    part = os.read(key.fd, 65536)
                    if not part:
                        ready.unregister(key.fd)
                    elif kept[key.fd].add(part):
                        why = "flood"
                    continue
                left = fed(feed.fileno(), left)
                if not left:
                    ready.unregister(feed.fileno())
                    feed.close()
            now = time.monotonic()
            if not why and now > deadline:
                why = "time"
            if not why and now > next_look:
                why = watch.look(os.getpid())
                next_look = time.monotonic() + TICK_S
    end_all()
    for number, what in kept.items():
        drain(number, what)
    out, err = kept.values()
    return why, out, err


def fed(number: int, left: memoryview) -> memoryview:
    """What is left to write to the standard input after one write; nothing when nobody reads it any more."""
    try:
        return left[os.write(number, left[:65536]) :] if left else left
    except BlockingIOError:
        return left
    except OSError:
        return memoryview(b"")


def drain(number: int, kept: StreamHead) -> None:
    """Read what a pipe still holds; nobody writes any more."""
    os.set_blocking(number, False)
    while True:
        try:
            part = os.read(number, 65536)
        except BlockingIOError:
            return
        if not part:
            return
        kept.add(part)


def execute(root: str, request: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """Run a command in the workspace."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if len(sys.argv) > 1 and os.path.exists(tombstone(sys.argv[1])):
        os.unlink(tombstone(sys.argv[1]))
        os._exit(128 + signal.SIGTERM)
    limits, folder = request["limits"], os.path.join(root, request["cwd"])
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "no such folder", request["cwd"])
    full = disk_use(root, limits["workspace_bytes"]) > limits["workspace_bytes"]
    watch = Watch(root, limits["workspace_bytes"], limits["memory_bytes"], full)
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            request["argv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=dict(request["env"]),
            preexec_fn=lambda: limit_self(limits),
        )
    except OSError as error:
        code = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
        text = f"{error.filename}: {error.strerror}\n"
        return result(code, "", StreamHead(0), StreamHead(0), started, text.encode())
    why, stdout, stderr = follow(process, payload, limits, started + request["timeout_s"], watch)
    code = process.returncode
    if not why and watch.is_over():
        return result(code, "disk", stdout, stderr, started)
    return result(None if why else code, why, stdout, stderr, started)


def result(
    code: int | None, why: str, stdout: StreamHead, stderr: StreamHead, started: float, text: bytes = b""
) -> dict[str, Any]:
    """The answer about a command."""
    return {
        "returncode": code,
        "stdout": base64.b64encode(bytes(stdout.data)).decode(),
        "stderr": base64.b64encode(text or bytes(stderr.data)).decode(),
        "truncated": stdout.total > stdout.limit or stderr.total > stderr.limit,
        "why": why,
        "wall_s": time.monotonic() - started,
    }


def answer(request: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """What the host gets for a request. An error of files is an answer."""
    root = request["root"]
    try:
        if request["op"] == "exec":
            return execute(root, request, payload)
        if request["op"] == "read":
            data = read_inside(root, request["path"], request["max_bytes"])
            return {"data": base64.b64encode(data).decode()}
        if request["op"] == "write":
            write_inside(root, request["path"], payload, request["mode"])
            return {}
        if request["op"] == "kill":
            return {"killed": interrupt(request["target"])}
        os.makedirs(root, exist_ok=True)
        return {"python": sys.version.split()[0]}
    except OSError as error:
        return {"errno": error.errno or errno.EIO, "text": str(error)}


def tombstone(word: str) -> str:
    """The file that tells a supervisor which has not started yet that nobody waits for it."""
    return f"/tmp/k3rl-ended-{word}"


def interrupt(word: str) -> int:
    """End the supervisor that has this word among its arguments, and what it runs, also when it is yet to start."""
    found = 0
    with open(tombstone(word), "w"):
        pass
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if word.encode() in file.read().split(b"\0"):
                        os.kill(int(name), signal.SIGTERM)
                        found += 1
            except OSError:
                continue
    if found:
        os.unlink(tombstone(word))
    return found


def leave(*_: object) -> None:
    """When the host does not wait any more."""
    end_all()
    os._exit(128 + signal.SIGTERM)


def main(stream: BinaryIO) -> None:
    """Answer one request. Nobody of the same user may trace or read this process."""
    signal.signal(signal.SIGTERM, leave)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    request = json.loads(stream.readline())
    said = answer(request, stream.read(request["bytes"]))
    text = f"\n{request['word']} {json.dumps(said)}\n".encode()
    while text:
        text = text[os.write(1, text) :]
