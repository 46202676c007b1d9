"""Judges designs: every gate in turn, then the reward; each stage in a sandbox of its own.

Right values never leave this process. A design that a tool cannot take, or that needs more processor time than a
tool is given, is wrong (0); a trick is Invalid; a sandbox or tool that fails on its own is Failed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3rl.envs.base import Rubric
from k3rl.envs.chip import flow, library
from k3rl.envs.chip.netlist import Netlist, NetlistError
from k3rl.envs.chip.reward import Measures, reward, score_parts
from k3rl.envs.chip.source import Refused, cleaned, files_of
from k3rl.envs.chip.stream import Interface, Parameters, Problem, Segment
from k3rl.envs.chip.tasks import problem_of
from k3rl.envs.chip.testbench import Verdict, judge
from k3rl.envs.sandbox import SandboxProvider, provider_named
from k3rl.envs.sandbox.base import SandboxError
from k3rl.types import Failed, Invalid, Score, Scored, Task

_REFERENCE_SEED = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A grading in words. stage: where it ended ("text", "lint", ..., "done"); message: what a person reads."""

    score: Score
    stage: str
    message: str
    measures: Measures | None = None


@dataclass(slots=True)
class _Progress:
    """What one grading has reached."""

    stage: str = "text"
    parts: dict[str, float] = field(default_factory=lambda: {"rules": 0.0})


class ChipRubric(Rubric):
    """The rubric. provider: a sandbox provider or its name; workers: gradings beside each other.

    `parts` of a score, as far as the design came: rules, lint and in_time (1 where kept), simulation and gates (share
    of right outputs); area, slack_ns and cycles_per_item as measured; area_score, speed_score and throughput_score
    as in `reward`.
    Raises ToolsMissing or SandboxUnavailable when designs cannot be judged here.
    """

    def __init__(self, provider: SandboxProvider | str = "bwrap", *, workers: int = 1) -> None:
        flow.check_tools()
        self._provider = provider_named(provider) if isinstance(provider, str) else provider
        self._provider.check()
        self._loop = _LoopThread()
        self._slots = asyncio.Semaphore(workers)
        self._references: dict[str, asyncio.Task[Measures]] = {}

    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        """One score per (task with hidden part, answer), in order; equal pairs are graded once."""
        return [report.score for report in self.reports(items)]

    def reports(self, items: Sequence[tuple[Task, str]]) -> list[Report]:
        """The same with words: what an engineer, or a tool of an agent, wants to read."""
        for task, _ in items:
            if task.hidden is None:
                raise ValueError(f"task {task.id} came to the grader without its hidden part; get it from the source")
        unique = {(task.id, answer): task for task, answer in items}

        async def grade() -> list[Report]:
            return await asyncio.gather(*(self._grade(task, answer) for (_, answer), task in unique.items()))

        found = dict(zip(unique, self._loop.run(grade()), strict=True))
        return [found[task.id, answer] for task, answer in items]

    def close(self) -> None:
        """End the grader's thread. Idempotent."""
        self._loop.close()

    async def _grade(self, task: Task, answer: str) -> Report:
        progress = _Progress()
        problem, parameters = problem_of(task)
        try:
            async with self._slots:
                found = await self._judge(task, answer, progress)
            if isinstance(found, Refused):
                return _refusal(found, progress)
            # Also for a design that failed: where the reference does not pass either, the tools are broken.
            reference = await self._reference(problem, parameters)
        except (SandboxError, OSError) as error:
            return Report(Failed(f"{progress.stage}: {error}"), progress.stage, str(error))
        if isinstance(found, str):
            return Report(Scored(0.0, progress.parts), progress.stage, found)
        scores = score_parts(found, reference, problem.period_ns(parameters))
        parts = progress.parts | {f"{name}_score": value for name, value in scores.items()}
        return Report(Scored(reward(scores), parts), "done", _summary(found, reference), found)

    async def _judge(self, task: Task, answer: str, progress: _Progress) -> Measures | Refused | str:
        """What the gates say: measures of a right design, a broken rule, or what else is wrong with the design.

        Raises SandboxError or OSError for the machine.
        """
        files = files_of(answer)
        if not isinstance(files, Refused):
            files = cleaned(files)
        if isinstance(files, Refused):
            return files
        progress.parts["rules"] = 1.0
        try:
            return await self._gates(task, files, progress)
        except NetlistError as error:
            return Refused(str(error), error.hack) if error.hack else str(error)
        except flow.Unfit as error:
            return str(error)

    async def _gates(self, task: Task, files: Mapping[str, str], progress: _Progress) -> Measures:
        """All gates in turn. Raises Unfit, NetlistError for the design, SandboxError for the machine."""
        problem, parameters = problem_of(task)
        interface, period = problem.interface(parameters), problem.period_ns(parameters)
        assert task.hidden is not None
        segments = problem.segments(parameters, random.Random(task.hidden["seed"]))
        async with await self._provider.create(flow.FRONT) as sandbox:
            await flow.write_files(sandbox, files)
            progress.stage = "lint"
            await flow.lint(sandbox, list(files))
            progress.parts["lint"] = 1.0
            progress.stage = "simulation"
            verdict = await _simulated(sandbox, files, interface, segments)
            _pass(verdict, "simulation", progress)
        progress.stage = "synthesis"
        netlist = await self._synthesized(files, interface, period)
        progress.parts |= {"area": netlist.area}
        async with await self._provider.create(flow.BACK) as sandbox:
            text = netlist.verilog()
            progress.stage = "gates"
            gates = {"net.v": text, "cells.v": library.models()}
            await flow.write_files(sandbox, gates)
            verdict = await _simulated(sandbox, gates, interface, segments)
            _pass(verdict, "gates", progress)
            progress.stage = "timing"
            slack, _ = await flow.slack_ns(sandbox, text, interface, period)
        measures = Measures(netlist.area, slack, verdict.cycles / verdict.items)
        progress.parts |= {"slack_ns": slack, "cycles_per_item": measures.cycles_per_item}
        return measures

    async def _synthesized(self, files: Mapping[str, str], interface: Interface, period: float) -> Netlist:
        async with await self._provider.create(flow.BACK) as sandbox:
            await flow.write_files(sandbox, files)
            return await flow.synthesize(sandbox, list(files), interface, period)

    async def _reference(self, problem: Problem, parameters: Parameters) -> Measures:
        """Measures of the reference, by the same tools; once per rung and parameters."""
        key = f"{problem.family} {sorted(parameters.items())}"
        if key not in self._references:
            self._references[key] = asyncio.create_task(self._measure(problem, parameters))
        try:
            return await asyncio.shield(self._references[key])
        except (SandboxError, OSError):
            # The next grading tries again; this one is Failed.
            self._references.pop(key, None)
            raise

    async def _measure(self, problem: Problem, parameters: Parameters) -> Measures:
        interface, period = problem.interface(parameters), problem.period_ns(parameters)
        files = {"dut.v": problem.reference(parameters)}
        segments = problem.segments(parameters, random.Random(_REFERENCE_SEED))
        try:
            async with self._slots, await self._provider.create(flow.BACK) as sandbox:
                await flow.write_files(sandbox, files)
                await flow.lint(sandbox, list(files))
                verdict = await _simulated(sandbox, files, interface, segments)
                netlist = await flow.synthesize(sandbox, list(files), interface, period)
                slack, _ = await flow.slack_ns(sandbox, netlist.verilog(), interface, period)
        except (flow.Unfit, NetlistError) as error:
            raise SandboxError(f"the reference of {problem.family} does not pass the tools: {error}") from error
        if not verdict.passed:
            raise SandboxError(f"the reference of {problem.family} simulates wrongly here: {verdict.problem}")
        return Measures(netlist.area, slack, verdict.cycles / verdict.items)


def _refusal(refused: Refused, progress: _Progress) -> Report:
    score = Invalid(refused.hack, refused.reason) if refused.hack else Scored(0.0, progress.parts)
    return Report(score, progress.stage, refused.reason)


async def _simulated(
    sandbox: Any, files: Mapping[str, str], interface: Interface, segments: Sequence[Segment]
) -> Verdict:
    """Simulate with a fresh key, which a design cannot know, and compare."""
    key = secrets.token_hex(8)
    return judge(interface, segments, await flow.simulate(sandbox, list(files), interface, segments, key))


def _pass(verdict: Verdict, stage: str, progress: _Progress) -> None:
    """Raises Unfit for a wrong or late design."""
    progress.parts[stage] = verdict.right / verdict.expected
    if not verdict.passed:
        raise flow.Unfit(f"{stage}: {verdict.problem}")
    progress.parts["in_time"] = float(verdict.late <= 0)
    if verdict.late > 0:
        raise flow.Unfit(f"{stage}: an output came {verdict.late} cycles too late")


def _summary(own: Measures, reference: Measures) -> str:
    return (
        f"area {own.area:.1f} (reference {reference.area:.1f}), "
        f"slack {own.slack_ns:.3f} ns ({reference.slack_ns:.3f}), "
        f"{own.cycles_per_item:.2f} cycles per item ({reference.cycles_per_item:.2f})"
    )


class _LoopThread:
    """An event loop in a thread that lives as long as the rubric.

    A sandbox dies with the thread that started it, and a caller may have a running loop of its own.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chip-grader", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine in the loop's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
