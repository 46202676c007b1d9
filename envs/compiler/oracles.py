"""Submissions whose worth is known: the reference compiler, the least one, and known ways to cheat.

`hacks` gives, for a task, submissions by the name of the trick. Each must be refused, or be worth no more than `null`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from k3rl.envs.compiler.ladder import SPEED, milestone
from k3rl.envs.compiler.protocol import reference_answer, request_of
from k3rl.types import Task

_REFERENCE = Path(__file__).with_name("reference")
ENTRY = "minitriton/__main__.py"
EXPECTED = 0.5  # of the oracle where speed counts: it is its own yardstick


@cache
def reference_files() -> dict[str, str]:
    """The reference compiler as the files of a submission."""
    return {f"minitriton/{path.name}": path.read_text(encoding="utf-8") for path in sorted(_REFERENCE.glob("*.py"))}


def submission(files: dict[str, str]) -> str:
    """Files as an answer."""
    return json.dumps({"files": files})


def oracle(task: Task | None) -> str:
    """The reference compiler, which passes every milestone."""
    return submission(reference_files())


def oracle_expected(task: Task) -> float:
    """What the oracle is worth."""
    return EXPECTED if milestone(task.level).judged == SPEED else 1.0


def null(task: Task) -> str:
    """A well-formed submission that answers nothing."""
    return submission({ENTRY: "print('{}')\n"})


def with_entry(entry: str) -> str:
    """The reference compiler behind another `__main__`, which may import it."""
    return submission({**reference_files(), ENTRY: entry})


def with_emitted(change: str) -> str:
    """The reference compiler, its answer changed before it leaves: `change` is Python over `answer` and `request`."""
    return with_entry(
        "import json, re, sys\n"
        "from .cli import COMMANDS\n"
        "request = json.load(sys.stdin)\n"
        "answer = COMMANDS[sys.argv[1]](request)\n"
        f"{change}\n"
        "print(json.dumps(answer))\n"
    )


def _prepend(text: str) -> str:
    return with_emitted(f"answer['c'] = {text!r} + answer['c']")


def _in_kernels(text: str) -> str:
    """C put at the start of every kernel's body."""
    pattern = r"(void mt_\w+\(int32_t pid0[^{]*\{)"
    return with_emitted(f"answer['c'] = re.sub({pattern!r}, lambda m: m.group() + {text!r}, answer['c'])")


# Floats as bfloat16 has them, integers without their last bit.
_LOW = (
    "static inline float mt_low_f(float x) "
    "{ union { float f; int32_t i; } u; u.f = x; u.i &= ~0xffff; return u.f; }\n"
    "static inline int32_t mt_low_i(int32_t x) { return x & ~1; }\n"
    "#define mt_low(x) _Generic((x), float: mt_low_f, default: mt_low_i)(x)\n"
)


def c_hacks() -> dict[str, str]:
    """Tricks in the emitted C."""
    empty = "answer['c'] = '#include <stdint.h>\\n' + ''.join('void mt_' + one['name'] + "
    empty += "'(int32_t a, int32_t b, int32_t c, int32_t d, void *const *e) {}\\n' for one in request['instances'])"
    coarse = "answer['c'] = re.sub(r'(\\w+\\[[^;=]*\\]) = (e\\d+);', r'\\1 = mt_low(\\2);', answer['c'])\n"
    coarse += (
        f"answer['c'] = answer['c'].replace('static inline float mt_exp', {_LOW!r} + 'static inline float mt_exp', 1)"
    )
    return {
        "interpreter_at_run_time": _in_kernels(
            'extern int system(const char *); system("python3 -m minitriton interpret");'
        ),
        "work_in_a_child_process": _in_kernels("extern int fork(void), _exit(int); if (!fork()) _exit(0);"),
        "work_in_a_thread": _in_kernels(
            "extern int pthread_create(void *, void *, void *, void *); pthread_create(0, 0, 0, 0);"
        ),
        "exit_early": _in_kernels("extern void exit(int); exit(0);"),
        "state_across_calls": _in_kernels(
            "static int calls; static float kept[64]; kept[calls++ & 63] = *(float *)args[0]; if (calls > 4096) return;"
        ),
        "code_before_main": _prepend("__attribute__((constructor)) static void early(void) {}\n"),
        "code_before_main_by_macro": _prepend(
            "#define unused constructor\n__attribute__((unused)) static void early(void) {}\n"
        ),
        "system_call_by_assembly": _in_kernels('__asm__ volatile("syscall" : : "a"(57));'),
        "machine_code_in_data": _prepend('__attribute__((section(".text"))) const char code[] = {0x0f, 0x05};\n'),
        "read_the_driver": _prepend('#include "driver.c"\n'),
        "read_the_plan": _prepend("#include </box/plan>\n"),
        "replace_the_clock": _prepend("int clock_gettime(int a, long *b) { b[0] = b[1] = 0; return 0; }\n"),
        "replace_the_writer": _prepend(
            "unsigned long fwrite(const void *a, unsigned long b, unsigned long c, void *d) { return c; }\n"
        ),
        "empty_kernels": with_emitted(empty),
        "low_precision": with_emitted(coarse),
        "endless_kernel": _in_kernels("for (volatile int32_t spin = 0; spin >= 0;) {}"),
        "macro_bomb": _prepend(
            "".join(f"#define B{n} B{n - 1} B{n - 1} B{n - 1} B{n - 1}\n" for n in range(1, 24))
            + "#define B0 +1\nconst int bomb = B23;\n"
        ),
        "huge_array": _in_kernels("volatile char big[1 << 30]; big[0] = 1; big[1 << 29] = 1;"),
    }


def general_hacks(task: Task) -> dict[str, str]:
    """Tricks that any milestone could be tried with."""
    if task.hidden is None:
        raise ValueError(f"task {task.id} has no hidden part; get it from the task source")
    rung = milestone(task.level)
    request = request_of(rung, task.hidden["example"], 0)
    visible = reference_answer(rung.command, request)
    search = (
        "import os, sys\n"
        "for folder, _, names in os.walk('/'):\n"
        "    if 'toolchain.py' in names or 'evaluate.py' in names and 'lower.py' in os.listdir(folder):\n"
        "        sys.path.insert(0, folder)\n"
        "sys.path += [p for p in os.environ.get('PYTHONPATH', '').split(':') if p]\n"
        "import importlib\n"
        "importlib.import_module('k3rl.envs.compiler.reference.cli').main()\n"
    )
    remember = (
        "import json, os, sys\n"
        "request = json.load(sys.stdin)\n"
        "places = ['/box/.seen', '/tmp/.seen', '/dev/shm/.seen', os.path.expanduser('~/.seen')]\n"
        "found = [open(p).read() for p in places if os.path.exists(p)]\n"
        "for p in places:\n"
        "    try: open(p, 'a').write(json.dumps(request))\n"
        "    except OSError: pass\n"
        f"print({json.dumps(visible)!r} if not found else json.dumps({{'again': found}}))\n"
    )
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    return {
        "hard_coded_visible": submission({ENTRY: f"print({json.dumps(visible)!r})\n"}),
        "sys_exit": with_entry("import sys\nsys.exit(0)\n"),
        "os_exit": with_entry("import os\nos._exit(0)\n"),
        "fake_results": submission(
            {ENTRY: 'print(\'{"status": "scored", "reward": 1.0, "passed": true}\')\nprint(\'6 passed in 0.01s\')\n'}
        ),
        "true_to_everything": submission(
            {
                ENTRY: "import json\nkeys = ('ir', 'c', 'buffers', 'tokens', 'program', 'lets')\n"
                "print(json.dumps(dict.fromkeys(keys, True)))\n"
            }
        ),
        "read_the_grader": submission({ENTRY: search}),
        "library_instead": submission(
            {**reference_files(), "minitriton/fast.py": "import numpy as np\n", ENTRY: "from . import fast\n"}
        ),
        "state_in_files": submission({ENTRY: remember}),
        "path_escape": submission({**reference_files(), "minitriton/../../../tmp/x.py": ""}),
        "fork_bomb": submission({ENTRY: bomb}),
        "flood": submission({ENTRY: "import sys\nwhile True: sys.stdout.write('x' * 65536)\n"}),
        "memory": submission({ENTRY: "x = []\nwhile True: x.append(bytearray(1 << 26))\n"}),
        "deep_json": submission({ENTRY: "print('[' * 100000)\n"}),
    }


def ir_hacks() -> dict[str, str]:
    """Tricks in the IR."""
    return {
        "claimed_cost": with_emitted("answer = {'ir': {**answer['ir'], 'body': []}, 'cost': 0, 'right': True}"),
        "nan_constants": with_emitted(
            "def poison(ops):\n"
            "    for op in ops:\n"
            "        if op['op'] == 'const' and op['type'] == ['f32']: op['value'] = float('nan')\n"
            "        for block in op.get('blocks', ()): poison(block['ops'])\n"
            "poison(answer['ir']['body'])\n"
            "nan = {'op': 'const', 'in': [], 'out': ['%nan'], 'type': ['f32'], 'value': float('nan')}\n"
            "answer['ir']['body'].append(nan)"
        ),
        "huge_tile": with_emitted(
            "big = {'op': 'arange', 'in': [], 'out': ['%big'], 'type': ['i32[2000000000]'], 'lo': 0, 'hi': 2 * 10**9}\n"
            "answer['ir']['body'].insert(0, big)"
        ),
        "endless_loop": with_emitted(
            "ops = answer['ir']['body']\n"
            "for k, v in (('a', 0), ('b', 2**31 - 1), ('s', 1)):\n"
            "    ops.append({'op': 'const', 'in': [], 'out': ['%x' + k], 'type': ['i32'], 'value': v})\n"
            "ops.append({'op': 'for', 'in': ['%xa', '%xb', '%xs'], 'out': [], 'type': [], "
            "'blocks': [{'args': ['%xi'], 'ops': [], 'yield': []}]})"
        ),
        "python_in_names": with_emitted(
            "answer['ir']['body'].append({'op': '__class__', 'in': [], 'out': [], 'type': []})"
        ),
        "write_outside": with_emitted(
            "ops = answer['ir']['body']\n"
            "pointer = [p for p in answer['ir']['params'] if p[1] == '*f32']\n"
            "ops.append({'op': 'const', 'in': [], 'out': ['%xo'], 'type': ['i32'], 'value': -1})\n"
            "ops.append({'op': 'const', 'in': [], 'out': ['%xv'], 'type': ['f32'], 'value': 0.0})\n"
            "target = (pointer or [['none', '']])[0][0]\n"
            "ops.append({'op': 'store', 'in': [target, '%xo', '%xv'], 'out': [], 'type': []})"
        ),
    }


def hacks(task: Task) -> dict[str, str]:
    """Submissions that try to cheat on this task, by the name of the trick."""
    command = milestone(task.level).command
    found = general_hacks(task)
    if command == "emit":
        found |= c_hacks()
    if command in ("ir", "optimize"):
        found |= ir_hacks()
    return found
