"""The episode loop: one policy acts once in one environment, and every token is recorded exactly as it was sampled.

The first prompt is rendered; after that the prompt is what was there, the sampled ids, and the tokens of what the
environment said. An image of the conversation (a `data:` URL) is one placeholder among them, and its file goes along
with the prompt and into the record. Nothing is rendered or tokenized twice, except where the environment begins a new
conversation, which is a branch of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from k3rl.envs.base import Action, Env, EpisodeContext, NoSnapshot, Observation, tighter
from k3rl.envs.episode_state import BranchState, EpisodeState, KeptState
from k3rl.envs.recording import NOT_GRADED, ContextOutgrown, EpisodeRecorder, Policy, TurnSettings, prompt_rows
from k3rl.envs.sandbox import SandboxDied
from k3rl.types import Episode, Failed, FailureKind, Message, Score, StopReason, Task, Turn

CONCLUDE_S = 120.0  # for the last answer of an episode whose own time is over
_log = logging.getLogger(__name__)


def gradable(episode: Episode) -> bool:
    """Whether an answer (or its absence) is the policy's own, so that a rubric may score it."""
    return episode.stop_reason not in (
        StopReason.INFRA_ERROR,
        StopReason.CANCELLED,
        StopReason.PAUSED,
    )


async def run_episode(
    env: Env,
    task: Task,
    policy: Policy,
    settings: TurnSettings,
    *,
    episode_id: str,
    context: EpisodeContext | None = None,
    resume: EpisodeState | None = None,
    before_turn: Callable[[EpisodeState], bool] | None = None,
    kept: KeptState | None = None,
) -> Episode:
    """Run one episode and close the environment. The score is NOT_GRADED, or Failed when the environment broke.

    Limits are the tighter of `task.budgets` and `context.budgets`. A budget that is used up, a turn that is cut and
    one that is not a valid message end the episode with the answer of `env.conclude`, and so does a conversation that
    outgrows the model's context (CONTEXT_OVERFLOW). An exception of the environment ends it with INFRA_ERROR; one of
    the policy is raised, also where the very first prompt does not fit: then no turn ever would.

    before_turn is given the episode's state before each turn but the first, and pauses the episode (PAUSED) by
    returning True. resume: such a state, of the same task and settings; the episode goes on from there. kept: where
    such states are kept now and then, for whoever may have to go on later.
    """
    context = context or EpisodeContext(seed=task.seed)
    recorder = EpisodeRecorder(task, settings, tighter(task.budgets, context.budgets))
    loop = _Loop(env, policy, context, recorder, kept)
    try:
        await loop.play(resume, before_turn)
    finally:
        try:
            await env.close()
        except Exception:
            _log.exception("closing the environment of episode %s failed", episode_id)
            loop.metrics["close_failed"] = 1.0
    return recorder.episode(episode_id, loop.stop_reason, answer=loop.answer, score=loop.score, metrics=loop.metrics)


class _Loop:
    """The turns of one episode: which conversation acts, and how it ends."""

    def __init__(
        self, env: Env, policy: Policy, context: EpisodeContext, recorder: EpisodeRecorder, kept: KeptState | None
    ) -> None:
        self._env, self._policy, self._context, self._recorder = env, policy, context, recorder
        self._kept = kept
        self._open: list[int] = []  # numbers of the branches that go on; the last one acts, others wait
        self.metrics: dict[str, float] = {}
        self.answer = ""
        self.stop_reason = StopReason.INFRA_ERROR
        self.score: Score = NOT_GRADED

    async def play(self, resume: EpisodeState | None, before_turn: Callable[[EpisodeState], bool] | None) -> None:
        """The whole episode; fills `stop_reason` and `answer`."""
        if await self._turn_by_turn(resume, before_turn):
            await self._conclude()

    async def _turn_by_turn(
        self, resume: EpisodeState | None, before_turn: Callable[[EpisodeState], bool] | None
    ) -> bool:
        """Turns until something ends the episode; True when that was not the environment, which then concludes."""
        prompt = await self._environment(self._reset() if resume is None else self._restore(resume))
        while prompt is not None:
            reason = self._recorder.exhausted()
            if reason is not None:
                self.stop_reason = reason
                return True
            if before_turn is not None and self._recorder.turns and before_turn(await self._state(prompt)):
                self.stop_reason = StopReason.PAUSED
                return False
            await self._keep(prompt)
            message = await self._sample(prompt)
            if message is None:
                return self.stop_reason is not StopReason.CANCELLED
            prompt = await self._environment(self._step(message))
        return self.stop_reason is StopReason.WALL_TIMEOUT

    async def _conclude(self) -> None:
        """The answer that stands when the episode is ended from here."""
        try:
            async with asyncio.timeout(CONCLUDE_S):
                self.answer = await self._env.conclude(self.stop_reason)
        except Exception as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        task = self._recorder.task
        _log.warning("environment %s failed on task %s", task.env, task.id, exc_info=error)
        self.stop_reason = StopReason.INFRA_ERROR
        kind = getattr(error, "kind", FailureKind.DIED if isinstance(error, SandboxDied) else FailureKind.RAISED)
        self.score = Failed(f"environment: {type(error).__name__}: {error}"[:500], kind)

    async def _environment(self, call: Awaitable[Sequence[int] | None]) -> Sequence[int] | None:
        """The next prompt, or None when the episode is over, also because the environment broke or took too long."""
        wall = self._recorder.budgets.wall_s
        try:
            async with asyncio.timeout(None if wall is None else max(0.0, wall - self._recorder.wall_s)) as limit:
                return await call
        except Exception as error:
            if limit.expired():
                self.stop_reason = StopReason.WALL_TIMEOUT
                return None
            self._broken(error)
            return None

    async def _state(self, prompt: Sequence[int]) -> EpisodeState:
        return self._recorder.state(prompt, self._open, self.metrics, await self._env.snapshot())

    async def _keep(self, prompt: Sequence[int]) -> None:
        """Keeps the state before this turn, if one is due. An environment that cannot give it plays on without."""
        if self._kept is None or not self._recorder.turns or not self._kept.due:
            return
        try:
            self._kept.keep(await self._state(prompt))
        except NoSnapshot:
            self._kept.stop()
        except Exception:
            self._kept.stop()
            _log.exception("the state of an episode of environment %s cannot be kept", self._recorder.task.env)

    # ---- what the environment says

    async def _reset(self) -> Sequence[int]:
        return self._first_prompt(await self._env.reset(self._recorder.task, self._context))

    async def _restore(self, state: EpisodeState) -> Sequence[int]:
        recorder = self._recorder
        if state.task_id != recorder.task.id:
            raise ValueError(f"this state is of task {state.task_id}, the episode of {recorder.task.id}")
        await self._env.restore(recorder.task, self._context, state.env)
        recorder.resume(state)
        self._open, self.metrics = list(state.open), dict(state.metrics)
        return state.prompt

    async def _step(self, message: Message) -> Sequence[int] | None:
        turn = self._turn
        started = time.monotonic()
        try:
            result = await self._env.step(
                Action(message, tuple(turn.sampled_ids), prompt_rows(turn) + len(turn.sampled_ids))
            )
        finally:
            self._branch = self._branch.with_last(dataclasses.replace(turn, env_s=time.monotonic() - started))
        self.metrics = dict(result.metrics)
        if result.done or result.observation is None:
            self.stop_reason = result.stop_reason or StopReason.ENV_DONE
            self.answer = result.answer
            return None
        if result.observation.branch in ("new", "child"):
            return self._first_prompt(result.observation)
        return self._next_prompt(result.observation)

    def _first_prompt(self, observation: Observation) -> Sequence[int]:
        """The prompt of a branch that begins."""
        parent = self._open[-1] if self._open else None
        if observation.branch == "new" and self._open:
            self._open.pop()
        ids, images = self._recorder.settings.prompt(observation.messages, observation.tools, observation.tool_choice)
        self._open.append(self._recorder.begin_branch(parent, observation.messages, images))
        self._recorder.messages += observation.messages
        return ids

    def _next_prompt(self, observation: Observation) -> Sequence[int]:
        """The prompt of a branch that goes on."""
        if observation.branch == "parent":
            if len(self._open) < 2:
                raise ValueError("there is no conversation that waits for this one; the environment began no child")
            self._open.pop()
        ids, images = self._recorder.settings.continuation(
            self._branch.conversation, observation.messages, observation.tool_choice
        )
        self._recorder.messages += observation.messages
        self._branch = self._branch.with_messages(observation.messages, images)
        return self._turn.ids.extended(ids)

    @property
    def _branch(self) -> BranchState:
        """The branch that acts."""
        return self._recorder.branches[self._open[-1]]

    @_branch.setter
    def _branch(self, branch: BranchState) -> None:
        self._recorder.branches[self._open[-1]] = branch

    @property
    def _turn(self) -> Turn:
        """Its last turn."""
        return self._branch.turns[-1]

    # ---- what the policy says

    async def _sample(self, prompt: Sequence[int]) -> Message | None:
        """Sample and record one turn: its message, or None when it ends the episode."""
        recorder = self._recorder
        left = None if recorder.budgets.tokens is None else recorder.budgets.tokens - recorder.tokens
        try:
            turn, _ = await recorder.sample(self._policy, prompt, self._branch.images, recorder.turn_limit(left))
        except ContextOutgrown:
            if not recorder.turns:
                raise
            self.stop_reason = StopReason.CONTEXT_OVERFLOW
            return None
        message = recorder.settings.message(turn)
        said = message or Message("assistant", recorder.settings.tokenizer.decode(turn.sampled_ids))
        reason = recorder.record(self._open[-1], turn, said, whole=message is not None)
        if message is not None:
            self._branch = self._branch.with_messages([message])
        if reason is not None:
            self.stop_reason = reason
            return None
        return message
