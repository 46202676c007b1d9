"""The loop door: one policy acts once in one environment, and every token is kept exactly as it was sampled.

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
from dataclasses import dataclass, field
from typing import Protocol

from k3rl.envs.base import Action, Env, EpisodeContext, Observation, tighter
from k3rl.envs.episode_state import BranchState, EpisodeState
from k3rl.envs.sandbox import SandboxDied
from k3rl.tokens import Tokenizer, xtml
from k3rl.tokens.images import encoded_images, image_prompts, image_rows
from k3rl.types import (
    Branch,
    Budgets,
    Completion,
    EncodedImage,
    Episode,
    Failed,
    FailureKind,
    Message,
    SamplingMasks,
    SamplingParams,
    Score,
    StopReason,
    Task,
    Turn,
)

NOT_GRADED = Failed("not graded")
CONCLUDE_S = 120.0  # for the last answer of an episode whose own time is over
_log = logging.getLogger(__name__)


class ContextOutgrown(RuntimeError):
    """A policy says it: the conversation and the tokens to sample do not fit the model's context."""


class Policy(Protocol):
    """Who acts: an engine, or whatever stands for one."""

    async def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[EncodedImage] = ()
    ) -> Completion:
        """Sample one completion. An exception here is the engine's and leaves `run_episode`, except ContextOutgrown.

        images: one for each placeholder of the prompt, in order; only passed where there are any, so that a policy
        that sees none may take two arguments.
        """
        ...


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
    tokenizer: Tokenizer,
    *,
    episode_id: str,
    sampling: SamplingParams,
    context: EpisodeContext | None = None,
    thinking: bool = False,
    thinking_effort: str | None = None,
    resume: EpisodeState | None = None,
    keep: Callable[[EpisodeState], bool] | None = None,
) -> Episode:
    """Run one episode and close the environment. The score is NOT_GRADED, or Failed when the environment broke.

    Limits are the tighter of `task.budgets` and `context.budgets`. `sampling.max_tokens` bounds each turn too;
    with a `sampling.seed` each turn derives its own. A budget that is used up, a turn that is cut and one that is not
    a valid message end the episode with the answer of `env.conclude`, and so does a conversation that outgrows the
    model's context (CONTEXT_OVERFLOW). An exception of the environment ends it with INFRA_ERROR; one of the policy is
    raised, also where the very first prompt does not fit: then no turn ever would.

    keep: is given the episode's state before each turn but the first, and pauses it (PAUSED) by returning True.
    resume: such a state, of the same task and settings; the episode goes on from there.
    """
    context = context or EpisodeContext(seed=task.seed)
    public = task.public()
    run = _Run(public, tokenizer, sampling, tighter(task.budgets, context.budgets), thinking, thinking_effort)
    try:
        await run.play(env, policy, context, resume, keep)
    finally:
        try:
            await env.close()
        except Exception:
            _log.exception("closing the environment of episode %s failed", episode_id)
            run.metrics["close_failed"] = 1.0
    return run.episode(episode_id)


@dataclass
class _Run:
    """The state of one episode."""

    task: Task
    tokenizer: Tokenizer
    sampling: SamplingParams
    budgets: Budgets
    thinking: bool
    thinking_effort: str | None
    started: float = field(default_factory=time.monotonic)
    messages: list[Message] = field(default_factory=list)  # all that was said, for readers
    branches: list[BranchState] = field(default_factory=list)  # in the order in which they began
    open: list[int] = field(default_factory=list)  # numbers of those that go on; the last one acts, others wait
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    tool_calls: int = 0
    answer: str = ""
    stop_reason: StopReason = StopReason.INFRA_ERROR
    score: Score = NOT_GRADED

    async def play(
        self,
        env: Env,
        policy: Policy,
        context: EpisodeContext,
        resume: EpisodeState | None,
        keep: Callable[[EpisodeState], bool] | None,
    ) -> None:
        """The whole episode; fills `stop_reason` and `answer`."""
        if await self._turn_by_turn(env, policy, context, resume, keep):
            await self._conclude(env)

    async def _turn_by_turn(
        self,
        env: Env,
        policy: Policy,
        context: EpisodeContext,
        resume: EpisodeState | None,
        keep: Callable[[EpisodeState], bool] | None,
    ) -> bool:
        """Turns until something ends the episode; True when that was not the environment, which then concludes."""
        begin = self._reset(env, context) if resume is None else self._take_up(env, context, resume)
        prompt = await self._environment(begin)
        while prompt is not None:
            reason = self._exhausted()
            if reason is not None:
                self.stop_reason = reason
                return True
            if keep is not None and self._turns_so_far() and keep(self._state(prompt, await env.snapshot())):
                self.stop_reason = StopReason.PAUSED
                return False
            message = await self._sample(policy, prompt)
            if message is None:
                return self.stop_reason is not StopReason.CANCELLED
            prompt = await self._environment(self._step(env, message))
        return self.stop_reason is StopReason.WALL_TIMEOUT

    async def _conclude(self, env: Env) -> None:
        """The answer that stands when the episode is ended from here."""
        try:
            async with asyncio.timeout(CONCLUDE_S):
                self.answer = await env.conclude(self.stop_reason)
        except Exception as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        _log.warning("environment %s failed on task %s", self.task.env, self.task.id, exc_info=error)
        self.stop_reason = StopReason.INFRA_ERROR
        kind = getattr(error, "kind", FailureKind.DIED if isinstance(error, SandboxDied) else FailureKind.RAISED)
        self.score = Failed(f"environment: {type(error).__name__}: {error}"[:500], kind)

    async def _environment(self, call: Awaitable[tuple[int, ...] | None]) -> tuple[int, ...] | None:
        """The next prompt, or None when the episode is over, also because the environment broke or took too long."""
        started = time.monotonic()
        wall = self.budgets.wall_s
        try:
            async with asyncio.timeout(None if wall is None else max(0.0, self.started + wall - started)) as limit:
                return await call
        except Exception as error:
            if limit.expired():
                self.stop_reason = StopReason.WALL_TIMEOUT
                return None
            self._broken(error)
            return None

    async def _reset(self, env: Env, context: EpisodeContext) -> tuple[int, ...]:
        return self._first_prompt(await env.reset(self.task, context))

    async def _take_up(self, env: Env, context: EpisodeContext, state: EpisodeState) -> tuple[int, ...]:
        if state.task_id != self.task.id:
            raise ValueError(f"this state is of task {state.task_id}, the episode of {self.task.id}")
        await env.restore(self.task, context, state.env)
        self.messages, self.branches, self.open = list(state.messages), list(state.branches), list(state.open)
        self.metrics, self.tokens, self.tool_calls = dict(state.metrics), state.tokens, state.tool_calls
        self.started = time.monotonic() - state.wall_s
        return state.prompt

    def _state(self, prompt: tuple[int, ...], env: bytes) -> EpisodeState:
        return EpisodeState(
            task_id=self.task.id,
            prompt=prompt,
            branches=tuple(self.branches),
            open=tuple(self.open),
            messages=tuple(self.messages),
            metrics=dict(self.metrics),
            tokens=self.tokens,
            tool_calls=self.tool_calls,
            wall_s=time.monotonic() - self.started,
            env=env,
        )

    def _turns_so_far(self) -> int:
        return sum(len(branch.turns) for branch in self.branches)

    async def _step(self, env: Env, message: Message) -> tuple[int, ...] | None:
        turn = self._branch.turns[-1]
        context_tokens = len(turn.prompt_ids) + len(turn.sampled_ids)
        context_tokens += sum(image_rows(image.width, image.height) - 1 for image in turn.images)
        started = time.monotonic()
        try:
            result = await env.step(Action(message, turn.sampled_ids, context_tokens))
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

    def _first_prompt(self, observation: Observation) -> tuple[int, ...]:
        """The prompt of a branch that begins."""
        parent = self.open[-1] if self.open else None
        if observation.branch == "new" and self.open:
            self.open.pop()
        images = encoded_images(observation.messages)
        self.open.append(len(self.branches))
        self.branches.append(BranchState(parent, (), observation.messages, images))
        self.messages += observation.messages
        segments = xtml.render(
            observation.messages,
            tools=observation.tools or None,
            thinking=self.thinking,
            thinking_effort=self.thinking_effort,
            tool_choice=observation.tool_choice,
            image_prompts=image_prompts(images),
        )
        return tuple(self.tokenizer.encode_segments(segments))

    def _next_prompt(self, observation: Observation) -> tuple[int, ...]:
        """The prompt of a branch that goes on."""
        if observation.branch == "parent":
            if len(self.open) < 2:
                raise ValueError("there is no conversation that waits for this one; the environment began no child")
            self.open.pop()
        images = encoded_images(observation.messages, self._branch.conversation)
        segments = xtml.continuation(
            self._branch.conversation,
            observation.messages,
            thinking=self.thinking,
            thinking_effort=self.thinking_effort,
            tool_choice=observation.tool_choice,
            image_prompts=image_prompts(images),
        )
        self.messages += observation.messages
        self._branch = self._branch.with_messages(observation.messages, images)
        turn = self._branch.turns[-1]
        return (*turn.prompt_ids, *turn.sampled_ids, *self.tokenizer.encode_segments(segments))

    @property
    def _branch(self) -> BranchState:
        """The branch that acts."""
        return self.branches[self.open[-1]]

    @_branch.setter
    def _branch(self, branch: BranchState) -> None:
        self.branches[self.open[-1]] = branch

    def _exhausted(self) -> StopReason | None:
        """The budget that forbids another turn."""
        budgets = self.budgets
        if budgets.turns is not None and self._turns_so_far() >= budgets.turns:
            return StopReason.MAX_TURNS
        if budgets.tokens is not None and self.tokens >= budgets.tokens:
            return StopReason.MAX_TOKENS
        if budgets.wall_s is not None and time.monotonic() - self.started >= budgets.wall_s:
            return StopReason.WALL_TIMEOUT
        return None

    async def _sample(self, policy: Policy, prompt: tuple[int, ...]) -> Message | None:
        """Sample and record one turn: its message, or None when it ends the episode."""
        left = None if self.budgets.tokens is None else self.budgets.tokens - self.tokens
        limits = [self.sampling.max_tokens, self.budgets.tokens_per_turn, left]
        seed = self.sampling.seed
        params = dataclasses.replace(
            self.sampling,
            max_tokens=min(limit for limit in limits if limit is not None),
            stop_ids=tuple(dict.fromkeys((xtml.stop_id(self.tokenizer), *self.sampling.stop_ids))),
            seed=None if seed is None else (seed * 1_000_003 + self._turns_so_far()) % 2**63,
        )
        before, images = time.monotonic(), self._branch.images
        shown = {"images": images} if images else {}
        try:
            completion = await policy.complete(prompt, params, **shown)
        except ContextOutgrown:
            if not self._turns_so_far():
                raise
            self.stop_reason = StopReason.CONTEXT_OVERFLOW
            return None
        turn = Turn(
            prompt_ids=prompt,
            sampled_ids=completion.token_ids,
            logprobs=completion.logprobs,
            stop_reason=completion.stop_reason,
            first_version=completion.first_version,
            last_version=completion.weight_version,
            routes=completion.routes,
            sampling_mask=None if completion.sampling_mask is None else SamplingMasks.of(completion.sampling_mask),
            model_s=time.monotonic() - before,
            images=images,
        )
        self._branch = self._branch.with_turn(turn)
        self.tokens += len(turn.sampled_ids)
        return self._read(turn)

    def _read(self, turn: Turn) -> Message | None:
        """The message of a turn, appended to the conversation; None when it ends the episode."""
        parsed = xtml.parse(turn.sampled_ids, self.tokenizer, thinking=self.thinking)
        if turn.stop_reason is not StopReason.STOP or isinstance(parsed, xtml.ParseError):
            self.messages.append(Message("assistant", self.tokenizer.decode(turn.sampled_ids)))
            self.stop_reason = self._cut(turn.stop_reason)
            return None
        self.messages.append(parsed)
        self._branch = self._branch.with_messages([parsed])
        self.tool_calls += len(parsed.tool_calls)
        if self.budgets.tool_calls is not None and self.tool_calls > self.budgets.tool_calls:
            self.stop_reason = StopReason.MAX_TOOL_CALLS
            return None
        return parsed

    def _cut(self, reason: StopReason) -> StopReason:
        """The episode's stop reason for a turn that is not a whole message."""
        if reason is StopReason.STOP:
            return StopReason.PARSE_ERROR
        if reason is StopReason.ABORTED:
            return StopReason.CANCELLED
        if reason is StopReason.LENGTH and self.budgets.tokens is not None and self.tokens >= self.budgets.tokens:
            return StopReason.MAX_TOKENS
        return reason

    def episode(self, episode_id: str) -> Episode:
        """The record."""
        used = {
            "turns": float(self._turns_so_far()),
            "tokens": float(self.tokens),
            "tool_calls": float(self.tool_calls),
            "wall_s": time.monotonic() - self.started,
        }
        return Episode(
            id=episode_id,
            task_id=self.task.id,
            env=self.task.env,
            family=self.task.family,
            level=self.task.level,
            branches=self._branches(episode_id),
            stop_reason=self.stop_reason,
            score=self.score,
            answer=self.answer,
            budgets_used=used,
            metrics=self.metrics,
            messages=tuple(self.messages),
        )

    def _branches(self, episode_id: str) -> tuple[Branch, ...]:
        """In the order in which they began."""
        branches = self.branches or [BranchState(None)]
        return tuple(
            Branch(
                f"{episode_id}/{number}",
                branch.turns,
                None if branch.parent is None else f"{episode_id}/{branch.parent}",
            )
            for number, branch in enumerate(branches)
        )
