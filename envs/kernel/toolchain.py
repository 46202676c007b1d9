"""Tools in sandboxes for C: build a kernel, run it, count what it executes. Expected values enter no sandbox.

A submission is linked statically with the driver alone, and its object file may call mathematics and `memcpy` only.
The driver gives up making processes and threads before it calls a kernel, and counts are written by valgrind after it
has ended.
"""

from __future__ import annotations

import platform
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from k3rl.envs.compiler.toolchain import Refused, lint_c, lint_object
from k3rl.envs.kernel import driver
from k3rl.envs.kernel.driver import Call, Returned
from k3rl.envs.sandbox import ExecResult, Sandbox, SandboxDied, SandboxLimits, SandboxProvider, SandboxUnavailable

DEBIAN_PACKAGES = {"gcc": "gcc", "nm": "binutils", "objdump": "binutils", "valgrind": "valgrind"}
LIBRARY_PACKAGE = "libc6-dev"
FLAGS = (
    *("-std=gnu17", "-O3", "-ffast-math", "-fno-pie", "-fno-stack-protector", "-fcf-protection=none", "-w"),
    "-fno-jump-tables",  # so that every indirect jump is one that the submission asked for
)
MACHINE_FLAGS = {"x86_64": ("-mavx2", "-mfma")}
BUILD_S = 60.0
RUN_S = 10.0
COUNT_S = 60.0
_TRESPASS = 99  # exit status when memcheck saw something
REPEATS = 5  # of the timed run, whose time is reported only
MAX_C_CHARS = 200_000
MEBIBYTE = 2**20
_BUILD = SandboxLimits(memory_bytes=1024 * MEBIBYTE, processes=32, cpu_s=20, output_bytes=8 * MEBIBYTE)
_RUN = SandboxLimits(memory_bytes=8192 * MEBIBYTE, processes=8, cpu_s=60, open_files=64)
# xchg rbx, rbx: what valgrind takes for a request to itself, when the right rotations stand before it.
_VALGRIND_REQUEST = b"\x48\x87\xdb"
_INDIRECT = re.compile(
    r"\t(?:\w+ )*l?(?:call|jmp)[a-z]*\s+\*.*|\t(?:syscall|sysenter|rdtscp?|cpuid)\b.*|\tint\s+\$0x80.*"
)


class KernelToolsMissing(SandboxUnavailable):
    """A Debian package or Python package that grading needs is missing; the message holds the command."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of a program: what came back of each call, or why nothing did."""

    returned: list[Returned] | None
    instructions: int = 0
    complaint: str = ""


def check_tools(path: str = "/usr/local/bin:/usr/bin:/bin") -> None:
    """Raises KernelToolsMissing when a tool is missing where sandboxes have them."""
    if platform.machine() not in MACHINE_FLAGS:
        raise KernelToolsMissing(
            f"kernels in C are graded on {', '.join(MACHINE_FLAGS)} machines; this one is {platform.machine()}"
        )
    missing = sorted({package for tool, package in DEBIAN_PACKAGES.items() if shutil.which(tool, path=path) is None})
    if missing:
        raise KernelToolsMissing(
            f"the kernel environment needs {', '.join(missing)} in /usr; run "
            f"`sudo apt-get install -y {' '.join(sorted({*missing, LIBRARY_PACKAGE}))}`"
        )


class Builder:
    """Builds kernels of one grader; the driver's object file is made once."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider
        self._driver: bytes | None = None

    async def build(self, text: str) -> bytes | str:
        """The program of a kernel with the driver, or what the compiler says. Raises Refused."""
        made = await self.compile(text)
        return made if isinstance(made, str) else await self._linked(made)

    async def compile(self, text: str) -> bytes | str:
        """The object file of a kernel that reaches for nothing, or what the compiler says. Raises Refused."""
        if len(text) > MAX_C_CHARS:
            raise Refused("resource_attack", f"{len(text)} characters of C; at most {MAX_C_CHARS}")
        lint_c(text)
        machine = MACHINE_FLAGS[platform.machine()]
        async with await self._provider.create(_BUILD) as sandbox:
            await sandbox.write("kernel.c", text.encode())
            compiled = await sandbox.exec(["/usr/bin/gcc", *FLAGS, *machine, "-c", "kernel.c"], timeout_s=BUILD_S)
            if compiled.returncode != 0:
                return tail(compiled)
            names = await _tool(sandbox, ["/usr/bin/nm", "kernel.o"])
            lint_object(names, await _tool(sandbox, ["/usr/bin/objdump", "-h", "kernel.o"]), ["kernel"])
            if not re.search(r" T kernel$", names, re.MULTILINE):
                return "the file defines no function `kernel`"
            code = await _tool(sandbox, ["/usr/bin/objdump", "-d", "--no-show-raw-insn", "kernel.o"])
            compiled_kernel = await sandbox.read("kernel.o", 8 * MEBIBYTE)
            lint_code(code, compiled_kernel)
            return compiled_kernel

    async def _linked(self, compiled_kernel: bytes) -> bytes | str:
        """Linked in a sandbox of its own."""
        async with await self._provider.create(_BUILD) as sandbox:
            if self._driver is None:
                await sandbox.write("driver.c", driver.DRIVER.encode())
                await _tool(sandbox, ["/usr/bin/gcc", "-O2", "-fno-pie", "-c", "driver.c"])
                self._driver = await sandbox.read("driver.o", MEBIBYTE)
            await sandbox.write("driver.o", self._driver)
            await sandbox.write("kernel.o", compiled_kernel)
            line = ["/usr/bin/gcc", "-no-pie", "-static", "driver.o", "kernel.o", "-o", "run", "-lm"]
            linked = await sandbox.exec(line, timeout_s=BUILD_S)
            return await sandbox.read("run", 32 * MEBIBYTE) if linked.returncode == 0 else tail(linked)


def lint_code(disassembly: str, object_file: bytes) -> None:
    """Refuse machine code that jumps where only it knows, calls the kernel, or speaks to valgrind. Raises Refused."""
    if found := _INDIRECT.search(disassembly):
        raise Refused("forbidden_instruction", found.group().strip()[:120])
    if _VALGRIND_REQUEST in object_file:
        raise Refused("speaks_to_the_counter", "the object file holds the mark of a valgrind request")


async def run(provider: SandboxProvider, program: bytes, calls: Sequence[Call]) -> Ran:
    """Run the calls natively, each REPEATS times."""
    return await _run(provider, program, calls, REPEATS, [], RUN_S)


async def count(provider: SandboxProvider, program: bytes, calls: Sequence[Call]) -> Ran:
    """Run the calls once under cachegrind."""
    counts = f"counts-{secrets.token_hex(8)}"
    tool = ["/usr/bin/valgrind", "--tool=cachegrind", "--cache-sim=no", "--vgdb=no", "-q"]
    return await _run(provider, program, calls, 1, [*tool, f"--cachegrind-out-file={counts}"], COUNT_S, counts)


async def trespasses(provider: SandboxProvider, program: bytes, calls: Sequence[Call]) -> bool:
    """Whether the calls touch memory that is not theirs, such as valgrind's, on the very contents that are counted."""
    tool = ["/usr/bin/valgrind", "--tool=memcheck", "--undef-value-errors=no", "--vgdb=no", "-q"]
    ran = await _run(provider, program, calls, 1, [*tool, f"--error-exitcode={_TRESPASS}"], COUNT_S)
    return ran.returned is None


async def _run(
    provider: SandboxProvider,
    program: bytes,
    calls: Sequence[Call],
    repeats: int,
    before: Sequence[str],
    timeout_s: float,
    counts: str | None = None,
) -> Ran:
    async with await provider.create(_RUN) as sandbox:
        await sandbox.write("run", program, 0o755)
        await sandbox.write("plan", driver.plan(calls, repeats))
        done = await sandbox.exec([*before, "./run", "plan", "out"], timeout_s=timeout_s)
        if done.returncode != 0:
            return Ran(None, complaint=tail(done))
        size = sum(8 + len(one.arena) for one in calls)
        try:
            returned = driver.unpack(calls, await sandbox.read("out", size + 1))
            total = 0 if counts is None else _total(await sandbox.read(counts, 8 * MEBIBYTE))
        except OSError:
            return Ran(None, complaint="the run left no output")
        if returned is None or total is None:
            return Ran(None, complaint="the output is not complete")
        return Ran(returned, total)


def _total(counts: bytes) -> int | None:
    """Instructions of a cachegrind file: its summary line."""
    found = re.search(rb"^summary:\s*(\d+)", counts, re.MULTILINE)
    return int(found.group(1)) if found else None


async def _tool(sandbox: Sandbox, line: Sequence[str]) -> str:
    """Output of a tool of ours on a small file: its failure is the machine's."""
    done = await sandbox.exec(line, timeout_s=BUILD_S)
    if done.returncode != 0 or done.truncated:
        raise SandboxDied(f"{line[0]} failed: {tail(done)}")
    return done.stdout.decode("utf-8", "replace")


def tail(done: ExecResult) -> str:
    """How a command ended and the end of what it said."""
    state = "time over" if done.timed_out else f"exit status {done.returncode}"
    return f"{state}: {done.stderr.decode('utf-8', 'replace').strip()[-600:]}"
