"""All rows of a file of chat data looked at before anything is started: what is wrong, and what there is.

A row without problems can be trained as it stands: it encodes, its turns come in an order that a policy meets, its
tool results answer its calls, and it fits. What the rows are together is summed up in a `DataReport`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from k3rl.data.chat_files import DatasetError, raw_rows
from k3rl.data.chat_forms import ChatExample, Messages, example_of
from k3rl.data.images import rows_per_token
from k3rl.data.sft import chat_sequence
from k3rl.tokens import ImageError, Tokenizer, TokenizerError, xtml

Thinking: TypeAlias = Literal["auto", "on", "off"]
MAX_PROBLEMS = 10_000  # kept of one file; a file of that many is another kind of file
_THINK_TAG = "<think>"


@dataclass(frozen=True, slots=True)
class Problem:
    """What keeps a row from being trained. row: from 0, None for the whole file; key: of row or message, or ""."""

    row: int | None
    key: str
    why: str


@dataclass
class DataReport:
    """What a file of chat data holds. Tokens and lengths are of rows without problems; an image counts all its rows.

    forms: rows of each form; columns: rows that have each column beside the conversation; lengths: tokens of each row.
    """

    rows: int = 0
    turns: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    reasoning_turns: int = 0
    tool_calls: int = 0
    untrained_answers: int = 0
    empty_answers: int = 0
    tagged_answers: int = 0
    problems: list[Problem] = field(default_factory=list)
    forms: Counter[str] = field(default_factory=Counter)
    columns: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 without any."""
        return max(self.lengths, default=0)

    @property
    def masked_share(self) -> float:
        """Share of the tokens that carry no loss; 0 without any token."""
        return 1 - self.trained_tokens / self.tokens if self.tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        counts = (
            "rows",
            "turns",
            "tokens",
            "trained_tokens",
            "masked_share",
            "reasoning_turns",
            "tool_calls",
            "longest",
        )
        more = ("untrained_answers", "empty_answers", "tagged_answers")
        problems = [{"row": problem.row, "key": problem.key, "why": problem.why} for problem in self.problems]
        return {
            **{name: getattr(self, name) for name in (*counts, *more)},
            "median": int(np.median(self.lengths)) if self.lengths else 0,
            "forms": dict(self.forms),
            "columns": dict(self.columns),
            "problems": problems,
        }

    def lines(self) -> list[str]:
        """The report for a reader, without the problems."""
        what = ", ".join(f"{n:,} as {form}" for form, n in self.forms.items())
        found = [
            f"{self.rows:,} rows ({what or 'none can be read'}), {self.turns:,} turns",
            f"{self.tokens:,} tokens, {self.trained_tokens:,} trained ({self.masked_share:.1%} carry no loss)",
        ]
        if self.lengths:
            found.append(f"tokens of a row: median {int(np.median(self.lengths)):,}, longest {self.longest:,}")
        found.append(f"{self.reasoning_turns:,} turns with reasoning, {self.tool_calls:,} tool calls")
        if self.untrained_answers:
            found.append(f"{self.untrained_answers:,} answers are context by their own keys and carry no loss")
        if self.empty_answers:
            found.append(f"{self.empty_answers:,} answers are empty, and are trained to be")
        if self.tagged_answers:
            found.append(
                f"{self.tagged_answers:,} answers hold {_THINK_TAG} as text and are trained so; reasoning belongs into "
                "reasoning_content"
            )
        if self.columns:
            found.append(f"columns that are not trained: {', '.join(sorted(self.columns))}")
        return found


@dataclass(frozen=True)
class Fit:
    """The most tokens that a row may have, and what sets them."""

    tokens: int
    why: str


def thinks(row: ChatExample, thinking: Thinking) -> bool:
    """Whether the assistant turns of a conversation have a think channel; "auto": where one of them has reasoning."""
    return thinking == "on" or (thinking == "auto" and any(_reasons(said) for said in row.messages))


def check_chat_file(
    path: Path,
    tokenizer: Tokenizer,
    *,
    thinking: Thinking = "auto",
    thinking_effort: str | None = None,
    fit: Fit | None = None,
    told: Callable[[int], None] = lambda rows: None,
) -> DataReport:
    """Looks at every row of a file and raises nothing for what is in it.

    thinking, thinking_effort: as SFT has them; fit: None leaves lengths alone; told: hears how many rows are looked at.
    """
    report = DataReport()
    try:
        for raw in raw_rows(path):
            report.rows += 1
            try:
                example = example_of(raw, path)
            except DatasetError as error:
                _add(report, [Problem(raw.row, error.found, error.reason)])
                continue
            _add(report, list(_looked_at(report, example, path, tokenizer, thinking, thinking_effort, fit)))
            told(report.rows)
    except DatasetError as error:
        report.problems.append(Problem(error.row, error.found, error.reason))
    return report


def _add(report: DataReport, problems: Sequence[Problem]) -> None:
    report.problems += problems[: MAX_PROBLEMS - len(report.problems)]


def _looked_at(
    report: DataReport,
    example: ChatExample,
    path: Path,
    tokenizer: Tokenizer,
    thinking: Thinking,
    effort: str | None,
    fit: Fit | None,
) -> Iterator[Problem]:
    """The problems of one conversation; one without any is counted."""
    found = [*_surrogates(example), *_wrong_messages(example.messages)]
    if not found:
        found += _wrong_order(example.messages)
    if found:
        yield from (Problem(example.row, key, why) for key, why in found)
        return
    channel = thinks(example, thinking)
    own = example.meta.get("thinking_effort") or effort
    try:
        sequence = chat_sequence(
            f"row-{example.row}",
            example.messages,
            example.tools,
            tokenizer,
            channel,
            thinking_effort=own if channel else None,
            folder=path.parent,
        )
    except (xtml.XTMLError, TokenizerError, ImageError) as error:
        yield Problem(example.row, getattr(error, "key", "") or "messages", str(error))
        return
    rows = rows_per_token(sequence.ids, sequence.images, tokenizer.special("media_pad")) if sequence.images else None
    length = len(sequence.ids) if rows is None else int(rows.sum())
    if fit is not None and length > fit.tokens:
        why = f"has {length:,} tokens, and {fit.tokens:,} fit: {fit.why}; shorten it, or raise that"
        yield Problem(example.row, "messages", why)
        return
    _count(report, example, length, int(sequence.loss_mask.sum()))


def _count(report: DataReport, example: ChatExample, length: int, trained: int) -> None:
    report.tokens += length
    report.trained_tokens += trained
    report.lengths.append(length)
    report.forms[example.form] += 1
    report.columns.update(example.meta.keys())
    for said in example.messages:
        assert isinstance(said, Mapping)
        report.turns += 1
        report.reasoning_turns += _reasons(said)
        if said.get("role") != "assistant":
            continue
        calls = said.get("tool_calls") or ()
        report.tool_calls += len(calls)
        context = said.get("masked") in (1, True) or any(
            said.get(key) in (0, False) for key in ("weight", "train", "loss")
        )
        report.untrained_answers += context
        report.empty_answers += not context and not calls and said.get("content") in ("", [])
        report.tagged_answers += _THINK_TAG in str(said.get("content"))


def _reasons(said: Any) -> bool:
    if not isinstance(said, Mapping):
        return bool(getattr(said, "reasoning", None))
    content = said.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return bool(
        said.get("reasoning_content")
        or said.get("reasoning")
        or any(isinstance(part, Mapping) and part.get("thinking") for part in parts)
    )


def _wrong_messages(messages: Messages) -> Iterator[tuple[str, str]]:
    """(key, why) of each message that has no form."""
    for number, said in enumerate(messages):
        try:
            xtml.check(said, number)
        except xtml.XTMLError as error:
            yield error.key or "messages", str(error)


def _wrong_order(messages: Messages) -> Iterator[tuple[str, str]]:
    """(key, why) of turns that no policy meets in this order, and of tool results and calls that do not match."""
    waiting: list[str | None] | None = None  # ids of the calls without a result; None: there were no calls
    before: Any = None
    for number, said in enumerate(messages):
        assert isinstance(said, Mapping)
        role = said["role"]
        if role == "tool":
            why = _unmatched(said, waiting)
            if why:
                yield "tool_call_id", f"message {number} is a tool result {why}"
            before = role
            continue
        if waiting and role in ("user", "assistant"):
            missing = ", ".join(str(name) for name in waiting if name) or f"{len(waiting)} of them"
            yield "tool_calls", f"message {number} of the role {role} comes before the result of the calls {missing}"
            waiting = None
        if role == "assistant" and before == "assistant":
            yield (
                "role",
                f"message {number} is an assistant turn right after another; join the two, or say what came between",
            )
        if role == "assistant":
            calls = said.get("tool_calls") or ()
            ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
            if twice := [name for name, n in Counter(ids).items() if name is not None and n > 1]:
                yield "tool_calls", f"message {number} has two calls with the id {twice[0]!r}"
            waiting = list(ids) if calls else None
        before = role
    if not any(said.get("role") == "assistant" for said in messages if isinstance(said, Mapping)):
        yield "messages", "the conversation has no assistant turn; there is nothing to train on"


def _unmatched(said: Mapping[str, Any], waiting: list[str | None] | None) -> str:
    """Why a tool result answers no call, or ""; takes the call that it answers from those that wait."""
    name = said.get("tool_call_id") or said.get("id")
    if waiting is None:
        return f"({name}) and no assistant turn before it has a call" if name else "without a call before it"
    if name in waiting:
        waiting.remove(name)
        return ""
    if name is not None and any(own is not None for own in waiting):
        return f"of the call {name!r}, and the calls without a result are {', '.join(map(repr, waiting))}"
    if not waiting:
        return f"({name}), and every call before it has its result" if name else "after every call had its result"
    waiting.pop(0)
    return ""


def _surrogates(example: ChatExample) -> Iterator[tuple[str, str]]:
    """(key, why) of each text that has no UTF-8 form."""
    for number, said in enumerate(example.messages):
        for key, text in _texts(said, ""):
            if place := _surrogate(text):
                yield key or "messages", f"message {number}, {key or 'a key'}: {place}"
    for key, text in _texts(list(example.tools or ()), "tools"):
        if place := _surrogate(text):
            yield key, f"tools: {place}"


def _surrogate(text: str) -> str:
    """Where and which the first lone surrogate of a text is; "" for text that has none."""
    if text.isascii():
        return ""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"character {error.start} is the lone surrogate {text[error.start]!a}, half of a character, which has no "
            "UTF-8 form; remove or replace it"
        )
    return ""


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(key of the message, text) of every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield key, str(name)
            yield from _texts(item, key or str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, key)
