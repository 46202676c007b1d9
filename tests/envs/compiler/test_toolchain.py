"""What C may hold, each refusal beside something honest that looks like it."""

from __future__ import annotations

import random

import pytest

from k3rl.envs.compiler import toolchain
from k3rl.envs.compiler.fuzz import elementwise
from k3rl.envs.compiler.protocol import reference_answer
from k3rl.envs.compiler.toolchain import CompilerUnavailable, Refused, lint_c, lint_object

REFUSED = {
    "assembly": '__asm__ volatile("syscall");',
    "assembly, spelt shortly": 'asm("nop");',
    "assembly over two lines": 'as\\\nm("nop");',
    "assembly put together": "#define J(a, b) a##b\n",
    "an attribute": "__attribute__((constructor)) void f(void) {}",
    "an attribute behind a macro": "#define aligned destructor\n",
    "an attribute of the other spelling": "[[gnu::constructor]] void f(void) {}",
    "an attribute in digraphs": "<:<:x:>:> void f(void) {}",
    "a section": '__attribute__ ((section(".text"))) int x;',
    "an attribute as a macro's argument": "#define A(x) __attribute__((x))\n",
    "a file": '#include "driver.c"\n',
    "a system file": "#include </proc/self/environ>\n",
    "a macro as a file": "#define F <stdio.h>\n#include F\n",
    "a digraph directive": '%:include "x"\n',
    "a pragma": '_Pragma("GCC target(\\"avx512f\\")")\n',
    "a pragma line": "#pragma redefine_extname f exit\n",
    "a wide name": "int \\u0061sm;",
    "text without end": "x" * (toolchain.MAX_C_CHARS + 1),
}
HONEST = {
    "a comment": "/* assembly of the result */\n",
    "headers": "#include <stdint.h>\n#  include <math.h>\n#include <immintrin.h>\n",
    "a macro": "#define MAX(a, b) ((a) > (b) ? (a) : (b))\n",
    "attributes": "typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));\n",
    "a helper": "static inline __attribute__((always_inline)) float f(float x) { return x; }\n",
    "unrolling": '_Pragma("GCC unroll 4")\n#pragma GCC ivdep\n',
    "indices": "x[y[1]] = t % 8 < 3;",
}


@pytest.mark.parametrize("name", REFUSED)
def test_c_that_reaches_out_is_refused(name):
    with pytest.raises(Refused):
        lint_c(REFUSED[name])


@pytest.mark.parametrize("name", HONEST)
def test_honest_c_passes(name):
    assert lint_c(HONEST[name]) is None  # it raises for a text that it refuses


def test_the_reference_s_c_passes():
    case = elementwise(random.Random(0))
    answer = reference_answer("emit", {"source": case["source"], "instances": case["instances"]})
    assert lint_c(answer["c"]) is None


SECTIONS = "  0 .text  00000010  00\n  1 .data  00000000  00\n  2 .bss   00000000  00\n  3 .rodata.cst4 00000004  00\n"


@pytest.mark.parametrize(
    ("line", "hack"),
    [
        ("                 U fork", "forbidden_call"),
        ("                 w __gmon_start__", "forbidden_call"),
        ("0000000000000000 b calls.0", "static_state"),
        ("0000000000000000 D shared", "static_state"),
        ("0000000000000000 T fwrite", "forbidden_symbol"),
        ("0000000000000000 W fwrite", "forbidden_symbol"),
        ("0000000000000000 i chosen", "forbidden_call"),
    ],
)
def test_symbols_beyond_the_kernels_are_refused(line, hack):
    lint_object(f"{'0' * 16} T mt_k\n                 U expf\n{'0' * 16} r table\n", SECTIONS, ["mt_k"])
    with pytest.raises(Refused) as caught:
        lint_object(f"{'0' * 16} T mt_k\n{line}\n", SECTIONS, ["mt_k"])
    assert caught.value.hack == hack


@pytest.mark.parametrize(
    ("section", "hack"),
    [("  4 .init_array 00000008  00\n", "forbidden_section"), ("  4 .data.x  00000004  00\n", "static_state")],
)
def test_sections_beyond_code_and_constants_are_refused(section, hack):
    with pytest.raises(Refused) as caught:
        lint_object(f"{'0' * 16} T mt_k\n", SECTIONS + section, ["mt_k"])
    assert caught.value.hack == hack


def test_a_missing_tool_is_named_with_the_one_command(monkeypatch):
    monkeypatch.setattr(
        toolchain.shutil, "which", lambda tool, path: None if tool == "valgrind" else f"/usr/bin/{tool}"
    )
    with pytest.raises(CompilerUnavailable, match=r"needs valgrind .* `sudo apt-get install -y libc6-dev valgrind`"):
        toolchain.check_tools()
