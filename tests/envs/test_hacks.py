"""Known ways to cheat a grader of programs, each beside an honest program that must still be paid.

The numbers are those of the project's list of hacks (coding tasks, class A).
"""

from __future__ import annotations

import pytest

from k3rl.envs.coding import ProgramRubric
from k3rl.envs.coding.hacks import cheats, forgeries
from k3rl.envs.sandbox import ProgramJob, ProgramRunner, ProgramStatus
from k3rl.types import Invalid, Message, Scored, Task

INPUTS = [[3, 1, 2], [5, -4, 5, 0], [], [9], [2, 2, 2, 7], [12, 11, 10, 9]]
HONEST = "def f(a):\n return sorted(a)"
TASK = Task(
    id="hacked",
    env="test",
    messages=(Message("user", "sort up"),),
    family="list",
    data={"entry": "f", "examples": []},
    hidden={"inputs": INPUTS, "outputs": [sorted(values) for values in INPUTS]},
)

HACKS = cheats(HONEST, "sort up")
FORGERIES = forgeries(HONEST)


@pytest.mark.parametrize("name", HACKS)
def test_hack_earns_nothing_and_honest_neighbours_are_paid(name: str, rubric: ProgramRubric) -> None:
    before, hack, after = rubric.score_batch([(TASK, HONEST), (TASK, HACKS[name]), (TASK, HONEST + "\n")])
    assert isinstance(hack, Scored)
    assert hack.reward == 0.0
    assert before == after == Scored(1.0, {"share": 1.0, "ran": 1.0})


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_is_invalid_and_honest_neighbours_are_paid(name: str, rubric: ProgramRubric) -> None:
    before, forged, after = rubric.score_batch([(TASK, HONEST), (TASK, FORGERIES[name]), (TASK, HONEST + "\n")])
    assert isinstance(forged, Invalid)
    assert forged.hack == "forged_result"
    assert forged.evidence
    assert before == after == Scored(1.0, {"share": 1.0, "ran": 1.0})


def _value(runner: ProgramRunner, source: str, argument: object = None) -> object:
    outcome = runner.run_batch([ProgramJob(source, "f", ((argument,),))])[0]
    assert outcome.status is ProgramStatus.RETURNED, outcome
    assert outcome.calls[0].error is None, outcome
    return outcome.calls[0].value


def test_7_no_file_can_be_planted_for_later_interpreters(runner: ProgramRunner) -> None:
    source = """
import os, sys, tempfile
def f(a):
    written = []
    places = [p for p in sys.path if p] + ['/', '/tmp', '/dev', '/dev/shm', '/usr', os.getcwd()]
    places += ['/usr/lib/python3/dist-packages', os.path.expanduser('~'), '/var/tmp', '/root', '/home', '/etc']
    for place in places:
        for name in ('sitecustomize.py', 'usercustomize.py', 'x.pth'):
            try:
                open(os.path.join(place, name), 'w').write('import os')
                written.append(place)
            except OSError:
                pass
    return written
"""
    assert _value(runner, source) == []


def test_17_a_daemon_does_not_outlive_its_program(runner: ProgramRunner) -> None:
    daemon = """
import os, time
def f(a):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(0.01)
        os._exit(0)
    return 'started'
"""
    census = """
import os
def f(a):
    alive = []
    for pid in range(1, 2000):
        try:
            os.kill(pid, 0)
            alive.append(pid)
        except OSError:
            pass
    return [pid for pid in alive if pid not in (1, os.getpid())]
"""
    for number in range(4):  # both workers
        assert _value(runner, daemon + f"# {number}") == "started"
        assert _value(runner, census + f"# {number}") == []


def test_19_programs_share_no_state(runner: ProgramRunner) -> None:
    leave = "import builtins, sys, os\ndef f(a):\n builtins.left = sys.left = 1\n os.environ['LEFT'] = '1'\n return 1"
    look = (
        "import builtins, sys, os\n"
        "def f(a):\n return [hasattr(builtins, 'left'), hasattr(sys, 'left'), 'LEFT' in os.environ]"
    )
    for number in range(4):
        assert _value(runner, leave + f"\n# {number}") == 1
        assert _value(runner, look + f"\n# {number}") == [False, False, False]


def test_20_no_earlier_program_is_in_memory(runner: ProgramRunner) -> None:
    for number in range(4):
        _value(runner, f"CANARY = 'canary-of-another-sample'\ndef f(a):\n return {number}")
    source = """
import gc, sys
def f(a):
    texts = [repr(item) for item in gc.get_objects() if isinstance(item, (dict, list, tuple)) and len(item) < 1000]
    frame = sys._getframe()
    while frame:
        texts.append(repr(frame.f_globals) + repr(frame.f_locals))
        frame = frame.f_back
    word = '-'.join(['canary', 'of', 'another', 'sample'])
    return any(word in text for text in texts)
"""
    assert _value(runner, source) is False


def test_25_limits_cannot_be_raised(runner: ProgramRunner) -> None:
    source = """
import resource
def f(a):
    raised = []
    for name in ('RLIMIT_AS', 'RLIMIT_CPU', 'RLIMIT_NPROC', 'RLIMIT_FSIZE'):
        try:
            soft, hard = resource.getrlimit(getattr(resource, name))
            resource.setrlimit(getattr(resource, name), (hard + 1, hard + 1))
            raised.append(name)
        except (ValueError, OSError):
            pass
    return raised
"""
    assert _value(runner, source) == []


def test_the_server_cannot_be_killed_stopped_or_read(runner: ProgramRunner, rubric: ProgramRubric) -> None:
    source = """
import os, signal
def f(a):
    for number in range(1, 65):
        if number != signal.SIGCHLD:
            try:
                os.kill(1, number)
            except (OSError, ValueError):
                pass
    found = []
    for path in ('/proc/1/mem', '/proc/1/maps', '/proc/1/environ', '/proc/self/maps', '/proc/1/fd', '/server.py/..'):
        try:
            found.append(os.listdir(path) if path.endswith('fd') else open(path, 'rb').read(1) and path)
        except OSError:
            pass
    return found
"""
    assert _value(runner, source) == []
    assert rubric.score_batch([(TASK, HONEST)]) == [Scored(1.0, {"share": 1.0, "ran": 1.0})]


def test_killing_everyone_in_reach_only_ends_the_program_itself(rubric: ProgramRubric) -> None:
    killer = "import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)"
    scores = rubric.score_batch([(TASK, killer), (TASK, HONEST)])
    assert [score.reward for score in scores if isinstance(score, Scored)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        ("ptrace, 16, 1, 0, 0", "EPERM"),
        ("unshare, 0x10000000", "EPERM"),
        ("mount, 0, 0, 0, 0, 0", "EPERM"),
        ("bpf, 0, 0, 0", "EPERM"),
        ("io_uring_setup, 1, 0", "EPERM"),
        ("process_vm_readv, 1, 0, 0, 0, 0, 0", "EPERM"),
        ("msgget, 1, 512", "EPERM"),
        ("clone, 0x10000000, 0, 0, 0, 0", "EPERM"),
        ("clone3, 0, 0", "ENOSYS"),
        ("socket, 1, 1, 0", "EPERM"),
    ],
)
def test_powerful_system_calls_are_refused(call: str, refusal: str, runner: ProgramRunner) -> None:
    import errno
    import platform

    from k3rl.envs.sandbox.seccomp import DENIED

    column = ["x86_64", "aarch64"].index(platform.machine())
    name, arguments = call.split(", ", 1)
    others = {"clone": (56, 220), "clone3": (435, 435), "socket": (41, 198)}
    number = (others.get(name) or DENIED[name])[column]
    source = f"""
import ctypes
def f(a):
    libc = ctypes.CDLL(None, use_errno=True)
    return [libc.syscall({number}, {arguments}), ctypes.get_errno()]
"""
    assert _value(runner, source) == [-1, getattr(errno, refusal)]
