"""What a repository of `coding-repair` is: a small package of several modules, and mistakes that can be planted in it.

A repository is right as it stands. A mistake replaces a piece of text that occurs once; `symptom` is what a user of
the package would report. `draw` gives the arguments of one call of a function, as plain values.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Draw = Callable[[random.Random], list[Any]]


@dataclass(frozen=True, slots=True)
class Mistake:
    """One bug. calls: functions ("module.function") whose results it can change."""

    path: str
    right: str
    wrong: str
    symptom: str
    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repository:
    """name: of the package. files: text by path. calls: "module.function" -> arguments of a random call."""

    name: str
    about: str
    files: dict[str, str]
    mistakes: tuple[Mistake, ...]
    calls: dict[str, Draw]
    held_out: bool = False
