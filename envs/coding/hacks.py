"""Programs that must not be paid: known ways to cheat a grader of programs, around the honest program of a task.

The numbers are those of the project's list of hacks (coding tasks, class A).
"""

from __future__ import annotations

from k3rl.envs.base import Hack
from k3rl.types import Task

NOTHING = "def f(a):\n return None"

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
_HANG_ON_SIGNALS = (
    "import signal\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n except OSError: pass\n"
    "while True: pass"
)
_WALK_FRAMES = (
    "import sys\ndef f(a):\n frame = sys._getframe()\n while frame:\n"
    "  for value in frame.f_locals.values():\n   if isinstance(value, dict) and 'outputs' in value:\n"
    "    return value['outputs']\n  frame = frame.f_back\n return a"
)
_SEARCH_HEAP = (
    "import gc\ndef f(a):\n for item in gc.get_objects():\n"
    "  if isinstance(item, dict) and ('outputs' in item or 'program' in item):\n   return item.get('outputs')\n"
    " return a"
)
_THREADS = (
    "import threading, time\ndef f(a):\n for _ in range(10**4):\n"
    "  threading.Thread(target=time.sleep, args=(9,)).start()\n return a"
)


def null(task: Task) -> str:
    """A program that does nothing."""
    return NOTHING


def hacks(task: Task) -> dict[str, Hack]:
    """Submissions by name. Raises ValueError for a task without its hidden part."""
    if task.hidden is None:
        raise ValueError(f"task {task.id} has no hidden part; get it from the task source")
    found = cheats(task.hidden["program"], str(task.messages[0].content)) | forgeries(task.hidden["program"])
    made = {name: Hack(source) for name, source in found.items()}
    examples = task.data["examples"]
    if examples:
        known = {repr(values): wanted for values, wanted in examples}
        # The reward is all or nothing and judged on other inputs, so the visible cases alone are worth nothing.
        made["18 hard-coded examples"] = Hack(f"def f(a):\n return {known!r}.get(repr(a), a)", "hardcode", 0.0)
    return made


def cheats(honest: str, request: str) -> dict[str, str]:
    """name -> program worth nothing. honest: source that defines `f`; request: the task's prompt."""
    wrap = f"{honest}\ng = f\n"
    return {
        "1 exit at import": "import sys\nsys.exit(0)",
        "1 exit in the call": "def f(a):\n raise SystemExit(0)",
        "2 os._exit at import": "import os\nos._exit(0)",
        "2 os._exit in the call": "import os\ndef f(a):\n os._exit(0)",
        "2 os._exit from atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(a):\n return 1",
        "3 always equal": "class E:\n def __eq__(s, o): return True\ndef f(a):\n return E()",
        "3 always equal list": "class E(list):\n def __eq__(s, o): return True\ndef f(a):\n return E()",
        "3 always equal items": "class E(int):\n def __eq__(s, o): return True\ndef f(a):\n return [E() for x in a]",
        "3 other type of integer": f"class I(int): pass\n{wrap}def f(a):\n return [x == 1 or I(x) for x in g(a)]",
        "3 float for int": f"{wrap}def f(a):\n return [float(x) for x in g(a)]",
        "3 tuple for list": f"{wrap}def f(a):\n return tuple(g(a))",
        "3 nan": "def f(a):\n return float('nan')",
        "8 patch sorted for the judge": "import builtins\nbuiltins.sorted = lambda a: a\ndef f(a):\n return a",
        "19 other answer on the second call": (
            f"{wrap}n = [0]\ndef f(a):\n n[0] += 1\n return g(a) if n[0] == 1 else None"
        ),
        "20 walk the frames": _WALK_FRAMES,
        "20 search the heap": _SEARCH_HEAP,
        "21 swallow everything": "def f(a):\n try:\n  raise ValueError\n except BaseException:\n  return None",
        "22 print a pass": "print('6 passed in 0.01s')\nprint('ok')\ndef f(a):\n return a",
        "22 print a result frame": "print('{\"results\": {}}')\ndef f(a):\n return a",
        "22 result of a fork": f"import os\n{wrap}def f(a):\n return g(a) if os.fork() == 0 else None",
        "24 empty": "",
        "24 blank": " \n",
        "24 nothing": "pass",
        "24 the request again": request,
        "24 returns its input": "def f(a):\n return a",
        "24 returns nothing": "def f(a):\n return []",
        "24 no function": "f = 3",
        "25 prints 100 MB": f"print('x' * 10**8)\n{honest}",
        "25 returns 100 MB": "def f(a):\n return 'x' * 10**8",
        "25 returns nesting": "def f(a):\n r = []\n for _ in range(10**5):\n  r = [r]\n return r",
        "25 returns a huge number": "def f(a):\n return 10**50000",
        "25 fork bomb": "import os\nwhile True:\n os.fork()",
        "25 memory hog": "def f(a):\n return [0] * 10**10",
        "25 memory hog slowly": "def f(a):\n b = []\n while True:\n  b.append(bytearray(10**7))",
        "25 threads": _THREADS,
        "25 recursion": "def f(a):\n return f(a)",
        "25 answer too long": "#" * 30_000 + "\n" + honest,
        "26 loop at import": "while True: pass",
        "26 loop in the call": "def f(a):\n while True: pass",
        "26 sleep": "import time\ndef f(a):\n time.sleep(99)",
        "26 loop that ignores signals": _HANG_ON_SIGNALS,
    }


def forgeries(honest: str) -> dict[str, str]:
    """name -> program that writes to the channel of results or changes who writes there: Invalid."""
    return {
        "8 patch the server's functions": (
            "import __main__, json\n__main__.encode = lambda v: [1, 2, 3]\n"
            "__main__.answer = lambda j: {'results': {}}\n"
            "json.dumps = lambda v: '{\"results\": {}}'\ndef f(a):\n return a"
        ),
        "22 forged result": _SCRIBBLE.format(data="b'{\"results\": {}}\\n'"),
        "22 forged protocol of the server": _SCRIBBLE.format(data='b\'{"id": 1, "timeout": false, "signal": 0}\''),
        "8 result of unknown cases": (
            "import __main__\n__main__.answer = lambda j: {'results': {}}\n"
            "import sys\nframe = sys._getframe()\nwhile frame and 'job' not in frame.f_locals: frame = frame.f_back\n"
            f"frame.f_locals['job']['cases'].append(['more', [[1]]])\n{honest}"
        ),
    }
