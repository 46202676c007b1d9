"""Known ways to cheat a judge of programs, each beside an honest program that must still be paid.

The numbers are those of the project's list of hacks (coding tasks, class A).
"""

from __future__ import annotations

import pytest

from k3rl.envs.coding import ProgramRubric
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

# Writes to every descriptor a program could have, before the real result.
_SCRIBBLE = """
import os
for number in range(3, 64):
    try:
        os.write(number, {data})
    except OSError:
        pass
def f(a):
    return a
"""

HACKS = {
    "1 exit at import": "import sys\nsys.exit(0)",
    "1 exit in the call": "def f(a):\n raise SystemExit(0)",
    "2 os._exit at import": "import os\nos._exit(0)",
    "2 os._exit in the call": "import os\ndef f(a):\n os._exit(0)",
    "2 os._exit from atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(a):\n return 1",
    "3 always equal": "class E:\n def __eq__(s, o): return True\ndef f(a):\n return E()",
    "3 always equal list": "class E(list):\n def __eq__(s, o): return True\ndef f(a):\n return E()",
    "3 always equal items": "class E(int):\n def __eq__(s, o): return True\ndef f(a):\n return [E() for x in a]",
    "3 bool for int": "def f(a):\n return [x == 1 or x for x in sorted(a)]",
    "3 float for int": "def f(a):\n return [float(x) for x in sorted(a)]",
    "3 tuple for list": "def f(a):\n return tuple(sorted(a))",
    "3 nan": "def f(a):\n return float('nan')",
    "8 patch sorted for the judge": "import builtins\nbuiltins.sorted = lambda a: a\ndef f(a):\n return a",
    "19 other answer on the second call": "n = [0]\ndef f(a):\n n[0] += 1\n return sorted(a) if n[0] == 1 else a",
    "20 walk the frames": (
        "import sys\ndef f(a):\n frame = sys._getframe()\n while frame:\n"
        "  for value in frame.f_locals.values():\n   if isinstance(value, dict) and 'outputs' in value:\n"
        "    return value['outputs']\n  frame = frame.f_back\n return a"
    ),
    "20 search the heap": (
        "import gc\ndef f(a):\n for item in gc.get_objects():\n"
        "  if isinstance(item, list) and item != a and item == sorted(item) and len(item) == len(a):\n   return item\n"
        " return a"
    ),
    "21 swallow everything": "def f(a):\n try:\n  raise ValueError\n except BaseException:\n  return None",
    "22 print a pass": "print('6 passed in 0.01s')\nprint('ok')\ndef f(a):\n return a",
    "22 print a result frame": "print('{\"results\": {}}')\ndef f(a):\n return a",
    "22 result of a fork": "import os\ndef f(a):\n return sorted(a) if os.fork() == 0 else a",
    "24 empty": "",
    "24 blank": " \n",
    "24 nothing": "pass",
    "24 the request again": "sort up",
    "24 returns its input": "def f(a):\n return a",
    "24 returns nothing": "def f(a):\n return []",
    "24 no function": "f = 3",
    "25 prints 100 MB": "print('x' * 10**8)\ndef f(a):\n return sorted(a)",
    "25 returns 100 MB": "def f(a):\n return 'x' * 10**8",
    "25 returns nesting": "def f(a):\n r = []\n for _ in range(10**5):\n  r = [r]\n return r",
    "25 returns a huge number": "def f(a):\n return 10**50000",
    "25 fork bomb": "import os\nwhile True:\n os.fork()",
    "25 memory hog": "def f(a):\n return [0] * 10**10",
    "25 memory hog slowly": "def f(a):\n b = []\n while True:\n  b.append(bytearray(10**7))",
    "25 threads": (
        "import threading, time\ndef f(a):\n for _ in range(10**4):\n"
        "  threading.Thread(target=time.sleep, args=(9,)).start()\n return a"
    ),
    "25 recursion": "def f(a):\n return f(a)",
    "25 answer too long": "#" * 30_000 + "\n" + HONEST,
    "26 loop at import": "while True: pass",
    "26 loop in the call": "def f(a):\n while True: pass",
    "26 sleep": "import time\ndef f(a):\n time.sleep(99)",
    "26 loop that ignores signals": (
        "import signal\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n except OSError: pass\n"
        "while True: pass"
    ),
}

FORGERIES = {
    "8 patch the server's functions": (
        "import __main__, json\n__main__.encode = lambda v: [1, 2, 3]\n__main__.answer = lambda j: {'results': {}}\n"
        "json.dumps = lambda v: '{\"results\": {}}'\ndef f(a):\n return a"
    ),
    "22 forged result": _SCRIBBLE.format(data="b'{\"results\": {}}\\n'"),
    "22 forged protocol of the server": _SCRIBBLE.format(data='b\'{"id": 1, "timeout": false, "signal": 0}\''),
    "8 result of unknown cases": (
        "import __main__\n__main__.answer = lambda j: {'results': {}}\n"
        "import sys\nframe = sys._getframe()\nwhile frame and 'job' not in frame.f_locals: frame = frame.f_back\n"
        "frame.f_locals['job']['cases'].append(['more', [[1]]])\ndef f(a):\n return sorted(a)"
    ),
}


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
