"""Progress of a run: one live panel on a terminal, one plain line per step anywhere else.

Everything goes to standard error, so that standard output holds results only. Workers draw nothing: they send their
counts to the driver, which calls `Stage.step`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from k3rl.run.terminal import visible

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """The last `width` values as bars between their own minimum and maximum."""
    recent = list(values)[-width:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in recent)


def duration(seconds: float) -> str:
    """`42s`, `3m05s`, `2h10m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """The stages of one run. Use as a context manager, so that the terminal is given back on any exit."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._stages: list[Stage] = []
        self._live = Live(console=self.console, refresh_per_second=2, get_renderable=self._render)

    def stage(self, name: str, total: int | None = None) -> Stage:
        """Begin a stage of `total` steps; None when their number is not known."""
        self._stages.append(Stage(self, name, total))
        return self._stages[-1]

    def note(self, text: str) -> None:
        """Say what start-up or a long wait is doing: "waiting for 2 CPUs: 1 free"."""
        self.console.print(Text(visible(text)), soft_wrap=True)

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for stage in self._stages:
            bar = ProgressBar(total=stage.total, completed=stage.done, width=24, pulse=stage.total is None)
            table.add_row(Text(stage.name), bar, *(Text(part) for part in stage.columns()))
        return Group(table)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


class Stage:
    """One stage: `step` after each of its steps, then `end`."""

    def __init__(self, progress: Progress, name: str, total: int | None) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.tokens = 0
        self._progress = progress
        self._shown: dict[str, float] = {}
        self._rewards: list[float] = []
        self._started = time.monotonic()
        self._first = 0
        self._ended: float | None = None

    def resume_at(self, step: int) -> None:
        """Steps before this one were done by an earlier attempt; they count as done and not for the speed."""
        self.done = self._first = step

    def step(self, done: int, *, tokens: int = 0, reward: float | None = None, **values: float) -> None:
        """`done` steps are finished; `tokens` were processed by the last one; `values` are shown by name."""
        self.done = done
        self.tokens += tokens
        if reward is not None:
            self._rewards.append(reward)
            values = {"reward": reward, **values}
        self._shown = values
        if not self._progress.console.is_terminal:
            self._progress.note("  ".join([self.name, *(part for part in self.columns(spark=False) if part)]))

    def end(self) -> None:
        """The stage is over, whether or not all its steps were needed."""
        self._ended = time.monotonic()

    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._started

    def columns(self, spark: bool = True) -> list[str]:
        """Step, values, sparkline, speed and time, as shown."""
        seconds = self.seconds()
        values = "  ".join(f"{name} {value:.4g}" for name, value in self._shown.items())
        speed = f"{self.tokens / seconds:,.0f} tokens/s" if self.tokens and seconds > 0 else ""
        steps = f"{self.done}/{self.total}" if self.total is not None else f"{self.done}"
        bars = [sparkline(self._rewards)] if spark else []
        return [steps, values, *bars, speed, self._time(seconds)]

    def _time(self, seconds: float) -> str:
        fresh = self.done - self._first
        if self._ended is not None or self.total is None or fresh <= 0 or self.done >= self.total:
            return duration(seconds)
        return f"eta {duration(seconds / fresh * (self.total - self.done))}"
