"""Tasks of `chip`: the ladder with its parameters, and the prompt.

"train" has no end: a rung and one of its training parameters are drawn for each index. "heldout" has REPEATS tasks
for each parameter that training never uses. The hidden part is the seed of the transactions that judge a design.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random

from k3rl.envs.chip import reward
from k3rl.envs.chip.flow import INPUT_DELAY
from k3rl.envs.chip.library import SETUP_NS, areas
from k3rl.envs.chip.problems import BY_FAMILY, LADDER
from k3rl.envs.chip.stream import TOP, Interface, Parameters, Problem
from k3rl.types import Budgets, Message, Task

NAME = "chip"
SPLITS = ("train", "heldout")
REPEATS = 2
WALL_S = 48 * 3600.0

ANSWER = 'Answer with the Verilog in one ```verilog block, or with JSON {"files": {"name.v": "text"}}.'
HAND_IN = (
    "Write the design to files that end in .v or .sv at the top of the workspace, for example dut.v, then submit, as "
    "often as you like: each submission is judged by practice transactions, and the best one is handed in."
)


class ChipLadder:
    """The task source. `family` and `level` narrow a split."""

    splits = SPLITS

    def length(self, split: str, *, level: int | None = None, family: str | None = None) -> int | None:
        """None for "train", else how many tasks there are."""
        return None if split == "train" else len(_heldout(split, level, family))

    def get(
        self, split: str, index: int, seed: int = 0, *, level: int | None = None, family: str | None = None
    ) -> Task:
        """The task with its hidden part. Raises ValueError for an unknown split, family or level, IndexError past
        the end."""
        if split == "train":
            narrowed = f"/{family or 'any'}-{level or 'any'}" if family or level else ""
            name = f"{NAME}/train/{seed}/{index}{narrowed}"
            rng = random.Random(name)
            problem = rng.choice(_rungs(level, family))
            return to_task(problem, rng.choice(problem.train), name, seed)
        places = _heldout(split, level, family)
        if not 0 <= index < len(places):
            raise IndexError(f"{NAME} {split} has {len(places)} such tasks; there is no number {index}")
        number, problem, parameters = places[index]
        return to_task(problem, parameters, f"{NAME}/{split}/{seed}/{number}", seed)


def _rungs(level: int | None, family: str | None) -> list[Problem]:
    found = [p for p in LADDER if level in (None, p.level) and family in (None, p.family)]
    if not found:
        ladder = ", ".join(f"{p.family} (level {p.level})" for p in LADDER)
        raise ValueError(f"{NAME} has no family {family!r} with level {level!r}; it has {ladder}")
    return found


def _heldout(split: str, level: int | None, family: str | None) -> list[tuple[int, Problem, Parameters]]:
    """(number in the whole split, problem, parameters), easy rungs first."""
    if split not in SPLITS:
        raise ValueError(f"{NAME} has no split {split!r}; it has {', '.join(SPLITS)}")
    rungs = _rungs(level, family)
    every = [(problem, p) for _ in range(REPEATS) for problem in LADDER for p in problem.heldout]
    return [(number, problem, p) for number, (problem, p) in enumerate(every) if problem in rungs]


def to_task(problem: Problem, parameters: Parameters, name: str, seed: int) -> Task:
    """The task of a rung and its parameters, hidden part included."""
    secret = hashlib.sha256(f"transactions of {name}".encode()).hexdigest()
    return Task(
        id=name,
        env=NAME,
        messages=(Message("user", prompt(problem, parameters)),),
        family=problem.family,
        level=problem.level,
        domain="hardware",
        budgets=Budgets(wall_s=WALL_S),
        data={
            "parameters": dict(parameters),
            "top": TOP,
            "period_ns": problem.period_ns(parameters),
            "wall_budget_s": WALL_S,
        },
        hidden={"seed": int(secret[:16], 16)},
        seed=seed,
    )


def with_workspace(task: Task) -> Task:
    """The same task for an agent with tools, who hands in files."""
    asked = task.messages[-1]
    text = str(asked.content).removesuffix(ANSWER) + HAND_IN
    return dataclasses.replace(task, messages=(*task.messages[:-1], dataclasses.replace(asked, content=text)))


def problem_of(task: Task) -> tuple[Problem, Parameters]:
    """The rung and the parameters of a task. Raises ValueError for a task of another environment."""
    if task.env != NAME or task.family not in BY_FAMILY:
        raise ValueError(f"task {task.id} of {task.env!r} is not one of {NAME!r}")
    return BY_FAMILY[task.family], task.data["parameters"]


def practice(task: Task, number: int = 0) -> Task:
    """The same task with transactions that anybody may know: what a tool of an agent judges with before the end."""
    return dataclasses.replace(task, id=f"{task.id}/practice-{number}", hidden={"seed": number})


def prompt(problem: Problem, p: Parameters) -> str:
    """The whole request: ports, protocol, behaviour, rules, and what counts."""
    interface, period = problem.interface(p), problem.period_ns(p)
    ports = "\n".join(
        f"  {direction:6} {f'[{width - 1}:0]' if width > 1 else '':7} {name}"
        for name, (direction, width) in interface.ports().items()
    )
    weights = ", ".join(f"{name} {weight}" for name, weight in reward.WEIGHTS.items())
    gates = ", ".join(f"{name[:-3]} {area:g}" for name, area in areas().items() if name.endswith("X1"))
    return f"""{problem.title}. Write a synthesizable module `{TOP}` in Verilog with exactly these ports:
{ports}

{problem.behaviour(p)}

Protocol. All flip-flops run on the rising edge of clk itself. rst = 1 for some cycles, synchronous, begins
everything anew, also in the middle of work; before the first reset the state is unknown.
{_handshake(interface)}
Latencies count from the cycle in which one passes to the cycle in which the other does.

Rules. Verilog-2005 or its synthesizable SystemVerilog successors; at least one module, `{TOP}`. Not allowed: system
tasks except $signed, $unsigned, $clog2, $bits; compiler directives except `default_nettype and `timescale; `initial`
and initial values, delays, strings, attributes, hierarchical names, latches, gated or derived clocks, asynchronous
resets, loops of gates, modules that are not defined.

Judging. Lint, then simulation with hidden random transactions, then synthesis, then the same simulation of
the gates. A design that fails any of them, or gives an output late, is worth 0. A right design is compared with
a reference: area, worst slack at the target period of {period} ns, and throughput ({weights}).
Inputs arrive {INPUT_DELAY:.0%} of the period after the edge, outputs must be there {INPUT_DELAY:.0%} of it before the
next, and flip-flops need {SETUP_NS} ns. Areas, for stronger gates 1.35 times as much:
{gates}.

{ANSWER}"""


def _handshake(interface: Interface) -> str:
    if interface.input.ready:
        text = "An input passes in a cycle with in_valid and in_ready both 1; in_valid, once 1, stays until then.\n"
    else:
        text = "An input passes in every cycle with in_valid = 1.\n"
    if interface.output.ready:
        return text + "An output passes in a cycle with out_valid and out_ready both 1."
    return text + "An output passes in every cycle with out_valid = 1."
