"""One episode behind an endpoint: conversations that a program sends become branches of exactly sampled tokens.

A program sends its whole conversation with every request. What it echoes of earlier answers is recognised and stands
for the ids that were sampled, so nothing that was sampled is tokenized again:

- a conversation that extends the newest turn of a branch extends that branch, token for token;
- one that extends an older turn (parallel calls, another try) begins a branch whose first prompt is that turn's tokens;
- any other one (a sub-agent, a shortened history) is rendered, with the recorded ids in the place of what was echoed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from k3rl.envs.rollout import NOT_GRADED, ContextOutgrown, Policy
from k3rl.tokens import Tokenizer, xtml
from k3rl.tokens.images import encoded_images, image_prompts
from k3rl.types import (
    Branch,
    Budgets,
    Completion,
    EncodedImage,
    Episode,
    Message,
    SamplingMasks,
    SamplingParams,
    Score,
    StopReason,
    Task,
    Turn,
)

CONTEXT_EXCEEDED = "context_length_exceeded"  # the code of a conversation that outgrew the policy's context


class Refused(Exception):
    """A request that gets no tokens. status: of HTTP; code: a word for programs."""

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Request:
    """What a program asks: the conversation, and what stands at its head and its end.

    max_tokens: of this answer, None for the session's. A field that sampling depends on is the session's alone.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | None = None
    max_tokens: int | None = None


@dataclass(slots=True)
class _Recorded:
    """A turn of a branch and the conversation through it. whole: whether the turn is a valid message."""

    branch: int
    turn: Turn
    head: str
    history: tuple[Message, ...]  # before the turn
    message: Message  # as the program sees it
    whole: bool

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.turn.prompt_ids, *self.turn.sampled_ids)


@dataclass(slots=True)
class _Branch:
    parent: int | None
    turns: list[_Recorded] = field(default_factory=list)
    busy: bool = False  # its next turn is being sampled


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request goes: its prompt, and the branch that it extends or the one that it leaves."""

    prompt: tuple[int, ...]
    images: tuple[EncodedImage, ...]
    extends: int | None
    parent: int | None


_Rendered: TypeAlias = tuple[list[int], tuple[EncodedImage, ...]]  # ids, and images in the order of their placeholders


class GatewaySession:
    """One program's episode. `complete` per request, `close` when the program has ended, `episode` for the record.

    sampling bounds every turn and is the same for all of them; with a `sampling.seed` each turn derives its own, in
    the order in which requests come. A budget that is used up refuses every further request (403), a closed session
    too (410).
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        tokenizer: Tokenizer,
        *,
        sampling: SamplingParams,
        budgets: Budgets | None = None,
        thinking: bool = False,
        thinking_effort: str | None = None,
    ) -> None:
        self.task = task.public()
        self.tokenizer = tokenizer
        self.thinking = thinking
        self._effort = thinking_effort
        self._policy = policy
        self._sampling = sampling
        self._budgets = budgets if budgets is not None else task.budgets
        self._branches: list[_Branch] = []
        self._last: int | None = None  # branch of the newest turn
        self._messages: list[Message] = []
        self._started = time.monotonic()
        self._turns = self._tokens = self._reserved = self._tool_calls = 0
        self._changed = asyncio.Condition()
        self.stop_reason: StopReason | None = None
        self.closed = False
        self.engine_error: str | None = None
        self._outgrown: str | None = None  # what the policy said of the first conversation that did not fit

    # -------------------------------------------------------------------------------------------------- a request

    async def complete(self, request: Request) -> tuple[Message, Turn]:
        """The message as the program sees it, and the turn. A turn that is cut or malformed is its plain text.

        Raises Refused, XTMLError or ImageError for a conversation that has no form, and whatever the policy raises.
        """
        self._check_open()
        limit = await self._reserve(request)
        try:
            place = self._place(request)
            number = self._turns
            self._turns += 1
            branch = self._enter(place)
            try:
                turn = await self._sample(place, limit, number)
            except ContextOutgrown as error:
                self._branches[branch].busy = False
                self.stop_reason = StopReason.CONTEXT_OVERFLOW
                self._outgrown = self._outgrown or str(error)
                raise Refused(str(error), 400, CONTEXT_EXCEEDED) from error
            except BaseException:
                self._branches[branch].busy = False
                raise
        finally:
            await self._release(limit)
        return self._record(request, branch, turn)

    async def _sample(self, place: _Place, limit: int, number: int) -> Turn:
        seed = self._sampling.seed
        params = dataclasses.replace(
            self._sampling,
            max_tokens=limit,
            stop_ids=tuple(dict.fromkeys((xtml.stop_id(self.tokenizer), *self._sampling.stop_ids))),
            seed=None if seed is None else (seed * 1_000_003 + number) % 2**63,
        )
        began = time.monotonic()
        shown = {"images": place.images} if place.images else {}
        completion: Completion = await self._policy.complete(place.prompt, params, **shown)
        return Turn(
            prompt_ids=place.prompt,
            sampled_ids=completion.token_ids,
            logprobs=completion.logprobs,
            stop_reason=completion.stop_reason,
            first_version=completion.first_version,
            last_version=completion.weight_version,
            routes=completion.routes,
            sampling_mask=None if completion.sampling_mask is None else SamplingMasks.of(completion.sampling_mask),
            model_s=time.monotonic() - began,
            images=place.images,
        )

    def _record(self, request: Request, number: int, turn: Turn) -> tuple[Message, Turn]:
        """Keep a turn; its message with ids for its calls."""
        parsed = xtml.parse(turn.sampled_ids, self.tokenizer, thinking=self.thinking)
        whole = turn.stop_reason is StopReason.STOP and isinstance(parsed, Message)
        message = Message("assistant", self.tokenizer.decode(turn.sampled_ids, skip_special=True))
        if whole and isinstance(parsed, Message):
            calls = tuple(
                dataclasses.replace(call, id=f"call_{self._recorded()}_{place}")
                for place, call in enumerate(parsed.tool_calls)
            )
            message = dataclasses.replace(parsed, tool_calls=calls)
        branch = self._branches[number]
        known = len(branch.turns[-1].history) + 1 if branch.turns else 0
        branch.turns.append(_Recorded(number, turn, self._head(request), request.messages, message, whole))
        branch.busy = False
        self._last = number
        self._tokens += len(turn.sampled_ids)
        self._messages += [*request.messages[known:], message]
        self._tool_calls += len(message.tool_calls)
        if not whole:
            self.stop_reason = self._cut(turn.stop_reason)
        elif self._budgets.tool_calls is not None and self._tool_calls > self._budgets.tool_calls:
            self.stop_reason = StopReason.MAX_TOOL_CALLS
        else:
            self.stop_reason = None
        return message, turn

    def _recorded(self) -> int:
        return sum(len(branch.turns) for branch in self._branches)

    def _cut(self, reason: StopReason) -> StopReason:
        """The stop reason of an episode whose last turn is no whole message."""
        if reason is StopReason.STOP:
            return StopReason.PARSE_ERROR
        if reason is StopReason.ABORTED:
            return StopReason.CANCELLED
        if reason is StopReason.LENGTH and self._budgets.tokens is not None and self._tokens >= self._budgets.tokens:
            return StopReason.MAX_TOKENS
        return reason

    # ------------------------------------------------------------------------------------------- which branch

    def _head(self, request: Request) -> str:
        """What is rendered before the conversation; a branch has one."""
        return json.dumps([dict(tool) for tool in request.tools], sort_keys=True)

    def _place(self, request: Request) -> _Place:
        head = self._head(request)
        known = [
            recorded
            for branch in self._branches
            for recorded in branch.turns
            if recorded.head == head and _extends(request.messages, recorded)
        ]
        if not known:
            ids, images = self._rendered(request)
            return _Place(tuple(ids), images, None, self._last)
        longest = max(len(recorded.history) for recorded in known)
        best = max((one for one in known if len(one.history) == longest), key=self._is_leaf)
        ids, images = self._after(request, longest, self._whole(best))
        extends = best.branch if self._is_leaf(best) else None
        return _Place((*best.ids, *ids), best.turn.images + images, extends, best.branch)

    def _is_leaf(self, recorded: _Recorded) -> bool:
        branch = self._branches[recorded.branch]
        return branch.turns[-1] is recorded and not branch.busy

    @staticmethod
    def _whole(recorded: _Recorded) -> Message:
        """Its message, which something may follow."""
        if not recorded.whole:
            raise Refused("an assistant message of this conversation was cut; nothing can follow it", 400, "turn_cut")
        return recorded.message

    def _enter(self, place: _Place) -> int:
        """The number of the branch that takes the turn, marked busy."""
        number = place.extends
        if number is None:
            number = len(self._branches)
            self._branches.append(_Branch(place.parent))
        self._branches[number].busy = True
        return number

    def _after(self, request: Request, said_at: int, said: Message) -> _Rendered:
        """What follows the assistant message at `said_at`, through the generation prefix."""
        messages = request.messages
        following = said_at + 1
        ids: list[int] = []
        images: tuple[EncodedImage, ...] = ()
        for place in range(following, len(messages)):
            if messages[place].role == "assistant":
                between, shown = self._continued(said, messages[following:place], None)
                own, said = self._spoken(messages[place])
                ids, images = [*ids, *between, *own], images + shown
                following = place + 1
        last, shown = self._continued(said, messages[following:], request.tool_choice)
        return ids + last, images + shown

    def _continued(self, said: Message, new: Sequence[Message], tool_choice: str | None) -> _Rendered:
        images = encoded_images(new, [said])
        segments = xtml.continuation(
            [said],
            new,
            thinking=self.thinking,
            thinking_effort=self._effort,
            tool_choice=tool_choice,
            image_prompts=image_prompts(images),
        )
        return self.tokenizer.encode_segments(segments), images

    def _rendered(self, request: Request) -> _Rendered:
        """The prompt of a conversation that extends none; what was sampled in it keeps its ids."""
        messages = request.messages
        first = next((n for n, message in enumerate(messages) if message.role == "assistant"), len(messages))
        images = encoded_images(messages[:first])
        segments = xtml.render(
            messages[:first],
            tools=request.tools or None,
            thinking=self.thinking,
            thinking_effort=self._effort,
            tool_choice=request.tool_choice if first == len(messages) else None,
            image_prompts=image_prompts(images),
        )
        ids = self.tokenizer.encode_segments(segments)
        if first == len(messages):
            return ids, images
        own, said = self._spoken(messages[first])
        after, shown = self._after(request, first, said)
        return [*ids, *own, *after], images + shown

    def _spoken(self, message: Message) -> tuple[tuple[int, ...], Message]:
        """(ids after the generation prefix, the message) of an assistant message in a rendered conversation.

        They are those of the newest turn that said it, else what a policy would sample for it.
        """
        for branch in reversed(self._branches):
            for recorded in reversed(branch.turns):
                if _same_assistant(message, recorded.message):
                    return recorded.turn.sampled_ids, self._whole(recorded)
        prompt = xtml.render([], thinking=self.thinking)
        whole = xtml.render(
            [dataclasses.replace(message, name=None)], thinking=self.thinking, add_generation_prompt=False
        )
        return tuple(self.tokenizer.encode_segments(whole[len(prompt) :])), message

    # --------------------------------------------------------------------------------------------- budgets, ends

    def _check_open(self) -> None:
        if self.closed:
            raise Refused("this session is closed: its program has ended", 410, "session_closed")
        reason = self._exhausted()
        if reason is not None:
            self.stop_reason = reason
            raise Refused(f"the budget of this episode is used up ({reason})", 403, "budget_exhausted")

    def _exhausted(self) -> StopReason | None:
        budgets = self._budgets
        if budgets.turns is not None and self._turns >= budgets.turns:
            return StopReason.MAX_TURNS
        if budgets.tokens is not None and self._tokens >= budgets.tokens:
            return StopReason.MAX_TOKENS
        if budgets.tool_calls is not None and self._tool_calls > budgets.tool_calls:
            return StopReason.MAX_TOOL_CALLS
        if budgets.wall_s is not None and time.monotonic() - self._started >= budgets.wall_s:
            return StopReason.WALL_TIMEOUT
        return None

    async def _reserve(self, request: Request) -> int:
        """Tokens that this turn may sample; waits while turns under way hold what is left of the budget."""
        limits = [self._sampling.max_tokens, self._budgets.tokens_per_turn, request.max_tokens]
        wanted = min(limit for limit in limits if limit is not None)
        if self._budgets.tokens is None:
            return wanted
        async with self._changed:
            while (left := self._budgets.tokens - self._tokens - self._reserved) < wanted and self._reserved:
                await self._changed.wait()
                self._check_open()
            limit = min(wanted, left)
            self._reserved += limit
        return limit

    async def _release(self, limit: int) -> None:
        if self._budgets.tokens is None:
            return
        async with self._changed:
            self._reserved -= limit
            self._changed.notify_all()

    @property
    def never_fitted(self) -> str | None:
        """What the policy said when conversations exceeded its context and no turn was sampled at all."""
        return None if self._recorded() else self._outgrown

    def close(self) -> None:
        """Refuse what still comes."""
        self.closed = True

    def episode(
        self,
        episode_id: str,
        stop_reason: StopReason,
        *,
        answer: str = "",
        score: Score = NOT_GRADED,
        metrics: Mapping[str, float] | None = None,
    ) -> Episode:
        """The record; `stop_reason` where the session itself knows none."""
        used = {
            "turns": float(self._recorded()),
            "tokens": float(self._tokens),
            "tool_calls": float(self._tool_calls),
            "wall_s": time.monotonic() - self._started,
        }
        kept = [(number, branch) for number, branch in enumerate(self._branches) if branch.turns]
        branches = tuple(
            Branch(
                f"{episode_id}/{number}",
                tuple(recorded.turn for recorded in branch.turns),
                None if branch.parent is None else f"{episode_id}/{branch.parent}",
            )
            for number, branch in kept
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
            messages=tuple(self._messages),
        )


def _extends(messages: Sequence[Message], recorded: _Recorded) -> bool:
    """Whether a conversation begins with the one through this turn."""
    size = len(recorded.history)
    if len(messages) <= size + 1 or messages[size].role != "assistant":
        return False
    return _same_assistant(messages[size], recorded.message) and all(
        _same(one, other) for one, other in zip(messages[:size], recorded.history, strict=True)
    )


def _same(one: Message, other: Message) -> bool:
    if one.role == other.role == "assistant":
        return _same_assistant(one, other)
    same_name = one.role == "tool" or one.name == other.name  # the name of a tool result follows from its call
    same_call = one.tool_call_id == other.tool_call_id
    return one.role == other.role and one.content == other.content and same_name and same_call


def _same_assistant(echoed: Message, said: Message) -> bool:
    """Whether a program's echo is this message. Programs drop the reasoning, and null may stand for empty text."""
    if (echoed.content or "") != (said.content or ""):
        return False
    if echoed.reasoning is not None and (echoed.reasoning or None) != said.reasoning:
        return False
    if len(echoed.tool_calls) != len(said.tool_calls):
        return False
    return all(
        one.name == other.name and _plain(one.arguments) == _plain(other.arguments) and one.id in (None, other.id)
        for one, other in zip(echoed.tool_calls, said.tool_calls, strict=True)
    )


def _plain(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True)
