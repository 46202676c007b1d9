"""Judges repaired repositories: declared files only, run in a sandbox of their own, values compared here.

The program gets inputs and nothing else; tests, configuration and history that a submission changed are never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3rl.envs.base import Rubric
from k3rl.envs.coding.repair.package import job
from k3rl.envs.harness.workspace import MAX_ARTIFACT_BYTES, MAX_ARTIFACTS, files_from, is_artifact
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


class RepairRubric(Rubric):
    """1 when every hidden call gives the right value, else 0. `parts`: share of right values, ran.

    provider: a sandbox provider or its name; workers: sandboxes beside each other. Raises SandboxUnavailable.
    """

    def __init__(
        self, provider: SandboxProvider | str = "bwrap", *, workers: int = 1, limits: ProgramLimits | None = None
    ) -> None:
        chosen = provider_named(provider) if isinstance(provider, str) else provider
        self._runner = ProgramRunner(chosen, workers=workers, limits=limits)

    def score_batch(self, items: Sequence[tuple[Task, str]]) -> list[Score]:
        """One score per (task with hidden part, answer), in order."""
        read = [_job(task, answer) for task, answer in items]
        outcomes = iter(self._runner.run_batch([one for one in read if isinstance(one, ProgramJob)]))
        return [
            score_of(task, next(outcomes)) if isinstance(one, ProgramJob) else one
            for (task, _), one in zip(items, read, strict=True)
        ]

    def close(self) -> None:
        """End the sandboxes."""
        self._runner.close()


def _hidden(task: Task) -> Mapping[str, Sequence[object]]:
    if task.hidden is None:
        raise ValueError(f"task {task.id} came to the grader without its hidden part; get it from the task source")
    return task.hidden


def _job(task: Task, answer: str) -> ProgramJob | Score:
    """The program of an answer, or the score of one that is none."""
    hidden = _hidden(task)
    files = files_from(answer)
    if files is None:
        return Scored(0.0, {"share": 0.0, "ran": 0.0})
    for path in files:
        if path.startswith("/") or ".." in path.split("/"):
            return Invalid("path_escape", f"the answer names the file {path[:200]!r}")
    declared = {path: text for path, text in files.items() if is_artifact(path, task.data["artifacts"])}
    size = sum(len(text) for text in declared.values())
    if len(declared) > MAX_ARTIFACTS or size > MAX_ARTIFACT_BYTES:
        return Scored(0.0, {"share": 0.0, "ran": 0.0})
    own = {path: text for path, text in task.data["files"].items() if is_artifact(path, task.data["artifacts"])}
    return job(own | declared, hidden["calls"])  # type: ignore[arg-type]


def score_of(task: Task, outcome: ProgramOutcome) -> Score:
    """What an outcome is worth."""
    if outcome.status is ProgramStatus.SANDBOX_DIED:
        return Failed(f"sandbox died: {outcome.detail}")
    if outcome.status is ProgramStatus.FORGED:
        return Invalid("forged_result", outcome.detail)
    if outcome.status is not ProgramStatus.RETURNED:
        return Scored(0.0, {"share": 0.0, "ran": 0.0})
    pairs = zip(outcome.calls, _hidden(task)["wanted"], strict=True)
    right = [call.error is None and same_value(call.value, want) for call, want in pairs]
    return Scored(float(all(right)), {"share": sum(right) / len(right), "ran": 1.0})
