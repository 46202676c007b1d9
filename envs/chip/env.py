"""The rules of `chip`: one answer, which is the design; or work with tools, as often submitting as one likes."""

from __future__ import annotations

import asyncio

from k3rl.envs.base import Action, Env, EpisodeContext, Observation, StepResult
from k3rl.envs.chip.grader import ChipRubric, Report
from k3rl.envs.chip.tasks import practice
from k3rl.envs.harness import Agentic, Validation, WorkspaceSpec
from k3rl.envs.sandbox import SandboxDied
from k3rl.types import Failed, Invalid, Scored, StopReason, Task

# Plain names only, as the grader wants them: `*` would match folders too.
ARTIFACTS = tuple("[!/]" * length + end for length in range(1, 33) for end in (".v", ".sv"))


def workspace(task: Task) -> WorkspaceSpec:
    """An empty folder: all that a design needs to know is in the request."""
    return WorkspaceSpec({}, ARTIFACTS)


class Validator:
    """Judges what an agent hands in while it works, by transactions that anybody may know; the best one counts."""

    def __init__(self, provider: str = "bwrap") -> None:
        self._provider = provider

    async def __call__(self, task: Task, answer: str) -> Validation:
        """Its reward on the practice transactions, and what an engineer would read. Raises SandboxDied."""
        report = await asyncio.to_thread(self._report, practice(task), answer)
        match report.score:
            case Scored(worth, _):
                return Validation(worth > 0, worth, report.message)
            case Invalid(hack, evidence):
                return Validation(False, 0.0, f"refused ({hack}): {evidence}")
            case Failed(reason):
                raise SandboxDied(f"a design could not be judged: {reason}")

    def _report(self, task: Task, answer: str) -> Report:
        rubric = ChipRubric(self._provider)
        try:
            return rubric.reports([(task, answer)])[0]
        finally:
            rubric.close()


def agentic(provider: str) -> Agentic:
    """What tasks put into the harness. provider: sandboxes that judge submissions while an agent works."""
    return Agentic(workspace, Validator(provider))


class ChipEnv(Env):
    """One episode: the request, and the final message as the answer."""

    def __init__(self) -> None:
        self._task: Task | None = None

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """The request."""
        if self._task is not None:
            raise RuntimeError("an environment is single use; make a new one for each episode")
        self._task = task
        return Observation(task.messages, task.tools, task.tool_choice)

    async def step(self, action: Action) -> StepResult:
        """Take the turn as the answer."""
        if self._task is None:
            raise RuntimeError("call reset before step")
        content = action.message.content
        return StepResult(
            done=True, stop_reason=StopReason.COMPLETED, answer=content if isinstance(content, str) else ""
        )
