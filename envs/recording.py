"""What becomes of completions: turns, branches and an episode, exactly as they were sampled and within budgets.

Who decides what is asked next records here: an environment (`rollout`) or a program (`gateway/session`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from k3rl.envs.episode_state import BranchState, EpisodeState
from k3rl.packed import Packed, SamplingMasks
from k3rl.tokens import Tokenizer, chat_format, encoded_images, image_prompts, image_rows
from k3rl.types import (
    Branch,
    Budgets,
    Completion,
    EncodedImage,
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
Rendered: TypeAlias = tuple[Sequence[int], tuple[EncodedImage, ...]]  # ids, and an image for each placeholder


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


class PromptCache:
    """The newest conversations that began, rendered: the episodes of a group begin with one."""

    def __init__(self, size: int = 64) -> None:
        self._size = size
        self._known: OrderedDict[str, Rendered] = OrderedDict()

    def get(self, key: str, render: Callable[[], Rendered]) -> Rendered:
        """What `render` gave for this key."""
        if key not in self._known:
            self._known[key] = render()
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """How the turns of a policy are rendered, sampled and read.

    sampling holds for every turn, `max_tokens` as an upper bound; with a `sampling.seed` each turn derives its own.
    thinking: assistant turns have a think channel; thinking_effort: low, high or max. prompts: those that other
    episodes of this tokenizer began with.
    """

    tokenizer: Tokenizer
    sampling: SamplingParams
    thinking: bool = False
    thinking_effort: str | None = None
    prompts: PromptCache | None = None

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = (), tool_choice: str | None = None
    ) -> Rendered:
        """A conversation that begins, through the generation prefix. Raises ChatError, TokenizerError or ImageError."""
        if self.prompts is None:
            return self._prompt(messages, tools, tool_choice)
        key = repr((messages, tools, tool_choice, self.thinking, self.thinking_effort))
        return self.prompts.get(key, lambda: self._prompt(messages, tools, tool_choice))

    def _prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], tool_choice: str | None
    ) -> Rendered:
        images = encoded_images(messages)
        segments = chat_format(self.tokenizer).render(
            messages,
            tools=tools or None,
            thinking=self.thinking,
            thinking_effort=self.thinking_effort,
            tool_choice=tool_choice,
            image_prompts=image_prompts(images),
        )
        return tuple(self.tokenizer.encode_segments(segments)), images

    def continuation(
        self, history: Sequence[Message], messages: Sequence[Message], tool_choice: str | None = None
    ) -> Rendered:
        """What `messages` add after the assistant turn that ends `history`, through the generation prefix.

        Raises as `prompt` does.
        """
        images = encoded_images(messages, history)
        segments = chat_format(self.tokenizer).continuation(
            history,
            messages,
            thinking=self.thinking,
            thinking_effort=self.thinking_effort,
            tool_choice=tool_choice,
            image_prompts=image_prompts(images),
        )
        return tuple(self.tokenizer.encode_segments(segments)), images

    def params(self, number: int, max_tokens: int) -> SamplingParams:
        """The sampling parameters of an episode's turn, counted from 0."""
        seed = self.sampling.seed
        return dataclasses.replace(
            self.sampling,
            max_tokens=max_tokens,
            stop_ids=tuple(dict.fromkeys((chat_format(self.tokenizer).stop_id, *self.sampling.stop_ids))),
            seed=None if seed is None else (seed * 1_000_003 + number) % 2**63,
        )

    def message(self, turn: Turn) -> Message | None:
        """The message of a turn; None for one that was cut or is not valid."""
        parsed = chat_format(self.tokenizer).parse(turn.sampled_ids, thinking=self.thinking)
        return parsed if turn.stop_reason is StopReason.STOP and isinstance(parsed, Message) else None


def prompt_rows(turn: Turn) -> int:
    """Rows of the model that a turn's prompt takes: a token is one, an image as many as its size gives."""
    return len(turn.prompt_ids) + sum(image_rows(image.width, image.height) - 1 for image in turn.images)


def _own_routes(turn: Turn, before: Sequence[Turn]) -> Turn:
    """A turn with the routes of those rows that its branch had not computed before, and no hold on the others."""
    if turn.routes is None or not before:
        return turn
    known = prompt_rows(before[-1]) + len(before[-1].sampled_ids) - 1
    return dataclasses.replace(turn, routes=turn.routes[known:].copy())


class EpisodeRecorder:
    """One episode as it grows, and what it has spent of its budgets.

    branches: in the order in which they began. messages: all that was said, for readers. turns_begun counts those
    under way and those that gave no tokens, too; tokens and tool_calls are of the recorded ones.
    """

    def __init__(self, task: Task, settings: TurnSettings, budgets: Budgets) -> None:
        self.task, self.settings, self.budgets = task.public(), settings, budgets
        self.started = time.monotonic()
        self.branches: list[BranchState] = []
        self.messages: list[Message] = []
        self.turns_begun = self.tokens = self.tool_calls = 0

    @property
    def turns(self) -> int:
        """The number of recorded turns."""
        return sum(len(branch.turns) for branch in self.branches)

    @property
    def wall_s(self) -> float:
        """Seconds since the episode began."""
        return time.monotonic() - self.started

    def begin_branch(
        self, parent: int | None, messages: Sequence[Message] = (), images: Sequence[EncodedImage] = ()
    ) -> int:
        """The number of a branch that begins, with what its first prompt says and shows."""
        self.branches.append(BranchState(parent, (), tuple(messages), tuple(images)))
        return len(self.branches) - 1

    def exhausted(self) -> StopReason | None:
        """The budget that forbids another turn."""
        budgets = self.budgets
        if budgets.turns is not None and self.turns_begun >= budgets.turns:
            return StopReason.MAX_TURNS
        if budgets.tokens is not None and self.tokens >= budgets.tokens:
            return StopReason.MAX_TOKENS
        if self._too_many_calls():
            return StopReason.MAX_TOOL_CALLS
        if budgets.wall_s is not None and self.wall_s >= budgets.wall_s:
            return StopReason.WALL_TIMEOUT
        return None

    def turn_limit(self, *others: int | None) -> int:
        """Tokens that one turn may sample, apart from what is left for the whole episode. others: further limits."""
        limits = (self.settings.sampling.max_tokens, self.budgets.tokens_per_turn, *others)
        return min(limit for limit in limits if limit is not None)

    async def sample(
        self, policy: Policy, prompt: Sequence[int], images: tuple[EncodedImage, ...], max_tokens: int
    ) -> tuple[Turn, Completion]:
        """One more turn, as `record` takes it: with routes of its whole prompt. Raises what the policy raises."""
        prompt = Packed.of(prompt, np.int32)
        params = self.settings.params(self.turns_begun, max_tokens)
        self.turns_begun += 1
        began = time.monotonic()
        shown = {"images": images} if images else {}
        completion = await policy.complete(prompt, params, **shown)
        ids = prompt.extended(completion.token_ids)
        turn = Turn(
            prompt_ids=ids[: len(prompt)],
            sampled_ids=ids[len(prompt) :],
            logprobs=Packed.of(completion.logprobs, np.float32),
            stop_reason=completion.stop_reason,
            first_version=completion.first_version,
            last_version=completion.weight_version,
            routes=completion.routes,
            sampling_mask=None if completion.sampling_mask is None else SamplingMasks.of(completion.sampling_mask),
            model_s=time.monotonic() - began,
            images=images,
        )
        return turn, completion

    def record(self, branch: int, turn: Turn, said: Message, *, whole: bool) -> StopReason | None:
        """Adds a turn to a branch; the reason why the episode ends with it, if it does.

        said: its message. whole: the message is what the policy sampled, not the text of a turn that was cut.
        """
        self.branches[branch] = self.branches[branch].with_turn(_own_routes(turn, self.branches[branch].turns))
        self.messages.append(said)
        self.tokens += len(turn.sampled_ids)
        self.tool_calls += len(said.tool_calls)
        if not whole:
            return self._reason_of_cut(turn.stop_reason)
        return StopReason.MAX_TOOL_CALLS if self._too_many_calls() else None

    def _too_many_calls(self) -> bool:
        return self.budgets.tool_calls is not None and self.tool_calls > self.budgets.tool_calls

    def _reason_of_cut(self, reason: StopReason) -> StopReason:
        """The episode's stop reason for a turn that is not a whole message."""
        if reason is StopReason.STOP:
            return StopReason.PARSE_ERROR
        if reason is StopReason.ABORTED:
            return StopReason.CANCELLED
        if reason is StopReason.LENGTH and self.budgets.tokens is not None and self.tokens >= self.budgets.tokens:
            return StopReason.MAX_TOKENS
        return reason

    def state(
        self, prompt: Sequence[int], going_on: Sequence[int], metrics: Mapping[str, float], env: bytes
    ) -> EpisodeState:
        """Where the episode stands before the turn of `prompt`. going_on: `EpisodeState.open`; env: its snapshot."""
        return EpisodeState(
            task_id=self.task.id,
            prompt=Packed.of(prompt, np.int32),
            branches=tuple(self.branches),
            open=tuple(going_on),
            messages=tuple(self.messages),
            metrics=dict(metrics),
            tokens=self.tokens,
            tool_calls=self.tool_calls,
            wall_s=self.wall_s,
            env=env,
        )

    def resume(self, state: EpisodeState) -> None:
        """Goes on from a state of the same task."""
        self.messages, self.branches = list(state.messages), list(state.branches)
        self.tokens, self.tool_calls = state.tokens, state.tool_calls
        self.turns_begun = self.turns
        self.started = time.monotonic() - state.wall_s

    def episode(
        self,
        episode_id: str,
        stop_reason: StopReason,
        *,
        answer: str = "",
        score: Score = NOT_GRADED,
        metrics: Mapping[str, float] | None = None,
    ) -> Episode:
        """The record. A branch in which nothing was said or sampled is not in it."""
        used = {
            "turns": float(self.turns),
            "tokens": float(self.tokens),
            "tool_calls": float(self.tool_calls),
            "wall_s": self.wall_s,
        }
        branches = tuple(
            Branch(
                f"{episode_id}/{number}",
                branch.turns,
                None if branch.parent is None else f"{episode_id}/{branch.parent}",
            )
            for number, branch in enumerate(self.branches)
            if branch.turns or branch.conversation
        )
        return Episode(
            id=episode_id,
            task_id=self.task.id,
            env=self.task.env,
            family=self.task.family,
            level=self.task.level,
            branches=branches or (Branch(f"{episode_id}/0", ()),),
            stop_reason=stop_reason,
            score=score,
            answer=answer,
            budgets_used=used,
            metrics=dict(metrics or {}),
            messages=tuple(self.messages),
        )
