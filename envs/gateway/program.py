"""Agent programs as harnesses: a program owns its loop, an episode is what its session recorded."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from k3rl.envs.base import EpisodeContext, tighter
from k3rl.envs.episode_state import message_row
from k3rl.envs.faults import EngineFailed
from k3rl.envs.gateway.mailbox import FOLDER, run_with_endpoint
from k3rl.envs.gateway.session import GatewaySession
from k3rl.envs.harness.workspace import Workspace, WorkspaceSpec, answer_from
from k3rl.envs.recording import NOT_GRADED, Policy, TurnSettings
from k3rl.envs.sandbox import SandboxDied, provider_named
from k3rl.types import Episode, Failed, FailureKind, Score, StopReason, Task

DEADLINE_S = 3600.0  # of a program whose budgets name no time
TASK_VARIABLE = "K3RL_TASK"
_SHOWN = 400  # characters of what a program complained
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HarnessResult:
    """How a program ended. returncode is None when it was killed; answer is what the rubric will score."""

    answer: str
    returncode: int | None
    timed_out: bool = False
    complaint: str = ""


class Harness(ABC):
    """An agent that owns its loop. Single use, made by a factory, like an `Env`."""

    @abstractmethod
    async def run(self, task: Task, context: EpisodeContext, session: GatewaySession) -> HarnessResult:
        """Do the whole episode; the policy is asked through `session`. `task.hidden` is None here.

        Must end within `context.budgets.wall_s`. An exception is the infrastructure's.
        """


class ProgramHarness(Harness):
    """A command in a workspace, with OPENAI_BASE_URL, OPENAI_API_KEY and the task as JSON in K3RL_TASK.

    command: task without hidden part -> the program and its arguments, run in the workspace. The sandbox is the
    context's; the provider `subprocess` runs it as a local process, which is for programs that you trust. answer:
    "files" (the declared artifacts) or "stdout" (what it printed).
    """

    def __init__(
        self,
        command: Callable[[Task], Sequence[str]],
        workspace: Callable[[Task], WorkspaceSpec],
        *,
        deadline_s: float = DEADLINE_S,
        env: Mapping[str, str] | None = None,
        answer: Literal["files", "stdout"] = "files",
    ) -> None:
        self._command = command
        self._workspace = workspace
        self._deadline_s = deadline_s
        self._env = dict(env or {})
        self._answer = answer

    async def run(self, task: Task, context: EpisodeContext, session: GatewaySession) -> HarnessResult:
        """See Harness."""
        provider = context.sandboxes or provider_named("bwrap")
        limit = context.budgets.wall_s
        deadline_s = self._deadline_s if limit is None else min(limit, self._deadline_s)
        workspace = await Workspace.open(provider, self._workspace(task))
        try:
            told = {"id": task.id, "messages": [message_row(message) for message in task.messages], "data": task.data}
            env = {**self._env, TASK_VARIABLE: json.dumps(told, default=str)}
            command = list(self._command(task))
            done = await run_with_endpoint(workspace.sandbox, session, command, env=env, timeout_s=deadline_s)
            if self._answer == "stdout":
                answer = done.stdout.decode("utf-8", "replace")
            else:
                files = await workspace.artifacts()
                answer = answer_from({path: text for path, text in files.items() if not path.startswith(FOLDER)})
        finally:
            await workspace.close()
        complaint = done.stderr.decode("utf-8", "replace").strip()[-_SHOWN:]
        return HarnessResult(answer, done.returncode, done.timed_out, complaint)


async def run_program(
    harness: Harness,
    task: Task,
    policy: Policy,
    settings: TurnSettings,
    *,
    episode_id: str,
    context: EpisodeContext | None = None,
) -> Episode:
    """One episode of a program: what `run_episode` is for an `Env`, with the same record and the same budgets.

    A program that ends with status 0 is COMPLETED. One that a budget refused, a cut turn ended or its deadline killed
    has that reason, and what it left is its answer. One that ends with an error is PROGRAM_FAILED and is graded by what
    it left, as what the policy said may have brought it down; before the policy said anything it is INFRA_ERROR and
    gets no reward.
    Raises EngineFailed when the policy gave no tokens, also where nothing that was asked fits its context.
    """
    context = context or EpisodeContext(seed=task.seed)
    budgets = tighter(task.budgets, context.budgets)
    session = GatewaySession(task, policy, settings, budgets=budgets)
    bounded = EpisodeContext(context.seed, context.group, budgets, context.programs, context.sandboxes)
    answer = ""
    score: Score = NOT_GRADED
    try:
        result = await harness.run(task.public(), bounded, session)
        answer = result.answer
        reason, score = _ended(session, result)
    except Exception as error:
        _log.warning("the program of task %s failed", task.id, exc_info=error)
        kind = FailureKind.DIED if isinstance(error, SandboxDied) else FailureKind.RAISED
        reason = StopReason.INFRA_ERROR
        score = Failed(f"program: {type(error).__name__}: {error}"[:500], getattr(error, "kind", kind))
    finally:
        session.close()
    if (said := session.engine_error or session.never_fitted) is not None:
        raise EngineFailed(said)
    return session.episode(episode_id, reason, answer=answer, score=score)


def _ended(session: GatewaySession, result: HarnessResult) -> tuple[StopReason, Score]:
    if result.timed_out:
        return StopReason.WALL_TIMEOUT, NOT_GRADED
    if session.stop_reason is not None:
        return session.stop_reason, NOT_GRADED
    if result.returncode == 0:
        return StopReason.COMPLETED, NOT_GRADED
    if session.acted:
        return StopReason.PROGRAM_FAILED, NOT_GRADED
    how = "was killed" if result.returncode is None else f"ended with status {result.returncode}"
    return StopReason.INFRA_ERROR, Failed(f"program: it {how}: {result.complaint}", FailureKind.RAISED)
