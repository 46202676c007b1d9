"""Judges submissions of `kernel`: right on hidden shapes first, then what it costs.

Expected values and costs of the expert stay in this process; a submission's process has inputs only.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3rl.envs.base import Rubric
from k3rl.envs.compiler.toolchain import Refused
from k3rl.envs.kernel import collection, driver, gpu, python, toolchain
from k3rl.envs.kernel.compare import complaint
from k3rl.envs.kernel.driver import Call, Returned
from k3rl.envs.kernel.operators import Arrays, Operator
from k3rl.envs.kernel.reward import UNTIMED, implausible, reward
from k3rl.envs.kernel.source import files_of
from k3rl.envs.kernel.tasks import operator_of
from k3rl.envs.sandbox import SandboxDied, SandboxProvider, provider_named
from k3rl.envs.sandbox.base import SandboxError
from k3rl.types import Failed, Invalid, Score, Scored, Task

_TESTED, _COUNTED, _FRESH = 1, 2, 3  # salts of contents
MAX_BASELINES = 1024  # kept between batches
WRONG: Mapping[str, float] = {"right": 0.0}


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the expert and an empty kernel cost on one shape, in instructions, and the expert's time."""

    expert: int
    empty: int
    ns: int


@dataclass
class Measured:
    """What experts cost, by task and hidden part, and the empty kernel; graders may share it."""

    baselines: dict[tuple[str, str], list[Baseline]] = field(default_factory=dict)
    empty: bytes | None = None


class KernelRubric(Rubric):
    """The rubric. provider: a sandbox provider or its name; workers: gradings beside each other; measured: what graders
    before this one have measured.

    parts: right, cost_ratio (expert's cost over the submission's), floor_share (least possible cost over the
    submission's), wall_ratio (the same as cost_ratio in wall time; reported only). Raises KernelToolsMissing or
    SandboxUnavailable when the language of a task cannot be judged here.
    """

    def __init__(
        self, provider: SandboxProvider | str = "bwrap", *, workers: int = 1, measured: Measured | None = None
    ) -> None:
        self._provider = provider_named(provider) if isinstance(provider, str) else provider
        self._provider.check()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kernel-grader", daemon=True)
        self._thread.start()
        self._free = asyncio.Semaphore(workers)
        self._builder = toolchain.Builder(self._provider)
        self._measured = measured or Measured()
        self._measuring = asyncio.Lock()

    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        """One score per (task with hidden part, answer), in order. The expert is measured once per task."""
        for task, _ in items:
            if task.hidden is None:
                raise ValueError(f"task {task.id} came to the grader without its hidden part; get it from the source")
            _check(self._provider, task)

        async def all_of_them() -> list[Score]:
            return list(await asyncio.gather(*(self._score(task, answer) for task, answer in items)))

        return self._run(all_of_them())

    async def score(self, task: Task, answer: str) -> Score:
        """The same for one answer, from another event loop."""
        _check(self._provider, task)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._score(task, answer), self._loop))

    async def explain(self, task: Task, answer: str) -> str:
        """Why a kernel in Python or CUDA does not compile or does not run, as its tools say it; empty where it does.

        For shapes that the agent may know (`practice`): what is said can name them.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._explain(task, answer), self._loop))

    async def _explain(self, task: Task, answer: str) -> str:
        files = files_of(answer, task.data["file"])
        if files is None:
            return f"there is no {task.data['file']} with text in it"
        calls = calls_of(task, operator_of(task))
        async with self._free:
            if task.data["device"] != "cuda":
                ran = await python.run(self._provider, task.data["language"], files, calls)
                return ran if isinstance(ran, str) else ""
            device = await gpu.describe()
            made = await gpu.compiled(self._provider, task.data["language"], files, calls, device["capability"])
        return made if isinstance(made, str) else ""

    def close(self) -> None:
        """End the grader's thread. Idempotent."""
        if self._thread.is_alive():
            self._run(_settle())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _score(self, task: Task, answer: str) -> Score:
        files = files_of(answer, task.data["file"])
        if files is None:
            return Scored(0.0, WRONG)
        try:
            async with self._free:
                if "text" in task.data:
                    return await collection.score(self._provider, task, files)
                if task.data["device"] == "cuda":
                    return await gpu.score(self._provider, task, files)
                if task.data["language"] == "c":
                    return await self._score_c(task, files["kernel.c"])
                return await _score_python(self._provider, task, files)
        except Refused as refused:
            return Invalid(refused.hack, refused.evidence)
        except (SandboxError, OSError) as error:
            return Failed(f"{type(error).__name__}: {error}")

    async def _score_c(self, task: Task, text: str) -> Score:
        program = await self._builder.build(text)
        if isinstance(program, str):
            return Scored(0.0, WRONG)
        operator = operator_of(task)
        tested = calls_of(task, operator)
        ran = await toolchain.run(self._provider, program, tested)
        if ran.returned is None or not await asyncio.to_thread(_all_right, tested, ran.returned):
            await self._baseline(task, operator)  # where the expert does not pass either, the tools are broken
            return Scored(0.0, WRONG)
        baselines = await self._baseline(task, operator)
        found, costs = [], []
        for one, baseline in zip(counted_calls(task, operator), baselines, strict=True):
            counted = await toolchain.count(self._provider, program, [one])
            if counted.returned is None or not await asyncio.to_thread(_all_right, [one], counted.returned):
                return Scored(0.0, WRONG)
            cost, expert = counted.instructions - baseline.empty, baseline.expert - baseline.empty
            floor = operator.floor(one.dims)
            if hack := implausible(cost, expert, floor):
                raise Refused(*hack)
            found.append(reward(cost, expert, floor))
            costs.append((expert / cost, floor / cost))
        if await toolchain.trespasses(self._provider, program, counted_calls(task, operator)):
            raise Refused("foreign_memory", "memory was touched that belongs to neither the call nor the stack")
        own = sum(one.ns for one in ran.returned[-len(baselines) :])
        parts = {
            "right": 1.0,
            "cost_ratio": _mean([ratio for ratio, _ in costs]),
            "floor_share": _mean([share for _, share in costs]),
            "wall_ratio": sum(one.ns for one in baselines) / max(own, 1),
        }
        return Scored(_mean(found), parts)

    async def _baseline(self, task: Task, operator: Operator) -> list[Baseline]:
        """The expert's costs on the counted shapes, measured once for all answers to a task."""
        key, known = (task.id, json.dumps(task.hidden)), self._measured.baselines
        async with self._measuring:
            if key not in known:
                while len(known) >= MAX_BASELINES:
                    known.pop(next(iter(known)))
                known[key] = await self._measure(task, operator)
            return known[key]

    async def _measure(self, task: Task, operator: Operator) -> list[Baseline]:
        if self._measured.empty is None:
            self._measured.empty = await self._built(driver.EMPTY)
        empty = self._measured.empty
        expert = await self._built(operator.expert)
        tested = calls_of(task, operator)
        timed = await toolchain.run(self._provider, expert, tested)
        counted = counted_calls(task, operator)
        if timed.returned is None or not await asyncio.to_thread(_all_right, tested, timed.returned):
            raise SandboxDied(f"the expert of {operator.family} is not right here: {timed.complaint}")
        found = []
        for one, native in zip(counted, timed.returned[-len(counted) :], strict=True):
            costs = []
            for program in (expert, empty):
                ran = await toolchain.count(self._provider, program, [one])
                if ran.returned is None:
                    raise SandboxDied(f"cachegrind did not run: {ran.complaint}")
                costs.append(ran.instructions)
            found.append(Baseline(costs[0], costs[1], native.ns))
        return found

    async def _built(self, text: str) -> bytes:
        program = await self._builder.build(text)
        if isinstance(program, str):
            raise SandboxDied(f"a kernel of ours did not build: {program}")
        return program


def calls_of(task: Task, operator: Operator) -> list[Call]:
    """Calls that test rightness: hidden shapes, one with contents that nobody could know, then the counted shapes."""
    hidden = task.hidden or {}
    shapes = [*hidden["small"], *hidden["counted"]]
    calls = [driver.call(operator, dims, [hidden["seed"], _TESTED, n]) for n, dims in enumerate(shapes)]
    return [driver.call(operator, hidden["small"][0], [secrets.randbits(48), _FRESH]), *calls]


def counted_calls(task: Task, operator: Operator) -> list[Call]:
    """Calls whose cost counts, on contents of their own."""
    hidden = task.hidden or {}
    return [driver.call(operator, dims, [hidden["seed"], _COUNTED, n]) for n, dims in enumerate(hidden["counted"])]


def _all_right(calls: Sequence[Call], returned: Sequence[Returned]) -> bool:
    """Whether every call's outputs are right. Raises Refused when anything else was written."""
    for call, back in zip(calls, returned, strict=True):
        if back.strayed:
            raise Refused("writes_outside", f"{back.strayed} bytes that are no output changed, inputs or beyond")
        wanted = call.operator.wanted(call.dims, call.inputs)
        if complaint(call.operator, back.outputs, wanted) is not None:
            return False
    return True


async def _score_python(provider: SandboxProvider, task: Task, files: Mapping[str, str]) -> Score:
    """Triton in the interpreter, and numba: right or not; their speed on this machine means nothing."""
    operator = operator_of(task)
    calls = calls_of(task, operator)
    ran = await python.run(provider, task.data["language"], files, calls)
    if isinstance(ran, str):
        return Scored(0.0, WRONG)
    judged = python.interpreted(operator, task.data["language"])
    outputs, without = ran
    if not await asyncio.to_thread(_outputs_right, calls, outputs, judged):
        return Scored(0.0, WRONG)
    if without:  # what Triton gave without its kernels
        still_right = await asyncio.to_thread(_outputs_right, calls, without, judged)
        if still_right:
            raise Refused("no_kernel_of_its_own", "outputs are right although no Triton kernel was run")
    return Scored(UNTIMED, {"right": 1.0})


def _outputs_right(calls: Sequence[Call], outputs: Sequence[Arrays], operator: Operator) -> bool:
    pairs = zip(calls, outputs, strict=True)
    return all(complaint(operator, got, operator.wanted(call.dims, call.inputs)) is None for call, got in pairs)


def _check(provider: SandboxProvider, task: Task) -> None:
    """Whether the language of a task can be judged here. Raises KernelToolsMissing."""
    if "text" in task.data:
        python.check(provider, "model")
    elif task.data["device"] == "cuda":
        gpu.check(provider, task.data["language"])
    elif task.data["language"] == "c":
        toolchain.check_tools()
    else:
        python.check(provider, task.data["language"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


async def _settle() -> None:
    """End every other task of this loop."""
    others = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)
