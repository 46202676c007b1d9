"""The grader's tools inside sandboxes: run a submission's command, build emitted C, run it, count its instructions.

Each command of a submission gets a fresh sandbox with nothing but its own files and the request. Emitted C is built
and run in yet another sandbox that never held the submission's Python. Expected values enter no sandbox.
"""

from __future__ import annotations

import asyncio
import json
import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3rl.envs.compiler import driver
from k3rl.envs.sandbox import ExecResult, Sandbox, SandboxDied, SandboxLimits, SandboxProvider, SandboxUnavailable

DEBIAN_PACKAGES = {"python3": "python3", "gcc": "gcc", "nm": "binutils", "objdump": "binutils", "valgrind": "valgrind"}
LIBRARY_PACKAGE = "libc6-dev"  # headers and the static libc, libm and libmvec
FLAGS = ("-std=gnu17", "-O3", "-ffast-math", "-fno-pie", "-fno-stack-protector", "-fcf-protection=none", "-w")
MACHINE_FLAGS = {"x86_64": ("-mavx2", "-mfma")}
COMMAND_S = 60.0  # wall; a submission's share, beside 20 s of CPU: running over either is its failure
BUILD_S = 60.0
RUN_S = 20.0
COUNT_S = 90.0
REPEATS = 5  # of the timed run; the counted run has one, so that nothing can be replayed
MAX_ANSWER_BYTES = 4 * 2**20
MAX_C_CHARS = 400_000
MEBIBYTE = 2**20

_COMMAND_LIMITS = SandboxLimits(memory_bytes=1024 * MEBIBYTE, processes=16, output_bytes=MAX_ANSWER_BYTES, cpu_s=20)
_BUILD_LIMITS = SandboxLimits(memory_bytes=8192 * MEBIBYTE, processes=32, cpu_s=120)

_INCLUDE = re.compile(r"#[ \t]*include[ \t]*<(?:stdint|stddef|math|string|immintrin)\.h>[ \t]*")
_DIRECTIVE = re.compile(r"#[ \t]*(?:define|undef|ifdef|ifndef|if|else|endif|pragma[ \t]+GCC[ \t]+(?:unroll|ivdep))\b.*")
_MACRO = re.compile(r"#[ \t]*define[ \t]+(\w+)")
_ATTRIBUTES = {"vector_size", "aligned", "may_alias", "always_inline", "noinline", "unused", "const", "pure", "hot"}
# Words cannot be put together from parts, because ## and line splices are refused too.
_FORBIDDEN = re.compile(
    r"\b_*(?:asm|section|constructor|destructor|ifunc|alias|gnu|has_include|embed)_*\b|\b__attribute\b"
    r"|\\[ \t]*\n|##|%:|<:|\\[uU]|\[\s*\[|\?\?="
    r'|_Pragma(?!\("GCC (?:unroll \d+|ivdep)"\))'
)
_SYMBOL = re.compile(
    r"(?:_ZGV[bcd]N[248]v_)?(?:exp|exp2|expm1|log|log2|log1p|pow|sin|cos|tanh|sqrt|fabs|floor|ceil|round|trunc|fmax|fmin"
    r"|fma|rint|nearbyint|ldexp|copysign|lrint|lround)f?(?:_finite)?|memcpy|memset|memmove|_GLOBAL_OFFSET_TABLE_"
)
_SECTIONS = re.compile(r"\.(?:text|rodata|comment|note|eh_frame|data|bss|llvm_addrsig|rela?|symtab|strtab)\b")


class CompilerUnavailable(SandboxUnavailable):
    """A Debian package that grading needs is missing; the message holds the one command that installs it."""


class TimeOver(Exception):
    """A submission's command ran over its time."""


class Refused(Exception):
    """The submission did something forbidden: which hack, and what shows it."""

    def __init__(self, hack: str, evidence: str) -> None:
        super().__init__(f"{hack}: {evidence}")
        self.hack, self.evidence = hack, evidence


@dataclass(frozen=True, slots=True)
class Built:
    """An executable, or why there is none."""

    program: bytes | None
    complaint: str = ""


@dataclass(frozen=True, slots=True)
class Ran:
    """Buffers after a run, or None when it did not end properly. `ns`: wall time of the launches."""

    buffers: list[np.ndarray] | None
    ns: int = 0
    instructions: int = 0
    complaint: str = ""


def missing_packages(path: str = "/usr/local/bin:/usr/bin:/bin") -> list[str]:
    """Debian packages that this machine lacks, tools looked up where sandboxes have them."""
    missing = {package for tool, package in DEBIAN_PACKAGES.items() if shutil.which(tool, path=path) is None}
    return sorted(missing)


def check_tools() -> None:
    """Raises CompilerUnavailable when a tool is missing."""
    missing = missing_packages()
    if missing:
        raise CompilerUnavailable(
            f"the compiler environment needs {', '.join(missing)} in /usr; run "
            f"`sudo apt-get install -y {' '.join(sorted({*missing, LIBRARY_PACKAGE}))}`"
        )


def lint_c(text: str) -> None:
    """Refuse C that could reach beyond its arguments: other files, assembly, attributes, odd spellings.

    Raises Refused. What passes is still judged by the symbols of the object file.
    """
    if len(text) > MAX_C_CHARS:
        raise Refused("resource_attack", f"{len(text)} characters of C; at most {MAX_C_CHARS}")
    if found := _FORBIDDEN.search(text):
        raise Refused("forbidden_c", f"{found.group()!r} in the emitted C")
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("#") and not (_INCLUDE.fullmatch(line) or _DIRECTIVE.fullmatch(line)):
            raise Refused("forbidden_include", line[:120])
        if (macro := _MACRO.match(line)) and macro.group(1).strip("_") in {*_ATTRIBUTES, "attribute", "Pragma"}:
            raise Refused("forbidden_c", line[:120])
    for found in re.finditer(r"__attribute__(.{0,200})", text, re.DOTALL):
        inside = re.match(r"\s*\(\(\s*((?:\w+\s*(?:\(\s*\w+\s*\)\s*)?,?\s*)*)\)\)", found.group(1))
        names = set(re.findall(r"([A-Za-z_]\w*)\s*(?:\(\s*\w+\s*\))?", inside.group(1))) if inside else {"?"}
        if not {name.strip("_") for name in names} <= _ATTRIBUTES:
            raise Refused("forbidden_attribute", found.group()[:120])


def lint_object(names: str, sections: str, symbols: Sequence[str]) -> None:
    """Refuse an object file that calls, defines or remembers more than the kernels. Raises Refused."""
    for line in filter(str.strip, names.splitlines()):
        *_, kind, name = line.split()
        if kind in "Uwv":
            if not _SYMBOL.fullmatch(name):
                raise Refused("forbidden_call", f"the object file calls {name}")
        elif kind in "DdBbGgSsC":
            raise Refused("static_state", f"{name} is writable memory that lives on between calls")
        elif kind in "Iiu":
            raise Refused("forbidden_call", f"{name} is resolved by code that runs before main")
        elif kind in "TWRV" and name not in symbols:
            raise Refused("forbidden_symbol", f"{name} is exported; only {', '.join(symbols[:3])} ... may be")
    for name, size in re.findall(r"^\s*\d+\s+(\S+)\s+([0-9a-f]{8})", sections, re.MULTILINE):
        if not _SECTIONS.match(name):
            raise Refused("forbidden_section", f"section {name}")
        if name.startswith((".data", ".bss")) and int(size, 16):
            raise Refused("static_state", f"section {name} holds {int(size, 16)} bytes that live on between calls")


class Toolchain:
    """Runs everything for one grader, with `workers` sandboxes at most at a time. Use from one event loop."""

    def __init__(self, provider: SandboxProvider, workers: int) -> None:
        self._provider = provider
        self._free = asyncio.Semaphore(workers)
        self._driver: bytes | None = None
        self._driver_lock = asyncio.Lock()

    async def command(
        self, files: Mapping[str, str], name: str, request: Mapping[str, Any], spare: Callable[[], bool]
    ) -> Any:
        """The JSON that `python3 -m minitriton NAME` answered, or None: a crash, no JSON, or spared when its turn came.

        Raises TimeOver.
        """
        async with self._free:
            if spare():
                return None
            async with await self._provider.create(_COMMAND_LIMITS) as sandbox:
                for path, text in files.items():
                    await sandbox.write(path, text.encode())
                line = ["/usr/bin/python3", "-E", "-s", "-S", "-B", "-m", "minitriton", name]
                done = await sandbox.exec(line, stdin=json.dumps(request).encode(), timeout_s=COMMAND_S)
        if done.timed_out:
            raise TimeOver
        if done.returncode != 0 or done.truncated:
            return None
        try:
            return json.loads(done.stdout)
        except (ValueError, RecursionError):
            return None

    async def build(self, text: str, case: Mapping[str, Any]) -> Built:
        """Compile and link one case's kernels. Raises Refused."""
        symbols = [f"mt_{one['name']}" for one in case["instances"]]
        lint_c(text)
        base = await self._driver_object()
        machine = MACHINE_FLAGS.get(platform.machine(), ())
        async with self._free, await self._provider.create(_BUILD_LIMITS) as sandbox:
            await sandbox.write("kernel.c", text.encode())
            compiled = await sandbox.exec(["/usr/bin/gcc", *FLAGS, *machine, "-c", "kernel.c"], timeout_s=BUILD_S)
            if compiled.returncode != 0:
                return Built(None, _tail(compiled))
            names = await _tool(sandbox, ["/usr/bin/nm", "kernel.o"])
            lint_object(names, await _tool(sandbox, ["/usr/bin/objdump", "-h", "kernel.o"]), symbols)
            await sandbox.write("table.c", driver.table(case).encode())
            await sandbox.write("driver.o", base)
            link = ["/usr/bin/gcc", "-no-pie", "-static", "driver.o", "table.c", "kernel.o", "-o", "run", "-lm"]
            linked = await sandbox.exec(link, timeout_s=BUILD_S)
            if linked.returncode != 0:
                return Built(None, _tail(linked))
            return Built(await sandbox.read("run", 32 * MEBIBYTE))

    async def run(self, program: bytes, case: Mapping[str, Any], contents: Sequence[np.ndarray], *, count: bool) -> Ran:
        """Run a program on contents; `count` under cachegrind and once, otherwise natively and REPEATS times."""
        async with self._free, await self._provider.create(_BUILD_LIMITS) as sandbox:
            await sandbox.write("run", program, 0o755)
            await sandbox.write("plan", driver.plan(case, contents, 1 if count else REPEATS))
            line = ["./run", "plan", "out"]
            if count:
                tool = ["/usr/bin/valgrind", "--tool=cachegrind", "--cache-sim=no", "--vgdb=no", "-q"]
                line = [*tool, "--cachegrind-out-file=counts", *line]
            done = await sandbox.exec(line, timeout_s=COUNT_S if count else RUN_S)
            if done.returncode != 0:
                return Ran(None, complaint=_tail(done))
            size = driver.HEADER + 4 * sum(buffer["size"] for buffer in case["buffers"])
            unpacked = driver.unpack(case, await sandbox.read("out", size + 1))
            if unpacked is None:
                return Ran(None, complaint="the output file is not complete")
            instructions = _total(await sandbox.read("counts", 8 * MEBIBYTE)) if count else 0
        return Ran(unpacked[1], unpacked[0], instructions)

    async def _driver_object(self) -> bytes:
        async with self._driver_lock:
            if self._driver is None:
                async with self._free, await self._provider.create(_BUILD_LIMITS) as sandbox:
                    await sandbox.write("driver.c", driver.DRIVER.encode())
                    await _tool(sandbox, ["/usr/bin/gcc", "-O2", "-fno-pie", "-c", "driver.c"])
                    self._driver = await sandbox.read("driver.o", MEBIBYTE)
            return self._driver


def empty_kernels(case: Mapping[str, Any]) -> str:
    """C whose kernels do nothing: what remains is the driver's own count."""
    head = "(int32_t a, int32_t b, int32_t c, int32_t d, void *const *e) {}"
    return "#include <stdint.h>\n" + "".join(f"void mt_{one['name']}{head}\n" for one in case["instances"])


async def _tool(sandbox: Sandbox, line: Sequence[str]) -> str:
    """Output of a tool of ours on a small file: its failure is the machine's."""
    done = await sandbox.exec(line, timeout_s=BUILD_S)
    if done.returncode != 0:
        raise SandboxDied(f"{line[0]} failed: {_tail(done)}")
    return done.stdout.decode("utf-8", "replace")


def _tail(done: ExecResult) -> str:
    state = "time over" if done.timed_out else f"exit status {done.returncode}"
    return f"{state}: {done.stderr.decode('utf-8', 'replace').strip()[-400:]}"


def _total(counts: bytes) -> int:
    """Instructions of a cachegrind file: its summary line."""
    found = re.search(rb"^summary:\s*(\d+)", counts, re.MULTILINE)
    if found is None:
        raise SandboxDied("cachegrind wrote no summary")
    return int(found.group(1))
