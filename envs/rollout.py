"""The loop door: one policy acts once in one environment, and every token is kept exactly as it was sampled.

The first prompt is rendered; after that the prompt is what was there, the sampled ids, and the tokens of what the
environment said. Nothing is rendered or tokenized twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from k3rl.envs.base import Action, Env, EpisodeContext, Observation
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import (
    Branch,
    Budgets,
    Completion,
    Episode,
    Failed,
    Message,
    SamplingParams,
    Score,
    StopReason,
    Task,
    Turn,
)

NOT_GRADED = Failed("not graded")
_log = logging.getLogger(__name__)


class Policy(Protocol):
    """Who acts: an engine, or whatever stands for one."""

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion. An exception here is the engine's and leaves `run_episode`."""
        ...


def tighter(one: Budgets, other: Budgets) -> Budgets:
    """The smaller of each limit; None is no limit."""
    limits = {}
    for item in dataclasses.fields(Budgets):
        values = [value for value in (getattr(one, item.name), getattr(other, item.name)) if value is not None]
        limits[item.name] = min(values, default=None)
    return Budgets(**limits)


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
) -> Episode:
    """Run one episode and close the environment. The score is NOT_GRADED, or Failed when the environment broke.

    Limits are the tighter of `task.budgets` and `context.budgets`. `sampling.max_tokens` bounds each turn too;
    with a `sampling.seed` each turn derives its own. A turn that is cut or not a valid message ends the episode
    with no answer. An exception of the environment ends it with INFRA_ERROR; one of the policy is raised.
    """
    context = context or EpisodeContext(seed=task.seed)
    public = task.public()
    run = _Run(public, tokenizer, sampling, tighter(task.budgets, context.budgets), thinking, thinking_effort)
    try:
        await run.play(env, policy, context)
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
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    tool_calls: int = 0
    answer: str = ""
    stop_reason: StopReason = StopReason.INFRA_ERROR
    score: Score = NOT_GRADED

    async def play(self, env: Env, policy: Policy, context: EpisodeContext) -> None:
        """Turns until something ends the episode; fills `stop_reason`."""
        prompt = await self._environment(self._reset(env, context))
        while prompt is not None:
            reason = self._exhausted()
            if reason is not None:
                self.stop_reason = reason
                return
            message = await self._sample(policy, prompt)
            if message is None:
                return
            prompt = await self._environment(self._step(env, message))

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
            _log.warning("environment %s failed on task %s", self.task.env, self.task.id, exc_info=error)
            self.stop_reason = StopReason.INFRA_ERROR
            self.score = Failed(f"environment: {type(error).__name__}: {error}"[:500])
            return None
        finally:
            if self.turns:
                self.turns[-1] = dataclasses.replace(self.turns[-1], env_s=time.monotonic() - started)

    async def _reset(self, env: Env, context: EpisodeContext) -> tuple[int, ...]:
        return self._first_prompt(await env.reset(self.task, context))

    async def _step(self, env: Env, message: Message) -> tuple[int, ...] | None:
        turn = self.turns[-1]
        result = await env.step(Action(message, turn.sampled_ids))
        self.metrics = dict(result.metrics)
        if result.done or result.observation is None:
            self.stop_reason = result.stop_reason or StopReason.ENV_DONE
            self.answer = result.answer
            return None
        return self._next_prompt(turn, result.observation)

    def _first_prompt(self, observation: Observation) -> tuple[int, ...]:
        self.messages += observation.messages
        segments = xtml.render(
            observation.messages,
            tools=observation.tools or None,
            thinking=self.thinking,
            thinking_effort=self.thinking_effort,
            tool_choice=observation.tool_choice,
        )
        return tuple(self.tokenizer.encode_segments(segments))

    def _next_prompt(self, turn: Turn, observation: Observation) -> tuple[int, ...]:
        segments = xtml.continuation(
            self.messages,
            observation.messages,
            thinking=self.thinking,
            thinking_effort=self.thinking_effort,
            tool_choice=observation.tool_choice,
        )
        self.messages += observation.messages
        return (*turn.prompt_ids, *turn.sampled_ids, *self.tokenizer.encode_segments(segments))

    def _exhausted(self) -> StopReason | None:
        """The budget that forbids another turn."""
        budgets = self.budgets
        if budgets.turns is not None and len(self.turns) >= budgets.turns:
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
            seed=None if seed is None else (seed * 1_000_003 + len(self.turns)) % 2**63,
        )
        before = time.monotonic()
        completion = await policy.complete(prompt, params)
        turn = Turn(
            prompt_ids=prompt,
            sampled_ids=completion.token_ids,
            logprobs=completion.logprobs,
            stop_reason=completion.stop_reason,
            first_version=completion.first_version,
            last_version=completion.weight_version,
            routes=completion.routes,
            model_s=time.monotonic() - before,
        )
        self.turns.append(turn)
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
            "turns": float(len(self.turns)),
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
            branches=(Branch(f"{episode_id}/0", tuple(self.turns)),),
            stop_reason=self.stop_reason,
            score=self.score,
            answer=self.answer,
            budgets_used=used,
            metrics=self.metrics,
            messages=tuple(self.messages),
        )
