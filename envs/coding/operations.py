"""The sixteen list operations of `coding-lists`: words, code, and the usual mistake in each.

An operation is one line of Python over the list `a`. `right` is what the words mean; `wrong` is the mistake a
careless author makes; `habit` marks the operations that the demonstrator usually gets wrong. A program is
`def f(a):`, one assignment per step, and a return; its text is canonical, so equal programs are equal strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

CONSTANTS = range(1, 10)

# How often the demonstrator is wrong: in an operation of habit, in another one, and how often it takes an
# ambiguous phrase in its first reading, whatever was meant.
HABIT_ERROR = 0.65
SLIP_ERROR = 0.15
FIRST_READING = 0.65


@dataclass(frozen=True, slots=True)
class Operation:
    """`words`, `right` and `wrong` are templates in the constant `{c}`; six operations have no constant."""

    name: str
    words: str
    right: str
    wrong: str
    habit: bool = False

    @property
    def takes_constant(self) -> bool:
        return "{c}" in self.words


OPERATIONS: tuple[Operation, ...] = (
    Operation("above", "keep above {c}", "[x for x in a if x>{c}]", "[x for x in a if x>={c}]", habit=True),
    Operation("below", "keep below {c}", "[x for x in a if x<{c}]", "[x for x in a if x<={c}]", habit=True),
    Operation("cap", "cap at {c}", "[min(x,{c}) for x in a]", "[max(x,{c}) for x in a]", habit=True),
    Operation("last", "last {c}", "a[-{c}:]", "a[:{c}]", habit=True),
    Operation("drop", "drop multiples of {c}", "[x for x in a if x%{c}]", "[x for x in a if x//{c}]", habit=True),
    Operation("add", "add {c}", "[x+{c} for x in a]", "a+[{c}]"),
    Operation("subtract", "subtract {c}", "[x-{c} for x in a]", "[{c}-x for x in a]"),
    Operation("times", "multiply by {c}", "[x*{c} for x in a]", "a*{c}"),
    Operation("first", "first {c}", "a[:{c}]", "a[1:{c}]"),
    Operation("skip", "skip {c}", "a[{c}:]", "a[{c}:-1]"),
    Operation("down", "sort down", "sorted(a)[::-1]", "sorted(a)", habit=True),
    Operation("unique", "unique", "list(dict.fromkeys(a))", "sorted(set(a))", habit=True),
    Operation("even", "keep even", "[x for x in a if x%2==0]", "[x for x in a if x%2==1]", habit=True),
    Operation("up", "sort up", "sorted(a)", "sorted(set(a))"),
    Operation("reverse", "reverse", "a[::-1]", "a[-1:]"),
    Operation("square", "square", "[x*x for x in a]", "[x+x for x in a]"),
)


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """A phrase with two readings, each an expression; the demonstrator's habit is the first."""

    name: str
    words: str
    readings: tuple[str, str]

    @property
    def takes_constant(self) -> bool:
        return "{c}" in self.words


AMBIGUOUS: tuple[Ambiguous, ...] = (
    Ambiguous("take", "take {c}", ("a[:{c}]", "a[-{c}:]")),
    Ambiguous("cut", "cut {c}", ("a[{c}:]", "a[:-{c}]")),
    Ambiguous("beyond", "keep beyond {c}", ("[x for x in a if x>{c}]", "[x for x in a if x<{c}]")),
    Ambiguous("scale", "scale by {c}", ("[x*{c} for x in a]", "[x//{c} for x in a]")),
    Ambiguous("shift", "shift by {c}", ("[x+{c} for x in a]", "[x-{c} for x in a]")),
    Ambiguous("sort", "sort", ("sorted(a)", "sorted(a)[::-1]")),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a task, constants filled in: words, right expression, wrong one, and how often it is wrong."""

    words: str
    right: str
    wrong: str
    error: float


def step(operation: Operation, constant: int) -> Step:
    """The step of `operation` with `constant`, which an operation without a constant ignores."""
    return Step(
        operation.words.format(c=constant),
        operation.right.format(c=constant),
        operation.wrong.format(c=constant),
        HABIT_ERROR if operation.habit else SLIP_ERROR,
    )


def ambiguous_step(phrase: Ambiguous, constant: int, reading: int) -> Step:
    """The step in which `phrase` means its reading 0 or 1; the other reading is the wrong one."""
    expressions = [text.format(c=constant) for text in phrase.readings]
    error = FIRST_READING if reading == 1 else 1 - FIRST_READING
    return Step(phrase.words.format(c=constant), expressions[reading], expressions[1 - reading], error)


def program(expressions: Sequence[str]) -> str:
    """The canonical source of `f`: one assignment per expression and a return."""
    return "\n".join(["def f(a):", *(f" a={expression}" for expression in expressions), " return a"])


def request(prefix: str, words: Sequence[str]) -> str:
    """The user's text: `list: keep above 5, then reverse`."""
    return f"{prefix}: {', then '.join(words)}"


def evaluate(expressions: Sequence[str], values: Sequence[int]) -> list[int]:
    """What the program of `expressions` returns for `values`. Only for expressions written in this file."""
    result = list(values)
    for expression in expressions:
        result = _compiled(expression)(result)
    return result


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> Callable[[list[int]], list[int]]:
    scope: dict[str, Any] = {}
    exec(f"def f(a): return {expression}", scope)
    function: Callable[[list[int]], list[int]] = scope["f"]
    return function


@cache
def _task_expressions() -> dict[str, str | None]:
    """Every expression that a task can mean -> the operation whose right form it is, None for a mere reading."""
    names: dict[str, str | None] = {}
    for constant in CONSTANTS:
        names |= {reading.format(c=constant): None for phrase in AMBIGUOUS for reading in phrase.readings}
    for constant in CONSTANTS:
        names |= {operation.right.format(c=constant): operation.name for operation in OPERATIONS}
    return names


def operation_of(expression: str) -> str | None:
    """The name of the operation that `expression` is the right form of, or None."""
    return _task_expressions().get(expression)


def could_be_meant(expressions: Sequence[str]) -> bool:
    """Whether some task's program consists of these expressions; a mistake such as `x>=5` is in none."""
    return all(expression in _task_expressions() for expression in expressions)
