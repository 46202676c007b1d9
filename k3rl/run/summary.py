"""The end of a run: a table of its stages, and the reward curve as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from k3rl.run.progress import duration
from k3rl.run.terminal import visible


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One row of the table. Rewards are held-out pass rates; None where the stage measured none."""

    stage: str
    steps: int
    tokens: int
    reward_before: float | None
    reward_after: float | None
    seconds: float
    note: str = ""


def print_summary(
    stages: Sequence[StageSummary],
    console: Console,
    *,
    paths: Mapping[str, Path] | None = None,
    notes: Iterable[str] = (),
) -> None:
    """Stage, steps, tokens, reward before and after, seconds; then notes and where things lie."""
    table = Table(title="stages", title_justify="left")
    table.add_column("stage")
    for name in ("steps", "tokens", "reward before", "reward after", "seconds"):
        table.add_column(name, justify="right")
    with_notes = any(stage.note for stage in stages)
    if with_notes:
        table.add_column("note")
    for stage in stages:
        row = [
            visible(stage.stage),
            str(stage.steps),
            f"{stage.tokens:,}",
            _rate(stage.reward_before),
            _rate(stage.reward_after),
            f"{stage.seconds:.1f}",
        ]
        table.add_row(*(Text(cell) for cell in [*row, *([visible(stage.note)] if with_notes else [])]))
    console.print(table)
    console.print(Text(f"all stages: {duration(sum(stage.seconds for stage in stages))}"))
    for note in notes:
        console.print(Text(visible(note)), soft_wrap=True)
    for name, path in (paths or {}).items():
        console.print(Text(f"{name}: {path}"), soft_wrap=True)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def plot_rewards(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    path: Path,
    *,
    levels: Mapping[str, float] | None = None,
    title: str = "reward by step",
) -> Path:
    """Write a PNG: each curve is (step, reward) points; `levels` are horizontal lines such as held-out pass rates.

    Raises ValueError when there is nothing to draw: an empty picture would look like a run without reward.
    """
    if not any(curves.values()) and not levels:
        raise ValueError("there are no rewards to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([step for step, _ in points], [reward for _, reward in points], label=name, linewidth=1.5)
    for number, (name, level) in enumerate((levels or {}).items()):
        axes.axhline(level, linestyle="--", linewidth=1, color=f"C{len(curves) + number}", label=f"{name} {level:.3f}")
    axes.set(xlabel="step", ylabel="reward", title=title, ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    FigureCanvasAgg(figure).print_png(str(temporary))
    temporary.replace(path)
    return path
