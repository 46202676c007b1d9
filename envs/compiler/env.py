"""The rules of `compiler`: one turn, whose text is the submission; or work with tools, at whose end files are."""

from __future__ import annotations

from k3rl.envs.base import Action, Env, EpisodeContext, Observation, StepResult
from k3rl.envs.compiler.tasks import specification
from k3rl.envs.harness import Agentic, WorkspaceSpec
from k3rl.types import StopReason, Task


def workspace(task: Task) -> WorkspaceSpec:
    """The specification and the example of the request as files; the package `minitriton` is what is handed in."""
    return WorkspaceSpec({"SPEC.md": specification(), **task.data["files"]}, ("minitriton/*",))


AGENTIC = Agentic(workspace)


class CompilerEnv(Env):
    """One episode: the specification and one milestone are asked, one JSON object of files is the answer."""

    def __init__(self) -> None:
        self._task: Task | None = None

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """The request."""
        if self._task is not None:
            raise RuntimeError("an environment is single use; make a new one for each episode")
        self._task = task
        return Observation(task.messages)

    async def step(self, action: Action) -> StepResult:
        """Take the turn's text as the submission."""
        if self._task is None:
            raise RuntimeError("call reset before step")
        content = action.message.content
        return StepResult(
            done=True, stop_reason=StopReason.COMPLETED, answer=content if isinstance(content, str) else ""
        )
