"""Tasks of `coding-lists`: which are drawn, which are held out, and what judges them.

Families
  list        one to three plain steps; answered in one turn
  probe       one ambiguous step and up to one plain one; the tool `run` tells whether a first guess is right
  list-pairs  two or three steps with an ordered pair of neighbours that never occurs in training; never trained on

A task is held out by construction: a hash of its program's text decides, so no seed can ever train on it.
`list` has one program per prompt. A `probe` prompt has two; training takes it only when neither is held out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any

from k3rl.envs.coding.operations import (
    AMBIGUOUS,
    CONSTANTS,
    OPERATIONS,
    Step,
    ambiguous_step,
    could_be_meant,
    evaluate,
    operation_of,
    program,
    request,
    step,
)
from k3rl.types import Budgets, Message, Task

NAME = "coding-lists"
SPLITS = ("train", "heldout", "heldout_family")
HIDDEN_LISTS = 6
VISIBLE_LISTS = 2
_VALUES = range(-4, 13)
PROBE_SHARE = 1 / 10
LEVEL_WEIGHTS = {"list": {1: 0.2, 2: 0.45, 3: 0.35}, "probe": {1: 0.3, 2: 0.7}}

# What the held-out splits are made of: (family, level) -> tasks. The order spreads each kind evenly.
_HELD_OUT = {
    "heldout": {("list", 1): 24, ("list", 2): 264, ("list", 3): 160, ("probe", 1): 16, ("probe", 2): 48},
    "heldout_family": {("list-pairs", 2): 128, ("list-pairs", 3): 128},
}

RUN_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "try a program on two examples",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
BUDGETS = {
    "list": Budgets(turns=1, tokens_per_turn=48),
    "list-pairs": Budgets(turns=1, tokens_per_turn=48),
    "probe": Budgets(turns=2, tokens_per_turn=72, tool_calls=1),
}


def _fraction(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


@cache
def reserved_pairs() -> frozenset[tuple[str, str]]:
    """Ordered pairs of operation names that are neighbours in `list-pairs` only: an eighth of all 256."""
    pairs = sorted((f"{one.name}>{two.name}", one.name, two.name) for one in OPERATIONS for two in OPERATIONS)
    chosen = sorted(pairs, key=lambda item: hashlib.sha256(item[0].encode()).digest())[: len(pairs) // 8]
    return frozenset((one, two) for _, one, two in chosen)


def has_reserved_pair(expressions: Sequence[str]) -> bool:
    """Whether two neighbouring expressions are the right forms of a reserved pair."""
    names = [operation_of(expression) for expression in expressions]
    return any((one, two) in reserved_pairs() for one, two in pairwise(names) if one and two)


def held_out(expressions: Sequence[str]) -> bool:
    """Whether this program is kept from training: 40 % of one-step programs, an eighth of the longer ones."""
    return _fraction(program(expressions)) < (0.4 if len(expressions) == 1 else 0.125)


def allowed_in_training(expressions: Sequence[str]) -> bool:
    """Whether training may show this program at all, as a task or as a (mistaken) demonstration."""
    return not (could_be_meant(expressions) and held_out(expressions)) and not has_reserved_pair(expressions)


def _draw_steps(family: str, level: int, rng: random.Random) -> tuple[list[Step], list[list[str]]]:
    """Steps, and the expression lists of all readings of the prompt, the meant one first."""
    steps = [step(rng.choice(OPERATIONS), rng.choice(CONSTANTS)) for _ in range(level)]
    if family != "probe":
        return steps, [[item.right for item in steps]]
    place = rng.randrange(level)
    steps[place] = ambiguous_step(rng.choice(AMBIGUOUS), rng.choice(CONSTANTS), rng.randrange(2))
    meant = [item.right for item in steps]
    other = [item.wrong if number == place else item.right for number, item in enumerate(steps)]
    return steps, [meant, other]


def _belongs(split: str, family: str, readings: Sequence[Sequence[str]]) -> bool:
    if family == "list-pairs":
        return has_reserved_pair(readings[0])
    if any(has_reserved_pair(reading) for reading in readings):
        return False
    if split == "train":
        return not any(held_out(reading) for reading in readings)
    return held_out(readings[0])


def _draw_lists(count: int, rng: random.Random) -> list[list[int]]:
    return [rng.choices(_VALUES, k=rng.randint(3, 10)) for _ in range(count)]


def discriminates(steps: Sequence[Step], inputs: Sequence[Sequence[int]]) -> bool:
    """Whether these inputs tell the right program from doing nothing, a missing step, and every single mistake."""
    right = [item.right for item in steps]
    wanted = [evaluate(right, values) for values in inputs]
    if len({tuple(output) for output in wanted if output}) < 2:
        return False
    rivals: list[list[str]] = [right[:number] + right[number + 1 :] for number in range(len(right))]
    rivals += [[*right[:number], item.wrong, *right[number + 1 :]] for number, item in enumerate(steps)]
    rivals += [[], [item.wrong for item in steps]]
    return all(
        any(evaluate(rival, values) != want for values, want in zip(inputs, wanted, strict=True)) for rival in rivals
    )


def _examples(right: Sequence[str], other: Sequence[str], rng: random.Random) -> list[list[list[int]]] | None:
    """Visible (input, wanted) pairs on which the other reading of a probe fails; None when none were found."""
    for _ in range(8):
        inputs = _draw_lists(VISIBLE_LISTS, rng)
        if all(evaluate(right, values) != evaluate(other, values) for values in inputs):
            return [[values, evaluate(right, values)] for values in inputs]
    return None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A task's steps with its inputs: `hidden` judge it, `examples` are what the tool `run` tries."""

    family: str
    level: int
    steps: tuple[Step, ...]
    hidden: list[list[int]]
    examples: list[list[list[int]]]

    @property
    def prompt(self) -> str:
        return request("probe" if self.family == "probe" else "list", [item.words for item in self.steps])

    @property
    def right(self) -> list[str]:
        return [item.right for item in self.steps]


def draw(split: str, family: str, level: int, rng: random.Random) -> Drawn:
    """Draw until steps belong to the split and six inputs judge them well (a dozen tries on average)."""
    while True:
        steps, readings = _draw_steps(family, level, rng)
        if not _belongs(split, family, readings):
            continue
        hidden = next(
            (lists for lists in (_draw_lists(HIDDEN_LISTS, rng) for _ in range(4)) if discriminates(steps, lists)), None
        )
        if hidden is None:
            continue
        examples = _examples(readings[0], readings[1], rng) if family == "probe" else []
        if examples is not None:
            return Drawn(family, level, tuple(steps), hidden, examples)


class CodingLists:
    """The task source. "train" has no end; "heldout" has 512 tasks and "heldout_family" 256, all prompts different.

    `level` and `family` narrow a split: in training they fix what is drawn (the hook for a curriculum), in a
    held-out split they keep the matching tasks.
    """

    splits = SPLITS

    def __init__(self, *, declare_tools: bool = False) -> None:
        self._tools = (RUN_TOOL,) if declare_tools else ()

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        if split == "train":
            return None
        return len(self._slots(split, level, family))

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """The task with its hidden part. ValueError: no such split, family or level; IndexError: past the end."""
        if split == "train":
            drawn, name = draw_training(index, seed, level, family)
        else:
            slots = self._slots(split, level, family)
            if not 0 <= index < len(slots):
                raise IndexError(f"{NAME} {split} has {len(slots)} such tasks; there is no number {index}")
            index = slots[index]
            drawn, name = held_out_tasks(split, seed, index + 1)[index], f"{NAME}/{split}/{seed}/{index}"
        return to_task(drawn, name, seed, self._tools)

    def _slots(self, split: str, level: int | None, family: str | None) -> list[int]:
        if split not in _HELD_OUT:
            raise ValueError(f"{NAME} has no split {split!r}; it has {', '.join(SPLITS)}")
        return [
            number
            for number, slot in enumerate(_plan(split))
            if (family is None or slot[0] == family) and (level is None or slot[1] == level)
        ]


def draw_training(index: int, seed: int, level: int | None = None, family: str | None = None) -> tuple[Drawn, str]:
    """Training task `index`, with its id."""
    name = f"{NAME}/train/{seed}/{index}"
    if family or level:
        name += f"/{family or 'any'}-{level or 'any'}"
    rng = random.Random(name)
    if family is None:
        family = "probe" if rng.random() < PROBE_SHARE and level in (None, *LEVEL_WEIGHTS["probe"]) else "list"
    if family not in LEVEL_WEIGHTS:
        raise ValueError(f"family {family!r} is not trained on; choose from {', '.join(LEVEL_WEIGHTS)}")
    weights = LEVEL_WEIGHTS[family]
    if level is None:
        level = rng.choices(list(weights), list(weights.values()))[0]
    if level not in weights:
        raise ValueError(f"family {family!r} has no level {level}; it has {', '.join(map(str, weights))}")
    return draw("train", family, level, rng), name


@cache
def _plan(split: str) -> tuple[tuple[str, int], ...]:
    """(family, level) of each task of a held-out split, every kind spread evenly over it."""
    places = [((number + 0.5) / count, slot) for slot, count in _HELD_OUT[split].items() for number in range(count)]
    return tuple(slot for _, slot in sorted(places))


class _HeldOut:
    """The tasks of a held-out split, no prompt twice, each drawn when it or a later one is first asked for."""

    def __init__(self, split: str, seed: int) -> None:
        self._split = split
        self._rng = random.Random(f"{NAME}/{split}/{seed}")
        self._prompts: set[str] = set()
        self._drawn: list[Drawn] = []
        self._lock = Lock()

    def first(self, n: int | None) -> list[Drawn]:
        with self._lock:
            for family, level in _plan(self._split)[len(self._drawn) : n]:
                drawn = draw(self._split, family, level, self._rng)
                while drawn.prompt in self._prompts:
                    drawn = draw(self._split, family, level, self._rng)
                self._prompts.add(drawn.prompt)
                self._drawn.append(drawn)
            return self._drawn[:n]


_held_out = lru_cache(maxsize=8)(_HeldOut)


def held_out_tasks(split: str, seed: int, n: int | None = None) -> list[Drawn]:
    """The first `n` tasks of a held-out split, or all of them; no prompt twice."""
    return _held_out(split, seed).first(n)


def to_task(drawn: Drawn, name: str, seed: int, tools: tuple[dict[str, Any], ...] = ()) -> Task:
    """The task of a draw, hidden part included. `tools`: declarations for a task that may call them."""
    probe = drawn.family == "probe"
    return Task(
        id=name,
        env=NAME,
        messages=(Message("user", drawn.prompt),),
        family=drawn.family,
        level=drawn.level,
        domain="tools" if probe else "code",
        tools=tools if probe else (),
        budgets=BUDGETS[drawn.family],
        data={"entry": "f", "examples": drawn.examples},
        hidden={
            "program": program(drawn.right),
            "inputs": drawn.hidden,
            "outputs": [evaluate(drawn.right, values) for values in drawn.hidden],
        },
        seed=seed,
    )
