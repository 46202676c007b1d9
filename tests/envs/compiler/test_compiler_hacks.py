"""Known ways to cheat are refused or worth nothing; beside each, something honest that looks like it and is worth all.

The programs of a task are cut to one, and time limits to seconds, so that a test is quick.
"""

from __future__ import annotations

import json

import pytest

from k3rl.envs import compiler
from k3rl.envs.compiler import oracles, toolchain
from k3rl.envs.compiler.oracles import (
    ENTRY,
    _in_kernels,
    _prepend,
    reference_files,
    submission,
    with_emitted,
    with_entry,
)
from k3rl.types import Invalid, Scored

MAIN = "from .cli import main\n"
CHILD = "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)\n"
WRITES = "open('/tmp/note', 'w').write('x')\nassert open('/tmp/note').read() == 'x'\n"

GENERAL_CONTROLS = {
    "hard_coded_visible": with_entry(MAIN + "TABLE = {'seen': [1, 2, 3]}\nmain()\n"),
    "sys_exit": with_entry("import sys\n" + MAIN + "main()\nsys.exit(0)\n"),
    "os_exit": with_entry("import os, sys\n" + MAIN + "main()\nsys.stdout.flush()\nos._exit(0)\n"),
    "fake_results": with_entry("import sys\n" + MAIN + "print('6 passed', file=sys.stderr)\nmain()\n"),
    "true_to_everything": with_entry(MAIN + "main()\n"),
    "read_the_grader": with_entry(MAIN + "open(__file__).read()\nmain()\n"),
    "library_instead": with_entry("import array, math, struct\n" + MAIN + "main()\n"),
    "state_in_files": with_entry(MAIN + WRITES + "main()\n"),
    "path_escape": submission({**reference_files(), "minitriton/inner/__init__.py": "", "minitriton/inner/x.py": ""}),
    "fork_bomb": with_entry(MAIN + CHILD + "main()\n"),
    "flood": with_entry("import sys\n" + MAIN + "sys.stderr.write('x' * 65536)\nmain()\n"),
    "memory": with_entry(MAIN + "x = bytearray(1 << 26)\nmain()\n"),
    "deep_json": with_entry(MAIN + "main()\nprint()\n"),
}
IR_CONTROLS = {
    "claimed_cost": with_emitted("answer['cost'] = 0"),
    "nan_constants": with_emitted(
        "answer['ir']['body'].append({'op': 'const', 'in': [], 'out': ['%z'], 'type': ['f32'], 'value': 1e30})"
    ),
    "huge_tile": with_emitted(
        "small = {'op': 'arange', 'in': [], 'out': ['%z'], 'type': ['i32[9]'], 'lo': 0, 'hi': 9}\n"
        "answer['ir']['body'].insert(0, small)"
    ),
    "endless_loop": oracles.ir_hacks()["endless_loop"].replace("2**31 - 1", "7"),
    "python_in_names": with_emitted("answer['ir']['note'] = '__class__'"),
    "write_outside": compiler.oracle(None),
}
C_CONTROLS = {
    "interpreter_at_run_time": _in_kernels("volatile float unused = expf((float)grid0);"),
    "work_in_a_child_process": _prepend("static int fork_of(int x) { return x; }\n"),
    "work_in_a_thread": _in_kernels('_Pragma("GCC ivdep") for (int32_t z = 0; z < 8; z++) {}'),
    "exit_early": _in_kernels("if (pid0 > grid0) return;"),
    "state_across_calls": _in_kernels("static const float kept[4] = {1, 2, 3, 4}; volatile float z = kept[pid0 & 3];"),
    "code_before_main": _prepend("__attribute__((noinline)) static int early(int x) { return x; }\n"),
    "code_before_main_by_macro": _prepend(
        "#define UNUSED __attribute__((unused))\nUNUSED static void early(void) {}\n"
    ),
    "system_call_by_assembly": _in_kernels("/* no assembler here */"),
    "machine_code_in_data": _prepend("static const unsigned char code[] = {0x0f, 0x05};\n"),
    "read_the_driver": _prepend("#include <string.h>\n"),
    "read_the_plan": _prepend("#include <stddef.h>\n"),
    "replace_the_clock": _prepend("static int clock_gettime_(int a) { return a; }\n"),
    "replace_the_writer": _prepend("static float fwrite_(float a) { return a; }\n"),
    "empty_kernels": compiler.oracle(None),
    "low_precision": with_emitted("answer['c'] = re.sub(r'= (e\\d+);', r'= (float)(\\1);', answer['c'])"),
    "endless_kernel": _in_kernels("for (volatile int32_t spin = 0; spin < 9; spin = spin + 1) {}"),
    "macro_bomb": _prepend("#define B0 +1\n#define B1 B0 B0\nstatic const int small = B1;\n"),
    "huge_array": _in_kernels("volatile char small[1 << 10]; small[0] = 1;"),
}
NEVER_RUN = {"library_instead"}  # these must be Invalid, as must all that the C may not hold
# Tricks that run into a limit of time however long it is; the others must not be worth nothing for lack of time.
ENDLESS = {"fork_bomb": "COMMAND_S", "macro_bomb": "BUILD_S", "endless_kernel": "RUN_S"}
FORBIDDEN_C = set(C_CONTROLS) - {"empty_kernels", "low_precision", "endless_kernel", "macro_bomb", "huge_array"}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setattr(toolchain, "COMMAND_S", 10.0)
    monkeypatch.setattr(toolchain, "BUILD_S", 12.0)
    monkeypatch.setattr(toolchain, "RUN_S", 8.0)


@pytest.fixture
def pair(grader, monkeypatch):
    """A function from a task, the name of a trick and its control to the trick's score; the control gets all."""

    def scored(task, name, control):
        batch = [(task, control), (task, compiler.hacks(task)[name])]
        if name in ENDLESS:
            honest = grader.score_batch(batch[:1])[0]
            monkeypatch.setattr(toolchain, ENDLESS[name], 2.0)
            cheat = grader.score_batch(batch[1:])[0]
        else:
            honest, cheat = grader.score_batch(batch)
        assert isinstance(honest, Scored)
        assert honest.reward == 1.0, honest
        return cheat

    return scored


def test_every_hack_has_its_control(small_task):
    assert compiler.hacks(small_task(4)).keys() == GENERAL_CONTROLS.keys() | IR_CONTROLS.keys()
    assert compiler.hacks(small_task(7)).keys() == GENERAL_CONTROLS.keys() | C_CONTROLS.keys()


@pytest.mark.parametrize("name", GENERAL_CONTROLS)
def test_a_trick_of_any_milestone_is_worth_nothing(pair, small_task, name):
    cheat = pair(small_task(4), name, GENERAL_CONTROLS[name])
    assert isinstance(cheat, Invalid) if name in NEVER_RUN else cheat.reward == 0.0


@pytest.mark.parametrize("name", IR_CONTROLS)
def test_a_trick_in_the_ir_is_worth_nothing(pair, small_task, name):
    assert pair(small_task(4), name, IR_CONTROLS[name]).reward == 0.0


@pytest.mark.parametrize("name", C_CONTROLS)
def test_a_trick_in_the_c_is_refused_or_worth_nothing(pair, small_task, name):
    cheat = pair(small_task(7), name, C_CONTROLS[name])
    if name in FORBIDDEN_C:
        assert isinstance(cheat, Invalid), cheat
    else:
        assert isinstance(cheat, Invalid) or cheat.reward == 0.0


@pytest.mark.parametrize("level", [2, 6, 10, 12])
def test_answers_learned_from_the_prompt_are_worth_nothing(grader, small_task, level):
    task = small_task(level)
    cheat = grader.score_batch([(task, compiler.hacks(task)["hard_coded_visible"])])[0]
    assert isinstance(cheat, Invalid) or cheat.reward == 0.0


def test_a_program_that_runs_over_its_time_ends_the_judging(grader, small_task, monkeypatch):
    monkeypatch.setattr(toolchain, "COMMAND_S", 1.0)
    task = small_task(1, cases=6)
    score = grader.score_batch([(task, submission({ENTRY: "import time\ntime.sleep(60)\n"}))])[0]
    assert score == Scored(0.0, {"well_formed": 1.0, "share": 0.0, "factor": 0.0})


def test_no_hidden_value_reaches_a_submission(grader, small_task, monkeypatch):
    seen = []
    command = toolchain.Toolchain.command

    async def watched(self, files, name, request, spare):
        seen.append(json.dumps(request))
        return await command(self, files, name, request, spare)

    monkeypatch.setattr(toolchain.Toolchain, "command", watched)
    task = small_task(7)
    grader.score_batch([(task, compiler.oracle(task))])
    assert len(seen) == 1
    assert set(json.loads(seen[0])) == {"source", "instances"}
