"""Repositories as values: run in this process where they are ours, as one program where they are a submission."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3rl.envs.coding.repair.repositories import Mistake, Repository
from k3rl.envs.sandbox import ProgramJob

# Read once: what is judged stays what this process knows.
_LOADER = Path(__file__).with_name("sandboxed").joinpath("loader.py").read_text(encoding="utf-8")

Call = Sequence[Any]  # ["package.module.function", arguments]


def source_of(files: Mapping[str, str]) -> str:
    """One program that is the whole repository."""
    return f"{_LOADER}\nFILES.update({json.dumps(dict(files))})\n"


def job(files: Mapping[str, str], calls: Sequence[Call]) -> ProgramJob:
    """These calls of a repository that somebody else wrote, for a sandbox."""
    return ProgramJob(source_of(files), "f", tuple((name, arguments) for name, arguments in calls))


class Trusted:
    """A repository of ours, loaded here. Never give it text that a policy wrote."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._names: dict[str, Any] = {"__name__": "trusted"}
        exec(compile(source_of(files), "loader", "exec"), self._names)

    def __call__(self, call: Call) -> tuple[str, Any]:
        """("value", result), or ("error", type of the exception) when the call raises."""
        name, arguments = json.loads(json.dumps(list(call)))  # calls may change their arguments
        try:
            return "value", self._names["f"](name, arguments)
        except Exception as error:
            return "error", type(error).__name__


def with_mistakes(repository: Repository, mistakes: Sequence[Mistake]) -> dict[str, str]:
    """Its files with these mistakes in them. Raises ValueError for one that has no place."""
    files = dict(repository.files)
    for mistake in mistakes:
        if files[mistake.path].count(mistake.right) != 1:
            raise ValueError(f"{repository.name}: {mistake.right!r} is not in {mistake.path} exactly once")
        files[mistake.path] = files[mistake.path].replace(mistake.right, mistake.wrong)
    return files
