"""The rules of `chip`: one answer, which is the design; or work with tools, at whose end files are handed in."""

from __future__ import annotations

from k3rl.envs.base import Action, Env, EpisodeContext, Observation, StepResult
from k3rl.envs.harness import Agentic, WorkspaceSpec
from k3rl.types import StopReason, Task

# Plain names only, as the grader wants them: `*` would match folders too.
ARTIFACTS = tuple("[!/]" * length + end for length in range(1, 33) for end in (".v", ".sv"))


def workspace(task: Task) -> WorkspaceSpec:
    """An empty folder: all that a design needs to know is in the request."""
    return WorkspaceSpec({}, ARTIFACTS)


AGENTIC = Agentic(workspace)


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
