"""Tasks that were read from a file: where a row is wrong, its line is named."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from k3rl.config import ConfigError
from k3rl.envs.base import Action, Env, EpisodeContext, Observation, StepResult
from k3rl.types import StopReason, Task


def read_rows(path: str, build: Callable[[Mapping[str, Any]], Task]) -> list[Task]:
    """The tasks of a JSONL file, plain or gzipped. Raises ConfigError with the line of a bad row.

    build: a row -> its task; KeyError, TypeError and ValueError say what is wrong with the row.
    """
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("a row must be a JSON object")
            task = build(row)
        except KeyError as error:
            raise bad_row(path, number, f"it has no {error.args[0]!r}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise bad_row(path, number, str(error)) from None
        if task.id in lines:
            raise bad_row(path, number, f"its id {task.id!r} is that of line {lines[task.id]}")
        lines[task.id] = number
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path} holds no task", key=path, got="no rows", wanted="one JSON object a line")
    return tasks


def bad_row(path: str, number: int, what: str) -> ConfigError:
    """The error of a row."""
    return ConfigError(f"{path}, line {number}: {what}", key=f"{path}:{number}", got=what)


def text(row: Mapping[str, Any], name: str) -> str:
    """A field that must be text. Raises KeyError and TypeError."""
    if not isinstance(row[name], str):
        raise TypeError(f"{name!r} is a {type(row[name]).__name__}; it must be text")
    value: str = row[name]
    return value


def _lines(path: str) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", key=path, wanted="a JSONL file") from None
    except (UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"{path} is not UTF-8 JSONL: {error}", key=path) from None


class FixedTasks:
    """A task source over tasks at hand.

    "heldout" is the given share of them by a hash of their ids, so it stays the same when others are added; at least
    one task is held out and, of several, at least one is not. "train" has no end: it goes through its tasks again and
    again, each time in another order drawn from the seed.
    """

    splits = ("train", "heldout")

    def __init__(self, tasks: Sequence[Task], heldout: float) -> None:
        if not 0 <= heldout <= 1:
            raise ConfigError(f"heldout is {heldout}; it must be a share from 0 to 1", key="heldout", got=heldout)
        ranked = sorted(tasks, key=lambda task: hashlib.sha256(task.id.encode()).digest())
        most = len(tasks) if heldout == 1 else max(1, len(tasks) - 1)
        held = {task.id for task in ranked[: min(max(1, round(heldout * len(tasks))), most)]}
        self._heldout = [task for task in tasks if task.id in held]
        self._train = [task for task in tasks if task.id not in held] or list(tasks)
        self._order = lru_cache(maxsize=8)(self._shuffled)

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """None for "train"."""
        return None if split == "train" else len(self._chosen(split, level, family))

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """Equal arguments give equal tasks."""
        chosen = self._chosen(split, level, family)
        if split == "heldout":
            return chosen[index]
        turn, place = divmod(index, len(chosen))
        return chosen[self._order(len(chosen), seed, turn)[place]]

    def _chosen(self, split: str, level: int | None, family: str | None) -> list[Task]:
        if split not in self.splits:
            raise ValueError(f"there is no split {split!r}; there are {', '.join(self.splits)}")
        tasks = self._train if split == "train" else self._heldout
        found = [task for task in tasks if level in (None, task.level) and family in (None, task.family)]
        if not found:
            known = sorted({(task.family, task.level) for task in tasks})
            raise ValueError(f"no task of {split} has family {family!r} and level {level!r}; there are {known[:10]}")
        return found

    def _shuffled(self, size: int, seed: int, turn: int) -> list[int]:
        order = list(range(size))
        random.Random(f"{seed}/{turn}").shuffle(order)
        return order


class OneAnswer(Env):
    """The request, and one turn whose text is the answer."""

    def __init__(self) -> None:
        self._started = False

    async def reset(self, task: Task, context: EpisodeContext) -> Observation:
        """The request."""
        if self._started:
            raise RuntimeError("an environment is single use; make a new one for each episode")
        self._started = True
        return Observation(task.messages)

    async def step(self, action: Action) -> StepResult:
        """Take the turn as the answer."""
        content = action.message.content
        answer = content if isinstance(content, str) else ""
        return StepResult(done=True, stop_reason=StopReason.COMPLETED, answer=answer)


def hidden_of(task: Task) -> Mapping[str, Any]:
    """What only a grader has. Raises ValueError for a public task."""
    if task.hidden is None:
        raise ValueError(f"task {task.id} came without its hidden part; get it from the task source")
    return task.hidden


def family_of(path: str) -> str:
    """The reporting key of a file's tasks: its name without endings."""
    return Path(path).name.partition(".")[0] or "tasks"
