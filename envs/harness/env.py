"""`HarnessEnv`: an agent in a workspace, as an `Env`.

A turn calls tools; their results and what is left of the budgets come back. `submit` hands in the declared files:
where the task has a validator (optimization tasks) the best validated submission counts and work goes on, elsewhere
the episode is over. An episode that a budget ends is judged by its best submission, or by the files as they are.
`delegate` lets a sub-agent do a piece of work in the same workspace, in a branch of its own.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3rl.envs.base import Action, Env, EpisodeContext, Observation, StepResult, tighter
from k3rl.envs.episode_state import message_of, message_row
from k3rl.envs.harness.budget import Spending
from k3rl.envs.harness.config import AnyHarness, HarnessConfig, HarnessMixture
from k3rl.envs.harness.context import Conversation, resumed
from k3rl.envs.harness.modules import Module
from k3rl.envs.harness.tools import TOOLS, Tool, shortened
from k3rl.envs.harness.workspace import Workspace, WorkspaceSpec, answer_from
from k3rl.envs.sandbox import SandboxProvider, provider_named
from k3rl.types import Budgets, Message, StopReason, Task, ToolCall

SUB_SYSTEM = (
    "You do one piece of work for another agent, in the same workspace. Act by calling tools. When it is done, answer "
    "without calling a tool; that text is all that the other agent will read."
)
DELEGATE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "delegate",
        "description": "let a sub-agent do a piece of work in this workspace; it knows only what `work` says",
        "parameters": {"type": "object", "properties": {"work": {"type": "string"}}, "required": ["work"]},
    },
}
NUDGE = "Nothing was called. Call a tool to go on, or submit to hand in your work."


@dataclass(frozen=True, slots=True)
class Validation:
    """What a validator says of a submission. score: greater is better; message: what the policy reads."""

    valid: bool
    score: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class Agentic:
    """What a kind of task puts into the harness.

    workspace: task without hidden part -> its files. validate: (task, answer) -> how good a submission is by what
    the agent may know; None where submitting ends the episode. tools: more tools, beside those that the config names.
    """

    workspace: Callable[[Task], WorkspaceSpec]
    validate: Callable[[Task, str], Awaitable[Validation]] | None = None
    tools: tuple[type[Tool], ...] = ()


@dataclass(frozen=True)
class _State:
    """All of an episode but its files; plain values."""

    conversation: Conversation = ()
    spent: Spending = field(default_factory=Spending)
    idle: int = 0
    kept: Conversation | None = None  # a summary is awaited; the conversation goes on from these and from it
    best: str | None = None
    best_score: float = 0.0
    submissions: int = 0
    cuts: int = 0
    waiting: Conversation | None = None  # of the agent whose sub-agent acts now
    sub_agents: int = 0
    real_s: float = 0.0  # since the episode began, up to the snapshot that holds it


class HarnessEnv(Env):
    """One episode. `agentic` says what the task's workspace is, `config` how the policy acts in it.

    With a mixture, all episodes of a group (`EpisodeContext.group`, else the task) act in the same variant.
    """

    def __init__(self, agentic: Agentic, config: AnyHarness | None = None) -> None:
        self._agentic = agentic
        self._choice = config or HarnessConfig()
        self._variant = 0
        self._config = self._chosen(0)
        self._tools: dict[str, Tool] = {}
        self._modules: dict[str, Module] = {}
        self._task: Task | None = None
        self._budgets = Budgets()
        self._workspace: Workspace | None = None
        self._state = _State()
        self._started = False
        self._began = time.monotonic()

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """Open the workspace; the system message and the request."""
        picked = self._choice.pick(context.group or task.id) if isinstance(self._choice, HarnessMixture) else 0
        self._assemble(picked)
        await self._open(task, context, None)
        words = [self._config.system, *(module.system() for module in self._modules.values())]
        said = "\n\n".join(filter(None, words))
        system = (Message("system", said),) if said else ()
        return self._observed((*system, *self._with_budget(task.messages)))

    async def step(self, action: Action) -> StepResult:
        """Answer one turn."""
        self._change(spent=self._state.spent.turn(len(action.token_ids), self._config.token_s))
        self._say(action.message)
        if self._state.kept is not None:
            return StepResult(self._resume(action.message), metrics=self._metrics())
        if self._state.spent.time_is_over(self._budgets):
            return await self._over(StopReason.VIRTUAL_TIMEOUT)
        if not action.message.tool_calls:
            return await self._idle(action) if self._state.waiting is None else self._report(action.message)
        self._change(idle=0)
        work = self._delegated(action.message.tool_calls)
        if work is not None:
            return self._sub_agent(work)
        results: list[Message] = []
        for call in action.message.tool_calls:
            text, done = await self._call(call)
            if done:
                return await self._over(StopReason.COMPLETED)
            results.append(Message("tool", text, name=call.name, tool_call_id=call.id))
        if self._state.spent.time_is_over(self._budgets):
            return await self._over(StopReason.VIRTUAL_TIMEOUT)
        return self._go_on(results, action.context_tokens)

    async def conclude(self, reason: StopReason) -> str:
        """The best validated submission, else the declared files as they are."""
        if self._state.best is not None:
            return self._state.best
        return "" if self._workspace is None else answer_from(await self._workspace.artifacts())

    async def snapshot(self) -> bytes:
        """The files and everything else."""
        rows = dataclasses.asdict(dataclasses.replace(self._state, real_s=self._real_s()))
        rows["variant"] = self._variant
        rows["modules"] = {name: module.state() for name, module in self._modules.items()}
        rows["conversation"] = [message_row(message) for message in self._state.conversation]
        for name in ("kept", "waiting"):
            part = getattr(self._state, name)
            rows[name] = None if part is None else [message_row(message) for message in part]
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w") as archive:
            for name, data in (
                ("state.json", json.dumps(rows).encode()),
                ("workspace.tgz", await self._open_workspace().snapshot()),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return target.getvalue()

    async def restore(self, task: Task, context: EpisodeContext, snapshot: bytes) -> None:
        """Open a workspace with the files of the snapshot."""
        with tarfile.open(fileobj=io.BytesIO(snapshot)) as archive:
            state, files = (_member(archive, name) for name in ("state.json", "workspace.tgz"))
        rows = json.loads(state)
        self._assemble(rows.pop("variant"))
        for name, part in rows.pop("modules").items():
            self._modules[name].restore(part)
        await self._open(task, context, files)
        rows["conversation"] = tuple(map(message_of, rows["conversation"]))
        for name in ("kept", "waiting"):
            rows[name] = None if rows[name] is None else tuple(map(message_of, rows[name]))
        self._state = _State(**{**rows, "spent": Spending(**rows["spent"])})

    async def close(self) -> None:
        """Remove the workspace."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            await workspace.close()

    async def _open(self, task: Task, context: EpisodeContext, files: bytes | None) -> None:
        if self._started:
            raise RuntimeError("an environment is single use; make a new one for each episode")
        self._started = True
        self._began = time.monotonic()
        provider: SandboxProvider = context.sandboxes or provider_named("bwrap")
        self._task = task
        few = Budgets(sub_agents=self._config.sub_agents or None)
        self._budgets = tighter(tighter(task.budgets, context.budgets), few)
        self._workspace = await Workspace.open(provider, self._agentic.workspace(task), files)

    def _chosen(self, variant: int) -> HarnessConfig:
        return self._choice.variants[variant].harness if isinstance(self._choice, HarnessMixture) else self._choice

    def _assemble(self, variant: int) -> None:
        """The harness of this episode: its tools and parts."""
        self._variant = variant
        self._config = self._chosen(variant)
        timeout_s, output_chars = self._config.command_timeout_s, self._config.output_chars
        self._modules = self._config.modules()
        kinds = {name: TOOLS[name] for name in self._config.tools} | {tool.name: tool for tool in self._agentic.tools}
        tools: list[Tool] = [kind(timeout_s=timeout_s, output_chars=output_chars) for kind in kinds.values()]
        for module in self._modules.values():
            tools += module.tools(timeout_s=timeout_s, output_chars=output_chars)
        self._tools = {tool.name: tool for tool in tools}

    def _open_workspace(self) -> Workspace:
        if self._workspace is None:
            raise RuntimeError("call reset before step")
        return self._workspace

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """(what the tool says, whether the episode is over)."""
        tool = self._tools.get(call.name)
        if tool is None or (call.name == "submit" and self._state.waiting is not None):
            self._change(spent=self._state.spent.call(0.0))
            return f"error: {self._no_tool(call.name)}", False
        before = time.monotonic()
        text = await tool.call(call.arguments, self._open_workspace())
        done = False
        if call.name == "submit" and not text.startswith("error"):
            text, done = await self._submit()
        self._change(spent=self._state.spent.call(time.monotonic() - before))
        return text, done

    def _no_tool(self, name: str) -> str:
        """Why a call is not answered."""
        if name == "delegate" and self._config.sub_agents and self._state.waiting is None:
            left = (self._budgets.sub_agents or 0) - self._state.sub_agents
            return f"delegate must be the only call of its turn and wants text as `work`; {left} sub-agents are left"
        there = [one for one in self._tools if one != "submit" or self._state.waiting is None]
        return f"there is no tool {name!r} here; there are {', '.join(there)}"

    def _delegated(self, calls: Sequence[ToolCall]) -> str | None:
        """The work that a turn hands to a sub-agent, None when it does not or may not."""
        only = calls[0]
        if len(calls) != 1 or only.name != "delegate" or not isinstance(only.arguments, Mapping):
            return None
        work = only.arguments.get("work")
        few = (self._budgets.sub_agents or 0) if self._config.sub_agents else 0
        may = self._state.waiting is None and self._state.sub_agents < few
        return work if may and isinstance(work, str) else None

    def _sub_agent(self, work: str) -> StepResult:
        """Begin a conversation that knows only its piece of work; the one so far waits."""
        spent = self._state.spent.call(0.0)
        self._change(waiting=self._state.conversation, sub_agents=self._state.sub_agents + 1, spent=spent)
        self._change(conversation=())
        begun = self._observed((Message("system", SUB_SYSTEM), Message("user", work)))
        return StepResult(dataclasses.replace(begun, branch="child"), metrics=self._metrics())

    def _report(self, message: Message) -> StepResult:
        """What a sub-agent said last, as the result of the call that began it."""
        text = message.content if isinstance(message.content, str) else ""
        self._change(conversation=self._state.waiting or (), waiting=None)
        told = Message("tool", shortened(text, self._config.output_chars), name="delegate")
        return StepResult(dataclasses.replace(self._observed((told,)), branch="parent"), metrics=self._metrics())

    async def _submit(self) -> tuple[str, bool]:
        """Hand in the declared files: the end, or another try of an optimization task."""
        self._change(submissions=self._state.submissions + 1)
        if self._agentic.validate is None or self._task is None:
            return "submitted", True
        answer = answer_from(await self._open_workspace().artifacts())
        found = await self._agentic.validate(self._task, answer)
        better = found.valid and (self._state.best is None or found.score > self._state.best_score)
        if better:
            self._change(best=answer, best_score=found.score)
        standing = "this is the best so far" if better else "the best so far stays"
        state = "valid" if found.valid else "not valid"
        return f"{state}, score {found.score:g}; {standing}. {found.message}".strip(), False

    async def _idle(self, action: Action) -> StepResult:
        """A turn without a call: a word, or the end when it happens again and again."""
        self._change(idle=self._state.idle + 1)
        if self._state.idle >= self._config.idle_turns:
            return await self._over(StopReason.COMPLETED)
        return self._go_on([Message("user", NUDGE)], action.context_tokens)

    async def _over(self, reason: StopReason) -> StepResult:
        return StepResult(done=True, stop_reason=reason, answer=await self.conclude(reason), metrics=self._metrics())

    def _go_on(self, said: list[Message], tokens: int) -> StepResult:
        """What the policy reads next, after a cut where the conversation has grown too long."""
        said = list(self._with_budget(said))
        cut = self._config.context.cut((*self._state.conversation, *said), tokens)
        if cut is None:
            return StepResult(self._observed(tuple(said)), metrics=self._metrics())
        question = self._config.context.question
        if question is not None:
            self._change(kept=cut)
            return StepResult(self._observed((*said, Message("user", question))), metrics=self._metrics())
        return StepResult(self._restarted(cut), metrics=self._metrics())

    def _with_budget(self, said: Sequence[Message]) -> tuple[Message, ...]:
        """The messages, the last one with what is left of the budgets where that is shown."""
        spent, begun = self._state.spent, self._state.sub_agents
        budget = spent.left(self._budgets, sub_agents=begun, real_s=self._real_s()) if self._config.show_budget else ""
        if not budget or not said or not isinstance(said[-1].content, str):
            return tuple(said)
        return (*said[:-1], dataclasses.replace(said[-1], content=f"{said[-1].content}\n{budget}"))

    def _real_s(self) -> float:
        return self._state.real_s + time.monotonic() - self._began

    def _resume(self, summary: Message) -> Observation:
        """The conversation that begins with the summary just given."""
        text = summary.content if isinstance(summary.content, str) else ""
        kept = self._state.kept or ()
        self._change(kept=None)
        return self._restarted(resumed(kept, text))

    def _restarted(self, messages: Conversation) -> Observation:
        self._change(conversation=(), cuts=self._state.cuts + 1)
        recalled = " ".join(filter(None, (module.recalled() for module in self._modules.values())))
        if recalled:
            messages = (*messages, Message("user", recalled))
        return dataclasses.replace(self._observed(messages), branch="new")

    def _observed(self, messages: Conversation) -> Observation:
        self._say(*messages)
        return Observation(messages, self._declared() if self._config.declare_tools else ())

    def _declared(self) -> tuple[dict[str, Any], ...]:
        """The tools of whoever acts: a sub-agent does not hand in work, nor pass it on."""
        if self._state.waiting is not None:
            return tuple(tool.declaration() for name, tool in self._tools.items() if name != "submit")
        own = tuple(tool.declaration() for tool in self._tools.values())
        return (*own, DELEGATE) if self._config.sub_agents else own

    def _say(self, *messages: Message) -> None:
        self._change(conversation=(*self._state.conversation, *messages))

    def _change(self, **fields: Any) -> None:
        self._state = dataclasses.replace(self._state, **fields)

    def _metrics(self) -> Mapping[str, float]:
        spent = self._state.spent
        return {
            "tool_calls": float(spent.tool_calls),
            "tool_s": spent.wall_s,
            "virtual_s": spent.virtual_s,
            "submissions": float(self._state.submissions),
            "cuts": float(self._state.cuts),
            "sub_agents": float(self._state.sub_agents),
            "harness_variant": float(self._variant),
        }


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"the snapshot has no {name}")
    return file.read()
