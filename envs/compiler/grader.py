"""Judges submissions of `compiler`.

reward = gate * mean over hidden programs of (right * factor): the gate is a well-formed submission that did nothing
forbidden, the factor is speed or saved work where the milestone has it and 1 elsewhere. Requests hold no answers; what
comes back is compared here.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3rl.envs.base import Rubric
from k3rl.envs.compiler import cuda
from k3rl.envs.compiler.evaluate import run_case
from k3rl.envs.compiler.ir_machine import BadIR, IRMachine
from k3rl.envs.compiler.ladder import SPEED, WORK, Milestone, milestone
from k3rl.envs.compiler.protocol import TEXT_COMMANDS, parameters, reference_answer, request_of
from k3rl.envs.compiler.toolchain import Refused, TimeOver, Toolchain, check_tools, empty_kernels
from k3rl.envs.sandbox import SandboxDied, SandboxProvider, provider_named
from k3rl.types import Failed, Invalid, Score, Scored, Task

MAX_SUBMISSION_CHARS = 2_000_000
MAX_FILES = 64
TOLERANCE = 2e-4  # of the largest magnitude of a buffer; float32 kernels are near 1e-6, bfloat16 ones near 4e-3
MAX_BASELINES = 4096  # kept between batches
FIRST, SECOND = 1, 2  # salts of the contents that outputs are compared on
IMPOSSIBLE = 0.25  # of the lower bound on instructions: below it the count, not the kernel, was worked on
_PATH = re.compile(r"minitriton/(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_]+\.(?:py|txt|json|c|h)")
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Judged:
    """One hidden program: right or not, its factor, and numbers that are only reported."""

    right: bool
    factor: float = 1.0
    notes: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the reference compiler's code costs on a case, and the driver alone. Instructions and nanoseconds."""

    instructions: int
    driver: int
    ns: int


class _Clock:
    """Whether some command of a submission ran over its time: then those not started yet are not run."""

    def __init__(self) -> None:
        self.over = False

    async def command(self, tools: Toolchain, files: Mapping[str, str], name: str, request: Mapping[str, Any]) -> Any:
        """See `Toolchain.command`."""
        try:
            return await tools.command(files, name, request, lambda: self.over)
        except TimeOver:
            self.over = True
            return None


def files_of(answer: str) -> dict[str, str] | None:
    """The files of a submission, or None when it is not a well-formed one."""
    blocks: list[str] = _FENCED.findall(answer)
    try:
        given = json.loads(blocks[-1] if blocks and not answer.lstrip().startswith("{") else answer)
    except (ValueError, RecursionError):
        return None
    files = given.get("files") if isinstance(given, dict) else None
    if not isinstance(files, dict) or not 0 < len(files) <= MAX_FILES or "minitriton/__main__.py" not in files:
        return None
    if not all(isinstance(text, str) and _PATH.fullmatch(path) for path, text in files.items()):
        return None
    if sum(map(len, files.values())) > MAX_SUBMISSION_CHARS or not all(map(_encodable, files.values())):
        return None
    return files


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def foreign_import(files: Mapping[str, str]) -> str | None:
    """The first import of something that is neither the standard library nor the submission, or None."""
    for path, text in files.items():
        try:
            tree = ast.parse(text) if path.endswith(".py") else ast.Module([], [])
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # it will not run either
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                if name.split(".")[0] not in (*sys.stdlib_module_names, "minitriton"):
                    return f"{path}:{getattr(node, 'lineno', 0)} imports {name}"
    return None


def same_buffer(got: Any, want: np.ndarray) -> bool:
    """Integers equal, floats within TOLERANCE of the largest magnitude; never with NaN or another type."""
    got = np.asarray(got)
    if got.shape != want.shape:
        return False
    if want.dtype.kind == "i":
        return got.dtype.kind == "i" and bool(np.array_equal(got, want))
    scale = max(float(np.abs(want).max(initial=0.0)), 1e-3)
    with np.errstate(invalid="ignore"):
        return bool(np.all(np.abs(got - want) <= TOLERANCE * scale))


def same_json(got: Any, want: Any) -> bool:
    """Equal in value and type, all the way down."""
    if type(got) is not type(want):
        return False
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(same_json(got[key], want[key]) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same_json, got, want))
    return bool(got == want)


def speed_factor(count: float, reference: float, floor: float) -> float:
    """0.5 at the reference's count, rising to 1 at the lower bound, falling with 1/count above it."""
    if count >= reference:
        return 0.5 * reference / count
    return min(1.0, 0.5 + 0.5 * (reference - count) / max(reference - floor, 1.0))


class CompilerRubric(Rubric):
    """Scores submissions. provider: a sandbox provider or its name; workers: sandboxes beside each other.

    parts: well_formed, share (of right hidden programs), factor (mean over right ones), wall_ratio (reference's wall
    time over the submission's, reported only). Raises CompilerUnavailable or SandboxUnavailable when it cannot work.
    """

    def __init__(self, provider: SandboxProvider | str = "bwrap", *, workers: int = 1) -> None:
        chosen = provider_named(provider) if isinstance(provider, str) else provider
        chosen.check()
        check_tools()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="compiler-grader", daemon=True)
        self._thread.start()
        self._tools = Toolchain(chosen, workers)
        self._baselines: dict[tuple[str, int], asyncio.Task[Baseline]] = {}
        self._truths: dict[tuple[str, int, int], Any] = {}

    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        """One score per (task with hidden part, answer), in order. A right baseline is measured once per task."""
        return asyncio.run_coroutine_threadsafe(self._all(items), self._loop).result()

    def close(self) -> None:
        """End the grader's thread. Idempotent."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_settle(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _all(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        scores = await asyncio.gather(*(self._score(task, answer) for task, answer in items))
        self._truths.clear()
        while len(self._baselines) > MAX_BASELINES:
            self._baselines.pop(next(iter(self._baselines)))
        return list(scores)

    async def _score(self, task: Task, answer: str) -> Score:
        if task.hidden is None:
            raise ValueError(f"task {task.id} came to the grader without its hidden part; get it from the task source")
        rung = milestone(task.level)
        if rung.needs_gpu and not cuda.available():
            return Failed(f"milestone {rung.name} is graded on a CUDA GPU; this machine has none")
        files = files_of(answer)
        if files is None:
            return Scored(0.0, {"well_formed": 0.0, "share": 0.0, "factor": 0.0})
        if found := foreign_import(files):
            return Invalid("foreign_import", found)
        clock = _Clock()
        jobs = [
            asyncio.ensure_future(self._judge(rung, task.id, number, case, files, clock))
            for number, case in enumerate(task.hidden["cases"])
        ]
        try:
            return _total(await asyncio.gather(*jobs))
        except Refused as refused:
            return Invalid(refused.hack, refused.evidence)
        except (SandboxDied, OSError) as error:
            return Failed(f"{type(error).__name__}: {error}")
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _judge(
        self,
        rung: Milestone,
        task_id: str,
        number: int,
        case: Mapping[str, Any],
        files: Mapping[str, str],
        clock: _Clock,
    ) -> Judged:
        request = request_of(rung, case, FIRST)
        answer = await clock.command(self._tools, files, rung.command, request)
        if not isinstance(answer, dict):
            return Judged(False)
        if rung.command in TEXT_COMMANDS:
            return Judged(same_json(answer, reference_answer(rung.command, request)))
        if rung.command in ("ir", "optimize"):
            ir = answer.get("ir")
            return await asyncio.to_thread(self._judge_ir, rung, task_id, number, case, ir, request)
        if rung.command == "interpret":
            return await asyncio.to_thread(self._judge_buffers, task_id, number, case, answer.get("buffers"))
        if rung.command == "ptx":
            return await self._judge_ptx(task_id, number, case, answer.get("ptx"))
        return await self._judge_c(rung, task_id, number, case, answer.get("c"), request)

    def _truth(self, task_id: str, number: int, case: Mapping[str, Any], salt: int) -> Any:
        key = (task_id, number, salt)
        if key not in self._truths:
            self._truths[key] = run_case(case, salt)
        return self._truths[key]

    def _judge_ir(
        self, rung: Milestone, task_id: str, number: int, case: Mapping[str, Any], ir: Any, request: Mapping[str, Any]
    ) -> Judged:
        cost = 0
        for salt in (FIRST, SECOND):
            start, final, _ = self._truth(task_id, number, case, salt)
            try:
                got, cost = run_ir(ir, case, start)
            except (BadIR, RecursionError, ValueError, OverflowError):
                return Judged(False)
            if not all(map(same_buffer, got, final)):
                return Judged(False)
        if rung.judged != WORK:
            return Judged(True)
        reference = reference_answer("optimize", request)["ir"]
        _, wanted = run_ir(reference, case, self._truth(task_id, number, case, SECOND)[0])
        return Judged(True, min(1.0, wanted / max(cost, 1)))

    def _judge_buffers(self, task_id: str, number: int, case: Mapping[str, Any], buffers: Any) -> Judged:
        names = [name for name, kind in parameters(case, case["instances"][0]["kernel"]) if kind.startswith("*")]
        if not isinstance(buffers, dict) or buffers.keys() != set(names):
            return Judged(False)
        final = self._truth(task_id, number, case, FIRST)[1]
        for name, want in zip(names, final, strict=True):
            kinds = (int,) if want.dtype.kind == "i" else (int, float)
            got = buffers[name]
            if not isinstance(got, list) or not all(type(one) in kinds and abs(one) < 2**127 for one in got):
                return Judged(False)
            if not same_buffer(np.asarray(got, want.dtype), want):
                return Judged(False)
        return Judged(True)

    async def _judge_c(
        self,
        rung: Milestone,
        task_id: str,
        number: int,
        case: Mapping[str, Any],
        text: Any,
        request: Mapping[str, Any],
    ) -> Judged:
        if not isinstance(text, str) or not _encodable(text):
            return Judged(False)
        built = await self._tools.build(text, case)
        if built.program is None:
            return Judged(False)
        start, final, _ = await asyncio.to_thread(self._truth, task_id, number, case, FIRST)
        timed = await self._tools.run(built.program, case, start, count=False)
        if timed.buffers is None or not all(map(same_buffer, timed.buffers, final)):
            return Judged(False)
        if rung.judged != SPEED:
            return Judged(True)
        start, final, work = await asyncio.to_thread(self._truth, task_id, number, case, SECOND)
        counted = await self._tools.run(built.program, case, start, count=True)
        if counted.buffers is None or not all(map(same_buffer, counted.buffers, final)):
            return Judged(False)
        base = await self._baseline(task_id, number, case, request)
        count = counted.instructions - base.driver
        if count < IMPOSSIBLE * work.floor():
            raise Refused("count_below_floor", f"{count} instructions where {work.floor():.0f} are a lower bound")
        factor = speed_factor(count, base.instructions - base.driver, work.floor())
        return Judged(True, factor, {"wall_ratio": base.ns / max(timed.ns, 1)})

    async def _judge_ptx(self, task_id: str, number: int, case: Mapping[str, Any], text: Any) -> Judged:
        if not isinstance(text, str) or not _encodable(text):
            return Judged(False)
        for salt in (FIRST, SECOND):
            start, final, _ = await asyncio.to_thread(self._truth, task_id, number, case, salt)
            got = await cuda.run(text, case, start)
            if got is None or not all(map(same_buffer, got, final)):
                return Judged(False)
        return Judged(True)

    async def _baseline(
        self, task_id: str, number: int, case: Mapping[str, Any], request: Mapping[str, Any]
    ) -> Baseline:
        """The reference's cost, measured once for all answers of a batch."""
        key = (task_id, number)
        if key not in self._baselines:
            self._baselines[key] = asyncio.ensure_future(self._measure(task_id, number, case, request))
        try:
            return await asyncio.shield(self._baselines[key])
        except (SandboxDied, OSError):
            self._baselines.pop(key, None)  # the next answer tries again
            raise

    async def _measure(
        self, task_id: str, number: int, case: Mapping[str, Any], request: Mapping[str, Any]
    ) -> Baseline:
        start, _, _ = await asyncio.to_thread(self._truth, task_id, number, case, SECOND)

        async def measured(text: str, count: bool) -> Any:
            built = await self._tools.build(text, case)
            if built.program is None:
                raise SandboxDied(f"the reference did not build: {built.complaint}")
            ran = await self._tools.run(built.program, case, start, count=count)
            if ran.buffers is None:
                raise SandboxDied(f"the reference did not run: {ran.complaint}")
            return built, ran

        text = (await asyncio.to_thread(reference_answer, "emit", request))["c"]
        built, counted = await measured(text, True)
        timed = await self._tools.run(built.program, case, start, count=False)
        _, driver = await measured(empty_kernels(case), True)
        return Baseline(counted.instructions, driver.instructions, timed.ns)


def run_ir(ir: Any, case: Mapping[str, Any], start: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """(buffers after running IR, its cost). Raises BadIR."""
    launch = case["launches"][0]
    params = parameters(case, case["instances"][0]["kernel"])
    machine = IRMachine(ir, params)
    buffers = [one.astype(np.float64 if one.dtype == np.float32 else np.int64) for one in start]
    values = {
        name: buffers[value] if kind == "buffer" else value
        for (name, _), (kind, value) in zip(params, launch["args"], strict=True)
    }
    with np.errstate(all="ignore"):
        machine.run(launch["grid"], values)
    return buffers, machine.cost


async def _settle() -> None:
    """End every other task of this loop."""
    others = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _total(judged: Sequence[Judged]) -> Score:
    right = [one for one in judged if one.right]
    parts = {
        "well_formed": 1.0,
        "share": len(right) / len(judged),
        "factor": sum(one.factor for one in right) / len(right) if right else 0.0,
    }
    ratios = [one.notes["wall_ratio"] for one in right if one.notes]
    if ratios:
        parts["wall_ratio"] = sum(ratios) / len(ratios)
    return Scored(sum(one.factor for one in right) / len(judged), parts)
