"""Tasks of `compiler`: one milestone and hidden programs drawn from the seed.

Task `index` is at level index % levels + 1, so a split climbs the ladder again and again. `train` has no end and
draws from a milestone's families; `heldout` has EACH tasks a level, half of whose programs are of families that
training never shows.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from k3rl.envs.compiler import gpt, texts
from k3rl.envs.compiler.fuzz import RUNNABLE, rename_kernels
from k3rl.envs.compiler.ladder import MILESTONES, SPEED, SPEED_RULE, Milestone, milestone
from k3rl.envs.compiler.library import KERNELS
from k3rl.envs.compiler.protocol import reference_answer, request_of
from k3rl.types import Budgets, Message, Task

NAME = "compiler"
SPLITS = ("train", "heldout")
EACH = 8
SHOWN = ("lex", "parse", "types", "ir", "interpret")  # commands whose requests show an answer, too
ANSWER = "Answer with the one JSON object of the submission."
WALL_S = 24 * 3600.0  # for an agent with tools
_SPEC = Path(__file__).with_name("spec.md")
_MAKERS = {**RUNNABLE, **KERNELS, **texts.TEXTS, "gpt": gpt.training}
_BREAK = {"lex": texts.break_lexing, "parse": texts.break_syntax, "types": texts.break_types}


@cache
def specification() -> str:
    """The language, the IR and the interfaces, as every prompt has them."""
    return _SPEC.read_text(encoding="utf-8")


def draw(rung: Milestone, families: tuple[str, ...], rng: random.Random) -> dict[str, Any]:
    """One case of a milestone."""
    case = _MAKERS[rng.choice(families)](rng)
    if "instances" in case:
        case = rename_kernels(case, f"{rng.getrandbits(24):06x}")
    if rung.command == "types":
        case["source"] = texts.enrich(rng, case["source"])
    if rng.random() < rung.mistakes:
        case["source"] = _BREAK[rung.command](rng, case["source"])
    return case


def prompt(rung: Milestone, example: Mapping[str, Any]) -> str:
    """The whole request for one task."""
    request = request_of(rung, example, 0)
    parts = [specification(), f"\n# Milestone {rung.level}: {rung.name}\n", f"Command `{rung.command}`. {rung.ask}"]
    if rung.judged == SPEED:
        parts.append(SPEED_RULE)
    parts.append(f"Judged on {rung.hidden} hidden programs. Only the command of this milestone is run.")
    parts.append(f"Example request:\n```json\n{json.dumps(request)}\n```")
    if rung.command in SHOWN:
        answer = reference_answer(rung.command, request)
        parts.append(f"Example answer:\n```json\n{json.dumps(answer)}\n```")
    parts.append(ANSWER)
    return "\n".join(parts)


def with_workspace(task: Task) -> Task:
    """The same task for an agent with tools, who hands in files and finds the example as files too."""
    if task.hidden is None:
        raise ValueError(f"task {task.id} came without its hidden part; get it from the task source")
    rung = milestone(task.level)
    request = request_of(rung, task.hidden["example"], 0)
    files = {"example.json": json.dumps(request)}
    if rung.command in SHOWN:
        files["example_answer.json"] = json.dumps(reference_answer(rung.command, request))
    told = [
        f"Milestone {rung.level} of the compiler that SPEC.md describes: {rung.name}.",
        f"Command `{rung.command}`. {rung.ask}",
        *([SPEED_RULE] if rung.judged == SPEED else []),
        f"Judged on {rung.hidden} hidden programs. Only the command of this milestone is run.",
        f"{' and '.join(files)} show a request{' and its answer' if len(files) > 1 else ''}.",
        "Write the package to minitriton/ in the workspace, then submit.",
    ]
    return dataclasses.replace(
        task,
        messages=(Message("user", "\n".join(told)),),
        budgets=Budgets(wall_s=WALL_S),
        data={**task.data, "files": files},
    )


class CompilerTasks:
    """The source. gpu: the ladder has its PTX milestone too, which only a machine with a CUDA GPU can grade."""

    def __init__(self, *, gpu: bool = False) -> None:
        self._levels = [one.level for one in MILESTONES if gpu or not one.needs_gpu]

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """None for `train`, which has no end."""
        chosen = self._chosen(split, level, family)
        return None if split == "train" else EACH * len(chosen)

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """Task `index`. Raises ValueError for an unknown split, level or family, IndexError past the end."""
        levels = self._chosen(split, level, family)
        length = self.length(split, level=level, family=family)
        if index < 0 or (length is not None and index >= length):
            raise IndexError(f"{NAME} {split} has {length} such tasks; there is no number {index}")
        rung = milestone(levels[index % len(levels)])
        name = f"{NAME}/{split}/{seed}/{rung.name}/{index // len(levels)}"
        rng = random.Random(name)
        example = draw(rung, rung.families[:1] if rung.command in _BREAK else rung.families, rng)
        cases = []
        for number in range(rung.hidden):
            held_out = split == "heldout" and rung.held_out and number % 2 == 0
            cases.append(draw(rung, rung.held_out if held_out else rung.families, rng))
        return Task(
            id=name,
            env=NAME,
            messages=(Message("user", prompt(rung, example)),),
            family=rung.name,
            level=rung.level,
            domain="code",
            budgets=Budgets(turns=1),
            data={"level": rung.level, "command": rung.command},
            hidden={"cases": cases, "example": example},
            seed=seed,
        )

    def _chosen(self, split: str, level: int | None, family: str | None) -> list[int]:
        if split not in SPLITS:
            raise ValueError(f"{NAME} has no split {split!r}; it has {', '.join(SPLITS)}")
        chosen = [one for one in self._levels if level in (None, one) and family in (None, milestone(one).name)]
        if not chosen:
            names = ", ".join(f"{one} {milestone(one).name}" for one in self._levels)
            raise ValueError(f"{NAME} has no level {level} with family {family!r}; it has {names}")
        return chosen
