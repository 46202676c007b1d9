"""The thirteen milestones of `compiler`: what is asked, which programs judge it, and how."""

from __future__ import annotations

from dataclasses import dataclass

SPEED = "speed"  # instructions against the reference compiler and a lower bound
WORK = "work"  # element operations against the reference optimizer


@dataclass(frozen=True, slots=True)
class Milestone:
    """One rung. `command`: what is run; `families`: programs drawn in training; `held_out`: drawn in `heldout` too.

    hidden: programs a task is judged on. mistakes: share of programs with a planted error. judged: None for right or
    wrong, SPEED or WORK for a factor. needs_gpu: graded only where a CUDA GPU is.
    """

    level: int
    name: str
    command: str
    ask: str
    families: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    hidden: int = 6
    mistakes: float = 0.0
    judged: str | None = None
    needs_gpu: bool = False


_PLAIN = ("elementwise", "integers", "loops", "branches", "tiles")

MILESTONES = (
    Milestone(
        1,
        "lex",
        "lex",
        'Request {"source"}. Answer {"tokens": [[kind, text, line, col], ...]} with the end token last, or {"error": '
        '{"code", "line", "col"}}.',
        ("tokens", *_PLAIN),
        ("spacing",),
        mistakes=0.3,
    ),
    Milestone(
        2,
        "parse",
        "parse",
        'Request {"source"}. Answer {"program": [kernel, ...]} or {"error": {"code", "line", "col"}}.',
        ("trees", *_PLAIN),
        ("deep",),
        mistakes=0.3,
    ),
    Milestone(
        3,
        "types",
        "types",
        'Request {"source", "kernel", "consts"}. Answer {"lets": [[name, type], ...]} for every let of that kernel '
        'in source order, or {"error": {"code", "line"}}.',
        _PLAIN,
        ("nested", "attention"),
        mistakes=0.5,
    ),
    Milestone(
        4,
        "ir",
        "ir",
        'Request {"source", "kernel", "consts"}. Answer {"ir": kernel}. The IR is checked and executed on hidden data.',
        _PLAIN,
        ("nested", "attention"),
    ),
    Milestone(
        5,
        "optimize",
        "optimize",
        'Request {"source", "kernel", "consts"}. Answer {"ir": kernel} that does the same at the least cost. Each '
        "right program counts min(1, cost of the reference optimizer / your cost).",
        ("redundant", "loops", "tiles", "elementwise"),
        ("nested", "attnres"),
        judged=WORK,
    ),
    Milestone(
        6,
        "interpret",
        "interpret",
        'Request {"source", "kernel", "consts", "grid", "args": {parameter: number or list}}. Run all program '
        'instances and answer {"buffers": {pointer parameter: list}}, every buffer as it is afterwards.',
        _PLAIN,
        ("nested", "matmul"),
    ),
    Milestone(
        7,
        "emit",
        "emit",
        'Request {"source", "instances": [{"name", "kernel", "consts"}]}. Answer {"c": text}. The text is compiled and '
        "run on hidden data.",
        ("elementwise", "integers", "loops", "branches"),
        ("nested",),
        hidden=4,
    ),
    Milestone(
        8, "tiles", "emit", "As `emit`, with two-dimensional tiles and reductions.", ("tiles", "rows"), ("delta",), 4
    ),
    Milestone(
        9,
        "vectorize",
        "emit",
        "As `emit`, for long vectors and rows, judged by speed.",
        ("vectors", "rows"),
        ("attnres",),
        hidden=3,
        judged=SPEED,
    ),
    Milestone(
        10,
        "matmul",
        "emit",
        "As `emit`, for matrix products with an epilogue, judged by speed.",
        ("matmul",),
        ("matmul_transposed",),
        hidden=2,
        judged=SPEED,
    ),
    Milestone(
        11,
        "fused",
        "emit",
        "As `emit`, for kernels of several fused steps, such as attention in one pass, judged by speed.",
        ("attention", "attnres"),
        ("delta",),
        hidden=2,
        judged=SPEED,
    ),
    Milestone(
        12,
        "train",
        "emit",
        "As `emit`, for all kernels of a one-layer GPT: forward, backward and update. The grader trains the model "
        "with them for a few steps and compares every weight, gradient and loss; judged by speed.",
        ("gpt",),
        hidden=1,
        judged=SPEED,
    ),
    Milestone(
        13,
        "ptx",
        "ptx",
        'Request {"source", "instances"}. Answer {"ptx": text}. Loaded with the CUDA driver and run on hidden data.',
        ("elementwise", "tiles", "loops"),
        ("matmul",),
        hidden=3,
        needs_gpu=True,
    ),
)

SPEED_RULE = (
    "Speed: instructions of your kernels under cachegrind (single run, driver subtracted). A right program counts "
    "0.5 * r / c when your count c is above the reference compiler's r, and 0.5 + 0.5 * (r - c) / (r - f) below it, "
    "where f is one instruction for each 8 elements that must be read, written or multiplied."
)


def milestone(level: int) -> Milestone:
    """The rung of a level. Raises ValueError for a level that there is not."""
    if not 1 <= level <= len(MILESTONES):
        raise ValueError(f"the compiler ladder has levels 1 to {len(MILESTONES)}; there is no level {level}")
    return MILESTONES[level - 1]
