"""Judges answers of `coding-lists`: the program runs in a sandbox, its values are compared here.

The program gets inputs only. Every value must be there and equal in type and value; exit codes, printed text
and exceptions of a type that the program chose count for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from k3rl.envs.base import Rubric
from k3rl.envs.sandbox import (
    ProgramJob,
    ProgramLimits,
    ProgramOutcome,
    ProgramRunner,
    ProgramStatus,
    SandboxProvider,
    provider_named,
    same_value,
)
from k3rl.types import Failed, Invalid, Score, Scored, Task

MAX_ANSWER_CHARS = 20_000
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def source_of(answer: str) -> str:
    """The program in an answer: its last fenced block, or all of it."""
    blocks: list[str] = _FENCED.findall(answer)
    return blocks[-1] if blocks else answer


class ProgramRubric(Rubric):
    """1 for a program that gives every hidden output exactly, else 0. `parts`: share of right outputs, crashed.

    provider: a sandbox provider or its name ("bwrap"); workers: sandboxes beside each other.
    Raises SandboxUnavailable when sandboxes cannot be made.
    """

    def __init__(
        self, provider: SandboxProvider | str = "bwrap", *, workers: int = 1, limits: ProgramLimits | None = None
    ) -> None:
        chosen = provider_named(provider) if isinstance(provider, str) else provider
        self._runner = ProgramRunner(chosen, workers=workers, limits=limits)

    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        """One score per (task with hidden part, answer), in order; equal programs for equal inputs run once."""
        places = [number for number, (_, answer) in enumerate(items) if _worth_running(answer)]
        outcomes = self._runner.run_batch([_job(*items[number]) for number in places])
        scores: list[Score] = [Scored(0.0, {"share": 0.0, "ran": 0.0}) for _ in items]
        for number, outcome in zip(places, outcomes, strict=True):
            scores[number] = score_of(items[number][0], outcome)
        return scores

    def close(self) -> None:
        """End the sandboxes."""
        self._runner.close()


def _worth_running(answer: str) -> bool:
    return bool(answer.strip()) and len(answer) <= MAX_ANSWER_CHARS


def _hidden(task: Task) -> tuple[Sequence[object], Sequence[object]]:
    if task.hidden is None:
        raise ValueError(f"task {task.id} came to the grader without its hidden part; get it from the task source")
    return task.hidden["inputs"], task.hidden["outputs"]


def _job(task: Task, answer: str) -> ProgramJob:
    inputs, _ = _hidden(task)
    return ProgramJob(source_of(answer), task.data["entry"], tuple((values,) for values in inputs))


def score_of(task: Task, outcome: ProgramOutcome) -> Score:
    """What an outcome is worth. Pure: the order of a batch cannot matter here."""
    _, wanted = _hidden(task)
    if outcome.status is ProgramStatus.SANDBOX_DIED:
        return Failed(f"sandbox died: {outcome.detail}")
    if outcome.status is ProgramStatus.FORGED:
        return Invalid("forged_result", outcome.detail)
    if outcome.status is not ProgramStatus.RETURNED:
        return Scored(0.0, {"share": 0.0, "ran": 0.0})
    right = [
        call.error is None and same_value(call.value, want) for call, want in zip(outcome.calls, wanted, strict=True)
    ]
    return Scored(float(all(right)), {"share": sum(right) / len(right), "ran": 1.0})
