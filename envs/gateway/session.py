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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3rl.envs.recording import NOT_GRADED, ContextOutgrown, EpisodeRecorder, Policy, Rendered, TurnSettings
from k3rl.packed import Packed
from k3rl.tokens import chat_format
from k3rl.tokens.openai import RequestError
from k3rl.types import Budgets, EncodedImage, Episode, Message, Score, StopReason, Task, Turn

CONTEXT_EXCEEDED = "context_length_exceeded"  # the code of a conversation that outgrew the policy's context


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a program asks: the conversation, and what stands at its head and its end.

    max_tokens: of this answer, None for the session's. A field that sampling depends on is the session's alone.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | None = None
    max_tokens: int | None = None

    @property
    def head(self) -> str:
        """What is rendered before the conversation; a branch has one."""
        return json.dumps([dict(tool) for tool in self.tools], sort_keys=True)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a program gets. message: of the turn, as the program sees it; cached_tokens: of its prompt."""

    message: Message
    turn: Turn
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A recorded turn of a branch and the conversation through it. whole: whether the turn is a valid message."""

    branch: int
    turn: Turn
    head: str
    history: tuple[Message, ...]  # before the turn
    message: Message  # as the program sees it
    whole: bool

    @property
    def ids(self) -> Packed:
        return self.turn.ids


@dataclass(slots=True)
class _Branch:
    """What the recorder's branch of the same number has heard."""

    exchanges: list[_Exchange] = field(default_factory=list)
    busy: bool = False  # its next turn is being sampled


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where a request goes: its prompt, and the branch that it extends or the one that it leaves."""

    prompt: Sequence[int]
    images: tuple[EncodedImage, ...]
    extends: int | None
    parent: int | None


class GatewaySession:
    """One program's episode. `complete` per request, `close` when the program has ended, `episode` for the record.

    Turns are numbered in the order in which requests come. A budget that is used up refuses every further request
    (403), a closed session too (410).
    """

    def __init__(self, task: Task, policy: Policy, settings: TurnSettings, *, budgets: Budgets | None = None) -> None:
        self._settings = settings
        self._policy = policy
        self._recorder = EpisodeRecorder(task, settings, budgets if budgets is not None else task.budgets)
        self._branches: list[_Branch] = []
        self._last: int | None = None  # branch of the newest turn
        self._reserved = 0  # tokens that turns under way may sample
        self._changed = asyncio.Condition()
        self.stop_reason: StopReason | None = None
        self.closed = False
        self.engine_error: str | None = None
        self._outgrown: str | None = None  # what the policy said of the first conversation that did not fit

    # -------------------------------------------------------------------------------------------------- a request

    async def complete(self, request: TurnRequest) -> Reply:
        """The next turn of a conversation. One that is cut or malformed is its plain text.

        Raises RequestError, ChatError, TokenizerError or ImageError for a conversation that has no form, and whatever
        the policy raises.
        """
        self._check_open()
        limit = await self._reserve(request)
        try:
            destination = self._destination(request)
            number = self._enter(destination)
            try:
                turn, completion = await self._recorder.sample(
                    self._policy, destination.prompt, destination.images, limit
                )
            except ContextOutgrown as error:
                self._branches[number].busy = False
                self.stop_reason = StopReason.CONTEXT_OVERFLOW
                self._outgrown = self._outgrown or str(error)
                raise RequestError(str(error), code=CONTEXT_EXCEEDED) from error
            except BaseException:
                self._branches[number].busy = False
                raise
        finally:
            await self._release(limit)
        return Reply(self._record(request, number, turn), turn, completion.cached_tokens)

    def _record(self, request: TurnRequest, number: int, turn: Turn) -> Message:
        """Keep a turn; its message with ids for its calls."""
        parsed = self._settings.message(turn)
        if parsed is None:
            message = Message("assistant", self._settings.tokenizer.decode(turn.sampled_ids, skip_special=True))
        else:
            calls = tuple(
                call if call.id is not None else dataclasses.replace(call, id=f"call_{self._recorder.turns}_{place}")
                for place, call in enumerate(parsed.tool_calls)
            )
            message = dataclasses.replace(parsed, tool_calls=calls)
        exchanges = self._branches[number].exchanges
        known = len(exchanges[-1].history) + 1 if exchanges else 0
        exchanges.append(_Exchange(number, turn, request.head, request.messages, message, parsed is not None))
        self._last = number
        self._recorder.messages += request.messages[known:]
        self.stop_reason = self._recorder.record(number, turn, message, whole=parsed is not None)
        self._branches[number].busy = False
        return message

    # ------------------------------------------------------------------------------------------- which branch

    def _destination(self, request: TurnRequest) -> _Destination:
        known = [
            exchange
            for branch in self._branches
            for exchange in branch.exchanges
            if exchange.head == request.head and _extends(request.messages, exchange)
        ]
        if not known:
            ids, images = self._rendered(request)
            return _Destination(ids, images, None, self._last)
        longest = max(len(exchange.history) for exchange in known)
        best = max((one for one in known if len(one.history) == longest), key=self._is_leaf)
        ids, images = self._after(request, longest, self._whole(best))
        extends = best.branch if self._is_leaf(best) else None
        return _Destination(best.ids.extended(ids), best.turn.images + images, extends, best.branch)

    def _is_leaf(self, exchange: _Exchange) -> bool:
        branch = self._branches[exchange.branch]
        return branch.exchanges[-1] is exchange and not branch.busy

    @staticmethod
    def _whole(exchange: _Exchange) -> Message:
        """Its message, which something may follow."""
        if not exchange.whole:
            raise RequestError(
                "an assistant message of this conversation was cut; nothing can follow it", code="turn_cut"
            )
        return exchange.message

    def _enter(self, destination: _Destination) -> int:
        """The number of the branch that takes the turn, marked busy."""
        number = destination.extends
        if number is None:
            number = self._recorder.begin_branch(destination.parent)
            self._branches.append(_Branch())
        self._branches[number].busy = True
        return number

    def _after(self, request: TurnRequest, said_at: int, said: Message) -> Rendered:
        """What follows the assistant message at `said_at`, through the generation prefix."""
        messages = request.messages
        following = said_at + 1
        ids: tuple[int, ...] = ()
        images: tuple[EncodedImage, ...] = ()
        for place in range(following, len(messages)):
            if messages[place].role == "assistant":
                between, shown = self._settings.continuation([said], messages[following:place])
                own, said = self._sampled(messages[place])
                ids, images = (*ids, *between, *own), images + shown
                following = place + 1
        last, shown = self._settings.continuation([said], messages[following:], request.tool_choice)
        return (*ids, *last), images + shown

    def _rendered(self, request: TurnRequest) -> Rendered:
        """The prompt of a conversation that extends none; what was sampled in it keeps its ids."""
        messages = request.messages
        first = next((n for n, message in enumerate(messages) if message.role == "assistant"), len(messages))
        choice = request.tool_choice if first == len(messages) else None
        ids, images = self._settings.prompt(messages[:first], request.tools, choice)
        if first == len(messages):
            return ids, images
        own, said = self._sampled(messages[first])
        after, shown = self._after(request, first, said)
        return (*ids, *own, *after), images + shown

    def _sampled(self, message: Message) -> tuple[Sequence[int], Message]:
        """(ids after the generation prefix, the message) of an assistant message in a rendered conversation.

        They are those of the newest turn that said it, else what a policy would sample for it.
        """
        for branch in reversed(self._branches):
            for exchange in reversed(branch.exchanges):
                if _same_assistant(message, exchange.message):
                    return exchange.turn.sampled_ids, self._whole(exchange)
        tokenizer = self._settings.tokenizer
        own = chat_format(tokenizer).sampled(message, thinking=self._settings.thinking)
        return tuple(tokenizer.encode_segments(own)), message

    # --------------------------------------------------------------------------------------------- budgets, ends

    def _check_open(self) -> None:
        if self.closed:
            raise RequestError("this session is closed: its program has ended", status=410, code="session_closed")
        reason = self._recorder.exhausted()
        if reason is not None:
            self.stop_reason = reason
            message = f"the budget of this episode is used up ({reason})"
            raise RequestError(message, status=403, code="budget_exhausted")

    async def _reserve(self, request: TurnRequest) -> int:
        """Tokens that this turn may sample; waits while turns under way hold what is left of the budget."""
        wanted = self._recorder.turn_limit(request.max_tokens)
        budget = self._recorder.budgets.tokens
        if budget is None:
            return wanted
        async with self._changed:
            while (left := budget - self._recorder.tokens - self._reserved) < wanted and self._reserved:
                await self._changed.wait()
                self._check_open()
            limit = min(wanted, left)
            self._reserved += limit
        return limit

    async def _release(self, limit: int) -> None:
        if self._recorder.budgets.tokens is None:
            return
        async with self._changed:
            self._reserved -= limit
            self._changed.notify_all()

    @property
    def acted(self) -> bool:
        """Whether the policy has said anything that the program may have heard."""
        return bool(self._recorder.turns)

    @property
    def never_fitted(self) -> str | None:
        """What the policy said when conversations exceeded its context and no turn was sampled at all."""
        return None if self._recorder.turns else self._outgrown

    def close(self) -> None:
        """Refuse what still comes."""
        self.closed = True

    def episode(
        self, episode_id: str, stop_reason: StopReason, *, answer: str = "", score: Score = NOT_GRADED
    ) -> Episode:
        """The record, with this stop reason."""
        return self._recorder.episode(episode_id, stop_reason, answer=answer, score=score)


def _extends(messages: Sequence[Message], exchange: _Exchange) -> bool:
    """Whether a conversation begins with the one through this turn."""
    size = len(exchange.history)
    if len(messages) <= size + 1 or messages[size].role != "assistant":
        return False
    return _same_assistant(messages[size], exchange.message) and all(
        _same(one, other) for one, other in zip(messages[:size], exchange.history, strict=True)
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
