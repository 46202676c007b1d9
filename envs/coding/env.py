"""The rules of `coding-lists`: one answer, or in `probe` one call of the tool `run` before it."""

from __future__ import annotations

from k3rl.envs.base import Action, Env, EpisodeContext, Observation, StepResult
from k3rl.envs.coding.grader import source_of
from k3rl.envs.sandbox import ProgramJob, ProgramStatus, SandboxDied, same_value
from k3rl.types import Message, StopReason, Task, ToolCall


class CodingEnv(Env):
    """One episode. The visible examples are in `task.data`; the hidden ones never come here.

    Where a task has examples, a turn with calls gets one word per call: `ok`, `bad`, or `error` for a program
    that does not run and for a call that is not `run` with a `code` string. Any other turn is the answer.
    Metrics of a task with examples: `tool_calls`, and `first_ok`, whether the first call answered `ok`.
    """

    def __init__(self) -> None:
        self._task: Task | None = None
        self._context = EpisodeContext()
        self._results: list[str] = []

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """The request."""
        if self._task is not None:
            raise RuntimeError("an environment is single use; make a new one for each episode")
        self._task, self._context = task, context
        return Observation(task.messages, task.tools, task.tool_choice)

    async def step(self, action: Action) -> StepResult:
        """Run what the turn calls, or take it as the answer."""
        task = self._current()
        calls = action.message.tool_calls
        if calls and task.data["examples"]:
            results = [Message("tool", await self._run(call), name=call.name, tool_call_id=call.id) for call in calls]
            return StepResult(Observation(tuple(results), task.tools, task.tool_choice), metrics=self._metrics(task))
        content = action.message.content
        return StepResult(
            done=True,
            stop_reason=StopReason.COMPLETED,
            answer=content if isinstance(content, str) else "",
            metrics=self._metrics(task),
        )

    async def _run(self, call: ToolCall) -> str:
        """The tool: try a program on the visible examples."""
        result = "error"
        if call.name == "run" and isinstance(call.arguments, dict) and isinstance(call.arguments.get("code"), str):
            result = await self._try(call.arguments["code"])
        self._results.append(result)
        return result

    async def _try(self, code: str) -> str:
        task = self._current()
        if self._context.programs is None:
            raise RuntimeError("the tool `run` needs EpisodeContext.programs, a ProgramRunner")
        examples = task.data["examples"]
        job = ProgramJob(source_of(code), task.data["entry"], tuple((values,) for values, _ in examples))
        outcome = (await self._context.programs.run([job]))[0]
        if outcome.status is ProgramStatus.SANDBOX_DIED:
            raise SandboxDied(outcome.detail)
        if outcome.status is not ProgramStatus.RETURNED or any(call.error is not None for call in outcome.calls):
            return "error"
        good = all(same_value(call.value, want) for call, (_, want) in zip(outcome.calls, examples, strict=True))
        return "ok" if good else "bad"

    def _metrics(self, task: Task) -> dict[str, float]:
        if not task.data["examples"]:
            return {}
        return {"tool_calls": float(len(self._results)), "first_ok": float(self._results[:1] == ["ok"])}

    def _current(self) -> Task:
        if self._task is None:
            raise RuntimeError("call reset before step")
        return self._task
