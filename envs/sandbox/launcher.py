"""A small process that starts commands for one host process and reaps all that they leave: plain standard library.

A fork of it costs the same however large the host process is, it has one thread, so that the kernel's parent-death
signal means what it says, and it is the reaper of orphans: bubblewrap's own first process is one. It ends what it
started, and itself, when the host closes the control socket, also by dying.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 4096
DESCRIPTORS = 8
STOP_S = 0.5  # for a process to take notice of SIGSTOP; longer than any system call of a sandbox's start
FAILED = 71  # the status of a command that could not be started; its standard error says why
COMPLAINT = b"k3rl could not start it: "
_HIGH = 64  # descriptors are moved up there before they are moved to their places
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0x40000000)


def start(order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """In the fork: become the command. Does not return.

    order: argv, env, cwd, groups (cgroup.procs files), uid or None, limits {RLIMIT name: [soft, hard]}; the
    descriptors become 0, 1, 2, and so on.
    """
    try:
        os.setsid()
        for path in order["groups"]:
            with open(path, "w") as file:
                file.write(str(os.getpid()))
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number in descriptors]
        for place, number in enumerate(high):
            os.dup2(number, place)
        for name, (soft, hard) in order["limits"].items():
            what = getattr(resource, name)
            top = resource.getrlimit(what)[1]
            resource.setrlimit(what, tuple(min(one, top) if top >= 0 else one for one in (soft, hard)))
        if order["uid"] is not None:
            os.setgroups([])
            os.setgid(order["uid"])
            os.setuid(order["uid"])
        os.chdir(order["cwd"])
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(order["argv"][0], order["argv"], order["env"])
    except BaseException as error:
        os.write(2, COMPLAINT + str(error).encode("utf-8", "replace"))
    finally:
        os._exit(FAILED)


class Launcher:
    """The loop: orders come in, ends go out."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.running: dict[int, int] = {}  # process id -> number of the order
        self.wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the host's affair

    def serve(self) -> None:
        """Until the host is gone."""
        watched = select.poll()
        watched.register(self.control, select.POLLIN)
        watched.register(self.wake, select.POLLIN)
        while True:
            for number, _ in watched.poll():
                if number == self.wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake, 4096)
                elif not self.obey():
                    self.end()
                    return
            self.reap()

    def obey(self) -> bool:
        """One message of the host; False when there is none any more."""
        message, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, DESCRIPTORS, _CLOEXEC)
        if not message:
            return False
        head = json.loads(message)
        if "kill" in head:
            for pid, number in self.running.items():
                if number == head["kill"]:
                    kill(pid)
            return True
        with open(descriptors[0], "rb") as file:
            order = json.loads(file.read())
        pid = os.fork()
        if pid == 0:
            start(order, descriptors[1:])
        self.running[pid] = head["start"]
        for number in descriptors[1:]:
            os.close(number)
        self.say({"started": head["start"], "pid": pid})
        return True

    def reap(self) -> None:
        """Everything that has ended; orphans end unsaid."""
        while True:
            try:
                pid, status, _ = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (number := self.running.pop(pid, None)) is not None:
                self.say({"ended": number, "code": os.waitstatus_to_exitcode(status)})

    def end(self) -> None:
        """Kill what still runs."""
        for pid in self.running:
            kill(pid)

    def say(self, what: dict[str, int]) -> None:
        with contextlib.suppress(OSError):
            self.control.send(json.dumps(what).encode())


def kill(leader: int) -> None:
    """SIGKILL to a command, to its process group, and to its children, whatever group they are in.

    The first process inside a bubblewrap's namespace leaves the group, and for a moment around that the death of its
    parent does not reach it: killing the group alone then leaves it waiting for ever, with the pipes open. The leader
    is stopped first, so that no child appears after they were listed. It has not been reaped, so the number is its own.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError, FileNotFoundError):
        os.kill(leader, signal.SIGSTOP)
        deadline = time.monotonic() + STOP_S
        while state(leader) not in "TtZX" and time.monotonic() < deadline:
            time.sleep(0.0002)
        for child in children(leader):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.kill(leader, signal.SIGKILL)
        os.killpg(leader, signal.SIGKILL)


def state(pid: int) -> str:
    """The letter of `proc(5)`; X when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def children(pid: int) -> list[int]:
    """The direct children, by one look at the threads."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Launcher(socket.socket(fileno=int(sys.argv[1]))).serve()
